"""Gradients of keys and values: a program owns a block of keys and runs over the rows.

Letters: M query rows, N keys, D head size, E value size. With grouped heads the program runs over
all query heads that share its keys, in order, so that nothing is added from two sides.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from interp.kernels.triton_gradient import load_lse, score_gradient
from interp.kernels.triton_ranges import rows_of_keys
from interp.kernels.triton_score import load_rows, score_tile, store_rows


@triton.jit
def _take_rows(
    grad_k_acc,
    grad_v_acc,
    k_tile,
    v_tile,
    q,
    grad_out,
    upstream,
    key_sets,
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
    E: tl.constexpr,
    E_PAD: tl.constexpr,
    N_SETS: tl.constexpr,
    CUT_AFTER: tl.constexpr,
    PRECISION: tl.constexpr,
    INSIDE: tl.constexpr,
):
    """Add what one block of rows, along the second axis of the tile, sends to the keys."""
    dtype = grad_k_acc.dtype
    rows = first_row + tl.arange(0, BLOCK_M)
    i = rows[None, :]
    pair = batch * sizes.n_heads + head
    q_tile = load_rows(q, batch, head, rows, sizes.n_queries, D, D_PAD, False)
    dots = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION, out_dtype=dtype)
    s, slope, kept = score_tile(dots, i, j, batch, head, sizes, scores, masks, INSIDE, CUT_AFTER)
    log2_p = s - load_lse(upstream.lse, pair, i, sizes)
    p = tl.exp2(log2_p)
    used = p
    if CUT_AFTER:
        used = tl.where(kept, p, 0.0)
    grad_tile = load_rows(grad_out, batch, head, rows, sizes.n_queries, E, E_PAD, False)
    grad_v_acc = tl.dot(
        used.to(grad_tile.dtype), grad_tile, grad_v_acc, input_precision=PRECISION, out_dtype=dtype
    )
    values = tl.dot(v_tile, tl.trans(grad_tile), input_precision=PRECISION, out_dtype=dtype)
    grad_s = score_gradient(
        log2_p, p, kept, values, i, j, batch, pair, upstream, key_sets, sizes, N_SETS,
        CUT_AFTER,
    )  # fmt: skip
    grad_dots = (grad_s * slope).to(q_tile.dtype)
    grad_k_acc = tl.dot(grad_dots, q_tile, grad_k_acc, input_precision=PRECISION, out_dtype=dtype)
    return grad_k_acc, grad_v_acc


@triton.jit
def dkv_kernel(
    q,
    k,
    v,
    grad_out,
    grad_k,
    grad_v,
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
    """One block of keys of one key-value head."""
    n_blocks = tl.cdiv(sizes.n_keys, BLOCK_N)
    n_kv_heads = sizes.n_heads // sizes.n_groups
    pair = tl.program_id(0) // n_blocks
    first_key = tl.program_id(0) % n_blocks * BLOCK_N
    batch = pair // n_kv_heads
    kv_head = pair % n_kv_heads
    keys = first_key + tl.arange(0, BLOCK_N)
    j = keys[:, None]
    dtype = upstream.lse.dtype.element_ty

    k_tile = load_rows(k, batch, kv_head, keys, sizes.n_keys, D, D_PAD, False)
    v_tile = load_rows(v, batch, kv_head, keys, sizes.n_keys, E, E_PAD, False)
    grad_k_acc = tl.zeros([BLOCK_N, D_PAD], dtype)
    grad_v_acc = tl.zeros([BLOCK_N, E_PAD], dtype)
    # heads and row blocks in one loop: two nested ones cost a quarter of the registers
    low, high, free_low, free_high = rows_of_keys(first_key, batch, sizes, masks, BLOCK_M, BLOCK_N)
    n_checked = tl.cdiv(tl.maximum(high - low, 0), BLOCK_M)
    for step in range(n_checked * sizes.n_groups):
        head = kv_head * sizes.n_groups + step // n_checked
        first_row = low + step % n_checked * BLOCK_M
        grad_k_acc, grad_v_acc = _take_rows(
            grad_k_acc, grad_v_acc, k_tile, v_tile, q, grad_out, upstream, key_sets, first_row, j,
            batch, head, sizes, scores, masks, BLOCK_M, D, D_PAD, E, E_PAD, N_SETS, CUT_AFTER,
            PRECISION, INSIDE=False,
        )  # fmt: skip
    n_free = tl.cdiv(tl.maximum(free_high - free_low, 0), BLOCK_M)
    for step in range(n_free * sizes.n_groups):
        head = kv_head * sizes.n_groups + step // n_free
        first_row = free_low + step % n_free * BLOCK_M
        grad_k_acc, grad_v_acc = _take_rows(
            grad_k_acc, grad_v_acc, k_tile, v_tile, q, grad_out, upstream, key_sets, first_row, j,
            batch, head, sizes, scores, masks, BLOCK_M, D, D_PAD, E, E_PAD, N_SETS, CUT_AFTER,
            PRECISION, INSIDE=True,
        )  # fmt: skip
    store_rows(grad_k, grad_k_acc * scale, batch, kv_head, keys, sizes.n_keys, D, D_PAD)
    store_rows(grad_v, grad_v_acc, batch, kv_head, keys, sizes.n_keys, E, E_PAD)
