"""The received mass: sums of the weights over queries, a second sweep that runs down the columns.

Letters: M query rows, N keys, D head size. A program owns a block of keys and is the only one to
write its sums, so that two runs give equal bits.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from interp.kernels.triton_gradient import load_lse
from interp.kernels.triton_ranges import rows_of_keys
from interp.kernels.triton_score import load_rows, score_tile


@triton.jit
def _take_rows(
    acc,
    k_tile,
    q,
    lse,
    first_row,
    j,
    batch,
    head,
    sizes,
    scores,
    masks,
    BLOCK_M: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    CUT_AFTER: tl.constexpr,
    PRECISION: tl.constexpr,
    INSIDE: tl.constexpr,
):
    """Add the weights of one block of rows, which run along the second axis of the tile."""
    rows = first_row + tl.arange(0, BLOCK_M)
    i = rows[None, :]
    q_tile = load_rows(q, batch, head, rows, sizes.n_queries, D, D_PAD, False)
    dots = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION, out_dtype=acc.dtype)
    s, _, kept = score_tile(dots, i, j, batch, head, sizes, scores, masks, INSIDE, CUT_AFTER)
    p = tl.exp2(s - load_lse(lse, batch * sizes.n_heads + head, i, sizes))
    if CUT_AFTER:
        p = tl.where(kept, p, 0.0)
    return acc + tl.sum(p, 1)


@triton.jit
def columns_kernel(
    q,
    k,
    lse,
    received,
    sizes,
    scores,
    masks,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    CUT_AFTER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One block of keys, seen by one query head."""
    n_blocks = tl.cdiv(sizes.n_keys, BLOCK_N)
    pair = tl.program_id(0) // n_blocks
    first_key = tl.program_id(0) % n_blocks * BLOCK_N
    batch = pair // sizes.n_heads
    head = pair % sizes.n_heads
    kv_head = head // sizes.n_groups
    keys = first_key + tl.arange(0, BLOCK_N)
    j = keys[:, None]

    k_tile = load_rows(k, batch, kv_head, keys, sizes.n_keys, D, D_PAD, False)
    acc = tl.zeros([BLOCK_N], received.dtype.element_ty)
    low, high, free_low, free_high = rows_of_keys(first_key, batch, sizes, masks, BLOCK_M, BLOCK_N)
    for first_row in range(low, high, BLOCK_M):
        acc = _take_rows(
            acc, k_tile, q, lse, first_row, j, batch, head, sizes, scores, masks, BLOCK_M, D,
            D_PAD, CUT_AFTER, PRECISION, INSIDE=False,
        )  # fmt: skip
    for first_row in range(free_low, free_high, BLOCK_M):
        acc = _take_rows(
            acc, k_tile, q, lse, first_row, j, batch, head, sizes, scores, masks, BLOCK_M, D,
            D_PAD, CUT_AFTER, PRECISION, INSIDE=True,
        )  # fmt: skip
    at_key = pair.to(tl.int64) * sizes.n_keys + keys
    tl.store(received + at_key, acc, mask=keys < sizes.n_keys)
