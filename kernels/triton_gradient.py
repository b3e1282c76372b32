"""The gradient of a score: the one formula that all backward kernels share.

With P the weights (slot included in the normaliser), O the output and u_j the indicators of the key
sets, the loss reaches a score through the output and through every statistic at once:

    dS = P * (dO v_j + dmass u_j + dreceived_j + dmax [j is largest] - dentropy log P + constant)

``constant`` gathers what is the same for a whole row (`interp.kernels.triton_constant`). Where
edges are cut after softmax, the first three terms vanish on them and the others do not.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

from interp.kernels.triton_score import LN2, LOG2E


@triton.jit
def load_lse(lse, pair, i, sizes):
    """Base-2 log-sum-exps of rows i, +inf where dead or beyond the end: 2^(s - lse) is 0 there."""
    at_row = pair.to(tl.int64) * sizes.n_queries + i
    natural = tl.load(lse + at_row, mask=i < sizes.n_queries, other=float("inf"))
    return tl.where(natural == float("-inf"), float("inf"), natural * LOG2E)


@triton.jit
def score_gradient(
    log2_p,
    p,
    kept,
    values,
    i,
    j,
    batch,
    pair,
    upstream,
    key_sets,
    sizes,
    N_SETS: tl.constexpr,
    CUT_AFTER: tl.constexpr,
):
    """Gradient of the scores of a tile, from its weights p and ``values``, the products dO v."""
    is_query = i < sizes.n_queries
    is_key = j < sizes.n_keys
    at_row = pair.to(tl.int64) * sizes.n_queries + i
    g = values
    for n in tl.static_range(N_SETS):
        at_set = key_sets.pointer + batch.to(tl.int64) * key_sets.batch + n * key_sets.row
        member = tl.load(at_set + j, mask=is_key, other=0.0)
        g += member * tl.load(upstream.mass + at_row * N_SETS + n, mask=is_query, other=0.0)
    if upstream.received is not None:
        at_key = pair.to(tl.int64) * sizes.n_keys + j
        g += tl.load(upstream.received + at_key, mask=is_key, other=0.0)
    if CUT_AFTER:
        g = tl.where(kept, g, 0.0)
    g += tl.load(upstream.constant + at_row, mask=is_query, other=0.0)
    if upstream.peak is not None:
        peak_key = tl.load(upstream.peak_key + at_row, mask=is_query, other=-1)
        peak = tl.load(upstream.peak + at_row, mask=is_query, other=0.0)
        g += tl.where(j == peak_key, peak, 0.0)
    if upstream.entropy is not None:
        log_p = tl.where(p > 0, log2_p * LN2, 0.0)
        g -= log_p * tl.load(upstream.entropy + at_row, mask=is_query, other=0.0)
    return p * g
