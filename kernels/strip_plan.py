"""How a call is cut into strips: some key-value heads, and a block of rows of their query heads.

Letters: G query heads per key-value head, R rows, W keys of a strip.

A strip is a matrix of scores ``[units, G * R, W]``; a *unit* is one key-value head of one sample.
Long sequences get one head and as many rows as fit in the cache; short ones get many heads, and
then many samples, so that the work per call of an operator does not vanish.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from interp.kernels.options import OPEN, AttentionOptions
from interp.kernels.scores import Selection, distances, knocked_out, pick

# What a strip should take, and the rows of one head in it. More rows make better matrix products,
# smaller strips stay in the cache between the passes over them.
STRIP_BYTES = 1 << 20
FEWEST_ROWS = 32
MOST_ROWS = 128
# Options that have a row for every sample, or one for all.
_BATCHED = (
    "prefix",
    "key_mask",
    "query_documents",
    "key_documents",
    "mask_allowed",
    "mask_added",
    "bias",
    "slot",
    "query_groups",
    "key_groups",
    "random_rows",
    "key_sets",
)
# With more than one thread a matrix product is shared out over the units of a strip.
UNITS_PER_THREAD = 2


@dataclass(frozen=True, eq=False)
class Strip(Selection):
    """Rows ``[first, last)`` of some heads against the keys ``[low, high)``."""

    first: int
    last: int


@dataclass(frozen=True, eq=False)
class Unit:
    """Samples ``[first_sample, last_sample)`` and key-value heads ``[first, last)`` of a call."""

    samples: slice
    key_value_heads: slice
    heads: slice
    n_units: int
    n_rows: int
    options: AttentionOptions  # narrowed to the samples
    _far: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    def strips(self, device: torch.device) -> Iterator[Strip]:
        """The blocks of rows that may see any key; together they are one range of rows."""
        o = self.options
        heads = torch.arange(self.heads.start, self.heads.stop, device=device)
        all_rows = torch.arange(o.query_pos, device=device)
        last = 0
        while last < o.query_pos:
            # Under causality the widths then are no multiples of a page, in which all rows of a
            # strip would fall on the same lines of the cache.
            first, n_rows = last, self.n_rows - (8 if last == 0 and self.n_rows > 8 else 0)
            last = min(first + n_rows, o.query_pos)
            low, high = o.key_range(first, last)
            if low < high:
                yield Strip(heads, all_rows[first:last], low, high, first, last)

    def far_keys(self, strip: Strip, start: int, stop: int) -> Tensor:
        """Keys ``[start, stop)`` at a distance that is not allowed: bool [R, stop - start]."""
        o = self.options
        ahead = strip.first + o.offset - start
        place = (ahead, strip.last - strip.first, stop - start)
        if place not in self._far:
            rows = torch.arange(place[1], device=strip.rows.device) + ahead
            distance = rows[:, None] - torch.arange(place[2], device=rows.device)
            self._far[place] = (distance < o.nearest) | (distance > o.farthest)
        return self._far[place]

    def per_head(self, x: Tensor) -> Tensor:
        """A strip [N, M, ...] seen as [samples, heads, R, ...]."""
        n_heads = self.heads.stop - self.heads.start
        return x.view(self.options.batch, n_heads, -1, *x.shape[2:])


def plan(options: AttentionOptions, *, element_size: int, n_threads: int) -> Iterator[Unit]:
    """Cut a call into units whose strips take about `STRIP_BYTES`."""
    o = options
    width = min(o.key_pos, max(1, _widest(o)))
    n_rows = STRIP_BYTES // (element_size * o.n_groups * width)
    n_rows = min(max(n_rows, FEWEST_ROWS // o.n_groups, 1), max(MOST_ROWS // o.n_groups, 1))
    n_rows = min(n_rows, o.query_pos)
    n_units = max(1, STRIP_BYTES // (element_size * o.n_groups * n_rows * width))
    if n_threads > 1:
        n_units = max(n_units, UNITS_PER_THREAD * n_threads)
    n_heads = min(n_units, o.n_key_value_heads)
    n_samples = min(max(1, n_units // n_heads), o.batch) if n_heads == o.n_key_value_heads else 1
    for sample in range(0, o.batch, n_samples):
        samples = slice(sample, min(sample + n_samples, o.batch))
        narrowed = narrow(o, samples)
        for head in range(0, o.n_key_value_heads, n_heads):
            last = min(head + n_heads, o.n_key_value_heads)
            yield Unit(
                samples=samples,
                key_value_heads=slice(head, last),
                heads=slice(head * o.n_groups, last * o.n_groups),
                n_units=narrowed.batch * (last - head),
                n_rows=n_rows,
                options=narrowed,
            )


def _widest(options: AttentionOptions) -> int:
    """About the most keys that a strip holds."""
    low, high = options.key_range(options.query_pos - 1, options.query_pos)
    return high - low


def narrow(options: AttentionOptions, samples: slice) -> AttentionOptions:
    """The options of some samples alone; key sets and row tensors are cut with them."""
    if samples == slice(0, options.batch):
        return options
    changes: dict[str, Tensor] = {}
    for name in _BATCHED:
        value = getattr(options, name)
        if value is not None and value.shape[0] == options.batch:
            changes[name] = value[samples]
    return replace(options, batch=samples.stop - samples.start, **changes)  # type: ignore[arg-type]


def mask_in_place(scores: Tensor, unit: Unit, strip: Strip, low: float) -> None:
    """Put ``low`` where a key is not allowed: [N, M, W], one pass for each mask that there is.

    The same as `interp.kernels.scores.allowed_keys` without a mask for the whole strip. Causality
    and windows touch only the columns at the strip's two ends, where they do not allow all rows.
    """
    o, keys = unit.options, strip.keys
    scores = unit.per_head(scores)
    if o.nearest > -OPEN or o.farthest < OPEN:
        _mask_by_distance(scores, unit, strip, low)
    if o.key_mask is not None:
        scores.masked_fill_(~o.key_mask[:, None, None, keys], low)
    if o.query_documents is not None and o.key_documents is not None:
        queries = o.query_documents[:, strip.first : strip.last]
        differ = queries[:, :, None] != o.key_documents[:, None, keys]
        scores.masked_fill_(differ[:, None], low)
    if o.mask_allowed is not None:
        scores.masked_fill_(~pick(o.mask_allowed, o, strip), low)
    if o.head_window is not None:
        distance = distances(o, strip)
        window = o.head_window.index_select(0, strip.heads)[:, :, None, None]
        scores.masked_fill_((distance < window[:, 0]) | (distance > window[:, 1]), low)
    if not o.is_cut_after:
        edges = knocked_out(o, strip)
        if edges is not None:
            scores.masked_fill_(edges, low)


def _mask_by_distance(scores: Tensor, unit: Unit, strip: Strip, fill: float) -> None:
    o, low, high = unit.options, strip.low, strip.high
    first, last = strip.first + o.offset, strip.last - 1 + o.offset
    # columns that every row of the strip may see
    open_low = min(max(last - o.farthest, low), high)
    open_high = max(min(first - o.nearest + 1, high), low)
    pieces = [(low, open_low), (open_high, high)] if open_low < open_high else [(low, high)]
    for start, stop in pieces:
        if start >= stop:
            continue
        far = unit.far_keys(strip, start, stop)
        if o.prefix is not None:
            columns = torch.arange(start, stop, device=scores.device)
            far = far & (columns >= o.prefix[:, None])[:, None, None, :]
        scores[..., start - low : stop - low].masked_fill_(far, fill)
