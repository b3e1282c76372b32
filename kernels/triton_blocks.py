"""Block sizes, warps and pipeline stages of every kernel: a table instead of an autotuner.

A table is the same on every run, needs no device to be read, and can be checked without one:
`interp.kernels.compile_only` compiles its rows and counts registers, spills and shared memory.
Tiles shrink as more has to be kept in registers beside them.
"""

from dataclasses import dataclass
from typing import Literal

from interp.kernels.options import AttentionOptions

KernelName = Literal["forward", "columns", "constant", "dkv", "dq", "dbias", "rows"]
Load = Literal["light", "medium", "heavy"]


@dataclass(frozen=True)
class Block:
    """How a kernel is cut up; ``rows`` and ``keys`` are the extents of a tile."""

    rows: int
    keys: int
    warps: int
    stages: int


# The interpreter has no registers to run out of, and pays by the tile.
INTERPRETED = Block(rows=128, keys=64, warps=1, stages=1)

WIDEST = 256

# By kernel and padded width (of keys or values, whichever is wider): light, medium, heavy.
Table = dict[KernelName, dict[int, tuple[Block, Block, Block]]]

HALF: Table = {
    "forward": {
        64: (Block(128, 64, 8, 3), Block(128, 64, 8, 3), Block(128, 32, 8, 2)),
        128: (Block(128, 64, 8, 2), Block(128, 32, 8, 2), Block(64, 32, 8, 2)),
        256: (Block(64, 32, 8, 2), Block(64, 32, 8, 2), Block(64, 32, 8, 2)),
    },
    "columns": {
        64: (Block(64, 64, 4, 3), Block(64, 64, 4, 3), Block(32, 64, 4, 2)),
        128: (Block(64, 64, 4, 2), Block(64, 64, 4, 2), Block(32, 64, 4, 2)),
        256: (Block(32, 64, 4, 2), Block(32, 64, 4, 2), Block(32, 64, 4, 2)),
    },
    "constant": {
        64: (Block(64, 32, 4, 2), Block(64, 32, 4, 2), Block(64, 32, 4, 2)),
        128: (Block(64, 32, 4, 2), Block(64, 32, 4, 2), Block(64, 32, 4, 2)),
        256: (Block(64, 32, 8, 2), Block(64, 32, 8, 2), Block(64, 32, 8, 2)),
    },
    "dkv": {
        64: (Block(64, 64, 4, 2), Block(32, 64, 4, 2), Block(16, 64, 4, 2)),
        128: (Block(64, 64, 8, 2), Block(32, 64, 8, 2), Block(16, 64, 8, 1)),
        256: (Block(32, 64, 8, 1), Block(16, 64, 8, 1), Block(16, 64, 8, 1)),
    },
    "dq": {
        64: (Block(64, 64, 4, 2), Block(64, 32, 4, 2), Block(64, 32, 4, 2)),
        128: (Block(64, 64, 8, 2), Block(64, 32, 8, 2), Block(64, 32, 8, 2)),
        256: (Block(64, 32, 8, 1), Block(64, 32, 8, 1), Block(64, 16, 8, 1)),
    },
    "dbias": {
        64: (Block(64, 32, 4, 1), Block(64, 32, 4, 1), Block(64, 32, 4, 1)),
        128: (Block(64, 32, 4, 1), Block(64, 32, 4, 1), Block(64, 32, 4, 1)),
        256: (Block(64, 32, 8, 1), Block(64, 32, 8, 1), Block(64, 32, 8, 1)),
    },
    "rows": {
        64: (Block(64, 64, 4, 2), Block(64, 64, 4, 2), Block(64, 64, 4, 2)),
        128: (Block(64, 64, 4, 2), Block(64, 64, 4, 2), Block(64, 64, 4, 2)),
        256: (Block(64, 32, 4, 2), Block(64, 32, 4, 2), Block(64, 32, 4, 2)),
    },
}

# For float32, whose products are three products of tensor-core precision.
SINGLE: Table = {
    "forward": {
        64: (Block(64, 32, 4, 2), Block(64, 32, 4, 2), Block(64, 32, 8, 2)),
        128: (Block(64, 32, 8, 2), Block(64, 32, 8, 2), Block(64, 16, 8, 2)),
        256: (Block(64, 16, 8, 1), Block(64, 16, 8, 1), Block(64, 16, 8, 1)),
    },
    "columns": {
        64: (Block(32, 64, 4, 2), Block(32, 64, 4, 2), Block(32, 64, 4, 2)),
        128: (Block(32, 64, 8, 2), Block(32, 64, 8, 2), Block(32, 64, 8, 2)),
        256: (Block(16, 64, 8, 1), Block(16, 64, 8, 1), Block(16, 64, 8, 1)),
    },
    "constant": {
        64: (Block(64, 32, 4, 2), Block(64, 32, 4, 2), Block(64, 32, 8, 2)),
        128: (Block(64, 32, 8, 2), Block(64, 32, 8, 2), Block(64, 16, 8, 2)),
        256: (Block(64, 16, 8, 1), Block(64, 16, 8, 1), Block(64, 16, 8, 1)),
    },
    "dkv": {
        64: (Block(32, 64, 8, 1), Block(32, 64, 8, 1), Block(16, 64, 8, 1)),
        128: (Block(16, 64, 8, 1), Block(16, 64, 8, 1), Block(16, 64, 8, 1)),
        256: (Block(16, 64, 8, 1), Block(16, 64, 8, 1), Block(16, 64, 8, 1)),
    },
    "dq": {
        64: (Block(64, 32, 8, 1), Block(64, 32, 8, 1), Block(64, 16, 8, 1)),
        128: (Block(64, 16, 8, 1), Block(64, 16, 8, 1), Block(64, 16, 8, 1)),
        256: (Block(64, 16, 8, 1), Block(64, 16, 8, 1), Block(64, 16, 8, 1)),
    },
    "dbias": {
        64: (Block(64, 32, 8, 1), Block(64, 32, 8, 1), Block(64, 16, 8, 1)),
        128: (Block(64, 16, 8, 1), Block(64, 16, 8, 1), Block(64, 16, 8, 1)),
        256: (Block(64, 16, 8, 1), Block(64, 16, 8, 1), Block(64, 16, 8, 1)),
    },
    "rows": {
        64: (Block(64, 32, 4, 2), Block(64, 32, 4, 2), Block(64, 32, 4, 2)),
        128: (Block(64, 32, 8, 1), Block(64, 32, 8, 1), Block(64, 32, 8, 1)),
        256: (Block(64, 16, 8, 1), Block(64, 16, 8, 1), Block(64, 16, 8, 1)),
    },
}


def padded(width: int) -> int:
    """The power of two, at least 16 (what a tensor core needs), that a width is padded to."""
    return max(16, 1 << (width - 1).bit_length())


def load_of(options: AttentionOptions, *, has_statistics: bool) -> Load:
    """How much a kernel has to keep beside its tiles.

    What models are made of (causality, a window, padding, a soft cap, ALiBi, a sink) is light;
    row statistics, or gradients of any, are medium; bias, masks given by the caller, documents and
    edits are heavy.
    """
    o = options
    heavy = (
        *(o.bias, o.mask_added, o.mask_allowed, o.query_documents, o.prefix),
        *(o.temperature, o.head_window, o.query_groups, o.random_heads),
    )
    if any(tensor is not None for tensor in heavy):
        return "heavy"
    return "medium" if has_statistics else "light"


def block_for(
    kernel: KernelName, width: int, item_size: int, load: Load, *, is_interpreted: bool
) -> Block:
    """The table's entry for a kernel and the wider of the two padded head sizes."""
    if is_interpreted:
        return INTERPRETED
    assert width <= WIDEST
    table = SINGLE if item_size > 2 else HALF
    light, medium, heavy = table[kernel][max(64, width)]
    return {"light": light, "medium": medium, "heavy": heavy}[load]
