"""First pass of the backward: the part of a score's gradient that is the same for a whole row.

    constant = -(dO O + dmass mass + dmax max + dsink sink_mass + sum_j P dreceived_j - dlse
                 + dentropy entropy)

Letters: M query rows, N keys, D head size, E value size. Only the sum over keys, which is there if
a gradient of the received mass is, needs the scores again; the rest is read from the forward.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from interp.kernels.triton_gradient import load_lse
from interp.kernels.triton_ranges import keys_of_rows
from interp.kernels.triton_score import load_rows, score_tile


@triton.jit
def _sum_received(
    acc,
    q_tile,
    k,
    received,
    lse,
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
    CUT_AFTER: tl.constexpr,
    PRECISION: tl.constexpr,
    INSIDE: tl.constexpr,
):
    """Add one block of keys to ``sum_j P_ij dreceived_j``."""
    keys = first_key + tl.arange(0, BLOCK_N)
    j = keys[None, :]
    k_tile = load_rows(k, batch, kv_head, keys, sizes.n_keys, D, D_PAD, INSIDE)
    dots = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION, out_dtype=acc.dtype)
    s, _, kept = score_tile(dots, i, j, batch, head, sizes, scores, masks, INSIDE, CUT_AFTER)
    p = tl.exp2(s - lse[:, None])
    if CUT_AFTER:
        p = tl.where(kept, p, 0.0)
    at_key = (batch * sizes.n_heads + head).to(tl.int64) * sizes.n_keys + j
    weight = tl.load(received + at_key, mask=j < sizes.n_keys, other=0.0)
    return acc + tl.sum(p * weight, 1)


@triton.jit
def constant_kernel(
    q,
    k,
    out,
    grad_out,
    constant,
    results,
    grads,
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
    """One block of rows of one head."""
    n_blocks = tl.cdiv(sizes.n_queries, BLOCK_M)
    pair = tl.program_id(0) // n_blocks
    first_row = (n_blocks - 1 - tl.program_id(0) % n_blocks) * BLOCK_M
    batch = pair // sizes.n_heads
    head = pair % sizes.n_heads
    kv_head = head // sizes.n_groups
    rows = first_row + tl.arange(0, BLOCK_M)
    inside = rows < sizes.n_queries
    at_row = pair.to(tl.int64) * sizes.n_queries + rows
    dtype = constant.dtype.element_ty

    out_tile = load_rows(out, batch, head, rows, sizes.n_queries, E, E_PAD, False).to(dtype)
    grad_tile = load_rows(grad_out, batch, head, rows, sizes.n_queries, E, E_PAD, False).to(dtype)
    acc = tl.sum(out_tile * grad_tile, 1)
    lse = load_lse(results.lse, pair, rows, sizes)
    if grads.received is not None:
        q_tile = load_rows(q, batch, head, rows, sizes.n_queries, D, D_PAD, False)
        free, low, high, gap, jump = keys_of_rows(
            first_row, batch, head, sizes, masks, BLOCK_M, BLOCK_N
        )
        for first_key in range(0, free, BLOCK_N):
            acc = _sum_received(
                acc, q_tile, k, grads.received, lse, first_key, rows[:, None], batch, head,
                kv_head, sizes, scores, masks, BLOCK_N, D, D_PAD, CUT_AFTER, PRECISION,
                INSIDE=True,
            )  # fmt: skip
        for step in range(low, high, BLOCK_N):
            first_key = step + tl.where(step >= gap, jump, 0)
            acc = _sum_received(
                acc, q_tile, k, grads.received, lse, first_key, rows[:, None], batch, head,
                kv_head, sizes, scores, masks, BLOCK_N, D, D_PAD, CUT_AFTER, PRECISION,
                INSIDE=False,
            )  # fmt: skip
    if grads.lse is not None:
        acc -= tl.load(grads.lse + at_row, mask=inside, other=0.0)
    if grads.entropy is not None:
        entropy = tl.load(results.entropy + at_row, mask=inside, other=0.0)
        acc += entropy * tl.load(grads.entropy + at_row, mask=inside, other=0.0)
    if grads.peak is not None:
        peak = tl.load(results.peak + at_row, mask=inside, other=0.0)
        acc += peak * tl.load(grads.peak + at_row, mask=inside, other=0.0)
    if grads.sink_mass is not None:
        sink_mass = tl.load(results.sink_mass + at_row, mask=inside, other=0.0)
        acc += sink_mass * tl.load(grads.sink_mass + at_row, mask=inside, other=0.0)
    if N_SETS > 0:
        column = tl.arange(0, S_PAD)[None, :]
        at_set = at_row[:, None] * N_SETS + column
        exists = inside[:, None] & (column < N_SETS)
        mass = tl.load(results.mass + at_set, mask=exists, other=0.0)
        acc += tl.sum(mass * tl.load(grads.mass + at_set, mask=exists, other=0.0), 1)
    # a dead row has no weights; whatever arrived for its lse must not spread
    acc = tl.where(lse == float("inf"), 0.0, -acc)
    tl.store(constant + at_row, acc, mask=inside)
