"""Chosen rows of the pattern, exactly: two sweeps over the keys, one to normalise, one to write.

Letters: M chosen rows, N keys, D head size.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from interp.kernels.triton_score import LOG2E, load_rows, score_tile


@triton.jit
def rows_kernel(
    q,
    k,
    slot,
    heads,
    rows,
    pattern,
    n_chosen_heads,
    n_chosen_rows,
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
    """One block of chosen rows of one chosen head: weights [batch, head, row, key]."""
    n_blocks = tl.cdiv(n_chosen_rows, BLOCK_M)
    pair = tl.program_id(0) // n_blocks
    batch = pair // n_chosen_heads
    head = tl.load(heads + pair % n_chosen_heads).to(tl.int32)
    kv_head = head // sizes.n_groups
    chosen = tl.program_id(0) % n_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = chosen < n_chosen_rows
    # a row that does not exist lies beyond the end, where every load is masked
    row = tl.load(rows + chosen, mask=exists, other=sizes.n_queries).to(tl.int32)
    i = row[:, None]
    dtype = pattern.dtype.element_ty

    q_tile = load_rows(q, batch, head, row, sizes.n_queries, D, D_PAD, False)
    peak = tl.full([BLOCK_M], float("-inf"), dtype)
    total = tl.zeros([BLOCK_M], dtype)
    for first_key in range(0, sizes.n_keys, BLOCK_N):
        keys = first_key + tl.arange(0, BLOCK_N)
        k_tile = load_rows(k, batch, kv_head, keys, sizes.n_keys, D, D_PAD, False)
        dots = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION, out_dtype=dtype)
        s, _, _ = score_tile(
            dots, i, keys[None, :], batch, head, sizes, scores, masks, False, CUT_AFTER
        )
        new_peak = tl.maximum(peak, tl.max(s, 1))
        level = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        total = total * tl.exp2(peak - level) + tl.sum(tl.exp2(s - level[:, None]), 1)
        peak = new_peak

    level = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.where(peak == float("-inf"), 1.0, total)
    if slot is not None:
        at_row = (batch * sizes.n_heads + head).to(tl.int64) * sizes.n_queries + row
        logit = tl.load(slot + at_row, mask=row < sizes.n_queries, other=0.0) * LOG2E
        higher = tl.maximum(level, logit)
        total = total * tl.exp2(level - higher) + tl.exp2(logit - higher)
        level = higher
    base = pattern + pair.to(tl.int64) * n_chosen_rows * sizes.n_keys
    for first_key in range(0, sizes.n_keys, BLOCK_N):
        keys = first_key + tl.arange(0, BLOCK_N)
        j = keys[None, :]
        k_tile = load_rows(k, batch, kv_head, keys, sizes.n_keys, D, D_PAD, False)
        dots = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION, out_dtype=dtype)
        s, _, kept = score_tile(dots, i, j, batch, head, sizes, scores, masks, False, CUT_AFTER)
        p = tl.exp2(s - level[:, None]) / total[:, None]
        if CUT_AFTER:
            p = tl.where(kept, p, 0.0)
        pointers = base + chosen[:, None].to(tl.int64) * sizes.n_keys + j
        tl.store(pointers, p, mask=exists[:, None] & (j < sizes.n_keys))
