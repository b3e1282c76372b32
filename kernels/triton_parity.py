"""Do the kernels compute what the reference defines, and the same bits twice? For a GPU at hand.

Tests ask the same questions in Triton's interpreter. Numbers are drawn on the CPU, so that every
device gets the same ones, and the reference sees exactly the numbers that the kernels see.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from interp.kernels.attention import AttentionOutput, attention
from interp.kernels.edits import Edit, KnockOut

STATISTICS = ("lse", "entropy", "max", "mass", "received")

# Largest error allowed, relative to the largest value of a result or to 1. float32 rounds each of
# the products of a sum; the half types round the operands of products to 11 and 8 bits.
TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 2e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 2e-2,
}


@dataclass(frozen=True)
class Setting:
    """Sizes, type and place of a call."""

    n_queries: int
    n_keys: int
    n_heads: int = 2
    n_key_value_heads: int = 1
    d_head: int = 11
    d_value: int = 7
    batch: int = 2
    dtype: torch.dtype = torch.float64
    device: str = "cpu"

    def normal(self, seed: int, *shape: int) -> Tensor:
        """Standard normal numbers, rounded to this type."""
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return drawn.to(self.dtype).to(self.device)

    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v."""
        return (
            self.normal(1, self.batch, self.n_heads, self.n_queries, self.d_head),
            self.normal(2, self.batch, self.n_key_value_heads, self.n_keys, self.d_head),
            self.normal(3, self.batch, self.n_key_value_heads, self.n_keys, self.d_value),
        )

    def key_sets(self) -> dict[str, list[int]]:
        """Three sets that overlap."""
        return {"first": [0], "even": list(range(0, self.n_keys, 2)), "last": [self.n_keys - 1]}


@dataclass(frozen=True, eq=False)
class Run:
    """Everything that one call gave: results, and gradients of a random mixture of them."""

    output: AttentionOutput
    values: dict[str, Tensor]
    gradients: dict[str, Tensor]


def run(
    setting: Setting,
    operands: tuple[Tensor, Tensor, Tensor],
    options: Mapping[str, Any],
    *,
    backend: str,
    dtype: torch.dtype,
    statistics: tuple[str, ...] = STATISTICS,
) -> Run:
    """Call attention on operands cast to ``dtype``; tensors that require gradients are learned."""
    leaves = {
        name: x.to(dtype).detach().requires_grad_() for name, x in zip("qkv", operands, strict=True)
    }
    given = dict(options)
    for name, value in options.items():
        if isinstance(value, Tensor) and value.requires_grad:
            rounded = value.detach().to(setting.dtype)
            leaves[name] = given[name] = rounded.to(dtype).requires_grad_()
    output = attention(
        leaves["q"],
        leaves["k"],
        leaves["v"],
        statistics=statistics,
        key_sets=setting.key_sets() if "mass" in statistics else None,
        backend=backend,
        **given,
    )
    values = {"out": output.out, **output.statistics}
    loss = torch.zeros((), dtype=torch.float64, device=setting.device)
    for seed, value in enumerate(values.values(), start=100):
        pull = setting.normal(seed, *value.shape).double()
        # where lse is -inf there is nothing to pull at
        loss = loss + (torch.where(value == -torch.inf, 0.0, value).double() * pull).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return Run(
        output,
        {name: value.detach() for name, value in values.items()},
        dict(zip(leaves, gradients, strict=True)),
    )


def errors(found: Run, expected: Run) -> dict[str, float]:
    """Largest error of each result and gradient ("dq", ...), relative to its largest value or 1.

    inf where one has an infinity or NaN that the other has not.
    """
    pairs = {name: (value, expected.values[name]) for name, value in found.values.items()}
    pairs |= {f"d{name}": (g, expected.gradients[name]) for name, g in found.gradients.items()}
    worst = {}
    for name, (ours, theirs) in pairs.items():
        is_finite = ours.isfinite()
        if not torch.equal(is_finite, theirs.isfinite()):
            worst[name] = torch.inf
            continue
        ours = torch.where(is_finite, ours.double(), 0.0)
        theirs = torch.where(is_finite, theirs.double(), 0.0)
        worst[name] = (ours - theirs).abs().max().item() / max(1.0, theirs.abs().max().item())
    return worst


@dataclass(frozen=True)
class Parity:
    """How far one case is from the reference, and whether a second run gave the same bits."""

    case: str
    errors: Mapping[str, float]
    tolerance: float
    is_repeatable: bool

    @property
    def is_right(self) -> bool:
        """Within the tolerance of the type everywhere, and repeatable."""
        return self.is_repeatable and max(self.errors.values()) <= self.tolerance


@dataclass(frozen=True)
class _Case:
    name: str
    changes: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


def check_parity(
    *, device: str = "cuda", dtype: torch.dtype = torch.bfloat16, length: int = 517
) -> list[Parity]:
    """Run every case twice in the kernels and once in the float64 reference.

    ``length`` is the number of keys, at least 17; memory grows with its square, because of the
    reference. Cases cover grouped heads, every head size of the block table, decoding with a
    cache, what models are made of, and every edit that has a kernel.
    """
    if length < 17:
        raise ValueError(f"length: got {length}, expected at least 17")
    parities = []
    for case in _cases(device, length):
        sizes = {"n_queries": length, "n_keys": length, "d_head": 64, "d_value": 64}
        setting = Setting(
            **{**sizes, "n_heads": 4, "n_key_value_heads": 2, **case.changes},
            dtype=dtype,
            device=device,
        )
        operands = setting.operands()
        first = run(setting, operands, case.options, backend="triton", dtype=dtype)
        second = run(setting, operands, case.options, backend="triton", dtype=dtype)
        exact = run(setting, operands, case.options, backend="reference", dtype=torch.float64)
        is_repeatable = all(
            torch.equal(a, b)
            for one, other in ((first.values, second.values), (first.gradients, second.gradients))
            for a, b in zip(one.values(), other.values(), strict=True)
        )
        found = errors(first, exact)
        parities.append(Parity(case.name, found, TOLERANCES[dtype], is_repeatable))
    return parities


def _cases(device: str, length: int) -> list[_Case]:
    generator = torch.Generator().manual_seed(7)
    groups = torch.randint(8, (2, length), generator=generator).to(device)
    padding = (torch.arange(length) >= torch.tensor([[0], [length // 3]])).to(device)
    documents = torch.randint(2, (2, length), generator=generator).cumsum(-1).to(device) // 5
    bias = torch.randn(4, length, length, generator=generator).to(device).requires_grad_()
    sink = torch.randn(4, generator=generator).to(device).requires_grad_()
    alibi = (torch.arange(1, 5) / 8).to(device)
    return [
        _Case("causal"),
        _Case("bidirectional", options={"causal": False}),
        _Case("one key-value head", {"n_key_value_heads": 1}),
        _Case("head size 128", {"d_head": 128, "d_value": 128}),
        _Case("head size 256", {"d_head": 256, "d_value": 256}),
        _Case("narrow values, odd head size", {"d_head": 72, "d_value": 24}),
        _Case("decoding", {"n_queries": 1}),
        _Case("some queries", {"n_queries": length // 2}),
        _Case(
            "window, softcap, padding", options={"window": 11, "softcap": 5.0, "key_mask": padding}
        ),
        _Case("window, prefix, sink", options={"window": 11, "prefix": 3, "sink": sink}),
        _Case("documents, ALiBi", options={"documents": documents, "alibi": alibi}),
        _Case("bias", options={"bias": bias}),
        _Case("temperature, head window", options={"edit": Edit({0: 0.0, 1: 2.0}, {2: (1, 1)})}),
        _Case("knock-out", options={"edit": Edit(knock_out=KnockOut(groups, groups, cut="after"))}),
        _Case("random pattern", options={"edit": Edit(random={0: 3, 3: 4})}),
    ]
