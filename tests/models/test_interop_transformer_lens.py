"""TransformerLens' own tools run on our models and find what is there."""

import pytest
import torch
from transformer_lens import ActivationCache, head_detector, patching

from interp.models.transformer import Transformer

FAMILIES = ["minimal", "standard", "modern", "classic"]
HEAD_SWEEPS = ["out", "q", "k", "v", "pattern"]


def metric(logits: torch.Tensor) -> torch.Tensor:
    return logits.square().mean()


def runs(model: Transformer, tokens: torch.Tensor):
    """Clean tokens' cache, and corrupted tokens that differ at one position."""
    corrupted = tokens.clone()
    other = {4: 5, 5: 4, 6: 7, 7: 6} if model.cfg.max_depth else {}
    first = 3
    for row in corrupted:
        row[first] = other.get(int(row[first]), (int(row[first]) + 1) % model.cfg.d_vocab)
    return model.run_with_cache(tokens)[1], corrupted


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kind", HEAD_SWEEPS)
def test_patching_heads_over_all_positions_equals_patching_them_by_hand(
    family, tokens_for, name, kind
):
    model = family[name]
    with torch.no_grad():
        cache, corrupted = runs(model, tokens_for(model.cfg))
        sweep = getattr(patching, f"get_act_patch_attn_head_{kind}_all_pos")
        found = sweep(model, corrupted, cache, metric)
        n_heads = model.cfg.kv_heads if kind in "kv" else model.cfg.n_heads
        assert found.shape == (model.cfg.n_layers, n_heads)
        point = {"out": "z"}.get(kind, kind)
        for layer in range(model.cfg.n_layers):
            for head in range(n_heads):
                full_name = f"blocks.{layer}.attn.hook_{point}"

                def patch(value, hook, full_name=full_name, head=head):
                    value = value.clone()
                    index = (slice(None), head) if kind == "pattern" else (..., head, slice(None))
                    value[index] = cache[full_name][index]
                    return value

                by_hand = metric(model.run_with_hooks(corrupted, fwd_hooks=[(full_name, patch)]))
                torch.testing.assert_close(found[layer, head].double(), by_hand, rtol=1e-5, atol=0)
        unpatched = metric(model(corrupted))
    assert (found - unpatched).abs().max() > 1e-3 * unpatched  # some head does matter


@pytest.mark.parametrize(
    ("name", "stream"),
    [("minimal", "resid_pre"), ("minimal", "attn_out")]
    + [
        (name, stream)
        for name in FAMILIES[1:]
        for stream in ("resid_pre", "resid_mid", "attn_out", "mlp_out")
    ],
)
def test_patching_the_whole_stream_before_the_difference_is_read_restores_the_clean_run(
    family, tokens_for, name, stream
):
    model = family[name]
    with torch.no_grad():
        tokens = tokens_for(model.cfg)
        cache, corrupted = runs(model, tokens)
        clean, broken = metric(model(tokens)).float(), metric(model(corrupted)).float()
        found = getattr(patching, f"get_act_patch_{stream}")(model, corrupted, cache, metric)
    assert found.shape == (model.cfg.n_layers, 7)
    # before the first difference there is nothing to patch
    torch.testing.assert_close(found[0, :3], broken.expand(3))
    if stream == "resid_pre" and not model.cfg.max_depth:
        torch.testing.assert_close(found[0, 3], clean)  # the one position where inputs differ
        assert not torch.isclose(clean, broken)


def test_patching_by_position_and_pattern_entry_has_the_promised_shapes(family, tokens_for):
    model = family["modern"]
    with torch.no_grad():
        cache, corrupted = runs(model, tokens_for(model.cfg))
        out = patching.get_act_patch_attn_head_out_by_pos(model, corrupted, cache, metric)
        keys = patching.get_act_patch_attn_head_k_by_pos(model, corrupted, cache, metric)
        rows = patching.get_act_patch_attn_head_pattern_by_pos(model, corrupted, cache, metric)
    assert out.shape == (2, 7, 4)
    assert keys.shape == (2, 7, 2)  # one column for each key-value head
    assert rows.shape == (2, 4, 7)


def previous_token_head(config_for) -> Transformer:
    """A model whose second head attends to the token before, whatever the tokens are."""
    model = Transformer(
        config_for(
            "minimal",
            n_heads=2,
            d_head=17,
            attention_biases=False,
            embedding="one_hot",
            max_depth=None,
            d_vocab=13,
            positional_embedding_type="standard",
        )
    )
    with torch.no_grad():
        attn = model.blocks[0].attn
        for weight in (attn.W_Q, attn.W_K, model.pos_embed.W_pos):
            weight.zero_()
        for position in range(model.cfg.n_ctx - 4):  # one dimension each, beyond the tokens'
            model.pos_embed.W_pos[position, 13 + position] = 1.0
        for position in range(1, 15):
            attn.W_Q[1, 13 + position, position] = 100.0
            attn.W_K[1, 13 + position - 1, position] = 100.0
    return model


@pytest.mark.parametrize("error_measure", ["mul", "abs"])
def test_the_head_detector_finds_the_head_that_was_built_to_look_back(config_for, error_measure):
    model = previous_token_head(config_for)
    scores = head_detector.detect_head(
        model,
        "2 5 1 7 11 3 8 12 0 4",
        "previous_token_head",
        exclude_current_token=True,
        error_measure=error_measure,
    )
    assert scores.shape == (1, 2)
    assert scores[0, 1] > 0.9 if error_measure == "mul" else scores[0, 1] > 0.85
    assert scores[0, 0] < 0.5


def test_tokens_come_from_ids_as_text_lists_or_tensors(family):
    model = family["classic"]
    for given in ("2 4 6", ["2 4 6"], [2, 4, 6], torch.tensor([2, 4, 6]), [[2, 4, 6]]):
        assert model.to_tokens(given).tolist() == [[2, 4, 6]]
    with pytest.raises(ValueError, match=r"'a b': this model has no tokenizer; give token ids"):
        model.to_tokens("a b")
    with pytest.raises(ValueError, match=r"expected integers \[pos\] or \[batch, pos\]"):
        model.to_tokens(torch.zeros(2, 3))
    assert model.to_single_token("7") == 7
    with pytest.raises(ValueError, match="'7 8' spells 2 tokens"):
        model.to_single_token("7 8")


# Decomposition of the residual stream.

STREAMS = ["standard", "modern", "classic", "encoder"]


@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("mlp_input", [False, True])
def test_components_add_up_to_the_stream_and_through_the_norm_to_what_the_layer_reads(
    family, tokens_for, name, mlp_input
):
    model = family[name]
    _, cache = model.run_with_cache(tokens_for(model.cfg))
    n_layers = model.cfg.n_layers
    for layer in range(n_layers + (not mlp_input)):
        kind = "mid" if mlp_input else "pre"
        stream = (
            cache["resid_post", n_layers - 1]
            if layer == n_layers
            else cache[f"resid_{kind}", layer]
        )
        parts, labels = cache.decompose_resid(layer, mlp_input=mlp_input, return_labels=True)
        torch.testing.assert_close(parts.sum(0), stream)
        assert labels[0] == "embed"
        every = cache.get_full_resid_decomposition(layer, mlp_input=mlp_input)
        torch.testing.assert_close(every.sum(0), stream)

        norm_name = f"blocks.{layer}.ln{2 if mlp_input else 1}"
        norm_name = "ln_final" if layer == n_layers else norm_name
        module = dict(model.named_modules()).get(norm_name)
        normalized = cache.decompose_resid(layer, mlp_input=mlp_input, apply_ln=True).sum(0)
        if module is None:
            torch.testing.assert_close(normalized, stream)
        else:
            torch.testing.assert_close(normalized + module.b, cache[f"{norm_name}.hook_normalized"])


@pytest.mark.parametrize("name", STREAMS)
def test_logit_attributions_of_all_components_add_up_to_the_logit(family, tokens_for, name):
    model = family[name]
    tokens = tokens_for(model.cfg)
    logits, cache = model.run_with_cache(tokens)
    answers = torch.tensor([1, 5, 3])
    every = cache.get_full_resid_decomposition(expand_neurons=False)
    attributions = cache.logit_attrs(every, answers)
    assert attributions.shape == (len(every), 3, 7)
    constant = model.b_U[answers]
    if model.cfg.final_norm is not None:
        constant = constant + model.ln_final.b @ model.W_U[:, answers]
    by_answer = logits.gather(-1, answers[:, None, None].expand(3, 7, 1)).squeeze(-1)
    torch.testing.assert_close(attributions.sum(0) + constant[:, None], by_answer)
    difference = cache.logit_attrs(every, answers, incorrect_tokens=torch.tensor([2, 2, 2]))
    assert difference.shape == attributions.shape


@pytest.mark.parametrize("name", STREAMS)
def test_neurons_projected_before_they_are_expanded_give_the_same_numbers(family, tokens_for, name):
    model = family[name]
    _, cache = model.run_with_cache(tokens_for(model.cfg))
    direction = model.W_U[:, :2]
    for layer, mlp_input in ((model.cfg.n_layers, False), (model.cfg.n_layers - 1, True)):
        if layer == 0:
            continue  # no neuron has fired before the first layer
        for apply_ln in (False, model.cfg.final_norm is not None or mlp_input):
            options = {"mlp_input": mlp_input, "apply_ln": apply_ln}
            whole = cache.get_full_resid_decomposition(layer, **options)
            projected = cache.get_full_resid_decomposition(
                layer, **options, project_output_onto=direction
            )
            torch.testing.assert_close(projected, whole @ direction)


@pytest.mark.parametrize("name", FAMILIES)
def test_head_results_and_the_remainder_add_up_to_the_stream(family, tokens_for, name):
    model = family[name]
    tokens = tokens_for(model.cfg)
    n_layers, n_heads = model.cfg.n_layers, model.cfg.n_heads
    _, cache = model.run_with_cache(tokens)
    heads, labels = cache.stack_head_results(n_layers, return_labels=True, incl_remainder=True)
    assert labels[0] == "L0H0"
    assert len(heads) == n_layers * n_heads + 1
    torch.testing.assert_close(heads.sum(0), cache["resid_post", n_layers - 1])
    # the same when nobody looked at hook_result: computed from z and W_O
    names = [name for name in model.hook_dict if not name.endswith("hook_result")]
    _, partial_cache = model.run_with_cache(tokens, names_filter=names)
    torch.testing.assert_close(partial_cache.stack_head_results(n_layers), heads[:-1])


def test_the_logit_lens_of_the_last_layer_is_the_model(family, tokens_for):
    for name in ("classic", "modern", "standard"):
        model = family[name]
        logits, cache = model.run_with_cache(tokens_for(model.cfg))
        stack = cache.accumulated_resid(apply_ln=True)
        torch.testing.assert_close(model.unembed(stack[-1]), logits)


def test_a_slice_of_the_batch_keeps_what_the_cache_knows(family, tokens_for):
    model = family["classic"]
    _, cache = model.run_with_cache(tokens_for(model.cfg))
    one = cache.apply_slice_to_batch_dim(1)
    assert isinstance(one, ActivationCache)
    parts = one.decompose_resid(apply_ln=True).sum(0) + model.ln_final.b
    torch.testing.assert_close(parts, cache["ln_final.hook_normalized"][1])
    last = cache.decompose_resid(apply_ln=True, pos_slice=-1).sum(0) + model.ln_final.b
    torch.testing.assert_close(last, cache["ln_final.hook_normalized"][:, -1])


def test_a_stream_that_is_replaced_is_not_decomposed(family, tokens_for):
    model = family["minimal"]
    _, cache = model.run_with_cache(tokens_for(model.cfg))
    with pytest.raises(
        ValueError, match="decompose_resid: in this model a layer replaces the resi"
    ):
        cache.decompose_resid()
    with pytest.raises(
        ValueError, match="get_full_resid_decomposition: in this model a layer repl"
    ):
        cache.get_full_resid_decomposition()


def test_a_scale_that_was_not_cached_is_asked_for(family, tokens_for):
    model = family["classic"]
    names = ["hook_embed", "hook_pos_embed"]
    names += [f"blocks.{layer}.hook_{part}_out" for layer in range(3) for part in ("attn", "mlp")]
    _, cache = model.run_with_cache(tokens_for(model.cfg), names_filter=names)
    assert cache.decompose_resid().shape == (8, 3, 7, 23)
    with pytest.raises(ValueError, match="ln_final.hook_scale is not in this cache: cache it too"):
        cache.decompose_resid(apply_ln=True)
