"""In the interpreter: dead rows, huge scores, scratch full of NaN, memory beyond the ends."""

import dataclasses
import subprocess
import sys
import textwrap

import pytest
import torch

from interp.kernels import attention as attention_module
from interp.kernels import triton_backend
from interp.kernels.attention import attention
from interp.kernels.edits import Edit, KnockOut
from interp.kernels.options import AttentionOptions

EVERYTHING = ("lse", "entropy", "max", "mass", "received")


def differentiable(setting):
    return [x.requires_grad_() for x in setting.operands()]


def test_a_sample_of_padding_gives_zeros_and_leaves_the_others_alone(setting):
    key_mask = torch.ones(setting.batch, setting.n_keys, dtype=torch.bool)
    key_mask[1] = False
    results = []
    for mask in (key_mask, None):
        q, k, v = differentiable(setting)
        found = attention(
            q,
            k,
            v,
            key_mask=mask,
            statistics=EVERYTHING,
            key_sets=setting.key_sets(),
            backend="triton",
        )
        # an infinite gradient arrives at every dead row: it must not get out
        loss = found.out.sum() + (found.lse**2).sum() + (found.entropy + found.max).sum()
        loss = loss + found.mass.sum() + (found.received**2).sum()
        results.append((found, torch.autograd.grad(loss, (q, k, v))))
    (masked, masked_gradients), (plain, plain_gradients) = results
    assert torch.equal(masked.out[0], plain.out[0])
    for gradient, expected in zip(masked_gradients, plain_gradients, strict=True):
        assert torch.equal(gradient[0], expected[0])
        assert torch.equal(gradient[1], torch.zeros_like(gradient[1]))
    assert (masked.lse[1] == -torch.inf).all()
    for name in ("out", "entropy", "max", "mass", "received"):
        value = getattr(masked, name)[1]
        assert torch.equal(value, torch.zeros_like(value)), name


def test_scores_of_ten_thousand_stay_exact(agree, setting):
    setting = dataclasses.replace(setting, batch=1)
    q, k, _ = setting.operands()
    assert (3e3 * q @ k.transpose(-1, -2)).abs().max() > 1e4
    agree(setting, {"scale": 3e3}, tolerance=1e-10)


@pytest.fixture
def nan_scratch():
    """Uninitialised memory is full of NaN, as it may be anywhere but in a test."""
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.use_deterministic_algorithms(was_deterministic)


@pytest.mark.usefixtures("nan_scratch", "small_blocks")
def test_nothing_is_read_before_it_is_written(agree, setting):
    bias = setting.normal(7, 1, setting.n_heads, 1, setting.n_keys).requires_grad_()
    options = {"window": 9, "prefix": 3, "bias": bias}
    agree(setting, options, tolerance=1e-12)


@pytest.mark.usefixtures("small_blocks")
def test_two_runs_give_equal_bits(setting):
    setting = dataclasses.replace(setting, dtype=torch.float32)
    runs = []
    for _ in range(2):
        q, k, v = differentiable(setting)
        found = attention(q, k, v, statistics=("lse", "entropy", "received"), backend="triton")
        loss = found.out.sum() + found.entropy.sum() + (found.received**2).sum()
        runs.append([found.out, found.received, *torch.autograd.grad(loss, (q, k, v))])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_gradients_are_those_of_finite_differences(setting):
    setting = dataclasses.replace(
        setting, n_queries=5, n_keys=7, d_head=3, d_value=2, n_heads=1, batch=1
    )
    bias = setting.normal(7, 5, 7).requires_grad_()
    sink = setting.normal(8, 1).requires_grad_()

    def everything(q, k, v, bias, sink):
        found = attention(
            q,
            k,
            v,
            bias=bias,
            sink=sink,
            softcap=2.0,
            statistics=(*EVERYTHING, "sink_mass"),
            key_sets=setting.key_sets(),
            backend="triton",
        )
        return (found.out, *found.statistics.values())

    inputs = (*differentiable(setting), bias, sink)
    with torch.random.fork_rng():  # gradcheck draws its directions from the global generator
        torch.manual_seed(5)
        assert torch.autograd.gradcheck(everything, inputs, fast_mode=True)


def test_a_gradient_of_nothing_but_a_statistic_reaches_q_and_k(setting):
    q, k, v = differentiable(setting)
    found = attention(q, k, v, statistics=("entropy",), backend="triton")
    of_triton = torch.autograd.grad(found.entropy.sum(), (q, k))
    expected = attention(q, k, v, statistics=("entropy",), backend="reference")
    of_reference = torch.autograd.grad(expected.entropy.sum(), (q, k))
    for ours, theirs in zip(of_triton, of_reference, strict=True):
        assert theirs.abs().max() > 0.1
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_chosen_rows_of_the_pattern_are_those_of_the_reference(setting, monkeypatch):
    q, k, v = setting.operands()
    groups = torch.arange(setting.n_keys)[None] % 3
    edit = Edit(
        temperature={0: 0.4},
        random={1: 9},
        knock_out=KnockOut(groups[:, : setting.n_queries], groups, cut="after"),
    )
    options: list[AttentionOptions] = []
    choose = attention_module.backends.choose
    monkeypatch.setattr(
        attention_module.backends,
        "choose",
        lambda backend, q, resolved: (options.append(resolved), choose(backend, q, resolved))[1],
    )
    expected = attention(
        q,
        k,
        v,
        window=20,
        sink=setting.normal(8, setting.n_heads),
        edit=edit,
        backend="reference",
    ).pattern(heads=[1, 0], rows=[18, 0, 11])
    found = triton_backend.pattern(
        q, k, options[0], torch.tensor([1, 0]), torch.tensor([18, 0, 11])
    )
    assert found.shape == (setting.batch, 2, 3, setting.n_keys)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


FUZZ = """
import torch
from interp.kernels import triton_blocks
from interp.kernels.attention import attention

triton_blocks.INTERPRETED = triton_blocks.Block(16, 32, 1, 1)
generator = torch.Generator().manual_seed(3)


def number(low, high):
    return int(torch.randint(low, high, (), generator=generator))


def moated(x, filling):
    moat = torch.full((x.numel() + 8192,), filling, dtype=x.dtype)
    inside = moat[4096:-4096].view(x.shape)
    inside.copy_(x)
    return inside


for _ in range(8):
    batch, groups, shared = number(1, 3), number(1, 3), number(1, 3)
    n_queries, n_keys, d_head, d_value = (number(1, n) for n in (20, 40, 20, 40))
    normal = lambda *shape: torch.randn(*shape, generator=generator)
    q = normal(batch, groups * shared, n_queries, d_head)
    k, v = normal(batch, groups, n_keys, d_head), normal(batch, groups, n_keys, d_value)
    options = {"window": number(1, 30), "causal": number(0, 2) == 1, "prefix": number(0, 9)}
    mask = torch.rand(batch, n_keys, generator=generator) < 0.8
    bias = normal(n_queries, n_keys)
    documents = torch.randint(3, (batch, n_keys), generator=generator)
    if n_queries <= n_keys:
        options["documents"] = moated(documents, 1 << 40)
    results = []
    for backend, wrap in (("reference", lambda x, _: x.double()), ("triton", moated)):
        leaves = [wrap(x, torch.nan).detach().requires_grad_() for x in (q, k, v, bias)]
        found = attention(
            *leaves[:3],
            bias=leaves[3],
            key_mask=moated(mask, True),
            statistics=("lse", "entropy", "received"),
            backend=backend,
            **options,
        )
        loss = found.out.sum() + found.entropy.sum() + (found.received ** 2).sum()
        gradients = torch.autograd.grad(loss, leaves)
        results.append([found.out, found.entropy, found.received, *gradients])
    for expected, result in zip(*results, strict=True):
        torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-4)
print("survived")
"""


def test_no_memory_beyond_the_ends_is_touched():
    """An access outside crashes the process, or reads the NaN that every tensor lies in."""
    process = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(FUZZ)], capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr[-2000:]
    assert process.stdout.strip() == "survived"
