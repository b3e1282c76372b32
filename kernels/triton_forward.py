"""The forward pass: output, log-sum-exp, entropy, largest weight and masses in one sweep over keys.

Letters: M query rows, N keys, D head size, E value size. Beside the running maximum and sum of the
usual online softmax every row carries ``spread``, the sum of p (s - max), from which the entropy
follows without cancellation however large the scores are, the key of its maximum, and the sums of
its weights over each key set.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from interp.kernels.triton_ranges import keys_of_rows
from interp.kernels.triton_score import LN2, LOG2E, load_rows, score_tile, store_rows


@triton.jit
def softplus2(x):
    """log2(1 + 2^x), finite for every finite x."""
    return tl.maximum(x, 0.0) + tl.log2(1.0 + tl.exp2(-tl.abs(x)))


@triton.jit
def _take_keys(
    acc,
    peak,
    total,
    spread,
    peak_key,
    mass,
    q_tile,
    k,
    v,
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
    S_PAD: tl.constexpr,
    ENTROPY: tl.constexpr,
    PEAK_KEY: tl.constexpr,
    CUT_AFTER: tl.constexpr,
    PRECISION: tl.constexpr,
    INSIDE: tl.constexpr,
):
    """Take one block of keys into the running sums of a block of rows."""
    keys = first_key + tl.arange(0, BLOCK_N)
    j = keys[None, :]
    k_tile = load_rows(k, batch, kv_head, keys, sizes.n_keys, D, D_PAD, INSIDE)
    dots = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION, out_dtype=total.dtype)
    s, _, kept = score_tile(dots, i, j, batch, head, sizes, scores, masks, INSIDE, CUT_AFTER)

    block_peak = tl.max(s, 1)
    new_peak = tl.maximum(peak, block_peak)
    # while a row has seen nothing, any finite number does: all its weights are 0
    level = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    shrink = tl.exp2(peak - level)
    p = tl.exp2(s - level[:, None])
    if PEAK_KEY:
        here = tl.min(tl.where(s == block_peak[:, None], j, 2147483647), 1)
        peak_key = tl.where(block_peak > peak, here, peak_key)
    if ENTROPY:
        fall = tl.where(total > 0, peak - level, 0.0)
        below = tl.where(p > 0, s - level[:, None], 0.0)
        spread = shrink * (spread + total * fall) + tl.sum(p * below, 1)
    total = total * shrink + tl.sum(p, 1)
    used = p
    if CUT_AFTER:
        used = tl.where(kept, p, 0.0)
    if N_SETS > 0:
        mass = mass * shrink[:, None]
        column = tl.arange(0, S_PAD)[None, :]
        for n in tl.static_range(N_SETS):
            at_set = key_sets.pointer + batch.to(tl.int64) * key_sets.batch + n * key_sets.row
            member = tl.load(at_set + j, mask=j < sizes.n_keys, other=0.0)
            share = tl.sum(used * member, 1)
            mass = mass + tl.where(column == n, share[:, None], 0.0)
    v_tile = load_rows(v, batch, kv_head, keys, sizes.n_keys, E, E_PAD, INSIDE)
    acc = acc * shrink[:, None]
    acc = tl.dot(used.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION, out_dtype=acc.dtype)
    return acc, new_peak, total, spread, peak_key, mass


@triton.jit
def forward_kernel(
    q,
    k,
    v,
    out,
    results,
    slot,
    key_sets,
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
    S_PAD: tl.constexpr,
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
    dtype = results.lse.dtype.element_ty
    ENTROPY: tl.constexpr = results.entropy is not None
    PEAK_KEY: tl.constexpr = results.peak_key is not None

    q_tile = load_rows(q, batch, head, rows, sizes.n_queries, D, D_PAD, False)
    acc = tl.zeros([BLOCK_M, E_PAD], dtype)
    peak = tl.full([BLOCK_M], float("-inf"), dtype)
    total = tl.zeros([BLOCK_M], dtype)
    spread = tl.zeros([BLOCK_M], dtype)
    peak_key = tl.zeros([BLOCK_M], tl.int32)
    mass = tl.zeros([BLOCK_M, S_PAD], dtype)
    free, low, high, gap, jump = keys_of_rows(
        first_row, batch, head, sizes, masks, BLOCK_M, BLOCK_N
    )
    for first_key in range(0, free, BLOCK_N):
        acc, peak, total, spread, peak_key, mass = _take_keys(
            acc, peak, total, spread, peak_key, mass, q_tile, k, v, key_sets, first_key, i,
            batch, head, kv_head, sizes, scores, masks, BLOCK_N, D, D_PAD, E, E_PAD, N_SETS,
            S_PAD, ENTROPY, PEAK_KEY, CUT_AFTER, PRECISION, INSIDE=True,
        )  # fmt: skip
    for step in range(low, high, BLOCK_N):
        first_key = step + tl.where(step >= gap, jump, 0)
        acc, peak, total, spread, peak_key, mass = _take_keys(
            acc, peak, total, spread, peak_key, mass, q_tile, k, v, key_sets, first_key, i,
            batch, head, kv_head, sizes, scores, masks, BLOCK_N, D, D_PAD, E, E_PAD, N_SETS,
            S_PAD, ENTROPY, PEAK_KEY, CUT_AFTER, PRECISION, INSIDE=False,
        )  # fmt: skip

    is_dead = peak == float("-inf")
    total = tl.where(is_dead, 1.0, total)
    level = tl.where(is_dead, 0.0, peak)
    lse = level + tl.log2(total)
    entropy = (tl.log2(total) - spread / total) * LN2
    share = tl.where(is_dead, 0.0, 1.0 / total)
    at_row = pair.to(tl.int64) * sizes.n_queries + rows
    inside = rows < sizes.n_queries
    if slot is not None:
        # the slot is one more column: the keys keep 2^(lse - lse') of the weight
        logit = tl.load(slot + at_row, mask=inside, other=0.0) * LOG2E
        gap = lse - logit
        keys_share = 1.0 / (1.0 + tl.exp2(-gap))
        slot_share = 1.0 / (1.0 + tl.exp2(gap))
        binary = keys_share * softplus2(-gap)
        binary += tl.where(slot_share > 0, slot_share * softplus2(gap), 0.0)
        lse = tl.maximum(lse, logit) + softplus2(-tl.abs(gap))
        entropy = keys_share * entropy + binary * LN2
        share = share * keys_share
        if results.sink_mass is not None:
            sink_mass = tl.where(is_dead, 0.0, slot_share)
            tl.store(results.sink_mass + at_row, sink_mass, mask=inside)
    store_rows(out, acc * share[:, None], batch, head, rows, sizes.n_queries, E, E_PAD)
    lse = tl.where(is_dead, float("-inf"), lse * LN2)
    tl.store(results.lse + at_row, lse, mask=inside)
    if results.entropy is not None:
        tl.store(results.entropy + at_row, tl.where(is_dead, 0.0, entropy), mask=inside)
    if results.peak is not None:
        tl.store(results.peak + at_row, share, mask=inside)
    if PEAK_KEY:
        tl.store(results.peak_key + at_row, peak_key, mask=inside)
    if N_SETS > 0:
        column = tl.arange(0, S_PAD)[None, :]
        tl.store(
            results.mass + at_row[:, None] * N_SETS + column,
            mass * share[:, None],
            mask=inside[:, None] & (column < N_SETS),
        )
