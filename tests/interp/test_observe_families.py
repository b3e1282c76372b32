"""One tiny random model of each well-known architecture, against its own eager attentions."""

import warnings

import pytest
import torch
from transformers import PreTrainedModel

import interp
from interp.benchmarks.family_check import check_family, first_output, make_texts
from interp.benchmarks.family_models import D_VOCAB, Family, text_families, tiny_model

# architecture -> (layers of each kind of attention, sides on which padding changes nothing,
# whether it generates)
EXPECTED = {
    "gpt2": ({"self": [0, 1]}, ["left", "right"], "yes"),
    "gpt_neox": ({"self": [0, 1]}, ["left", "right"], "yes"),
    "gptj": ({"self": [0, 1]}, ["left", "right"], "yes"),
    "opt": ({"self": [0, 1]}, ["left", "right"], "yes"),
    "llama": ({"self": [0, 1]}, ["left", "right"], "yes"),
    "mistral": ({"self": [0, 1]}, ["left", "right"], "yes"),
    "qwen2": ({"self": [0, 1]}, ["left", "right"], "yes"),
    "qwen3": ({"self": [0, 1]}, ["left", "right"], "yes"),
    "qwen3_next": ({"self": [3]}, ["left", "right"], "yes"),
    "gemma2": ({"self": [0, 1]}, ["left", "right"], "yes"),
    "gemma3_text": ({"self": [0, 1]}, ["left", "right"], "yes"),
    "phi3": ({"self": [0, 1]}, ["left", "right"], "yes"),
    "stablelm": ({"self": [0, 1]}, ["left", "right"], "yes"),
    "olmo2": ({"self": [0, 1]}, ["left", "right"], "yes"),
    "deepseek_v3": ({"self": [0, 1]}, ["left", "right"], "yes"),
    "gpt_oss": ({"self": [0, 1]}, ["left", "right"], "yes"),
    "bert": ({"self": [0, 1]}, ["left", "right"], ""),
    "roberta": ({"self": [0, 1]}, ["left", "right"], ""),
    "modernbert": ({"self": [0, 1]}, ["left", "right"], ""),
    "t5": (
        {"cross": [0, 1], "decoder": [0, 1], "encoder": [0, 1]},
        ["left", "right"],
        "yes",
    ),
}
FAMILIES = {family.model_type: family for family in text_families()}
_built: dict[str, PreTrainedModel] = {}


def model_of(name: str) -> PreTrainedModel:
    if name not in _built:
        _built[name] = tiny_model(FAMILIES[name])
    return _built[name]


@pytest.mark.parametrize("name", EXPECTED)
def test_statistics_are_those_of_the_models_own_eager_attentions(name):
    """Against what ``output_attentions=True`` returns, on texts padded on the right."""
    model, texts = model_of(name), make_texts(D_VOCAB)["right"]
    arguments = texts.arguments(model)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(**arguments, output_attentions=True)
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    statistics = ("entropy", "max", "first_mass", "received")
    with torch.no_grad(), interp.observe(model, statistics=statistics, reduce="none") as seen:
        output = model(**arguments)
    real = texts.is_real
    logits = (first_output(output) - first_output(expected)).abs()
    assert (logits[real] if logits.shape[:2] == real.shape else logits).max() <= 5e-4
    kinds = {"encoder": "encoder_attentions", "decoder": "decoder_attentions"}
    kinds |= {"cross": "cross_attentions", "self": "attentions"}
    for stack, layers in seen.stacks.items():
        attentions = [a for a in expected[kinds[stack]] if a is not None]
        assert len(attentions) == len(layers)
        for layer, pattern in zip(layers, attentions, strict=True):
            is_query = real if pattern.shape[2] == real.shape[1] else torch.ones(2, 8).bool()
            is_key = real if pattern.shape[3] == real.shape[1] else torch.ones(2, 8).bool()
            for sample in range(2):
                rows = pattern[sample].double()[:, is_query[sample]][..., is_key[sample]]
                lost = (1 - rows.sum(-1)).clamp_min(0)  # to a learned sink, where there is one
                told = {
                    "entropy": torch.special.entr(rows).sum(-1) + torch.special.entr(lost),
                    "max": rows.amax(-1),
                    "first_mass": rows[..., 0],
                    "received": rows.sum(-2),
                }
                for statistic, value in told.items():
                    ours = seen.layer_tensor(statistic, layer, stack=stack)[sample]
                    torch.testing.assert_close(
                        ours[:, : value.shape[1]].double(), value, atol=2e-5, rtol=0
                    )


@pytest.mark.parametrize("name", EXPECTED)
def test_padding_batching_caches_and_lse_are_right_and_the_model_is_left_alone(name):
    report = check_family(model_of(name), d_vocab=D_VOCAB)
    layers, padding, generates = EXPECTED[name]
    assert report.status == "served", report
    assert report.layers == layers
    assert report.padding == padding
    assert report.generates == generates
    assert report.statistic_error <= 2e-5
    assert report.logit_error <= 5e-4
    assert not report.notes


def test_a_hybrid_says_which_layers_are_served():
    model = model_of("qwen3_next")
    assert len(model.model.layers) == 4  # a positive control: there are layers to leave out
    with interp.observe(model) as seen:
        model(torch.tensor([[5, 6, 7]]))
    assert seen.stacks == {"self": [3]}
    with (
        pytest.raises(ValueError, match=r"no attention in layer 1 .* expected among \[3\]"),
        interp.observe(model, layers=[1]),
    ):
        pass


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("bloom", "BloomForCausalLM does not call attention through transformers' Attention"),
        ("mpt", "MptForCausalLM does not call attention .* output_attentions=True"),
        ("falcon", "FalconForCausalLM does not call attention .* attn_implementation='eager'"),
        ("mamba", "MambaForCausalLM has no attention layers that could be observed"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_by_name_and_told_what_to_do(name, why):
    model = tiny_model(FAMILIES[name])
    with pytest.raises(ValueError, match=why), interp.observe(model):
        pass
    assert model.config._attn_implementation in ("eager", "sdpa")


def test_attention_outside_the_interface_is_told_and_not_passed_over_in_silence():
    """A model whose encoder has sparse attention of its own beside served decoder attention."""
    model = tiny_model(FAMILIES["bigbird_pegasus"])
    with (
        pytest.warns(UserWarning, match="2 attention modules do not go through transformers' int"),
        interp.observe(model) as seen,
    ):
        pass
    assert len(seen.unserved) == 2
    assert all(name.startswith("model.encoder.layers.") for name in seen.unserved)


def test_bfloat16_models_are_observed_within_their_precision():
    model = tiny_model(FAMILIES["llama"])
    tokens = make_texts(D_VOCAB)["plain"].tokens
    with torch.no_grad(), interp.observe(model, reduce="none") as exact:
        model(tokens)
    with torch.no_grad(), interp.observe(model.bfloat16(), reduce="none") as seen:
        output = model(tokens)
    assert output.logits.dtype == torch.bfloat16
    assert seen.tensor("entropy").dtype == torch.float32
    torch.testing.assert_close(
        seen.tensor("first_mass"), exact.tensor("first_mass"), atol=5e-2, rtol=0
    )


def test_models_wrapped_by_peft_are_observed():
    peft = pytest.importorskip("peft")
    model = tiny_model(FAMILIES["llama"])
    tokens = make_texts(D_VOCAB)["plain"].tokens
    with torch.no_grad(), interp.observe(model) as plain:
        model(tokens)
    config = peft.LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads what transformers renames
        torch.manual_seed(0)
        wrapped = peft.get_peft_model(model, config).eval()
    with torch.no_grad(), interp.observe(wrapped) as adapted:
        wrapped(tokens)
    with torch.no_grad(), wrapped.disable_adapter(), interp.observe(wrapped) as disabled:
        wrapped(input_ids=tokens)
    assert not torch.allclose(adapted.tensor("entropy"), plain.tensor("entropy"))
    torch.testing.assert_close(disabled.tensor("entropy"), plain.tensor("entropy"))


def test_the_list_of_architectures_names_the_class_that_predicts_tokens():
    assert FAMILIES["bert"] == Family("bert", "BertForMaskedLM")
    assert FAMILIES["t5"] == Family("t5", "T5ForConditionalGeneration")
    assert FAMILIES["llama"].is_causal
    assert len(FAMILIES) > 200
