"""The transformer against a second one, written out head by head in float64."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from interp.models.config import TransformerConfig
from interp.models.transformer import Transformer


def reference_norm(x: Tensor, kind: str | None, w: Tensor | None, b: Tensor | None, eps: float):
    if kind is None:
        return x
    if kind == "LN":
        x = x - x.sum(-1, keepdim=True) / x.shape[-1]
    root_mean_square = (x * x).sum(-1, keepdim=True).div(x.shape[-1]).add(eps) ** 0.5
    normalized = x / root_mean_square * w
    return normalized if b is None else normalized + b


def reference_activation(name: str, x: Tensor) -> Tensor:
    match name:
        case "gelu_new":
            inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
            return 0.5 * x * (1 + inner.tanh())
        case "gelu":
            return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))
        case "silu":
            return x / (1 + torch.exp(-x))
        case "relu":
            return x * (x > 0)
    raise AssertionError(name)


def reference_embedding(config: TransformerConfig, weights: dict[str, Tensor], sequence: list[int]):
    rows, height = [], 0
    n_types = (config.d_vocab - 4) // 2
    for token in sequence:
        row = torch.zeros(config.d_model, dtype=torch.float64)
        is_open, is_close = 4 <= token < 4 + n_types, token >= 4 + n_types
        after = height + is_open - is_close
        carried = height if is_close else after
        match config.embedding:
            case "learned":
                row = weights["embed.W_E"][token]
            case "one_hot":
                row[token] = 1
            case "dyck_joint" if token < 4:
                row[token] = 1
            case "dyck_joint":
                row[4 + (token - 4) * (config.max_depth + 1) + carried] = 1
            case "dyck_separate":
                row[token] = 1
                row[config.d_vocab + carried] = 1
            case "dyck_angle":
                tangent = after / (config.max_depth + 2 - after)
                row[token] = 1
                row[config.d_vocab] = 1 / math.sqrt(1 + tangent**2)
                row[config.d_vocab + 1] = tangent / math.sqrt(1 + tangent**2)
        height = after
        rows.append(row)
    return torch.stack(rows)


def reference_position(config: TransformerConfig, weights: dict[str, Tensor], position: int):
    row = torch.zeros(config.d_model, dtype=torch.float64)
    match config.positional_embedding_type:
        case "standard":
            row = weights["pos_embed.W_pos"][position]
        case "sinusoidal":
            for i in range(config.d_model // 2):
                angle = position / 10000 ** (2 * i / config.d_model)
                row[2 * i], row[2 * i + 1] = math.sin(angle), math.cos(angle)
        case "linear":
            row[-1] = position / config.linear_position_divisor
    return row


def turn(vector: Tensor, position: int, base: float) -> Tensor:
    half = len(vector) // 2
    turned = vector.clone()
    for i in range(half):
        angle = position * base ** (-i / half)
        a, b = vector[i], vector[i + half]
        turned[i] = a * math.cos(angle) - b * math.sin(angle)
        turned[i + half] = a * math.sin(angle) + b * math.cos(angle)
    return turned


def reference_attention(config, weights, prefix: str, x: Tensor) -> Tensor:
    n_pos = len(x)
    heads = []
    for head in range(config.n_heads):
        group = head // (config.n_heads // config.kv_heads)
        q = x @ weights[f"{prefix}.W_Q"][head]
        k = x @ weights[f"{prefix}.W_K"][group]
        v = x @ weights[f"{prefix}.W_V"][group]
        if config.attention_biases:
            q = q + weights[f"{prefix}.b_Q"][head]
            k = k + weights[f"{prefix}.b_K"][group]
            v = v + weights[f"{prefix}.b_V"][group]
        if config.positional_embedding_type == "rotary":
            q = torch.stack([turn(q[i], i, config.rotary_base) for i in range(n_pos)])
            k = torch.stack([turn(k[i], i, config.rotary_base) for i in range(n_pos)])
        z = []
        for i in range(n_pos):
            last = i + 1 if config.attention_dir == "causal" else n_pos
            scores = k[:last] @ q[i] / config.score_scale
            weight = (scores - scores.max()).exp()
            z.append((weight / weight.sum()) @ v[:last])
        heads.append(torch.stack(z))
    if not config.output_projection:
        return torch.cat(heads, dim=-1)
    out = sum(z @ weights[f"{prefix}.W_O"][head] for head, z in enumerate(heads))
    return out + weights[f"{prefix}.b_O"] if config.attention_biases else out


def reference_mlp(config, weights, prefix: str, x: Tensor) -> Tensor:
    hidden = x @ weights[f"{prefix}.W_in"]
    if config.mlp_biases:
        hidden = hidden + weights[f"{prefix}.b_in"]
    if config.gated_mlp:
        gate = x @ weights[f"{prefix}.W_gate"]
        gate = gate + weights[f"{prefix}.b_gate"] if config.mlp_biases else gate
        hidden = reference_activation(config.act_fn, gate) * hidden
    else:
        hidden = reference_activation(config.act_fn, hidden)
    out = hidden @ weights[f"{prefix}.W_out"]
    return out + weights[f"{prefix}.b_out"] if config.mlp_biases else out


def reference_logits(model: Transformer, tokens: Tensor) -> Tensor:
    """Logits [batch, pos, d_vocab] from the model's config and saved weights alone."""
    config, weights = model.cfg, model.state_dict()

    def norm(x: Tensor, kind: str | None, name: str) -> Tensor:
        return reference_norm(
            x, kind, weights.get(f"{name}.w"), weights.get(f"{name}.b"), config.eps
        )

    logits = []
    for sequence in tokens.tolist():
        x = reference_embedding(config, weights, sequence)
        positions = [reference_position(config, weights, i) for i in range(len(sequence))]
        x = x + torch.stack(positions)
        for layer in range(config.n_layers):
            block = f"blocks.{layer}"
            attn_in = norm(x, config.attention_norm, f"{block}.ln1")
            attn_out = reference_attention(config, weights, f"{block}.attn", attn_in)
            x = x + attn_out if config.attention_residual else attn_out
            if config.d_mlp is not None:
                mlp_in = norm(x, config.mlp_norm, f"{block}.ln2")
                mlp_out = reference_mlp(config, weights, f"{block}.mlp", mlp_in)
                x = x + mlp_out if config.mlp_residual else mlp_out
        x = norm(x, config.final_norm, "ln_final")
        W_U = weights["embed.W_E"].T if config.tie_embeddings else weights["unembed.W_U"]
        x = x @ W_U
        logits.append(x + weights["unembed.b_U"] if config.unembed_bias else x)
    return torch.stack(logits)


VARIANTS = [
    ("minimal", {}),
    ("minimal", {"embedding": "dyck_separate"}),
    ("minimal", {"embedding": "dyck_angle"}),
    ("minimal", {"n_heads": 2, "d_head": 17, "attention_biases": False}),
    ("minimal", {"n_layers": 2, "attention_norm": "RMS", "attention_residual": True}),
    ("standard", {}),
    ("standard", {"positional_embedding_type": "none", "final_norm": "RMS", "act_fn": "gelu"}),
    ("standard", {"mlp_residual": False, "attention_dir": "bidirectional", "eps": 0.1}),
    ("modern", {}),
    ("modern", {"n_key_value_heads": 1, "act_fn": "relu", "rotary_base": 50.0}),
    ("modern", {"mlp_biases": True, "attention_biases": True, "n_key_value_heads": None}),
    ("classic", {}),
    ("classic", {"d_mlp": None, "tie_embeddings": False, "unembed_bias": True}),
    ("classic", {"attn_scale": 1.0, "act_fn": "silu", "mlp_norm": None}),
    ("encoder", {}),
]


@pytest.mark.parametrize(("name", "changes"), VARIANTS)
@pytest.mark.parametrize("is_observed", [False, True], ids=["fused", "eager"])
def test_logits_are_those_of_a_transformer_written_out_by_hand(
    config_for, build_model, tokens_for, name, changes, is_observed
):
    model = build_model(config_for(name, **changes))
    tokens = tokens_for(model.cfg)
    logits = model.run_with_cache(tokens)[0] if is_observed else model(tokens)
    expected = reference_logits(model, tokens)
    assert expected.std() > 0.05  # else the comparison would see nothing
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)


def test_the_same_seed_gives_the_same_model_in_any_dtype_and_another_seed_another(config_for):
    config = config_for("classic")
    first, second = Transformer(config).state_dict(), Transformer(config).state_dict()
    single = Transformer(replace(config, dtype=torch.float32)).state_dict()
    other = Transformer(replace(config, seed=1)).state_dict()
    for name, weight in first.items():
        assert torch.equal(weight, second[name])
        assert torch.equal(weight.float(), single[name])
    assert not torch.equal(first["embed.W_E"], other["embed.W_E"])


def test_building_a_model_leaves_the_global_random_state_alone(config_for):
    before = torch.random.get_rng_state()
    Transformer(config_for("classic"))
    assert torch.equal(before, torch.random.get_rng_state())


def test_weights_start_with_the_stated_spread_and_smaller_where_they_write(config_for):
    config = config_for(
        "classic", d_model=64, d_mlp=256, n_heads=4, d_head=16, d_vocab=97, initializer_range=0.02
    )
    model = Transformer(config)
    written = 0.02 / math.sqrt(2 * config.n_layers)
    for name, expected in [
        ("embed.W_E", 0.02),
        ("blocks.1.attn.W_Q", 0.02),
        ("blocks.1.mlp.W_in", 0.02),
        ("blocks.1.attn.W_O", written),
        ("blocks.1.mlp.W_out", written),
    ]:
        weight = model.get_parameter(name)
        standard_error = expected / math.sqrt(2 * weight.numel())
        assert abs(weight.std().item() - expected) < 5 * standard_error, name
    assert not any(p.any() for n, p in model.named_parameters() if n.endswith((".b_Q", ".b_out")))
    assert all((p == 1).all() for n, p in model.named_parameters() if n.endswith(".w"))


def test_frozen_embeddings_are_no_parameters_but_are_saved(family):
    for name in ("minimal", "standard"):
        parameters = dict(family[name].named_parameters())
        assert not any(key.startswith(("embed.", "pos_embed.")) for key in parameters)
    assert "embed.table" in family["minimal"].state_dict()
    assert "embed.W_E" in family["standard"].state_dict()


def test_a_model_is_born_in_evaluation_mode_and_training_changes_nothing(tiny, tokens_for):
    assert not any(module.training for module in tiny.modules())
    tokens = tokens_for(tiny.cfg)
    evaluated = tiny(tokens)
    tiny.train()
    trained = tiny(tokens)
    tiny.eval()
    assert torch.equal(evaluated, trained)


def test_the_config_follows_the_model_to_another_dtype(config_for):
    model = Transformer(config_for("modern"))
    assert model.cfg == config_for("modern")
    model.to(torch.float32)
    assert model.cfg == config_for("modern", dtype=torch.float32)


# Weights by name.


@pytest.mark.parametrize("name", ["modern", "classic"])
def test_weight_accessors_have_transformer_lens_shapes(family, name):
    model = family[name]
    c = model.cfg
    heads = (c.n_layers, c.n_heads)
    assert model.W_E.shape == (c.d_vocab, c.d_model)
    assert model.W_U.shape == (c.d_model, c.d_vocab)
    assert model.b_U.shape == (c.d_vocab,)
    for letter in "QKV":
        assert getattr(model, f"W_{letter}").shape == (*heads, c.d_model, c.d_head)
        assert getattr(model, f"b_{letter}").shape == (*heads, c.d_head)
    assert model.W_O.shape == (*heads, c.d_head, c.d_model)
    assert model.b_O.shape == (c.n_layers, c.d_model)
    assert model.W_in.shape == (c.n_layers, c.d_model, c.d_mlp)
    assert model.W_out.shape == (c.n_layers, c.d_mlp, c.d_model)
    assert model.b_in.shape == (c.n_layers, c.d_mlp)
    assert model.b_out.shape == (c.n_layers, c.d_model)


def test_grouped_heads_keep_one_parameter_each_and_are_repeated_by_the_accessor(family):
    model = family["modern"]
    assert model.blocks[1].attn.W_K.shape == (2, 23, 6)
    assert torch.equal(model.W_K[1, :2], model.blocks[1].attn.W_K[[0, 0]])
    assert torch.equal(model.W_V[1, 2:], model.blocks[1].attn.W_V[[1, 1]])
    assert model.W_gate.shape == (2, 23, 17)


def test_without_an_output_projection_W_O_reads_as_the_identity(config_for, tokens_for):
    model = Transformer(config_for("minimal", n_heads=2, d_head=17))
    assert torch.equal(model.W_O[0].flatten(0, 1), torch.eye(34, dtype=torch.float64))
    assert "blocks.0.attn.W_O" not in model.state_dict()
    _, cache = model.run_with_cache(tokens_for(model.cfg))
    results = cache["blocks.0.attn.hook_result"]
    torch.testing.assert_close(results.sum(-2), cache["blocks.0.hook_attn_out"])
    assert not results[:, :, 0, 17:].any()  # each head writes to its own half of the stream
    assert not results[:, :, 1, :17].any()


def test_biases_that_a_config_drops_read_as_zero(family):
    model = family["modern"]
    assert not model.b_Q.any()
    assert not model.b_out.any()
    assert not any(".b_" in name for name in model.state_dict())


@pytest.mark.parametrize(
    ("name", "weight", "reason"),
    [
        ("minimal", "W_E", "depends on its depth: see model.embed.table"),
        ("minimal", "W_in", "has no MLP"),
        ("modern", "W_pos", "adds no positions to the residual stream"),
        ("classic", "W_gate", "has no gated MLP"),
    ],
)
def test_a_weight_without_meaning_says_why_it_is_absent(family, name, weight, reason):
    with pytest.raises(AttributeError, match=f"no {weight}: .*{reason}"):
        getattr(family[name], weight)
    with pytest.raises(AttributeError, match="W_X"):
        _ = family[name].W_X


def test_all_heads_are_projected_without_copying_the_weights(family):
    weight = family["modern"].blocks[0].attn.W_Q
    rows = weight.transpose(1, 2).flatten(0, 1)
    assert rows.data_ptr() == weight.data_ptr()
    assert rows.is_contiguous()


def test_accumulated_biases_are_what_the_layers_have_added(family):
    model = family["classic"]
    first_two = model.b_O[:2].sum(0) + model.b_out[:2].sum(0)
    torch.testing.assert_close(model.accumulated_bias(2), first_two)
    torch.testing.assert_close(model.accumulated_bias(2, mlp_input=True), first_two + model.b_O[2])
    attention_alone = model.accumulated_bias(2, include_mlp_biases=False)
    torch.testing.assert_close(attention_alone, model.b_O[:2].sum(0))
    with pytest.raises(ValueError, match=r"layer=4: expected 0\.\.3"):
        model.accumulated_bias(4)


# Padding and loss.


@pytest.mark.parametrize("is_observed", [False, True], ids=["fused", "eager"])
@pytest.mark.parametrize("n_pads", [0, 1, 2, 3, 4])
def test_left_padding_changes_no_logit_of_a_real_token(tiny, tokens_for, n_pads, is_observed):
    tokens = tokens_for(tiny.cfg)
    # a second sequence in the batch has no padding, so that masks differ within the batch
    pads = torch.full((3, n_pads), 6 if tiny.cfg.max_depth else 1)
    padded = torch.cat([pads, tokens], dim=1)
    mask = torch.cat([torch.zeros(3, n_pads), torch.ones(3, 7)], dim=1).long()
    names = None if is_observed else "hook_embed"
    logits, _ = tiny.run_with_cache(padded, attention_mask=mask, names_filter=names)
    torch.testing.assert_close(logits[:, n_pads:], tiny(tokens), rtol=1e-10, atol=1e-10)


def test_each_sequence_of_a_batch_has_its_own_padding(family, tokens_for):
    model = family["classic"]
    tokens = tokens_for(model.cfg)
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[1, :2] = False
    mask[2, :4] = False
    logits = model(tokens, attention_mask=mask)
    for row, start in ((0, 0), (1, 2), (2, 4)):
        alone = model(tokens[row : row + 1, start:])
        torch.testing.assert_close(logits[row, start:], alone[0], rtol=1e-10, atol=1e-10)


def test_positions_count_from_the_first_real_token_and_padding_before_it_has_the_first(
    family, tokens_for
):
    model = family["classic"]
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[1, :3] = False
    name = "hook_pos_embed"
    _, cache = model.run_with_cache(tokens_for(model.cfg), attention_mask=mask, names_filter=name)
    assert torch.equal(cache[name][0], model.W_pos[:7])
    assert torch.equal(cache[name][1], model.W_pos[[0, 0, 0, 0, 1, 2, 3]])


@pytest.mark.parametrize("is_observed", [False, True], ids=["fused", "eager"])
def test_a_row_that_sees_no_key_is_zero_and_leaves_every_gradient_finite(
    family, tokens_for, is_observed
):
    model = family["classic"]
    tokens = tokens_for(model.cfg)
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[1, :3] = False  # causal: queries 0 to 2 of this sequence see nothing
    names = ["blocks.0.attn.hook_z"]
    names += ["blocks.0.attn.hook_pattern", "blocks.0.attn.hook_attn_scores"] * is_observed
    with torch.autograd.set_detect_anomaly(True):
        _, cache = model.run_with_cache(
            tokens, attention_mask=mask, return_type="loss", names_filter=names, incl_bwd=True
        )
    assert not cache["blocks.0.attn.hook_z"][1, :3].any()
    assert cache["blocks.0.attn.hook_z"][0, :3].any()
    if is_observed:
        row_sums = cache["blocks.0.attn.hook_pattern"].sum(-1)
        assert not row_sums[1, :, :3].any()
        torch.testing.assert_close(row_sums[0], torch.ones_like(row_sums[0]))
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    gradients += [value for key, value in cache.items() if key.endswith("_grad")]
    assert all(gradient.isfinite().all() for gradient in gradients)
    model.zero_grad()


def test_the_loss_is_the_mean_cross_entropy_of_next_tokens(family, tokens_for):
    model = family["classic"]
    tokens = tokens_for(model.cfg)
    log_probs = reference_logits(model, tokens).log_softmax(-1)
    nats = [-log_probs[b, i, tokens[b, i + 1]] for b in range(3) for i in range(6)]
    expected = torch.stack(nats).mean()
    torch.testing.assert_close(model(tokens, return_type="loss"), expected)


def test_the_loss_counts_pairs_of_real_tokens_alone(family, tokens_for):
    model = family["classic"]
    tokens = tokens_for(model.cfg)[:1]
    padded = torch.cat([torch.zeros(1, 3, dtype=torch.long), tokens], dim=1)
    mask = torch.cat([torch.zeros(1, 3), torch.ones(1, 7)], dim=1).bool()
    loss = model(padded, attention_mask=mask, return_type="loss")
    torch.testing.assert_close(loss, model(tokens, return_type="loss"))


BAD_INPUTS = [
    ({"tokens": torch.zeros(7).long()}, r"tokens: got torch.int64 of shape \(7,\), expected integ"),
    ({"tokens": torch.zeros(1, 7)}, r"tokens: got torch.float32 of shape \(1, 7\), expected"),
    ({"tokens": torch.zeros(2, 0).long()}, r"tokens: .* \(2, 0\), expected .* neither of them 0"),
    ({"tokens": torch.zeros(1, 20).long()}, r"tokens: 20 positions exceed n_ctx=19"),
    ({"tokens": torch.tensor([[1, 13]])}, r"tokens: got 13, expected 0\.\.12 \(d_vocab=13\)"),
    ({"tokens": torch.tensor([[1, -1]])}, r"tokens: got -1, expected 0\.\.12"),
    (
        {"tokens": torch.zeros(2, 7).long(), "attention_mask": torch.ones(2, 6).bool()},
        r"attention_mask: got torch.bool of shape \(2, 6\), expected .* tokens' shape \(2, 7\)",
    ),
    (
        {"tokens": torch.zeros(2, 7).long(), "attention_mask": torch.zeros(2, 7)},
        r"attention_mask: got torch.float32 of shape \(2, 7\), expected booleans, or integers 0",
    ),
    (
        {"tokens": torch.zeros(2, 7).long(), "return_type": "both"},
        r"return_type='both': expected 'logits' or 'loss'",
    ),
    (
        {"tokens": torch.zeros(2, 1).long(), "return_type": "loss"},
        r"the loss needs two positions, got tokens of shape \(2, 1\)",
    ),
    (
        {
            "tokens": torch.zeros(1, 3).long(),
            "attention_mask": torch.tensor([[1, 0, 1]]),
            "return_type": "loss",
        },
        r"attention_mask leaves no pair of real neighbours",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUTS)
def test_bad_input_is_named_with_what_came_and_what_was_expected(family, arguments, message):
    with pytest.raises(ValueError, match=message):
        family["classic"](**arguments)


def test_bidirectional_attention_has_no_next_token_loss(family, tokens_for):
    model = family["encoder"]
    with pytest.raises(ValueError, match="bidirectional attention already sees"):
        model(tokens_for(model.cfg), return_type="loss")


@pytest.mark.parametrize("embedding", ["dyck_joint", "dyck_separate", "dyck_angle"])
@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        ([2, 4, 4, 5, 4, 4], r"sequence 0 reaches depth 5 at position 5, but .*depths 0\.\.4"),
        ([2, 4, 6, 7, 4, 6], r"sequence 0 reaches depth -1 at position 3"),
        ([2, 4, 8], r"tokens: got 8, expected 0\.\.7"),
        ([2, 4, -1], r"tokens: got -1, expected 0\.\.7"),
    ],
)
def test_depths_that_the_embedding_has_no_vector_for_are_refused(
    config_for, embedding, sequence, message
):
    model = Transformer(config_for("minimal", embedding=embedding))
    with pytest.raises(ValueError, match=message):
        model(torch.tensor([sequence]))


def test_the_row_of_a_token_and_depth_is_the_one_that_the_forward_pass_reads(family):
    embed = family["minimal"].embed
    rows = embed.rows(torch.tensor([[2, 4, 5, 7, 6, 3]])).tolist()[0]
    by_hand = [(2, 0), (4, 1), (5, 2), (7, 2), (6, 1), (3, 0)]
    assert rows == [embed.row(token, depth) for token, depth in by_hand]
    with pytest.raises(ValueError, match=r"depth=5: expected 0\.\.4"):
        embed.row(4, 5)
    with pytest.raises(ValueError, match=r"token=8: expected 0\.\.7"):
        embed.row(8, 1)
