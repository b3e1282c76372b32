"""The score of every query-key pair of a tile: the one place where options act on scores.

Letters: M query rows, N keys, D head size. A tile is [M, N] where rows run down and [N, M] in the
kernel that gathers over rows; nothing here minds, because positions come as two index tensors that
broadcast to the tile: ``i`` for queries, ``j`` for keys.
"""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# tanh(x) / x - 1 over x^2, fitted in x^2 up to x = 0.55: relative error of tanh 4e-9
TANH_0 = tl.constexpr(-0.33333332)
TANH_1 = tl.constexpr(0.13333118)
TANH_2 = tl.constexpr(-0.05391007)
TANH_3 = tl.constexpr(0.02131275)
TANH_4 = tl.constexpr(-0.00661576)
# the hash of interp.kernels.edits
KEY_STRIDE = tl.constexpr(0x9E3779B1)
MIX_1 = tl.constexpr(0x85EBCA6B)
MIX_2 = tl.constexpr(0xC2B2AE35)


@triton.jit
def load_rows(
    x, batch, head, rows, n_rows, WIDTH: tl.constexpr, PADDED: tl.constexpr, INSIDE: tl.constexpr
):
    """Rows [len(rows), PADDED] of an `Operand`, 0 beyond its end unless all rows are inside."""
    columns = tl.arange(0, PADDED)[None, :]
    base = x.pointer + batch.to(tl.int64) * x.batch + head.to(tl.int64) * x.head
    pointers = base + rows[:, None].to(tl.int64) * x.row + columns
    if INSIDE and WIDTH == PADDED:
        tile = tl.load(pointers)
    elif INSIDE:
        tile = tl.load(pointers, mask=columns < WIDTH, other=0.0)
    else:
        tile = tl.load(pointers, mask=(rows[:, None] < n_rows) & (columns < WIDTH), other=0.0)
    return tile


@triton.jit
def store_rows(x, tile, batch, head, rows, n_rows, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Write a tile to rows of an `Operand`, in its type."""
    columns = tl.arange(0, PADDED)[None, :]
    base = x.pointer + batch.to(tl.int64) * x.batch + head.to(tl.int64) * x.head
    pointers = base + rows[:, None].to(tl.int64) * x.row + columns
    inside = (rows[:, None] < n_rows) & (columns < WIDTH)
    tl.store(pointers, tile.to(x.pointer.dtype.element_ty), mask=inside)


@triton.jit
def _load_plane(x, batch, head, i, j, inside):
    """The tile of a `Plane`, 0 outside."""
    base = x.pointer + batch.to(tl.int64) * x.batch + head.to(tl.int64) * x.head
    pointers = base + i.to(tl.int64) * x.row + j.to(tl.int64) * x.column
    return tl.load(pointers, mask=inside, other=0)


@triton.jit
def _tanh(x):
    """tanh to the precision of x's type, also near 0, where 1 - e^-2x would cancel."""
    size = tl.abs(x)
    power = tl.exp2(size * (-2.0 * LOG2E))
    far = (1.0 - power) / (1.0 + power)
    far = tl.where(x < 0, -far, far)
    if x.dtype == tl.float64:
        result = far
    else:
        square = x * x
        series = TANH_3 + square * TANH_4
        series = TANH_2 + square * series
        series = TANH_1 + square * series
        series = TANH_0 + square * series
        result = tl.where(size < 0.55, x + x * square * series, far)
    return result


@triton.jit
def _random_score(row_key, j, s):
    """log2 of an exponential variate, hashed from the row's key and the key's position."""
    x = row_key.to(tl.uint32, bitcast=True) ^ (j.to(tl.uint32) * KEY_STRIDE)
    x = x ^ (x >> 16)
    x = x * MIX_1
    x = x ^ (x >> 13)
    x = x * MIX_2
    x = x ^ (x >> 16)
    uniform = ((x >> 9).to(s.dtype) + 0.5) * 1.1920928955078125e-07
    return tl.log2(-tl.log(uniform))


@triton.jit
def score_tile(
    dots,
    i,
    j,
    batch,
    head,
    sizes,
    scores,
    masks,
    INSIDE: tl.constexpr,
    CUT_AFTER: tl.constexpr,
):
    """Scores in base 2, -inf where not allowed; their slope in the dots; where nothing is cut.

    The slope leaves out the scale, which is the same for all. ``INSIDE`` says that the position
    masks (causal, window, prefix, the end of the keys) let everything in this tile pass.
    """
    is_query = i < sizes.n_queries
    is_key = j < sizes.n_keys
    distance = i + sizes.offset - j
    s = dots * scores.scale
    slope = 1.0
    if scores.softcap is not None:
        bent = _tanh(s / scores.softcap)
        s = bent * scores.softcap
        slope = 1.0 - bent * bent
    if scores.alibi is not None:
        s = s - tl.load(scores.alibi + head) * tl.abs(distance).to(s.dtype)
    if scores.bias is not None:
        bias = _load_plane(scores.bias, batch, head, i, j, is_query & is_key)
        s = s + bias.to(s.dtype) * LOG2E
    if scores.temperature is not None:
        factor = tl.load(scores.temperature + head).to(s.dtype)
        is_open = s > float("-inf")
        # 0 * -inf is no number; a key that the bias excludes stays excluded
        s = tl.where(is_open, tl.where(is_open, s, 0.0) * factor, s)
        slope = slope * factor
    if scores.random_heads is not None:
        is_random = tl.load(scores.random_heads + head) != 0
        at_row = (batch * sizes.n_heads + head).to(tl.int64) * sizes.n_queries + i
        row_key = tl.load(scores.random_rows + at_row, mask=is_query, other=0)
        s = tl.where(is_random, _random_score(row_key, j, s), s)
        slope = tl.where(is_random, 0.0, slope)
    if scores.added is not None:
        added = _load_plane(scores.added, batch, head, i, j, is_query & is_key)
        s = s + added.to(s.dtype) * LOG2E

    if not INSIDE:
        near = is_key
        if masks.nearest is not None:
            near = near & (distance >= masks.nearest)
        if masks.farthest is not None:
            near = near & (distance <= masks.farthest)
        if masks.prefix is not None:
            near = near | (is_key & (j < tl.load(masks.prefix + batch)))
        s = tl.where(near, s, float("-inf"))
    if masks.head_window is not None:
        nearest = tl.load(masks.head_window + 2 * head)
        farthest = tl.load(masks.head_window + 2 * head + 1)
        s = tl.where((distance >= nearest) & (distance <= farthest), s, float("-inf"))
    at_query = batch.to(tl.int64) * sizes.n_queries + i
    at_key = batch.to(tl.int64) * sizes.n_keys + j
    if masks.key_mask is not None:
        seen = tl.load(masks.key_mask + at_key, mask=is_key, other=0)
        s = tl.where(seen != 0, s, float("-inf"))
    if masks.query_documents is not None:
        query_document = tl.load(masks.query_documents + at_query, mask=is_query, other=0)
        key_document = tl.load(masks.key_documents + at_key, mask=is_key, other=0)
        s = tl.where(query_document == key_document, s, float("-inf"))
    if masks.allowed is not None:
        allowed = _load_plane(masks.allowed, batch, head, i, j, is_query & is_key)
        s = tl.where(allowed != 0, s, float("-inf"))
    kept = True
    if masks.query_groups is not None:
        groups = tl.load(masks.query_groups + at_query, mask=is_query, other=0)
        groups = groups & tl.load(masks.head_groups + head)
        groups = groups & tl.load(masks.key_groups + at_key, mask=is_key, other=0)
        if CUT_AFTER:
            kept = groups == 0
        else:
            s = tl.where(groups == 0, s, float("-inf"))
    return s, slope, kept
