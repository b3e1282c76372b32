"""Edits act inside attention, in the layers and heads that were chosen, and nowhere else."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Qwen2Config, Qwen2ForCausalLM

import interp
from interp.kernels.edits import Edit, KnockOut

TOKENS = torch.tensor([[5, 6, 7, 8, 9, 10, 11], [11, 3, 5, 7, 5, 3, 4]])
N_HEADS, D_HEAD = 3, 4


@pytest.fixture(scope="module")
def model():
    config = GPT2Config(
        n_layer=2,
        n_head=N_HEADS,
        n_embd=N_HEADS * D_HEAD,
        vocab_size=31,
        n_positions=16,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.4,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return GPT2LMHeadModel(config).eval()


def heads_outputs(model, layer, edit=None):
    """What c_proj of a layer is given, [batch, pos, head, d_head], with and without an edit."""
    kept = []
    module = model.transformer.h[layer].attn.c_proj
    handle = module.register_forward_pre_hook(lambda m, args: kept.append(args[0]))
    try:
        with torch.no_grad(), interp.observe(model, edit=edit):
            model(TOKENS)
    finally:
        handle.remove()
    return kept[0].unflatten(-1, (N_HEADS, D_HEAD))


def test_a_silenced_head_gives_zeros_and_the_others_what_they_gave(model):
    edited = heads_outputs(model, 0, {0: Edit(output={1: torch.zeros(1)})})
    plain = heads_outputs(model, 0)
    assert not edited[:, :, 1].any()
    assert plain[:, :, 1].any()
    for head in (0, 2):
        torch.testing.assert_close(edited[:, :, head], plain[:, :, head])


def test_an_edit_of_one_layer_leaves_the_layers_before_it_alone(model):
    edit = {1: Edit(output={0: torch.zeros(1)})}
    torch.testing.assert_close(heads_outputs(model, 0, edit), heads_outputs(model, 0))
    assert not torch.allclose(heads_outputs(model, 1, edit), heads_outputs(model, 1))


def test_an_ablation_moves_the_logits_exactly_as_zeroed_columns_of_the_projection_do(model):
    with torch.no_grad():
        weight = model.transformer.h[0].attn.c_proj.weight
        before = weight.clone()
        weight[D_HEAD : 2 * D_HEAD] = 0
        expected = model(TOKENS).logits
        weight.copy_(before)
        with interp.observe(model, edit={0: Edit(output={1: torch.zeros(1)})}):
            ablated = model(TOKENS).logits
    torch.testing.assert_close(ablated, expected, atol=2e-5, rtol=0)
    assert (ablated - model(TOKENS).logits).abs().max() > 1e-3


def test_statistics_are_those_of_the_edited_pattern(model):
    edit = Edit(temperature={0: 0.0}, window={2: (0, 0)})
    statistics = ("entropy", "max", "first_mass", "received")
    with (
        torch.no_grad(),
        interp.observe(model, edit=edit, reduce="none", statistics=statistics) as s,
    ):
        model(TOKENS)
    n_keys = torch.arange(1.0, 8.0)
    for layer in range(2):
        torch.testing.assert_close(
            s.layer_tensor("entropy", layer)[:, 0], n_keys.log().expand(2, 7), atol=1e-5, rtol=0
        )
        torch.testing.assert_close(
            s.layer_tensor("max", layer)[:, 0], (1 / n_keys).expand(2, 7), atol=1e-6, rtol=0
        )
        assert (s.layer_tensor("max", layer)[:, 2] == 1).all()
        assert (s.layer_tensor("received", layer)[:, 2] == 1).all()
        assert (s.layer_tensor("first_mass", layer)[:, 2, 1:] == 0).all()


def test_rows_that_an_edit_leaves_without_keys_enter_no_mean(model):
    previous = {0: (1, 1)}  # the first query has no previous token
    with torch.no_grad(), interp.observe(model, layers=[0], edit=Edit(window=previous)) as seen:
        model(TOKENS)
    table = seen.table()
    counts = table[table["statistic"] == "entropy"]["n"].tolist()
    assert counts == [12, 14, 14]


def test_queries_and_keys_from_another_run_patch_that_runs_pattern(model):
    kept = []
    handle = model.transformer.h[1].attn.c_attn.register_forward_hook(
        lambda m, args, out: kept.append(out.detach())
    )
    other = TOKENS.flip(0)
    with torch.no_grad(), interp.observe(model, patterns=[(1, 2)], statistics=()) as donor:
        model(other)
    handle.remove()
    q, k, _ = kept[0].chunk(3, dim=-1)
    at = slice(2 * D_HEAD, 3 * D_HEAD)
    edit = {1: Edit(queries={2: q[..., at]}, keys={2: k[..., at]})}
    with (
        torch.no_grad(),
        interp.observe(model, edit=edit, patterns=[(1, 2)], statistics=()) as patched,
    ):
        model(TOKENS)
    for sample in range(2):
        torch.testing.assert_close(
            patched.pattern(1, 2, sample=sample).weights, donor.pattern(1, 2, sample=sample).weights
        )


def test_edges_are_knocked_out_before_softmax(model):
    queries = torch.tensor([[0, 0, 0, 1, 1, 1, 1]], dtype=torch.int32)
    keys = torch.tensor([[1, 0, 0, 0, 0, 0, 0]], dtype=torch.int32)
    edit = Edit(knock_out=KnockOut(queries, keys))
    with torch.no_grad(), interp.observe(model, edit=edit, patterns=[(0, 0)]) as seen:
        model(TOKENS)
    weights = seen.pattern(0, 0).weights
    assert (weights[3:, 0] == 0).all()
    assert (weights[:3, 0] > 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(7))


def test_a_random_pattern_is_drawn_from_its_seed_alone(model):
    def rows(seed):
        edit = {0: Edit(random={1: seed})}
        with torch.no_grad(), interp.observe(model, edit=edit, patterns=[(0, 1)]) as seen:
            model(TOKENS)
        return seen.pattern(0, 1).weights

    state = torch.get_rng_state()
    assert torch.equal(rows(5), rows(5))
    assert not torch.allclose(rows(5), rows(6))
    assert torch.equal(torch.get_rng_state(), state)


def test_heads_that_share_keys_are_edited_one_by_one():
    config = Qwen2Config(
        num_hidden_layers=1,
        hidden_size=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=8,
        vocab_size=31,
        pad_token_id=0,
        initializer_range=0.4,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(config).eval()
    keys = torch.zeros(2, 7, 4)
    with torch.no_grad(), interp.observe(model, reduce="none") as plain:
        model(TOKENS)
    with torch.no_grad(), interp.observe(model, edit=Edit(keys={1: keys}), reduce="none") as edited:
        model(TOKENS)
    uniform = torch.arange(1.0, 8.0).log().expand(2, 7)
    ours, before = edited.layer_tensor("entropy", 0), plain.layer_tensor("entropy", 0)
    torch.testing.assert_close(ours[:, 1], uniform, atol=1e-5, rtol=0)
    for head in (0, 2, 3):  # head 0 reads the same key-value head
        torch.testing.assert_close(ours[:, head], before[:, head])
