"""The metrics on tiny models against transformers' own attentions and hidden states."""

import pytest
import torch
import transformers

from interp.language_loss import perplexity, token_losses
from interp.massive_activations import massive_activations, secondary_sinks
from interp.models.config import TransformerConfig
from interp.models.transformer import Transformer
from interp.residual_profile import residual_profile
from interp.residual_stream import (
    block_outputs,
    block_writes,
    edited_block_output,
    residual_blocks,
)
from interp.sink_profile import sink_profile, value_drains
from interp.sinks import attention_entropy, position_importance, value_drain

N_LAYERS, N_TOKENS, D_MODEL = 3, 13, 22


def build(cls, config):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = cls(config).eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.fixture(scope="module")
def llama():
    config = transformers.LlamaConfig(
        vocab_size=53,
        hidden_size=D_MODEL,
        intermediate_size=34,
        num_hidden_layers=N_LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=10,
    )
    return build(transformers.LlamaForCausalLM, config)


@pytest.fixture(scope="module")
def zoo():
    config = TransformerConfig(
        n_layers=N_LAYERS, d_model=D_MODEL, n_heads=2, d_head=11, d_mlp=34, d_vocab=53, n_ctx=16
    )
    return Transformer(config).eval()


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(53, (5, N_TOKENS), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def eager(llama, tokens):
    llama.set_attn_implementation("eager")
    with torch.no_grad():
        output = llama(tokens, output_attentions=True, output_hidden_states=True)
    llama.set_attn_implementation("sdpa")
    return output


def test_the_sink_profile_equals_eager_attention_and_batching_changes_nothing(llama, tokens, eager):
    pattern = torch.stack(eager.attentions, 1).double()
    for batch_size in (2, 5):
        profile = sink_profile(llama, tokens, batch_size=batch_size)
        torch.testing.assert_close(
            profile.importance, position_importance(pattern), atol=2e-5, rtol=0
        )
        torch.testing.assert_close(
            profile.entropy, attention_entropy(pattern).mean(-1), atol=2e-5, rtol=1e-5
        )
        f_attn = profile.first_token_attention()
        torch.testing.assert_close(f_attn, pattern[..., 1:, 0].mean(-1), atol=2e-5, rtol=0)
        with_first = profile.first_token_attention(include_first_query=True)
        torch.testing.assert_close(with_first, pattern[..., 0].mean(-1), atol=2e-5, rtol=0)


def test_sink_rates_threshold_each_text_and_head(llama, tokens, eager):
    alpha = torch.stack(eager.attentions, 1)[..., 0].mean(-1)
    profile = sink_profile(llama, tokens)
    epsilon = float(alpha.median()) + 1e-4
    rate = (alpha > epsilon).double().mean((0, 2))
    torch.testing.assert_close(profile.sink_rate_by_layer(epsilon=epsilon), rate)
    assert profile.sink_rate(epsilon=epsilon) == pytest.approx(float(rate.mean()))
    assert 0 < profile.sink_rate(epsilon=epsilon) < 1


def test_the_sink_table_has_a_row_per_layer_and_head(llama, tokens):
    profile = sink_profile(llama, tokens)
    table = profile.table()
    assert len(table) == N_LAYERS * 2
    row = table[(table["layer"] == 2) & (table["head"] == 1)].iloc[0]
    assert row.importance == pytest.approx(float(profile.importance[:, 2, 1, 0].mean()))
    assert row.entropy == pytest.approx(float(profile.entropy[:, 2, 1].mean()))


def test_the_profile_of_a_zoo_model_equals_its_own_patterns(zoo, tokens):
    _, cache = zoo.run_with_cache(
        tokens, names_filter=[f"blocks.{layer}.attn.hook_pattern" for layer in range(N_LAYERS)]
    )
    pattern = torch.stack(list(cache.values()), 1)
    profile = sink_profile(zoo, tokens, batch_size=2)
    torch.testing.assert_close(profile.importance, position_importance(pattern))
    torch.testing.assert_close(profile.entropy, attention_entropy(pattern).mean(-1))


def test_value_drains_are_those_of_the_values_that_attention_reads(llama, zoo, tokens):
    seen = []
    handles = [
        block.self_attn.v_proj.register_forward_hook(lambda m, i, o: seen.append(o))
        for block in llama.model.layers
    ]
    drains = value_drains(llama, tokens)
    for handle in handles:
        handle.remove()
    values = torch.stack(seen, 1).unflatten(-1, (1, 10)).transpose(2, 3)
    torch.testing.assert_close(drains, value_drain(values))
    assert drains.shape == (5, N_LAYERS, 1)
    _, cache = zoo.run_with_cache(tokens, names_filter="blocks.1.attn.hook_v")
    expected = value_drain(cache["blocks.1.attn.hook_v"].transpose(1, 2))
    torch.testing.assert_close(value_drains(zoo, tokens, batch_size=2)[:, 1], expected)


def test_block_outputs_are_the_hidden_states_before_the_final_norm(llama, tokens, eager):
    parts = list(block_outputs(llama, tokens, batch_size=2))
    assert [len(part) for part in parts] == [2, 2, 1]
    hidden = torch.cat(parts)
    assert hidden.shape == (5, N_LAYERS, N_TOKENS, D_MODEL)
    for layer in range(N_LAYERS - 1):
        torch.testing.assert_close(
            hidden[:, layer], eager.hidden_states[layer + 1], atol=1e-5, rtol=1e-5
        )
    last = llama.model.norm(hidden[:, -1])
    torch.testing.assert_close(last, eager.hidden_states[-1], atol=1e-5, rtol=1e-5)


def test_block_outputs_of_a_zoo_model_are_its_resid_post(zoo, tokens):
    _, cache = zoo.run_with_cache(tokens)
    hidden = torch.cat(list(block_outputs(zoo, tokens)))
    for layer in range(N_LAYERS):
        torch.testing.assert_close(hidden[:, layer], cache[f"blocks.{layer}.hook_resid_post"])


def test_a_bidirectional_model_has_blocks_and_two_stacks_are_refused(tokens):
    bert = transformers.BertConfig(
        vocab_size=53,
        hidden_size=D_MODEL,
        intermediate_size=34,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    model = build(transformers.BertForMaskedLM, bert)
    assert residual_blocks(model) == list(model.bert.encoder.layer)
    with torch.no_grad():
        hidden = model(tokens, output_hidden_states=True).hidden_states
    torch.testing.assert_close(
        torch.cat(list(block_outputs(model, tokens))), torch.stack(hidden[1:], 1)
    )
    t5 = transformers.T5Config(
        vocab_size=53, d_model=D_MODEL, d_kv=8, d_ff=34, num_layers=2, num_heads=2
    )
    with pytest.raises(ValueError, match="one stack of blocks with attention, found: decoder"):
        residual_blocks(build(transformers.T5ForConditionalGeneration, t5))


def test_what_attention_and_mlp_write_adds_up_to_what_the_block_changed(llama, tokens):
    writes = block_writes(llama, tokens, 1, position=4, dimension=7, batch_size=2)
    change = writes["after"] - writes["before"]
    torch.testing.assert_close(writes["self_attn"] + writes["mlp"], change, atol=1e-5, rtol=1e-5)
    hidden = torch.cat(list(block_outputs(llama, tokens)))
    torch.testing.assert_close(writes["after"], hidden[:, 1, 4, 7])
    torch.testing.assert_close(writes["before"], hidden[:, 0, 4, 7])


def test_an_edit_acts_at_its_block_and_position_only_and_is_gone_afterwards(llama, tokens):
    def double(states):
        return states * 2

    before = torch.cat(list(block_outputs(llama, tokens)))
    with edited_block_output(llama, 1, double, position=3):
        edited = torch.cat(list(block_outputs(llama, tokens)))
    torch.testing.assert_close(edited[:, 0], before[:, 0])
    torch.testing.assert_close(edited[:, 2, :3], before[:, 2, :3])
    assert not torch.allclose(edited[:, 2, 3:], before[:, 2, 3:])
    torch.testing.assert_close(torch.cat(list(block_outputs(llama, tokens))), before)
    with pytest.raises(RuntimeError, match="on purpose"), edited_block_output(llama, 1, double):
        raise RuntimeError("on purpose")
    torch.testing.assert_close(torch.cat(list(block_outputs(llama, tokens))), before)
    with (
        pytest.raises(ValueError, match="block must be 0..2, got 3"),
        edited_block_output(llama, 3, double),
    ):
        pass


def test_an_edit_that_returns_its_input_changes_nothing(llama, tokens):
    plain = token_losses(llama, tokens)
    with edited_block_output(llama, 0, lambda states: states):
        assert torch.equal(token_losses(llama, tokens), plain)


def test_token_losses_are_the_models_own_and_perplexity_is_their_exponential(llama, tokens):
    losses = token_losses(llama, tokens, batch_size=2)
    assert losses.shape == (5, N_TOKENS - 1)
    with torch.no_grad():
        loss = llama(tokens, labels=tokens).loss
    torch.testing.assert_close(losses.mean(), loss)
    assert perplexity(losses) == pytest.approx(float(loss.exp()), rel=1e-5)
    assert perplexity(torch.tensor([1e4])) == float("inf")


def test_the_residual_profile_finds_what_an_edit_plants(llama, tokens):
    def plant(states):
        states[:, 5] = 3e4
        return states

    with edited_block_output(llama, 1, plant, position=2):
        profile = residual_profile(llama, tokens, batch_size=2)
        hidden = torch.cat(list(block_outputs(llama, tokens)))
    pairs = set(zip(profile.massive.layer, profile.massive.position, strict=True))
    assert (1, 2) in pairs
    place = profile.places().iloc[0]
    assert (place.layer, place.position, place.dimension, place.share) == (1, 2, 5, 1)
    assert place.value == 3e4
    whole = massive_activations(hidden)
    assert profile.massive[["sample", "layer", "position", "dimension"]].equals(
        whole[["sample", "layer", "position", "dimension"]]
    )
    torch.testing.assert_close(profile.norms, hidden.norm(dim=-1))
    assert len(profile.outliers) == 5 * N_LAYERS
    assert profile.outliers["sample"].tolist() == sorted(profile.outliers["sample"])


def test_the_profiles_waves_and_secondary_sinks_are_those_of_its_hidden_states(llama, tokens):
    def same_direction(states):
        return states * 0 + torch.linspace(30, 60, D_MODEL)

    with (
        edited_block_output(llama, 1, same_direction, position=0),
        edited_block_output(llama, 1, same_direction, position=6),
    ):
        profile = residual_profile(llama, tokens, batch_size=2)
        hidden = torch.cat(list(block_outputs(llama, tokens)))
    (wave,) = profile.waves()
    assert wave.first_layer == 1
    found = profile.secondary_sinks(wave)
    assert set(found.position) == {6}
    assert found.equals(secondary_sinks(hidden, wave))


def test_tokens_that_fit_no_model_are_refused_with_their_shape(llama):
    with pytest.raises(ValueError, match=r"\[batch, pos\] with at least 2 positions"):
        sink_profile(llama, torch.zeros(2, 1, dtype=torch.long))
    with pytest.raises(ValueError, match="vocabulary of 53: 99"):
        next(block_outputs(llama, torch.tensor([[1, 99]])))
