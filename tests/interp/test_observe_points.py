"""Our zoo, TransformerLens' bridges and nnsight's traces, observed by the same call."""

import subprocess
import sys
import warnings

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import interp
from interp.kernels.edits import Edit
from interp.models.config import TransformerConfig
from interp.models.transformer import Transformer

TOKENS = torch.tensor([[5, 6, 7, 8, 9, 10, 11], [11, 3, 5, 7, 5, 3, 4]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0]])
STATISTICS = ("lse", "entropy", "first_mass", "received")


@pytest.fixture(scope="module")
def zoo():
    config = TransformerConfig(
        n_layers=2,
        d_model=12,
        n_heads=3,
        d_head=4,
        d_vocab=31,
        n_ctx=16,
        d_mlp=20,
        initializer_range=0.5,
    )
    return Transformer(config)


@pytest.fixture(scope="module")
def bridge(tmp_path_factory):
    from transformer_lens.model_bridge.sources.transformers import boot

    folder = tmp_path_factory.mktemp("gpt2")
    vocabulary = WordLevel({f"t{i}": i for i in range(31)}, unk_token="t0")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(vocabulary),
        unk_token="t0",
        bos_token="t1",
        eos_token="t2",
        pad_token="t0",
    )
    config = GPT2Config(
        n_layer=2,
        n_head=3,
        n_embd=12,
        vocab_size=31,
        n_positions=16,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.4,
    )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config).eval()
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return boot(str(folder), hf_model=GPT2LMHeadModel.from_pretrained(folder).eval()), model


@pytest.mark.parametrize("mask", [None, MASK, MASK.flip(1)], ids=["plain", "right", "left"])
def test_the_zoo_is_observed_through_its_points(zoo, mask):
    arguments = {} if mask is None else {"attention_mask": mask.bool()}
    _, cache = zoo.run_with_cache(TOKENS, **arguments)
    names = (*STATISTICS, "max", "mass")
    sets = {"others": [1, 2]}
    with interp.observe(zoo, statistics=names, key_sets=sets, reduce="none") as seen:
        zoo(TOKENS, **arguments)
    real = torch.ones_like(TOKENS).bool() if mask is None else mask.bool()
    for layer in range(2):
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"].double()
        for sample in range(2):
            rows = pattern[sample][:, real[sample]][..., real[sample]]
            n = rows.shape[-1]
            expected = {
                "entropy": torch.special.entr(rows).sum(-1),
                "max": rows.amax(-1),
                "first_mass": rows[..., 0],
                "received": rows.sum(-2),
                "mass": rows[..., 1:3].sum(-1, keepdim=True),
            }
            for name, value in expected.items():
                ours = seen.layer_tensor(name, layer)[sample][:, :n].double()
                torch.testing.assert_close(ours, value, atol=2e-5, rtol=0)


def test_the_zoo_serves_its_read_outs_without_building_a_pattern(zoo, monkeypatch):
    monkeypatch.setattr(type(zoo.blocks[0].attn), "_eager", _forbidden)
    with interp.observe(zoo, statistics=STATISTICS) as seen:
        zoo(TOKENS)
    assert seen.n_texts == 2
    with (
        pytest.raises(AssertionError, match="built a pattern"),
        interp.observe(zoo, statistics=("max",)),
    ):
        zoo(TOKENS)


def _forbidden(*args, **kwargs):
    raise AssertionError("built a pattern")


def test_rows_of_the_zoos_patterns_are_kept(zoo):
    _, cache = zoo.run_with_cache(TOKENS)
    with interp.observe(zoo, patterns={(1, 2): [-1]}, reduce="sample") as seen:
        zoo(TOKENS)
    rows = seen.pattern(1, 2, sample=1)
    assert rows.rows.tolist() == [6]
    expected = cache["blocks.1.attn.hook_pattern"][1, 2, 6:]
    torch.testing.assert_close(rows.weights, expected)


def test_hooks_of_the_zoo_are_gone_afterwards_also_after_an_error(zoo):
    def n_hooks():
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in zoo.modules())

    before = n_hooks()
    with pytest.raises(KeyboardInterrupt), interp.observe(zoo):
        zoo(TOKENS)
        assert n_hooks() > before
        raise KeyboardInterrupt
    assert n_hooks() == before
    with pytest.raises(ValueError, match="tokens: the text is empty"), interp.observe(zoo):
        zoo(TOKENS[:, :0])
    assert n_hooks() == before


def test_what_points_cannot_do_is_refused_with_what_can(zoo):
    with (
        pytest.raises(
            ValueError, match=r"edit: .* edit with a hook on 'blocks.\{layer\}.attn.hook"
        ),
        interp.observe(zoo, edit=Edit(output={0: torch.zeros(1)})),
    ):
        pass
    with (
        pytest.raises(ValueError, match="layers: Transformer has no attention in layer 2"),
        interp.observe(zoo, layers=[2]),
    ):
        pass
    with (
        pytest.raises(ValueError, match="'sink_mass' is the weight of a learned sink"),
        interp.observe(zoo, statistics=("sink_mass",)),
    ):
        pass


def test_a_bridge_is_observed_as_the_model_it_wraps(bridge):
    wrapped, original = bridge
    names = (*STATISTICS, "max")
    with torch.no_grad(), interp.observe(original, statistics=names, reduce="none") as expected:
        original(TOKENS)
    with torch.no_grad(), interp.observe(wrapped, statistics=names, reduce="none") as seen:
        wrapped(TOKENS)
    assert seen.backends == {"hook points"}
    for name in names:
        torch.testing.assert_close(
            seen.tensor(name), expected.tensor(name), atol=2e-5, rtol=0, check_dtype=False
        )


def test_nnsight_traces_run_inside_an_observation():
    """In a process of its own: nnsight replaces the forward of every module it is shown."""
    program = """
import warnings; warnings.simplefilter("ignore")
import beartype, torch
from transformers import GPT2Config, GPT2LMHeadModel
import interp
config = GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=31, n_positions=16,
                    bos_token_id=1, eos_token_id=2)
model = GPT2LMHeadModel(config).eval()
tokens = torch.tensor([[5, 6, 7]])
with torch.no_grad(), interp.observe(model) as expected:
    model(tokens)
from nnsight import NNsight
seeing = NNsight(model)
for observed in (model, seeing):
    with torch.no_grad(), interp.observe(observed) as seen:
        with seeing.trace(tokens):
            states = seeing.transformer.h[0].output.save()
            logits = seeing.output.logits.save()
    assert logits.shape == (1, 3, 31)
    torch.testing.assert_close(seen.tensor("entropy"), expected.tensor("entropy"))
assert model.config._attn_implementation == "sdpa"
print("served")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "served", done.stderr[-2000:]
