"""What the Triton kernels are handed: tensors with their strides, grouped by what they are for.

The groups are named tuples, which Triton takes as kernel arguments. A field that is None is known
to be absent when the kernel is compiled, so an option that a call does not use costs nothing.
Scores live in base-2 units inside the kernels (``exp2`` is the native instruction), so whatever is
added to a score or bounds it is multiplied by log2(e) here or where it is loaded.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from interp.kernels.options import OPEN, AttentionOptions, statistics_dtype

LOG2E = math.log2(math.e)


class Operand(NamedTuple):
    """A [batch, head, row, column] tensor whose columns are contiguous."""

    pointer: Tensor
    batch: int
    head: int
    row: int


class Plane(NamedTuple):
    """A [batch, head, query, key] tensor with any strides, 0 along an axis of length 1."""

    pointer: Tensor
    batch: int
    head: int
    row: int
    column: int


class Sizes(NamedTuple):
    """Extents; ``offset`` is the place of query 0 among the keys."""

    n_heads: int
    n_groups: int
    n_queries: int
    n_keys: int
    offset: int


class Scores(NamedTuple):
    """What turns a dot product into a score, in base-2 units."""

    scale: float
    softcap: float | None
    alibi: Tensor | None
    bias: Plane | None
    temperature: Tensor | None
    random_heads: Tensor | None
    random_rows: Tensor | None
    added: Plane | None


class Masks(NamedTuple):
    """What keeps a query from a key."""

    nearest: int | None
    farthest: int | None
    prefix: Tensor | None
    head_window: Tensor | None
    key_mask: Tensor | None
    query_documents: Tensor | None
    key_documents: Tensor | None
    query_groups: Tensor | None
    key_groups: Tensor | None
    head_groups: Tensor | None
    allowed: Plane | None


class KeySets(NamedTuple):
    """Key sets [batch, set, key] whose mass is asked for; keys are contiguous."""

    pointer: Tensor | None
    batch: int
    row: int


class Results(NamedTuple):
    """Where the forward kernel writes statistics, None for those that nobody needs."""

    lse: Tensor
    entropy: Tensor | None
    peak: Tensor | None
    peak_key: Tensor | None
    mass: Tensor | None
    sink_mass: Tensor | None


class Grads(NamedTuple):
    """Gradients that arrived for the statistics, None for those that nothing came for."""

    lse: Tensor | None
    entropy: Tensor | None
    peak: Tensor | None
    mass: Tensor | None
    received: Tensor | None
    sink_mass: Tensor | None


class Upstream(NamedTuple):
    """What the backward kernels know about every row, [batch, head, query] unless it says else.

    ``lse`` is the forward's; ``constant`` the part of a score's gradient that is the same for the
    whole row; the others are gradients of the statistics, None where none arrived.
    """

    lse: Tensor
    constant: Tensor
    entropy: Tensor | None
    peak: Tensor | None
    peak_key: Tensor | None
    mass: Tensor | None  # [batch, head, query, set]
    received: Tensor | None  # [batch, head, key]


def operand(x: Tensor) -> Operand:
    """A tensor with its strides; columns must be contiguous already."""
    assert x.stride(-1) == 1 or x.shape[-1] == 1
    return Operand(x, x.stride(0), x.stride(1), x.stride(2))


def plane(x: Tensor | None) -> Plane | None:
    """A query-by-key tensor with its strides, booleans as bytes."""
    if x is None:
        return None
    if x.dtype == torch.bool:
        x = x.view(torch.uint8)
    strides = [0 if n == 1 else step for n, step in zip(x.shape, x.stride(), strict=True)]
    return Plane(x, *strides)


def sizes(options: AttentionOptions) -> Sizes:
    """The extents of a call."""
    return Sizes(
        options.n_heads, options.n_groups, options.query_pos, options.key_pos, options.offset
    )


def scores(options: AttentionOptions, dtype: torch.dtype) -> Scores:
    """The score terms of a call whose operands have this type."""
    exact = statistics_dtype(dtype)
    alibi = None
    if options.alibi is not None:
        alibi = (options.alibi.detach().to(exact) * LOG2E).contiguous()
    return Scores(
        scale=options.scale * LOG2E,
        softcap=None if options.softcap is None else options.softcap * LOG2E,
        alibi=alibi,
        bias=plane(None if options.bias is None else options.bias.detach()),
        temperature=_contiguous(options.temperature),
        random_heads=_bytes(options.random_heads),
        random_rows=_contiguous(options.random_rows),
        added=plane(None if options.mask_added is None else options.mask_added.detach()),
    )


def masks(options: AttentionOptions) -> Masks:
    """The masks of a call."""
    return Masks(
        nearest=None if options.nearest <= -OPEN else options.nearest,
        farthest=None if options.farthest >= OPEN else options.farthest,
        prefix=_contiguous(options.prefix),
        head_window=_contiguous(options.head_window),
        key_mask=_bytes(options.key_mask),
        query_documents=_contiguous(options.query_documents),
        key_documents=_contiguous(options.key_documents),
        query_groups=_contiguous(options.query_groups),
        key_groups=_contiguous(options.key_groups),
        head_groups=_contiguous(options.head_groups),
        allowed=plane(options.mask_allowed),
    )


def key_sets(options: AttentionOptions, dtype: torch.dtype) -> KeySets:
    """The key sets of a call, where ``mass`` is among its statistics."""
    if options.key_sets is None or "mass" not in options.statistics:
        return KeySets(None, 0, 0)
    sets = options.key_sets.to(statistics_dtype(dtype)).contiguous()
    return KeySets(sets, sets.stride(0), sets.stride(1))


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _bytes(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous().view(torch.uint8)
