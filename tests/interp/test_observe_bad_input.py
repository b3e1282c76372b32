"""What cannot be observed is refused in one clear sentence, and the model is left as it was."""

import re

import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaModel,
)

import interp
from interp.benchmarks.family_check import snapshot
from interp.kernels.edits import Edit, KnockOut
from interp.observe_request import read_request

TOKENS = torch.tensor([[5, 6, 7, 8, 9]])
ZEROS = torch.zeros(1)


@pytest.fixture(scope="module")
def model():
    config = GPT2Config(
        n_layer=3, n_head=2, n_embd=8, vocab_size=31, n_positions=16, bos_token_id=1, eos_token_id=2
    )
    with torch.random.fork_rng(devices=[]):
        return GPT2LMHeadModel(config).eval()


@pytest.fixture(scope="module")
def rotary():
    config = LlamaConfig(
        num_hidden_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=8,
        vocab_size=31,
        max_position_embeddings=16,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        return LlamaForCausalLM(config).eval()


ARGUMENTS = [
    ({"layers": [3]}, "layers: GPT2LMHeadModel has no attention in layer 3 .* among [0, 1, 2]"),
    ({"layers": [-1]}, "layers: GPT2LMHeadModel has no attention in layer -1"),
    ({"heads": [2]}, "heads: layer 0 has no head 2, expected 0 to 1"),
    ({"heads": [-1]}, "heads: layer 0 has no head -1, expected 0 to 1"),
    ({"heads": {1: [0, 5]}}, "heads: layer 1 has no head 5, expected 0 to 1"),
    ({"heads": {7: [0]}}, "heads: names layer 7, expected among [0, 1, 2]"),
    ({"heads": {1: [0]}, "layers": [0]}, "heads: names layer 1, which is not observed; add it"),
    ({"stacks": ["encoder"]}, "stacks: GPT2LMHeadModel has no 'encoder', expected among ['self']"),
    ({"statistics": ("entrpy",)}, "statistics: unknown 'entrpy'; known are lse, entropy, max"),
    ({"statistics": ()}, "statistics: is empty, and neither patterns nor edit is given"),
    (
        {"statistics": ("sink_mass",)},
        "statistics: 'sink_mass' is the weight of a learned sink",
    ),
    ({"statistics": ("mass",)}, "key_sets: 'mass' among the statistics and key_sets="),
    ({"key_sets": {"a": [0]}}, "key_sets: 'mass' among the statistics and key_sets="),
    (
        {"statistics": ("mass",), "key_sets": {"a": [-1]}},
        "key_sets['a']: names -1, expected positions from 0",
    ),
    ({"reduce": "mean"}, "reduce: got 'mean', expected one of all, sample, position, none"),
    ({"from_query": -1}, "from_query: got -1, expected a position of at least 0"),
    ({"patterns": [(0, 2)]}, "patterns: layer 0 has no head 2, expected 0 to 1"),
    ({"patterns": [(4, 0)]}, "patterns: names layer 4, expected among [0, 1, 2]"),
    (
        {"patterns": [(0, 1)], "heads": [0]},
        "patterns: head 1 of layer 0 is not observed; add it to heads",
    ),
    (
        {"edit": Edit(output={1: ZEROS}), "heads": [0]},
        "edit: changes head 1 of layer 0, which is not observed: heads=[0]",
    ),
    (
        {"edit": {2: Edit(temperature={0: 0.0})}, "layers": [0, 1]},
        "edit: names layer 2, which is not observed; add it to layers=[0, 1]",
    ),
    ({"edit": {9: Edit()}}, "edit: names layer 9, expected among [0, 1, 2]"),
    ({"edit": Edit(window={2: (0, 0)})}, "edit: layer 0 has no head 2, expected 0 to 1"),
    (
        {
            "edit": Edit(knock_out=KnockOut(torch.ones(1, 5).int(), torch.ones(1, 5).int())),
            "heads": [0],
        },
        "edit: changes every head of layer 0, which is not observed",
    ),
]


def plain(message: str) -> str:
    """A message as a pattern in which only `` .* `` is special."""
    return " .* ".join(re.escape(part) for part in message.split(" .* "))


@pytest.mark.parametrize(("arguments", "message"), ARGUMENTS, ids=[m[:40] for _, m in ARGUMENTS])
def test_an_argument_that_does_not_fit_is_named(model, arguments, message):
    before = snapshot(model)
    with pytest.raises(ValueError, match=plain(message)), interp.observe(model, **arguments):
        pass
    assert snapshot(model) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"statistics": "entropy"}, "statistics: got the string 'entropy', expected names in a"),
        ({"statistics": ("mass",), "key_sets": {"a": "x"}}, "key_sets['a']: got 'x', expected pos"),
        (
            {"edit": {0: "zero"}},
            "edit: got str, expected an interp.kernels.edits.Edit or a",
        ),
        ({"patterns": [0]}, "patterns: got 0, expected (layer, head) pairs"),
    ],
)
def test_an_argument_of_the_wrong_type_is_named(arguments, message):
    """Asked of the function behind `observe`, whose own annotations are checked in tests."""
    given = dict.fromkeys(("layers", "heads", "stacks", "key_sets", "edit", "patterns"))
    given |= {"statistics": ("entropy",), "reduce": "all", "from_query": 0}
    given |= {"extrapolate": False, "backend": "auto"}
    with pytest.raises(TypeError, match=plain(message)):
        read_request(**{**given, **arguments})


def test_a_misspelt_keyword_is_no_keyword(model):
    with pytest.raises(TypeError, match="unexpected keyword argument 'layer'"):
        interp.observe(model, layer=[0])


def test_what_is_no_model_is_refused():
    with (
        pytest.raises(TypeError, match="model: got str, expected a transformers model"),
        interp.observe("gpt2"),
    ):
        pass
    with (
        pytest.raises(ValueError, match="model: Linear is no transformers model, and has no hook"),
        interp.observe(nn.Linear(2, 2)),
    ):
        pass


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from within torch.compile
def test_a_compiled_model_is_refused_since_its_graph_would_not_see_us(model):
    for compiled in (torch.compile(model), torch.compile(model.transformer)):
        with (
            pytest.raises(ValueError, match="is compiled, and a compiled graph keeps the att"),
            interp.observe(compiled),
        ):
            pass


def test_a_model_without_weights_is_refused():
    with torch.device("meta"):
        hollow = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=31))
    with (
        pytest.raises(ValueError, match=r"on the meta device, .* load them first \(nnsight: disp"),
        interp.observe(hollow),
    ):
        pass


def run_refused(model, message: str, *args, error: type[Exception] = ValueError, **kwargs):
    """The call raises inside an observation, and the model works afterwards as before."""
    before = snapshot(model)
    options = {name: kwargs.pop(name) for name in ("extrapolate", "statistics") if name in kwargs}
    with pytest.raises(error, match=plain(message)), interp.observe(model, **options):
        model(*args, **kwargs)
    assert snapshot(model) == before
    with interp.observe(model) as seen:
        model(TOKENS)
    assert seen.n_texts == 1


def test_an_empty_text_is_refused(model):
    run_refused(model, "input_ids: the text is empty", torch.zeros(1, 0, dtype=torch.int64))


def test_a_mask_that_hides_everything_is_refused(model):
    tokens = TOKENS.expand(3, -1)
    mask = torch.ones_like(tokens)
    mask[1] = 0
    message = "attention_mask: hides every token of sample 1; expected at least one real token"
    run_refused(model, message, tokens, attention_mask=mask)
    square = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    run_refused(
        model,
        "attention_mask: hides every key from every query of sample 0",
        TOKENS,
        attention_mask=square & False,
    )
    additive = torch.full((1, 1, 5, 5), torch.finfo(torch.float32).min)
    run_refused(
        model,
        "attention_mask: hides every key from every query of sample 0",
        TOKENS,
        attention_mask=additive,
    )
    with interp.observe(model) as seen:
        model(TOKENS, attention_mask=square)  # the control: a 4-D mask as such is welcome
    assert seen.n_texts == 1


def test_a_text_beyond_a_learned_position_table_is_refused(model):
    long = torch.full((1, 17), 5)
    message = "input_ids: a text of 17 tokens is longer than the 16 positions of GPT2LMHead"
    run_refused(model, message, long)
    run_refused(model, message, long, extrapolate=True)


def test_a_text_beyond_the_trained_rotary_positions_needs_to_be_asked_for(rotary):
    long = torch.full((1, 17), 5)
    message = "input_ids: a text of 17 tokens is longer than the 16 positions of LlamaFor"
    run_refused(rotary, message, long)
    with interp.observe(rotary, extrapolate=True) as seen:
        rotary(long)
    assert seen.lengths().tolist() == [17]
    with interp.observe(rotary) as seen:
        rotary(long[:, :16])  # exactly as many are fine
    assert seen.lengths().tolist() == [16]


def test_vectors_in_the_place_of_tokens_are_counted_too(model, rotary):
    with (
        pytest.raises(ValueError, match="inputs_embeds: a text of 17 tokens is longer than the 16"),
        interp.observe(rotary),
    ):
        rotary(inputs_embeds=torch.zeros(1, 17, 8))
    with pytest.raises(ValueError, match="inputs_embeds: the text is empty"), interp.observe(model):
        model(inputs_embeds=torch.zeros(1, 0, 8))


def test_positions_used_up_by_a_cache_count(rotary):
    with (
        pytest.raises(ValueError, match="a text of 17 tokens is longer than the 16 positions"),
        interp.observe(rotary),
    ):
        first = rotary(torch.full((1, 10), 5), use_cache=True)
        name = "cache" if "cache" in first else "past_key_values"
        rotary(torch.full((1, 7), 5), **{name: first[name]})


def test_a_position_table_that_begins_after_the_padding_token_is_that_much_shorter():
    config = RobertaConfig(
        num_hidden_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        intermediate_size=8,
        vocab_size=31,
        max_position_embeddings=16,
        pad_token_id=1,
    )
    model = RobertaModel(config).eval()
    run_refused(
        model, "a text of 15 tokens is longer than the 14 positions", torch.full((1, 15), 5)
    )
    model(torch.full((1, 14), 5))  # the control: 14 do fit


def test_attentions_are_not_silently_left_out_of_the_output(model):
    message = "output_attentions: asks for every pattern, which an observation never builds; name"
    run_refused(model, message, TOKENS, output_attentions=True)


def test_dropout_of_attention_is_refused(model):
    model.train()
    try:
        message = "(GPT2Attention) drops attention weights at random (dropout=0.1)"
        with pytest.raises(ValueError, match=plain(message)), interp.observe(model):
            model(TOKENS)
        assert model.training
    finally:
        model.eval()


def test_a_keyword_of_attention_that_we_do_not_know_is_not_swallowed(model):
    message = (
        "transformer.h.0.attn (GPT2Attention) passes ['future_option'] to attention, which this "
        "observation does not know and will not ignore"
    )
    run_refused(model, message, TOKENS, future_option=3)
    with interp.observe(model) as seen:
        model(TOKENS, future_option=None)  # not given is not ignored
    assert seen.n_texts == 1


def test_a_part_of_a_model_run_by_itself_is_refused(model):
    before = snapshot(model)
    states = torch.zeros(1, 5, 8)
    with (
        pytest.raises(RuntimeError, match="ran outside a forward pass that was followed from its"),
        interp.observe(model),
    ):
        model.transformer.h[0](states)
    assert snapshot(model) == before


def test_results_that_were_not_asked_for_are_named(model):
    with interp.observe(model, statistics=("entropy",), layers=[0, 2], patterns=[(0, 1)]) as seen:
        with pytest.raises(ValueError, match="nothing was observed: no observed layer of GPT2"):
            seen.table()
        model(TOKENS)
    with pytest.raises(ValueError, match="statistic: 'lse' was not observed, expected among"):
        seen.tensor("lse")
    with pytest.raises(ValueError, match=r"layer: 1 was not seen, expected among \[0, 2\]"):
        seen.layer_tensor("entropy", 1)
    with pytest.raises(ValueError, match=r"patterns: head 0 of layer 2 was not asked for"):
        seen.pattern(2, 0)
    with pytest.raises(ValueError, match=r"sample: no row of text 1 was kept, expected among \[0"):
        seen.pattern(0, 1, sample=1)
    with pytest.raises(ValueError, match="stack: 'cross' was not seen, expected among"):
        seen.tensor("entropy", stack="cross")
