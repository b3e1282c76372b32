"""In the interpreter, the Triton kernels agree with the reference for every option and edit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from interp.kernels.edits import Edit, KnockOut

pytestmark = pytest.mark.usefixtures("small_blocks")

BATCH, N_HEADS, N_QUERIES, N_KEYS, D_HEAD, D_VALUE = 2, 2, 19, 37, 11, 7


class Draw:
    """Draws what an option needs, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def learned(self, *shape: int) -> Tensor:
        return self.normal(*shape).requires_grad_()

    def coin(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator) < 0.7

    def integers(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator)

    def knock_out(self, cut: str) -> Edit:
        queries, keys = self.integers(8, BATCH, N_QUERIES), self.integers(8, BATCH, N_KEYS)
        return Edit(knock_out=KnockOut(queries, keys, self.integers(8, N_HEADS), cut=cut))


OPTIONS: dict[str, Callable[[Draw], dict[str, Any]]] = {
    "causal": lambda draw: {},
    "bidirectional, softcap, alibi": lambda draw: {
        "causal": False,
        "softcap": 1.3,
        "scale": 0.9,
        "alibi": draw.normal(N_HEADS).abs(),
    },
    "window of distances": lambda draw: {"window": (2, 21)},
    "window ahead": lambda draw: {"causal": False, "window": (-7, -1)},
    "prefix": lambda draw: {"prefix": torch.tensor([0, 34])},
    "prefix and a window far from it": lambda draw: {"prefix": torch.tensor([3, 1]), "window": 2},
    "padding and documents": lambda draw: {
        "key_mask": draw.coin(BATCH, N_KEYS),
        "documents": draw.integers(2, BATCH, N_KEYS).cumsum(-1) // 7,
    },
    "boolean mask": lambda draw: {"mask": draw.coin(1, N_HEADS, N_QUERIES, N_KEYS)},
    "random pattern and additive mask": lambda draw: {
        "mask": draw.normal(BATCH, 1, 1, N_KEYS).masked_fill(~draw.coin(N_KEYS), -torch.inf),
        "edit": Edit(random={1: 2**31 - 1}),
    },
    "bias": lambda draw: {"bias": draw.learned(BATCH, N_HEADS, N_QUERIES, N_KEYS)},
    "bias shared by heads and rows": lambda draw: {"bias": draw.learned(BATCH, 1, 1, N_KEYS)},
    "bias shared by samples and keys": lambda draw: {"bias": draw.learned(N_HEADS, N_QUERIES, 1)},
    "bias that masks, temperature": lambda draw: {
        "bias": draw.normal(N_QUERIES, N_KEYS)
        .masked_fill(~draw.coin(N_QUERIES, N_KEYS), -torch.inf)
        .requires_grad_(),
        "edit": Edit(temperature={0: 0.0, 1: 2.5}),
    },
    "sink and a sample of padding": lambda draw: {
        "sink": (4 * draw.normal(N_HEADS)).requires_grad_(),
        "key_mask": torch.tensor([[False], [True]]).expand(BATCH, N_KEYS),
    },
    "softmax1 and gate": lambda draw: {
        "variant": "softmax1",
        "gate": draw.learned(BATCH, N_HEADS, N_QUERIES, D_VALUE),
    },
    "window of a head": lambda draw: {"edit": Edit(window={0: (1, 1), 1: (0, 19)})},
    "cut before softmax": lambda draw: {"edit": draw.knock_out("before")},
    "cut after softmax": lambda draw: {"edit": draw.knock_out("after")},
    "given pattern and output": lambda draw: {
        "edit": Edit(
            pattern={0: draw.normal(N_QUERIES, N_KEYS).softmax(-1)},
            output={1: draw.normal(D_VALUE)},
        )
    },
    "queries and keys of another run": lambda draw: {
        "edit": Edit(
            queries={1: draw.normal(BATCH, N_QUERIES, D_HEAD)},
            keys={1: draw.normal(BATCH, N_KEYS, D_HEAD)},
        )
    },
    "everything": lambda draw: {
        "window": 31,
        "prefix": torch.tensor([2, 0]),
        "key_mask": draw.coin(BATCH, N_KEYS),
        "softcap": 2.0,
        "alibi": draw.normal(N_HEADS).abs() / 5,
        "bias": draw.learned(1, N_HEADS, N_QUERIES, N_KEYS),
        "mask": draw.coin(N_QUERIES, N_KEYS),
        "sink": draw.learned(N_HEADS),
        "gate": draw.learned(BATCH, N_HEADS, N_QUERIES, 1),
        "edit": Edit(
            temperature={1: 0.3},
            window={0: (1, 17)},
            random={1: 5},
            knock_out=draw.knock_out("after").knock_out,
        ),
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_kernels_agree_with_the_reference_in_float64(name, agree, setting):
    options = OPTIONS[name](Draw(seed=len(name)))
    statistics = ("lse", "entropy", "max", "mass", "received")
    if "sink" in options or "variant" in options:
        statistics = (*statistics, "sink_mass")
    found = agree(setting, options, statistics=statistics, tolerance=1e-12)
    assert all(gradient.isfinite().all() for gradient in found.gradients.values())
