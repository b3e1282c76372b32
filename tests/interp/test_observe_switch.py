"""Observing one model leaves it as it was, whatever happens inside, and never touches another."""

import gc
import subprocess
import sys
import threading

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, GPT2Config, GPT2LMHeadModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import interp
from interp.benchmarks.family_check import snapshot

TOKENS = torch.tensor([[5, 6, 7, 8, 9, 10, 11], [11, 3, 5, 7, 5, 3, 4]])


def config() -> GPT2Config:
    return GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=16,
        vocab_size=31,
        n_positions=32,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.3,
    )


def model_from(shared: GPT2Config, *, seed: int) -> GPT2LMHeadModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT2LMHeadModel(shared).eval()


@pytest.fixture
def shared():
    return config()


@pytest.fixture
def model(shared):
    return model_from(shared, seed=0)


@pytest.fixture
def bystander(shared):
    """Another model of the same class, built from the same config object."""
    return model_from(shared, seed=1)


def registered() -> tuple[set[str], set[str]]:
    return set(AttentionInterface._global_mapping), set(AttentionMaskInterface._global_mapping)


def attend_of(model: GPT2LMHeadModel):
    name = model.config._attn_implementation
    return ALL_ATTENTION_FUNCTIONS[name]


class Stop(Exception):
    pass


@pytest.mark.parametrize("error", [None, Stop, KeyboardInterrupt, ValueError])
@pytest.mark.parametrize("when", ["before", "inside", "after"])
def test_the_model_is_as_it_was_whatever_the_body_raises(model, error, when):
    before, names = snapshot(model), registered()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def strike(*args):
        raise error

    try:
        with interp.observe(model) as seen:
            assert snapshot(model) != before  # the control: something does change inside
            if error is not None and when == "before":
                strike()
            handle = None
            if error is not None and when == "inside":
                handle = model.transformer.h[1].mlp.register_forward_hook(strike)
            try:
                model(TOKENS)
            finally:
                if handle is not None:
                    handle.remove()
            if error is not None and when == "after":
                strike()
    except (Stop, KeyboardInterrupt, ValueError) as raised:
        assert type(raised) is error
    else:
        assert error is None
    assert snapshot(model) == before
    assert registered() == names
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name])
    if error is None or when == "after":
        assert seen.n_texts == 2  # what was seen stays readable


def test_a_model_that_shares_its_config_object_never_changes(model, bystander):
    assert model.config is bystander.config
    expected, attend, before = bystander(TOKENS).logits, attend_of(bystander), snapshot(bystander)
    with interp.observe(model) as seen:
        assert snapshot(bystander) == before
        assert attend_of(bystander) is attend
        assert torch.equal(bystander(TOKENS).logits, expected)
        assert not seen.stacks  # its pass was none of ours
        model(TOKENS)
    assert seen.n_texts == 2
    assert snapshot(bystander) == before
    assert torch.equal(bystander(TOKENS).logits, expected)


def test_importing_and_observing_leaves_the_process_attention_functions_alone(model, bystander):
    functions = dict(AttentionInterface._global_mapping)
    with interp.observe(model):
        model(TOKENS)
        ours = set(AttentionInterface._global_mapping) - set(functions)
        assert len(ours) == 1
        assert {k: AttentionInterface._global_mapping[k] for k in functions} == functions
    assert AttentionInterface._global_mapping == functions


def test_a_model_built_before_the_toolkit_is_imported_runs_as_before_afterwards():
    """In a process of its own, where nothing of ours is loaded at first."""
    program = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
config = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=31, n_positions=16,
                    bos_token_id=1, eos_token_id=2)
bystander = GPT2LMHeadModel(config).eval()
tokens = torch.tensor([[5, 6, 7, 8]])
logits, functions = bystander(tokens).logits, dict(ALL_ATTENTION_FUNCTIONS.items())
import interp
from interp.models.config import TransformerConfig
from interp.models.transformer import Transformer
sizes = dict(n_layers=1, d_model=8, n_heads=2, d_head=4, d_vocab=31, n_ctx=16)
zoo = Transformer(TransformerConfig(**sizes))
other = GPT2LMHeadModel(config).eval()
with interp.observe(zoo), interp.observe(other):
    zoo(tokens)
    other(tokens)
    assert torch.equal(bystander(tokens).logits, logits)
assert dict(ALL_ATTENTION_FUNCTIONS.items()) == functions
assert torch.equal(bystander(tokens).logits, logits)
print("untouched")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "untouched", done.stderr[-2000:]


def test_a_bystander_in_another_thread_keeps_its_attention_all_the_while(model, bystander):
    expected = bystander(TOKENS).logits
    stop, wrong = threading.Event(), []

    def run():
        while not stop.is_set():
            with torch.no_grad():
                logits = bystander(TOKENS).logits
            if not torch.equal(logits, expected):
                wrong.append(logits)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for _ in range(5):
            with interp.observe(model) as seen:
                model(TOKENS)
            assert seen.n_texts == 2
    finally:
        stop.set()
        thread.join()
    assert not wrong


def test_two_models_can_be_observed_at_once(model, bystander):
    with interp.observe(model) as one, interp.observe(bystander) as other:
        model(TOKENS)
        bystander(TOKENS[:1])
    assert (one.n_texts, other.n_texts) == (2, 1)
    assert not torch.allclose(one.tensor("entropy"), other.tensor("entropy"))


@pytest.mark.parametrize("part", [lambda m: m, lambda m: m.transformer])
def test_a_second_observation_of_one_model_is_refused_and_harms_nothing(model, part):
    before = snapshot(model)
    with interp.observe(model) as seen:
        inside = snapshot(model)
        with (
            pytest.raises(ValueError, match="model: .* is being observed already; ask one observe"),
            interp.observe(part(model)),
        ):
            pass
        assert snapshot(model) == inside
        model(TOKENS)
    assert seen.n_texts == 2
    assert snapshot(model) == before


def test_changes_that_the_body_makes_to_the_config_are_kept(model):
    original = model.config
    with interp.observe(model):
        model.config.use_cache = False
        model.config.pad_token_id = 0
        model(TOKENS)
    assert model.config is original
    assert (original.use_cache, original.pad_token_id) == (False, 0)
    assert original._attn_implementation == "sdpa"


def test_an_attention_implementation_chosen_in_the_body_is_kept_and_nothing_is_seen(model):
    with interp.observe(model) as seen:
        model.set_attn_implementation("eager")
        model(TOKENS)
    assert model.config._attn_implementation == "eager"
    with pytest.raises(ValueError, match="nothing was observed: no observed layer of GPT2LMHead"):
        seen.table()


def test_training_mode_and_gradients_go_through_an_observation(shared):
    for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
        setattr(shared, name, 0.0)
    model = model_from(shared, seed=0).train()
    model(TOKENS, labels=TOKENS).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    with interp.observe(model):
        loss = model(TOKENS, labels=TOKENS).loss
        assert model.training
    loss.backward()  # after the block: the graph needs nothing of it
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-5, rtol=1e-4)


def test_checkpointed_gradients_are_refused_since_layers_would_run_again_unobserved(shared):
    for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
        setattr(shared, name, 0.0)
    model = model_from(shared, seed=0).train()
    model.activation_checkpointing_enable()
    with (
        pytest.raises(ValueError, match="checkpoints its gradients: .* Switch that off first"),
        interp.observe(model),
    ):
        model(TOKENS, use_cache=False)
    with torch.no_grad(), interp.observe(model) as seen:
        model(TOKENS, use_cache=False)  # nothing runs again without a backward pass
    assert seen.n_texts == 2


def test_two_hundred_observations_leave_memory_flat(model):
    def observe_once():
        with torch.no_grad(), interp.observe(model, reduce="sample"):
            model(TOKENS)

    def alive() -> tuple[int, int]:
        gc.collect()
        objects = gc.get_objects()
        return len(objects), sum(type(o) is torch.Tensor for o in objects)

    for _ in range(5):
        observe_once()
    n_objects, n_tensors = alive()
    for _ in range(200):
        observe_once()
    assert alive()[1] == n_tensors
    assert alive()[0] - n_objects < 200  # fewer than one object for each
