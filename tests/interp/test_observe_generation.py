"""Generation with a key-value cache is observed as the whole text would be."""

import inspect

import pytest
import torch
from transformers import (
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    StaticCache,
)

import interp

STATISTICS = ("lse", "entropy", "max", "first_mass", "received")
PROMPTS = torch.tensor([[0, 0, 5, 6, 7, 8, 9], [4, 11, 3, 5, 7, 5, 3]])
MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])
SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 12,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "intermediate_size": 20,
    "vocab_size": 31,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.5,
}
N_NEW = 6
OPTIONS = {"max_new_tokens": N_NEW, "min_new_tokens": N_NEW, "do_sample": False}


# what the argument is called, now and in older transformers
_NAMES = inspect.signature(LlamaForCausalLM.forward).parameters
CACHE = "cache" if "cache" in _NAMES else "past_key_values"


def seeded(build, config):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return build(config).eval()


@pytest.fixture(scope="module", params=["full attention", "sliding windows"])
def model(request):
    if request.param == "full attention":
        return seeded(LlamaForCausalLM, LlamaConfig(**SIZES))
    layers = ["sliding_attention", "full_attention"]
    return seeded(
        Gemma3ForCausalLM, Gemma3TextConfig(**SIZES, sliding_window=4, layer_types=layers)
    )


def whole_text(model, tokens):
    """The generated texts in one pass without a cache; the last token was never fed back."""
    mask = torch.cat([MASK, torch.ones(2, N_NEW - 1, dtype=torch.int64)], 1)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad(), interp.observe(model, statistics=STATISTICS, reduce="none") as seen:
        model(tokens[:, :-1], attention_mask=mask, position_ids=positions, use_cache=False)
    return seen


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_greedy_decoding_gives_eagers_tokens_and_the_whole_texts_statistics(model, cache):
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model.generate(PROMPTS, attention_mask=MASK, **OPTIONS)
    model.set_attn_implementation("sdpa")
    with torch.no_grad(), interp.observe(model, statistics=STATISTICS, reduce="none") as seen:
        tokens = model.generate(PROMPTS, attention_mask=MASK, cache_implementation=cache, **OPTIONS)
    assert torch.equal(tokens, expected)
    assert seen.n_texts == 2
    assert seen.lengths().tolist() == [5 + N_NEW - 1, 7 + N_NEW - 1]
    whole = whole_text(model, tokens)
    for statistic in STATISTICS:
        torch.testing.assert_close(
            seen.tensor(statistic),
            whole.tensor(statistic),
            atol=2e-5,
            rtol=0,
            equal_nan=True,
            check_dtype=False,
        )


@pytest.mark.parametrize("reduce", ["all", "sample", "position"])
def test_means_over_a_generated_text_are_those_over_the_whole_text(model, reduce):
    with torch.no_grad(), interp.observe(model, statistics=STATISTICS, reduce=reduce) as seen:
        tokens = model.generate(PROMPTS, attention_mask=MASK, **OPTIONS)
    mask = torch.cat([MASK, torch.ones(2, N_NEW - 1, dtype=torch.int64)], 1)
    with torch.no_grad(), interp.observe(model, statistics=STATISTICS, reduce=reduce) as whole:
        model(
            tokens[:, :-1],
            attention_mask=mask,
            position_ids=(mask.cumsum(-1) - 1).clamp_min(0),
            use_cache=False,
        )
    ours, theirs = seen.table(), whole.table()
    assert ours["n"].tolist() == theirs["n"].tolist()
    assert ours["value"].to_numpy() == pytest.approx(theirs["value"].to_numpy(), abs=2e-5)


def test_rows_kept_while_generating_grow_with_the_text(model):
    with torch.no_grad(), interp.observe(model, patterns=[(1, 2)], statistics=()) as seen:
        tokens = model.generate(PROMPTS, attention_mask=MASK, **OPTIONS)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        eager = model(tokens[1:, :-1], output_attentions=True).attentions[1][0, 2]
    model.set_attn_implementation("sdpa")
    rows = seen.pattern(1, 2, sample=1)
    assert rows.rows.tolist() == list(range(12))
    torch.testing.assert_close(rows.weights, eager, atol=2e-5, rtol=0)


def test_each_call_of_generate_is_a_new_text(model):
    with torch.no_grad(), interp.observe(model, reduce="sample") as seen:
        for _ in range(3):
            model.generate(PROMPTS, attention_mask=MASK, **OPTIONS)
    assert seen.n_texts == 6
    entropy = seen.tensor("entropy")
    torch.testing.assert_close(entropy[:2], entropy[4:])


def test_a_cache_that_is_handed_on_continues_its_texts_and_another_does_not(model):
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), interp.observe(model, reduce="sample") as seen:
        model(PROMPTS[1:], **{CACHE: cache})
        assert seen.n_texts == 1
        model(PROMPTS[1:, :2], **{CACHE: cache})
        assert seen.n_texts == 1
        model(PROMPTS[1:], **{CACHE: DynamicCache(config=model.config)})
        assert seen.n_texts == 2
    assert seen.lengths().tolist() == [9, 7]


def test_a_cache_that_the_model_made_itself_is_recognised(model):
    with torch.no_grad(), interp.observe(model, reduce="sample") as seen:
        first = model(PROMPTS[1:], use_cache=True)
        model(PROMPTS[1:, :2], **{CACHE: first[CACHE]})
    assert seen.lengths().tolist() == [9]


def test_chunks_fed_through_a_static_cache_are_one_text(model):
    whole, chunked = PROMPTS[1:], StaticCache(config=model.config, max_cache_len=16)
    with torch.no_grad(), interp.observe(model, statistics=STATISTICS, reduce="none") as seen:
        model(whole[:, :3], **{CACHE: chunked})
        model(whole[:, 3:], **{CACHE: chunked})
    with torch.no_grad(), interp.observe(model, statistics=STATISTICS, reduce="none") as once:
        model(whole, use_cache=False)
    for statistic in STATISTICS:
        torch.testing.assert_close(
            seen.tensor(statistic), once.tensor(statistic), atol=2e-5, rtol=0, check_dtype=False
        )


def test_beam_search_gives_the_same_text(model):
    options = {**OPTIONS, "num_beams": 3}
    with torch.no_grad():
        expected = model.generate(PROMPTS, attention_mask=MASK, **options)
        with interp.observe(model, reduce="sample") as seen:
            observed = model.generate(PROMPTS, attention_mask=MASK, **options)
    assert torch.equal(observed, expected)
    assert seen.n_texts == 6  # every beam is a text
