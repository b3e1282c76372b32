"""Which blocks a program has to look at: the work that position masks save.

There are two ranges, in steps of the block size. The *free* one holds the blocks that the position
masks let pass whole, so that their tiles skip those masks; it is empty, and known to be when the
kernel is compiled, unless causality is the only position mask or there is none. The *checked* one
holds the others. Its last block may reach beyond the end of the tensors.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def keys_of_rows(
    first_row, batch, head, sizes, masks, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Keys that rows ``[first_row, first_row + BLOCK_M)`` may look at.

    The free range is ``[0, free)``, the checked one ``[low, high)``, in which every position from
    ``gap`` on stands for one that is ``jump`` further: what lies between a prefix and a window is
    never loaded.
    """
    place = first_row + sizes.offset
    last_place = tl.minimum(first_row + BLOCK_M, sizes.n_queries) - 1 + sizes.offset
    low = 0
    high = sizes.n_keys
    if masks.head_window is not None:
        low = tl.maximum(place - tl.load(masks.head_window + 2 * head + 1), 0)
        high = tl.minimum(last_place - tl.load(masks.head_window + 2 * head) + 1, high)
    prefix_low = low // BLOCK_N * BLOCK_N
    prefix_high = high
    if masks.farthest is not None:
        low = tl.maximum(place - masks.farthest, low)
    if masks.nearest is not None:
        high = tl.minimum(last_place - masks.nearest + 1, high)
    low = low // BLOCK_N * BLOCK_N
    free = 0
    gap = 0
    jump = 0
    if masks.prefix is not None:
        prefix_high = tl.minimum(tl.load(masks.prefix + batch), prefix_high)
        gap = tl.maximum(tl.cdiv(prefix_high, BLOCK_N) * BLOCK_N, prefix_low)
        jump = tl.maximum(low - gap, 0)
        low = prefix_low
        high = tl.maximum(high - jump, gap)
    elif masks.farthest is None and masks.head_window is None:
        free = sizes.n_keys
        if masks.nearest is not None:
            free = tl.minimum(place - masks.nearest + 1, free)
        free = tl.maximum(free, 0) // BLOCK_N * BLOCK_N
        low = free
    return free, low, high, gap, jump


@triton.jit
def rows_of_keys(first_key, batch, sizes, masks, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows that may look at keys ``[first_key, first_key + BLOCK_N)``, whatever their head.

    The checked range is ``[low, high)``, the free one ``[free_low, free_high)``. A head's own
    window narrows nothing here: heads that share keys share the ranges.
    """
    last_key = tl.minimum(first_key + BLOCK_N, sizes.n_keys) - 1
    low = 0
    high = sizes.n_queries
    if masks.nearest is not None:
        low = tl.maximum(first_key + masks.nearest - sizes.offset, low)
    if masks.farthest is not None:
        high = tl.minimum(last_key + masks.farthest - sizes.offset + 1, high)
    if masks.prefix is not None:
        is_prefix = first_key < tl.load(masks.prefix + batch)
        low = tl.where(is_prefix, 0, low)
        high = tl.where(is_prefix, sizes.n_queries, high)
    low = low // BLOCK_M * BLOCK_M
    free_low = 0
    free_high = 0
    if masks.prefix is None and masks.farthest is None:
        free_low = low
        free_high = high
        if masks.nearest is not None:
            free_low = tl.maximum(last_key + masks.nearest - sizes.offset, low)
            free_low = tl.cdiv(free_low, BLOCK_M) * BLOCK_M
        high = tl.minimum(free_low, high)
    return low, high, free_low, free_high
