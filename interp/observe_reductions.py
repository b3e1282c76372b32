"""Running means over texts: what is kept of every attention call, and how much.

Positions count from a text's first real token, so that padding and its side change nothing.
Queries that are padding, or that may see no key at all, are left out of every mean.
"""

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.observe_placement import Placement

Reduction = Literal["all", "sample", "position", "none"]
REDUCTIONS: tuple[str, ...] = get_args(Reduction)

# Statistics with one value per query, and the one with a value per key.
PER_QUERY = ("lse", "entropy", "max", "first_mass", "mass", "sink_mass")
PER_KEY = "received"


@dataclass
class MeanOverQueries:
    """A running mean of one statistic in one layer; ``values`` [batch, head, query_pos, set]."""

    reduce: Reduction
    sums: Tensor | None = None
    counts: Tensor | None = None
    kept: list[Tensor] = field(default_factory=list)
    kept_counts: list[Tensor] = field(default_factory=list)

    def add(
        self,
        values: Float[Tensor, "batch head query_pos set"],
        is_valid: Bool[Tensor, "batch head query_pos"],
        place: Placement,
    ) -> None:
        if self.reduce == "none":
            self._keep(values, is_valid, place)
        elif self.reduce == "position":
            self._add_by_position(values, is_valid, place)
        else:
            counted = torch.where(is_valid[..., None], values, 0.0).sum(2, dtype=torch.float64)
            number = is_valid.sum(2)
            if self.reduce == "all":
                self._accumulate(counted.sum(0), number.sum(0))
            elif place.is_continued and self.kept:
                self.kept[-1] += counted.cpu()
                self.kept_counts[-1] += number.cpu()
            else:
                self.kept.append(counted.cpu())
                self.kept_counts.append(number.cpu())

    def _accumulate(self, sums: Tensor, counts: Tensor) -> None:
        self.sums = sums if self.sums is None else self.sums + sums
        self.counts = counts if self.counts is None else self.counts + counts

    def _add_by_position(self, values: Tensor, is_valid: Tensor, place: Placement) -> None:
        length = int(place.queries.max()) + 1
        n_heads, n_sets = values.shape[1], values.shape[3]
        sums = torch.zeros(length, n_heads, n_sets, dtype=torch.float64, device=values.device)
        counts = torch.zeros(length, n_heads, dtype=torch.int64, device=values.device)
        at = place.queries.clamp_min(0).flatten()
        counted = torch.where(is_valid[..., None], values, 0.0).to(torch.float64)
        sums.index_add_(0, at, counted.permute(0, 2, 1, 3).flatten(0, 1))
        counts.index_add_(0, at, is_valid.to(torch.int64).permute(0, 2, 1).flatten(0, 1))
        self.sums = _grow_and_add(self.sums, sums)
        self.counts = _grow_and_add(self.counts, counts)

    def _keep(self, values: Tensor, is_valid: Tensor, place: Placement) -> None:
        """Every value, at its position in its text; NaN elsewhere."""
        seen = values.detach().masked_fill(~is_valid[..., None], torch.nan)
        spread = scatter_positions(seen.transpose(1, 2), place.queries).transpose(1, 2).cpu()
        if place.is_continued and self.kept:
            before = pad_to(self.kept[-1], 2, spread.shape[2])
            spread = pad_to(spread, 2, before.shape[2])
            self.kept[-1] = torch.where(spread.isnan(), before, spread)
        else:
            self.kept.append(spread)

    def result(self) -> tuple[Float[Tensor, "..."], Int[Tensor, "..."]]:
        """Means and how many queries each is a mean of.

        Shapes [head, set] for "all", [sample, head, set], [pos, head, set], or, not reduced,
        [sample, head, pos, set].
        """
        if self.reduce == "none":
            longest = max(kept.shape[2] for kept in self.kept)
            values = torch.cat([pad_to(kept, 2, longest) for kept in self.kept])
            return values, (~values.isnan()).any(-1).to(torch.int64)
        if self.reduce == "sample":
            sums, counts = torch.cat(self.kept), torch.cat(self.kept_counts)
        else:
            assert self.sums is not None and self.counts is not None
            sums, counts = self.sums.cpu(), self.counts.cpu()
        return sums / counts[..., None], counts  # 0/0: a mean over nothing is NaN


@dataclass
class MassPerKey:
    """What each key receives; ``values`` [batch, head, key_pos] are sums over queries.

    "sample" and "none" keep the sum of every text's key, the others its mean over texts.
    """

    reduce: Reduction
    sums: Tensor | None = None
    counts: Tensor | None = None
    kept: list[Tensor] = field(default_factory=list)

    def add(self, values: Float[Tensor, "batch head key_pos"], place: Placement) -> None:
        seen = values.detach().to(torch.float64).transpose(1, 2)
        spread = scatter_positions(seen, place.keys).transpose(1, 2).cpu()
        if self.reduce in ("sample", "none"):
            if place.is_continued and self.kept:
                before = pad_to(self.kept[-1], 2, spread.shape[2])
                spread = pad_to(spread, 2, before.shape[2])
                both = before.nan_to_num() + spread.nan_to_num()
                self.kept[-1] = both.masked_fill(before.isnan() & spread.isnan(), torch.nan)
            else:
                self.kept.append(spread)
            return
        new = scatter_positions(place.new_keys.to(torch.float64), place.keys).cpu()
        self.sums = _grow_and_add(self.sums, spread.nan_to_num().sum(0).T)
        self.counts = _grow_and_add(self.counts, new.nan_to_num().sum(0).to(torch.int64))

    def result(self) -> tuple[Float[Tensor, "..."], Int[Tensor, "..."]]:
        """[sample, head, pos] sums, or [pos, head] means over texts, and the number of texts."""
        if self.reduce in ("sample", "none"):
            longest = max(kept.shape[2] for kept in self.kept)
            values = torch.cat([pad_to(kept, 2, longest) for kept in self.kept])
            return values, (~values.isnan()).to(torch.int64)
        assert self.sums is not None and self.counts is not None
        return self.sums / self.counts[:, None], self.counts


def scatter_positions(
    values: Float[Tensor, "batch n *rest"], positions: Int[Tensor, "batch n"]
) -> Float[Tensor, "batch pos *rest"]:
    """Each value at its position; NaN where no value has that position; position -1 is dropped."""
    length = int(positions.max()) + 1
    spread = values.new_full((values.shape[0], length, *values.shape[2:]), torch.nan)
    row, column = (positions >= 0).nonzero(as_tuple=True)
    spread[row, positions[row, column]] = values[row, column]
    return spread


def pad_to(values: Tensor, dim: int, size: int) -> Tensor:
    """Append NaN along one axis up to a size."""
    missing = size - values.shape[dim]
    if missing <= 0:
        return values
    shape = list(values.shape)
    shape[dim] = missing
    return torch.cat([values, values.new_full(shape, torch.nan)], dim)


def _grow_and_add(before: Tensor | None, now: Tensor) -> Tensor:
    """Sum along a first axis of positions, as long as the longer of the two."""
    if before is None:
        return now
    if len(before) < len(now):
        before, now = now, before
    total = before.clone()
    total[: len(now)] += now
    return total
