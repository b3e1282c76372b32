"""Every fused backend computes what the reference defines: results and gradients, any option."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from interp.kernels import variants
from interp.kernels.attention import AttentionOutput, attention
from interp.kernels.edits import Edit, KnockOut

EVERYTHING = ("lse", "entropy", "max", "mass", "received")

# Primes, so that no two axes can be confused; grouped heads; fewer queries than keys.
BATCH, N_HEADS, N_KEY_VALUE_HEADS = 2, 6, 3
D_HEAD, D_VALUE = 5, 7


@dataclass(frozen=True)
class Case:
    """A call of attention: options may be made from a generator, sizes, type."""

    name: str
    make: Callable[["Maker"], Mapping[str, Any]] = lambda make: {}
    query_pos: int = 19
    key_pos: int = 23
    learned: tuple[str, ...] = field(default=())


@dataclass(frozen=True)
class Maker:
    """Draws tensors for a case."""

    generator: torch.Generator
    dtype: torch.dtype
    query_pos: int
    key_pos: int

    def normal(self, *shape: int) -> Tensor:
        drawn = torch.randn(*shape, generator=self.generator, dtype=torch.float64)
        return drawn.to(self.dtype)

    def coin(self, *shape: int, p: float = 0.7) -> Tensor:
        return torch.rand(*shape, generator=self.generator) < p

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator)


def some_padding(make: Maker) -> Tensor:
    """Left padding in one sample, holes in the other."""
    mask = make.coin(BATCH, make.key_pos)
    mask[0] = torch.arange(make.key_pos) >= 6
    return mask


def knock_out(make: Maker, cut: str) -> KnockOut:
    return KnockOut(
        make.integers(8, BATCH, make.query_pos),
        make.integers(8, BATCH, make.key_pos),
        make.integers(8, N_HEADS),
        cut=cut,
    )


def documents(make: Maker) -> Tensor:
    return make.integers(2, BATCH, make.key_pos).cumsum(-1)


def minus_inf_bias(make: Maker) -> Tensor:
    bias = make.normal(N_HEADS, make.query_pos, make.key_pos)
    return bias.masked_fill(~make.coin(N_HEADS, make.query_pos, make.key_pos), -torch.inf)


CASES = [
    Case("causal"),
    Case("bidirectional", lambda make: {"causal": False}),
    Case("one token", query_pos=1, key_pos=1),
    Case("one query and a cache", query_pos=1),
    Case("more queries than keys", query_pos=29),
    Case("many rows", query_pos=211, key_pos=223),
    Case("window", lambda make: {"window": 4}),
    Case("window around", lambda make: {"window": 3, "causal": False}),
    Case("window of distances", lambda make: {"window": (2, 5)}),
    Case("window ahead", lambda make: {"window": (-4, -1), "causal": False}),
    Case("many rows in a window", lambda make: {"window": 31}, query_pos=211, key_pos=223),
    Case("prefix", lambda make: {"prefix": 11}),
    Case("prefix of each sample", lambda make: {"prefix": torch.tensor([0, 7]), "window": 3}),
    Case("padding", lambda make: {"key_mask": some_padding(make)}),
    Case(
        "a sample of padding alone",
        lambda make: {"key_mask": torch.tensor([[False], [True]]).expand(2, make.key_pos)},
    ),
    Case("documents", lambda make: {"documents": documents(make)}),
    Case(
        "documents of queries and keys",
        lambda make: {
            "documents": (make.integers(3, 2, make.query_pos), make.integers(3, 1, make.key_pos)),
            "causal": False,
        },
    ),
    Case("boolean mask", lambda make: {"mask": make.coin(make.query_pos, make.key_pos)}),
    Case(
        "additive mask",
        lambda make: {"mask": minus_inf_bias(make)[:1], "causal": False},
    ),
    Case("scale", lambda make: {"scale": 1.7}),
    Case("softcap", lambda make: {"softcap": 0.8, "scale": 1.3}),
    Case("alibi", lambda make: {"alibi": make.normal(N_HEADS).abs()}),
    Case(
        "bias",
        lambda make: {"bias": make.normal(BATCH, N_HEADS, make.query_pos, make.key_pos)},
        learned=("bias",),
    ),
    Case(
        "bias of every sample and row",
        lambda make: {"bias": make.normal(1, N_HEADS, 1, make.key_pos)},
        learned=("bias",),
    ),
    Case(
        "bias of every key",
        lambda make: {"bias": make.normal(make.query_pos, 1)},
        learned=("bias",),
    ),
    Case("bias that masks", lambda make: {"bias": minus_inf_bias(make)}, learned=("bias",)),
    Case("sink", lambda make: {"sink": make.normal(N_HEADS)}, learned=("sink",)),
    Case(
        "sink and padding",
        lambda make: {"sink": 3 * make.normal(N_HEADS), "key_mask": some_padding(make)},
        learned=("sink",),
    ),
    Case(
        "gate",
        lambda make: {"gate": make.normal(BATCH, N_HEADS, make.query_pos, D_VALUE)},
        learned=("gate",),
    ),
    Case(
        "gate of a head",
        lambda make: {"gate": make.normal(BATCH, N_HEADS, make.query_pos, 1)},
        learned=("gate",),
    ),
    Case("softmax1", lambda make: {"variant": "softmax1", "key_mask": some_padding(make)}),
    Case(
        "everything at once",
        lambda make: {
            "window": 13,
            "key_mask": some_padding(make),
            "documents": documents(make) // 4,
            "softcap": 1.5,
            "alibi": make.normal(N_HEADS).abs() / 3,
            "bias": make.normal(1, N_HEADS, make.query_pos, make.key_pos),
            "sink": make.normal(N_HEADS),
            "gate": make.normal(BATCH, N_HEADS, make.query_pos, 1),
            "edit": Edit(
                temperature={0: 0.0, 1: 1.9},
                window={2: (0, 3)},
                knock_out=knock_out(make, "after"),
                random={3: 7},
            ),
        },
        learned=("bias", "sink", "gate"),
    ),
    Case("temperature", lambda make: {"edit": Edit(temperature={1: 0.0, 2: 2.5})}),
    Case("window of a head", lambda make: {"edit": Edit(window={1: (1, 1), 4: (0, 2)})}),
    Case("cut before", lambda make: {"edit": Edit(knock_out=knock_out(make, "before"))}),
    Case("cut after", lambda make: {"edit": Edit(knock_out=knock_out(make, "after"))}),
    Case("random pattern", lambda make: {"edit": Edit(random={0: 3, 5: 2**31 - 1})}),
    Case(
        "given pattern",
        lambda make: {
            "edit": Edit(
                pattern={
                    2: make.normal(make.query_pos, make.key_pos).softmax(-1),
                    3: make.normal(BATCH, make.query_pos, make.key_pos).softmax(-1),
                }
            )
        },
    ),
    Case(
        "queries and keys of another run",
        lambda make: {
            "edit": Edit(
                queries={1: make.normal(BATCH, make.query_pos, D_HEAD)},
                keys={1: make.normal(BATCH, make.key_pos, D_HEAD)},
            )
        },
    ),
    Case("mean output", lambda make: {"edit": Edit(output={4: make.normal(D_VALUE)})}),
]

OTHER_VARIANTS = [
    Case(name, lambda make, name=name: {"variant": name, "key_mask": some_padding(make)})
    for name in ("softpick", "clipped", "relu", "sigmoid", "sigmoid_unshifted")
] + [
    Case("relu over a length", lambda make: {"variant": variants.ReluOverLength(length=17)}),
    Case(
        "clipped with a knock-out",
        lambda make: {
            "variant": variants.ClippedSoftmax(lower=-0.2, upper=1.3),
            "edit": Edit(knock_out=knock_out(make, "after")),
        },
    ),
]


def key_sets(make: Maker) -> dict[str, Any]:
    first_half = torch.arange(make.key_pos) < make.key_pos // 2
    return {"first": [0], "half": first_half, "sampled": make.coin(BATCH, make.key_pos, p=0.4)}


@dataclass(frozen=True)
class Run:
    """What a backend returned, and the gradients of a random mixture of it."""

    output: AttentionOutput
    results: dict[str, Tensor]
    gradients: dict[str, Tensor]


def run(case: Case, backend: str, dtype: torch.dtype, *, exact: bool = False) -> Run:
    """Call attention on a case; ``exact`` computes on the same numbers in float64."""
    generator = torch.Generator().manual_seed(11)
    make = Maker(generator, dtype, case.query_pos, case.key_pos)
    inputs = {
        "q": make.normal(BATCH, N_HEADS, case.query_pos, D_HEAD),
        "k": make.normal(BATCH, N_KEY_VALUE_HEADS, case.key_pos, D_HEAD),
        "v": make.normal(BATCH, N_KEY_VALUE_HEADS, case.key_pos, D_VALUE),
    }
    options = dict(case.make(make))
    has_slot = "sink" in options or options.get("variant") == "softmax1"
    statistics = (*EVERYTHING, "sink_mass") if has_slot else EVERYTHING
    sets = key_sets(make)
    if exact:
        inputs = {name: tensor.double() for name, tensor in inputs.items()}
        options = {name: in_double(value) for name, value in options.items()}
    leaves = {name: tensor.requires_grad_() for name, tensor in inputs.items()}
    leaves |= {name: options[name].requires_grad_() for name in case.learned}
    output = attention(
        inputs["q"],
        inputs["k"],
        inputs["v"],
        statistics=statistics,
        key_sets=sets,
        backend=backend,
        **options,
    )
    results = {"out": output.out, **output.statistics}
    # every result pulls with its own random weights; where lse is -inf there is nothing to pull
    loss = 0.0
    for tensor in results.values():
        pull = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.dtype)
        loss = loss + (torch.where(tensor == -torch.inf, 0.0, tensor) * pull).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return Run(output, results, dict(zip(leaves, gradients, strict=True)))


def in_double(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.detach().double()
    if isinstance(value, Edit):
        changed = {}
        for name in ("pattern", "queries", "keys", "output"):
            mapping = getattr(value, name)
            changed[name] = mapping and {head: t.double() for head, t in mapping.items()}
        return Edit(value.temperature, value.window, value.knock_out, value.random, **changed)
    return value


def assert_close(found: Run, expected: Run, *, rtol: float, atol: float) -> None:
    pairs = {**{n: (t, expected.results[n]) for n, t in found.results.items()}}
    pairs |= {f"d{n}": (t, expected.gradients[n]) for n, t in found.gradients.items()}
    for name, (ours, theirs) in pairs.items():
        assert not ours.isnan().any(), name
        torch.testing.assert_close(
            ours.double(),
            theirs.double(),
            rtol=rtol,
            atol=atol,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def case_name(case: Case) -> str:
    return case.name


@pytest.mark.parametrize("case", CASES + OTHER_VARIANTS, ids=case_name)
def test_strips_equal_the_reference_in_float64(case):
    found = run(case, "strips", torch.float64)
    assert found.output.backend == "strips"
    assert_close(found, run(case, "reference", torch.float64), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_c_equals_the_reference(case):
    found = run(case, "c", torch.float32)
    assert found.output.backend == "c"
    assert_close(found, run(case, "reference", torch.float32, exact=True), rtol=2e-5, atol=2e-5)
