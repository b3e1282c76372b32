"""Streaming against two witnesses: dense attention under a mask, and token-by-token caches."""

import pytest
import torch
import transformers

from interp.language_loss import token_losses
from interp.rotary import KeyRotation, cache_argument, find_key_rotations
from interp.streaming import streaming_losses, streaming_table

N_TOKENS = 151
SINKS, RECENT = 3, 17


def build(cls, config):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = cls(config).double().eval()
        for parameter in model.parameters():  # wide weights, so that attention is far from uniform
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.35)
    return model


SIZES = {
    "vocab_size": 53,
    "hidden_size": 44,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
}


@pytest.fixture(scope="module")
def llama():
    config = transformers.LlamaConfig(
        **SIZES, intermediate_size=36, num_attention_heads=2, num_key_value_heads=1, head_dim=22
    )
    return build(transformers.LlamaForCausalLM, config)


@pytest.fixture(scope="module")
def neox():
    """A quarter of each head's dimensions turn."""
    config = transformers.GPTNeoXConfig(
        **SIZES, intermediate_size=36, num_attention_heads=2, rotary_pct=0.28
    )
    return build(transformers.GPTNeoXForCausalLM, config)


@pytest.fixture(scope="module")
def cohere():
    """Neighbouring dimensions form a pair."""
    config = transformers.CohereConfig(
        **SIZES, intermediate_size=36, num_attention_heads=2, num_key_value_heads=2
    )
    return build(transformers.CohereForCausalLM, config)


@pytest.fixture(scope="module")
def gpt2():
    config = transformers.GPT2Config(vocab_size=53, n_embd=44, n_layer=2, n_head=2, n_positions=256)
    return build(transformers.GPT2LMHeadModel, config)


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(53, (2, N_TOKENS), generator=torch.Generator().manual_seed(0))


def dense_losses(model, tokens, *, n_sinks, n_recent, position_ids=None):
    """One forward over the whole text under the window's mask."""
    index = torch.arange(N_TOKENS)
    behind = index[:, None] - index
    visible = (behind >= 0) & ((index < n_sinks) | (behind <= n_recent))
    mask = torch.zeros(N_TOKENS, N_TOKENS, dtype=torch.float64)
    mask = mask.masked_fill(~visible, float("-inf")).expand(2, 1, -1, -1)
    if position_ids is None:
        position_ids = index
    with torch.no_grad():
        logits = model(
            input_ids=tokens, attention_mask=mask, position_ids=position_ids.expand(2, -1)
        ).logits
    log_p = logits[:, :-1].log_softmax(-1)
    return -log_p.gather(-1, tokens[:, 1:, None])[..., 0]


def token_by_token_losses(model, tokens, *, mode, rotation):
    """A cache that is evicted after every token, as a serving loop would do it."""
    cache = transformers.DynamicCache()
    losses = []
    with torch.no_grad():
        for i in range(N_TOKENS - 1):
            position = i if mode == "original" else cache.get_seq_length()
            logits = model(
                input_ids=tokens[:, i : i + 1],
                position_ids=torch.tensor([[position]]),
                use_cache=True,
                **cache_argument(model, cache),
            ).logits[:, -1]
            losses.append(-logits.log_softmax(-1).gather(-1, tokens[:, i + 1 : i + 2]))
            for layer in cache.layers:
                n = layer.keys.shape[2]
                if n <= SINKS + RECENT:
                    continue
                recent = layer.keys[:, :, n - RECENT :]
                if mode == "shifted":
                    recent = rotation.turn(recent, torch.full((RECENT,), -1))
                layer.keys = torch.cat([layer.keys[:, :, :SINKS], recent], 2)
                layer.values = torch.cat(
                    [layer.values[:, :, :SINKS], layer.values[:, :, n - RECENT :]], 2
                )
    return torch.cat(losses, 1)


@pytest.mark.parametrize("name", ["llama", "neox", "cohere", "gpt2"])
@pytest.mark.parametrize(("n_sinks", "n_recent"), [(0, 19), (3, 17), (1, 0), (70, 5)])
def test_original_positions_equal_dense_attention_under_the_windows_mask(
    name, n_sinks, n_recent, tokens, request
):
    model = request.getfixturevalue(name)
    ours = streaming_losses(model, tokens, n_sinks=n_sinks, n_recent=n_recent)
    torch.testing.assert_close(
        ours, dense_losses(model, tokens, n_sinks=n_sinks, n_recent=n_recent)
    )


def test_a_cache_that_holds_the_whole_text_equals_the_plain_model(llama, tokens):
    ours = streaming_losses(llama, tokens, n_sinks=2, n_recent=N_TOKENS)
    torch.testing.assert_close(ours, token_losses(llama, tokens))


@pytest.mark.parametrize("name", ["llama", "neox", "cohere"])
@pytest.mark.parametrize("mode", ["original", "shifted", "stuck"])
def test_every_mode_equals_a_cache_that_is_evicted_token_by_token(name, mode, tokens, request):
    model = request.getfixturevalue(name)
    rotation = find_key_rotations(model)[0]
    ours = streaming_losses(model, tokens, n_sinks=SINKS, n_recent=RECENT, positions=mode)
    reference = token_by_token_losses(model, tokens, mode=mode, rotation=rotation)
    # models compute their angles in float32, and a shifted key has been turned twice
    atol = 2e-4 if mode == "shifted" else 1e-7
    torch.testing.assert_close(ours, reference, atol=atol, rtol=0)


def test_the_three_modes_differ_once_the_cache_is_full_and_agree_before(llama, tokens):
    losses = {
        mode: streaming_losses(llama, tokens, n_sinks=SINKS, n_recent=RECENT, positions=mode)
        for mode in ("original", "shifted", "stuck")
    }
    first_full = SINKS + RECENT + 1
    for mode in ("shifted", "stuck"):
        difference = (losses[mode] - losses["original"]).abs()
        assert difference[:, :first_full].max() < 1e-5
        assert difference[:, first_full + 20 :].mean() > 1e-3


def test_without_sinks_shifting_changes_nothing(llama, tokens):
    original, shifted = (
        streaming_losses(llama, tokens, n_sinks=0, n_recent=RECENT, positions=mode)
        for mode in ("original", "shifted")
    )
    torch.testing.assert_close(shifted, original)


def test_a_gap_puts_the_sinks_so_much_further_away(llama, tokens):
    index = torch.arange(N_TOKENS)
    position_ids = index + 1000 * (index >= SINKS)
    ours = streaming_losses(llama, tokens, n_sinks=SINKS, n_recent=RECENT, gap=1000)
    reference = dense_losses(
        llama, tokens, n_sinks=SINKS, n_recent=RECENT, position_ids=position_ids
    )
    torch.testing.assert_close(ours, reference)


def test_key_rotations_are_those_that_the_model_uses(llama, neox, cohere):
    assert [len(r.frequencies) for r in find_key_rotations(llama)] == [11, 11]
    assert [r.pairing for r in find_key_rotations(llama)] == ["halves", "halves"]
    assert {len(r.frequencies) for r in find_key_rotations(neox)} == {3}
    assert {r.pairing for r in find_key_rotations(cohere)} == {"neighbours"}


def test_layers_of_one_model_may_turn_differently_or_not_at_all():
    config = transformers.SmolLM3Config(
        **SIZES,
        intermediate_size=36,
        num_attention_heads=2,
        num_key_value_heads=1,
        no_rope_layers=[1, 0],
        pad_token_id=0,
    )
    rotations = find_key_rotations(build(transformers.SmolLM3ForCausalLM, config))
    assert [len(rotation.frequencies) for rotation in rotations] == [11, 0]


def test_turning_there_and_back_gives_the_keys_again():
    keys = torch.randn(2, 3, 5, 14, generator=torch.Generator().manual_seed(0)).double()
    by = torch.tensor([0, 1, 7, 100, 20000])
    for pairing in ("halves", "neighbours"):
        rotation = KeyRotation(torch.tensor([1.0, 0.3, 0.01]), pairing)
        turned = rotation.turn(keys, by)
        assert torch.equal(turned[..., 6:], keys[..., 6:])
        assert not torch.allclose(turned[:, :, 1:, :6], keys[:, :, 1:, :6])
        torch.testing.assert_close(rotation.turn(turned, -by), keys)


def test_shifting_a_model_with_learned_positions_is_refused(gpt2, tokens):
    with pytest.raises(ValueError, match="layer 0 of GPT2LMHeadModel do not turn.*rotary"):
        streaming_losses(gpt2, tokens, n_sinks=1, n_recent=9, positions="shifted")


def test_frequencies_that_change_with_the_length_are_refused(tokens):
    config = transformers.LlamaConfig(
        **SIZES,
        intermediate_size=36,
        num_attention_heads=2,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    )
    model = build(transformers.LlamaForCausalLM, config)
    with pytest.raises(ValueError, match="rotary frequencies with the length.*'dynamic'"):
        streaming_losses(model, tokens, n_sinks=1, n_recent=9, positions="shifted")


def test_bad_requests_name_what_came_and_what_was_expected(llama, gpt2, tokens):
    with pytest.raises(ValueError, match="n_sinks and n_recent must be at least 0, got -1"):
        streaming_losses(llama, tokens, n_sinks=-1, n_recent=3)
    with pytest.raises(ValueError, match="positions must be one of 'original'.*got 'moved'"):
        streaming_losses(llama, tokens, n_sinks=1, n_recent=3, positions="moved")
    with pytest.raises(ValueError, match="gap is a distance.*got 5 with positions='stuck'"):
        streaming_losses(llama, tokens, n_sinks=1, n_recent=3, positions="stuck", gap=5)
    with pytest.raises(ValueError, match="256 learned positions, and 1150 would be needed"):
        streaming_losses(gpt2, tokens, n_sinks=1, n_recent=3, gap=1000)
    with pytest.raises(ValueError, match="vocabulary of 53: 60"):
        streaming_losses(llama, torch.tensor([[1, 60]]), n_sinks=1, n_recent=3)
    with pytest.raises(ValueError, match="at least 2 positions"):
        streaming_losses(llama, tokens[:, :1], n_sinks=1, n_recent=3)


def test_a_window_shorter_than_the_cache_and_layers_without_attention_are_refused(tokens):
    sizes = SIZES | {"intermediate_size": 36, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.MistralConfig(**sizes, sliding_window=16)
    model = build(transformers.MistralForCausalLM, config)
    with pytest.raises(ValueError, match="see only 16 tokens; n_sinks \\+ n_recent must be less"):
        streaming_losses(model, tokens, n_sinks=3, n_recent=17)
    ours = streaming_losses(model, tokens, n_sinks=3, n_recent=11)
    torch.testing.assert_close(ours, dense_losses(model, tokens, n_sinks=3, n_recent=11))
    model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(ValueError, match="layers of type linear_attention"):
        streaming_losses(model, tokens, n_sinks=3, n_recent=11)


def test_the_table_crosses_sinks_with_positions_and_gaps(llama, tokens):
    table = streaming_table(
        llama, tokens, caches=[(0, 20), (3, 17)], positions=("original", "stuck"), gaps=(0, 500)
    )
    assert list(table.columns) == ["n_sinks", "n_recent", "positions", "gap", "perplexity"]
    keys = table[["n_sinks", "positions", "gap"]].itertuples(index=False, name=None)
    assert list(keys) == [
        (s, mode, gap)
        for s in (0, 3)
        for mode, gap in (("original", 0), ("original", 500), ("stuck", 0))
    ]
    one = streaming_losses(llama, tokens, n_sinks=3, n_recent=17, positions="stuck")
    assert table.perplexity.iloc[5] == pytest.approx(float(one.double().mean().exp()))
