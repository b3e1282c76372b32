"""Gradient of an additive bias: the score's gradient itself, summed where the bias is shared.

Letters: M query rows, N keys, D head size, E value size. A program owns a tile of the gradient and
runs over whatever shares it: samples, heads, all rows or all keys. Only a bias that has all four
axes costs a tensor with all four axes.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from interp.kernels.triton_gradient import load_lse, score_gradient
from interp.kernels.triton_score import load_rows, score_tile


@triton.jit
def dbias_kernel(
    q,
    k,
    v,
    grad_out,
    grad_bias,
    upstream,
    key_sets,
    n_batches,
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
    SUM_BATCH: tl.constexpr,
    SUM_HEADS: tl.constexpr,
    SUM_ROWS: tl.constexpr,
    SUM_KEYS: tl.constexpr,
):
    """One tile of the gradient [batch or 1, heads or 1, rows or 1, keys or 1]."""
    first_row, last_row = 0, sizes.n_queries
    first_key, last_key = 0, sizes.n_keys
    rest = tl.program_id(0)
    if not SUM_KEYS:
        n_key_blocks = tl.cdiv(sizes.n_keys, BLOCK_N)
        first_key = rest % n_key_blocks * BLOCK_N
        last_key = first_key + 1
        rest = rest // n_key_blocks
    if not SUM_ROWS:
        n_row_blocks = tl.cdiv(sizes.n_queries, BLOCK_M)
        first_row = rest % n_row_blocks * BLOCK_M
        last_row = first_row + 1
        rest = rest // n_row_blocks
    first_head, last_head = 0, sizes.n_heads
    if not SUM_HEADS:
        first_head = rest % sizes.n_heads
        last_head = first_head + 1
        rest = rest // sizes.n_heads
    first_batch, last_batch = 0, n_batches
    if not SUM_BATCH:
        first_batch = rest
        last_batch = first_batch + 1

    dtype = upstream.lse.dtype.element_ty
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype)
    for sample in range(last_batch - first_batch):
        batch = first_batch + sample
        for step in range(last_head - first_head):
            head = first_head + step
            kv_head = head // sizes.n_groups
            pair = batch * sizes.n_heads + head
            for row in range(first_row, last_row, BLOCK_M):
                rows = row + tl.arange(0, BLOCK_M)
                i = rows[:, None]
                q_tile = load_rows(q, batch, head, rows, sizes.n_queries, D, D_PAD, False)
                grad_tile = load_rows(grad_out, batch, head, rows, sizes.n_queries, E, E_PAD, False)
                for key in range(first_key, last_key, BLOCK_N):
                    keys = key + tl.arange(0, BLOCK_N)
                    j = keys[None, :]
                    k_tile = load_rows(k, batch, kv_head, keys, sizes.n_keys, D, D_PAD, False)
                    v_tile = load_rows(v, batch, kv_head, keys, sizes.n_keys, E, E_PAD, False)
                    dots = tl.dot(
                        q_tile, tl.trans(k_tile), input_precision=PRECISION, out_dtype=dtype
                    )
                    values = tl.dot(
                        grad_tile, tl.trans(v_tile), input_precision=PRECISION, out_dtype=dtype
                    )
                    s, _, kept = score_tile(
                        dots, i, j, batch, head, sizes, scores, masks, False, CUT_AFTER
                    )
                    log2_p = s - load_lse(upstream.lse, pair, i, sizes)
                    p = tl.exp2(log2_p)
                    grad_s = score_gradient(
                        log2_p, p, kept, values, i, j, batch, pair, upstream,
                        key_sets, sizes, N_SETS, CUT_AFTER,
                    )  # fmt: skip
                    if scores.temperature is not None:
                        grad_s = grad_s * tl.load(scores.temperature + head).to(dtype)
                    if scores.random_heads is not None:
                        grad_s = tl.where(tl.load(scores.random_heads + head) != 0, 0.0, grad_s)
                    acc += grad_s

    # the tile belongs to a compact tensor in which a shared axis has length 1
    n_columns = 1 if SUM_KEYS else sizes.n_keys
    n_rows = 1 if SUM_ROWS else sizes.n_queries
    n_heads = 1 if SUM_HEADS else sizes.n_heads
    at_batch = 0 if SUM_BATCH else first_batch
    at_head = 0 if SUM_HEADS else first_head
    plane = tl.cast(at_batch * n_heads + at_head, tl.int64)
    base = grad_bias + plane * n_rows * n_columns
    i = first_row + tl.arange(0, BLOCK_M)[:, None]
    j = first_key + tl.arange(0, BLOCK_N)[None, :]
    if SUM_ROWS:
        acc = tl.sum(acc, 0)[None, :]
        i = tl.zeros([1, 1], tl.int32)
    if SUM_KEYS:
        acc = tl.sum(acc, 1)[:, None]
        j = tl.zeros([1, 1], tl.int32)
    inside = (i < n_rows) & (j < n_columns)
    tl.store(base + i.to(tl.int64) * n_columns + j, acc, mask=inside)
