"""Gradients of queries: a program owns a block of rows and runs over the keys.

Letters: M query rows, N keys, D head size, E value size.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from interp.kernels.triton_gradient import load_lse, score_gradient
from interp.kernels.triton_ranges import keys_of_rows
from interp.kernels.triton_score import load_rows, score_tile, store_rows


@triton.jit
def _take_keys(
    acc,
    q_tile,
    grad_tile,
    k,
    v,
    upstream,
    key_sets,
    first_key,
    i,
    batch,
    head,
    kv_head,
    sizes,
    scores,
    masks,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    N_SETS: tl.constexpr,
    CUT_AFTER: tl.constexpr,
    PRECISION: tl.constexpr,
    INSIDE: tl.constexpr,
):
    """Add what one block of keys sends to the rows."""
    keys = first_key + tl.arange(0, BLOCK_N)
    j = keys[None, :]
    pair = batch * sizes.n_heads + head
    k_tile = load_rows(k, batch, kv_head, keys, sizes.n_keys, D, D_PAD, INSIDE)
    dots = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION, out_dtype=acc.dtype)
    s, slope, kept = score_tile(dots, i, j, batch, head, sizes, scores, masks, INSIDE, CUT_AFTER)
    log2_p = s - load_lse(upstream.lse, pair, i, sizes)
    p = tl.exp2(log2_p)
    v_tile = load_rows(v, batch, kv_head, keys, sizes.n_keys, E, E_PAD, INSIDE)
    values = tl.dot(grad_tile, tl.trans(v_tile), input_precision=PRECISION, out_dtype=acc.dtype)
    grad_s = score_gradient(
        log2_p, p, kept, values, i, j, batch, pair, upstream, key_sets, sizes, N_SETS,
        CUT_AFTER,
    )  # fmt: skip
    grad_dots = (grad_s * slope).to(k_tile.dtype)
    return tl.dot(grad_dots, k_tile, acc, input_precision=PRECISION, out_dtype=acc.dtype)


@triton.jit
def dq_kernel(
    q,
    k,
    v,
    grad_out,
    grad_q,
    upstream,
    key_sets,
    scale,
    sizes,
    scores,
    masks,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    N_SETS: tl.constexpr,
    CUT_AFTER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One block of rows of one head; the longest rows of a causal head start first."""
    n_blocks = tl.cdiv(sizes.n_queries, BLOCK_M)
    pair = tl.program_id(0) // n_blocks
    first_row = (n_blocks - 1 - tl.program_id(0) % n_blocks) * BLOCK_M
    batch = pair // sizes.n_heads
    head = pair % sizes.n_heads
    kv_head = head // sizes.n_groups
    rows = first_row + tl.arange(0, BLOCK_M)
    i = rows[:, None]

    q_tile = load_rows(q, batch, head, rows, sizes.n_queries, D, D_PAD, False)
    grad_tile = load_rows(grad_out, batch, head, rows, sizes.n_queries, E, E_PAD, False)
    acc = tl.zeros([BLOCK_M, D_PAD], upstream.lse.dtype.element_ty)
    free, low, high, gap, jump = keys_of_rows(
        first_row, batch, head, sizes, masks, BLOCK_M, BLOCK_N
    )
    for first_key in range(0, free, BLOCK_N):
        acc = _take_keys(
            acc, q_tile, grad_tile, k, v, upstream, key_sets, first_key, i, batch, head, kv_head,
            sizes, scores, masks, BLOCK_N, D, D_PAD, E, E_PAD, N_SETS, CUT_AFTER, PRECISION,
            INSIDE=True,
        )  # fmt: skip
    for step in range(low, high, BLOCK_N):
        first_key = step + tl.where(step >= gap, jump, 0)
        acc = _take_keys(
            acc, q_tile, grad_tile, k, v, upstream, key_sets, first_key, i, batch, head, kv_head,
            sizes, scores, masks, BLOCK_N, D, D_PAD, E, E_PAD, N_SETS, CUT_AFTER, PRECISION,
            INSIDE=False,
        )  # fmt: skip
    store_rows(grad_q, acc * scale, batch, head, rows, sizes.n_queries, D, D_PAD)
