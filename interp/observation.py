"""What an observation has seen: running means per layer and head, as tables and tensors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.observe_placement import Placement
from interp.observe_reductions import (
    PER_KEY,
    MassPerKey,
    MeanOverQueries,
    pad_to,
    scatter_positions,
)
from interp.observe_request import FIRST_TOKEN, ObservationRequest

# axes after the head that a statistic keeps under each reduction
_AXES = {
    "all": (),
    "sample": ("sample",),
    "position": ("position",),
    "none": ("sample", "position"),
}


@dataclass(frozen=True, eq=False)
class PatternRows:
    """Rows of one head's pattern in one text.

    rows: positions of the queries, counted from the text's first real token.
    weights: [row, key_pos] over the text's real tokens; rows sum to 1, less what a learned sink
        takes.
    """

    rows: Int[Tensor, " row"]
    weights: Float[Tensor, "row key_pos"]


@dataclass(frozen=True, eq=False)
class CallRecord:
    """One call of attention, as whoever computed it tells it to the observation.

    values: by statistic, [batch, head, query_pos], with a last axis of sets for "mass", and
        [batch, head, key_pos] for "received". lse [batch, head, query_pos] is -inf in rows that
        may see no key. pattern: rows of heads, [batch, len(heads), len(rows), key_pos].
    """

    stack: str
    layer: int
    place: Placement
    values: Mapping[str, Tensor]
    lse: Tensor
    pattern: Callable[[Sequence[int], Sequence[int]], Tensor]
    backend: str


class Observation:
    """Everything that was asked for, over all texts that the model has read inside the block.

    stacks: the kinds of attention seen, each with its layers, ``{"self": [0, 1, ...]}``.
    unserved: modules that look like attention but do not go through transformers' interface.
    backends: the kernel backends that ran.
    """

    def __init__(self, request: ObservationRequest, *, model: str, unserved: list[str]) -> None:
        self._request = request
        self._model = model
        self._means: dict[tuple[str, int], dict[str, MeanOverQueries | MassPerKey]] = {}
        self._patterns: dict[tuple[str, int, int], dict[int, PatternRows]] = {}
        self._lengths: dict[str, list[Tensor]] = {}
        self.unserved = unserved
        self.backends: set[str] = set()

    def __repr__(self) -> str:
        layers = "; ".join(f"{stack}: layers {found}" for stack, found in self.stacks.items())
        return f"Observation({self._model}, {self.n_texts} texts, {layers or 'nothing seen yet'})"

    # -- recording ------------------------------------------------------------------------------

    def record(self, call: CallRecord) -> None:
        """Take in one call of attention."""
        request, place = self._request, call.place
        self.backends.add(call.backend)
        self._note_texts(call.stack, place)
        heads = request.heads_of(call.layer)
        chosen = slice(None) if heads is None else list(heads)
        is_valid = (place.queries >= request.from_query)[:, None] & (call.lse != -torch.inf)
        means = self._means.setdefault((call.stack, call.layer), {})
        for name, values in call.values.items():
            kept = values.detach()[:, chosen]
            if name == PER_KEY:
                per_key = means.setdefault(name, MassPerKey(request.reduce))
                assert isinstance(per_key, MassPerKey)
                per_key.add(kept, place)
            else:
                per_query = means.setdefault(name, MeanOverQueries(request.reduce))
                assert isinstance(per_query, MeanOverQueries)
                kept = kept if name == "mass" else kept[..., None]
                per_query.add(kept, is_valid[:, chosen], place)
        for head, rows in request.patterns_of(call.layer).items():
            self._record_pattern(call, head, rows)

    def _note_texts(self, stack: str, place: Placement) -> None:
        """Real tokens of every text that were queries, up to the last one."""
        lengths = self._lengths.setdefault(stack, [])
        reached = (place.queries.max(1).values + 1).cpu()
        seen = sum(len(batch) for batch in lengths)
        if place.first_sample >= seen:
            lengths.append(reached)
        else:
            lengths[-1] = torch.maximum(lengths[-1], reached)

    def _record_pattern(self, call: CallRecord, head: int, rows: tuple[int, ...] | None) -> None:
        place = call.place
        kept = self._patterns.setdefault((call.stack, call.layer, head), {})
        for sample in range(len(place.queries)):
            queries = place.queries[sample]
            real = (queries >= 0).nonzero().flatten().tolist()
            if rows is not None:
                length = int(queries.max()) + 1
                wanted = {row % length if -length <= row < 0 else row for row in rows}
                real = [i for i in real if int(queries[i]) in wanted]
            if not real:
                continue
            weights = call.pattern([head], real).detach()[sample, 0]
            spread = scatter_positions(weights.T[None], place.keys[sample : sample + 1])[0]
            now = PatternRows(queries[real].cpu(), spread.T.nan_to_num().cpu())
            number = place.first_sample + sample
            kept[number] = _join(kept[number], now) if number in kept else now

    # -- results --------------------------------------------------------------------------------

    @property
    def stacks(self) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for stack, layer in sorted(self._means):
            found.setdefault(stack, []).append(layer)
        return found

    @property
    def statistics(self) -> tuple[str, ...]:
        return self._request.statistics

    @property
    def n_texts(self) -> int:
        """Texts read so far (of the stack that read most)."""
        return max((sum(map(len, batches)) for batches in self._lengths.values()), default=0)

    def lengths(self, stack: str | None = None) -> Int[Tensor, " sample"]:
        """Real tokens of each text that were queries, up to the last one."""
        return torch.cat(self._lengths[self._only(stack)])

    def tensor(self, statistic: str, *, stack: str | None = None) -> Float[Tensor, "..."]:
        """One statistic, by layer and head.

        Shape by ``reduce``: "all" [layer, head]; "sample" [sample, layer, head]; "position"
        [layer, head, pos]; "none" [sample, layer, head, pos]. "mass" has a last axis of key sets in
        the order they were given. "received" always keeps its keys, [layer, head, key_pos], with
        the samples in front for "sample" and "none". Layers are those of ``stacks[stack]``, heads
        those observed; NaN where a text has no such position, or a layer no such head.

        Raises ValueError for what was not observed.
        """
        stack = self._only(stack)
        layers = [self._result(stack, layer, statistic)[0] for layer in self._layers(stack)]
        longest = [max(part.shape[i] for part in layers) for i in range(layers[0].ndim)]
        for axis, size in enumerate(longest):
            layers = [pad_to(part, axis, size) for part in layers]
        return torch.stack(layers, 1 if self._has_samples() else 0)

    def layer_tensor(
        self, statistic: str, layer: int, *, stack: str | None = None
    ) -> Float[Tensor, "..."]:
        """One statistic in one layer: as `tensor`, without the axis of layers."""
        stack = self._only(stack)
        if (stack, layer) not in self._means:
            raise ValueError(f"layer: {layer} was not seen, expected among {self.stacks[stack]}")
        return self._result(stack, layer, statistic)[0]

    def table(self) -> pd.DataFrame:
        """Tidy: one row per layer, head and statistic, and per sample, position or set if kept.

        Columns: ``layer``, ``head``, ``statistic``, ``value``; ``sample`` and ``position`` as
        ``reduce`` keeps them (``received`` always has the key's position); ``set`` where masses of
        key sets were asked for; ``n``, how many queries (texts, for ``received``) the value is a
        mean over; ``stack`` in front where a model has several kinds of attention.
        """
        parts = []
        for stack, layers in self._checked_stacks().items():
            for layer in layers:
                for name in self._means[stack, layer]:
                    part = self._frame(stack, layer, name)
                    part.insert(0, "stack", stack)
                    parts.append(part)
        table = pd.concat(parts, ignore_index=True)
        if "position" in table:
            table["position"] = table["position"].astype("Int64")  # only some rows have one
        return table if len(self.stacks) > 1 else table.drop(columns="stack")

    def pattern(
        self, layer: int, head: int, *, sample: int = 0, stack: str | None = None
    ) -> PatternRows:
        """The rows asked for of one head in one text."""
        key = (self._only(stack), layer, head)
        if key not in self._patterns:
            raise ValueError(
                f"patterns: head {head} of layer {layer} was not asked for; say "
                f"observe(..., patterns=[({layer}, {head})])"
            )
        if sample not in self._patterns[key]:
            raise ValueError(
                f"sample: no row of text {sample} was kept, expected among "
                f"{sorted(self._patterns[key])}"
            )
        return self._patterns[key][sample]

    def _only(self, stack: str | None) -> str:
        stacks = self._checked_stacks()
        if stack is None:
            if len(stacks) > 1:
                raise ValueError(
                    f"stack: {self._model} has several kinds of attention, say which of "
                    f"{sorted(stacks)}"
                )
            return next(iter(stacks))
        if stack not in stacks:
            raise ValueError(f"stack: {stack!r} was not seen, expected among {sorted(stacks)}")
        return stack

    def _checked_stacks(self) -> dict[str, list[int]]:
        stacks = self.stacks
        if not stacks:
            raise ValueError(
                f"nothing was observed: no observed layer of {self._model} ran inside the block"
            )
        seen = {layer for layers in stacks.values() for layer in layers}
        missing = [layer for layer in self._request.layers or () if layer not in seen]
        if missing:
            raise ValueError(f"layers: {missing} were asked for and never ran")
        return stacks

    def _layers(self, stack: str) -> list[int]:
        return self.stacks[stack]

    def _has_samples(self) -> bool:
        return "sample" in _AXES[self._request.reduce]

    def _result(self, stack: str, layer: int, statistic: str) -> tuple[Tensor, Tensor]:
        """Values [sample?, head, pos?, set?] and counts [sample?, head, pos?] of one layer."""
        if statistic not in self._request.statistics:
            raise ValueError(
                f"statistic: {statistic!r} was not observed, expected among "
                f"{self._request.statistics}"
            )
        means = self._means[stack, layer]
        if statistic not in means:
            raise ValueError(f"statistic: layer {layer} has no {statistic!r} (no learned sink)")
        values, counts = means[statistic].result()
        if isinstance(means[statistic], MassPerKey):
            return (
                (values, counts)
                if self._has_samples()
                else (values.T, counts.expand(values.T.shape))
            )
        if self._request.reduce == "position":
            values, counts = values.transpose(0, 1), counts.T
        return (values if statistic == "mass" else values[..., 0]), counts

    def _frame(self, stack: str, layer: int, statistic: str) -> pd.DataFrame:
        """The table's rows of one layer and statistic."""
        values, counts = self._result(stack, layer, statistic)
        axes = ["sample"] if self._has_samples() else []
        axes.append("head")
        if statistic == PER_KEY or "position" in _AXES[self._request.reduce]:
            axes.append("position")
        if statistic == "mass":
            axes.append("set")
            counts = counts[..., None].expand(values.shape)
        places = torch.cartesian_prod(*(torch.arange(n) for n in values.shape)).reshape(
            -1, values.ndim
        )
        frame = pd.DataFrame(dict(zip(axes, places.T.numpy(), strict=True)))
        heads = self._request.heads_of(layer)
        if heads is not None:
            frame["head"] = pd.Series(heads)[frame["head"]].to_numpy()
        if statistic == "mass":
            names = pd.Series([n for n in self._request.key_sets if n != FIRST_TOKEN])
            frame["set"] = names[frame["set"]].to_numpy()
        frame.insert(0, "layer", layer)
        frame["statistic"] = statistic
        frame["value"] = values.flatten().numpy()
        frame["n"] = counts.flatten().numpy()
        frame = frame[frame["n"] > 0]
        order = ["layer", "head", "statistic", "value", "sample", "position", "set", "n"]
        return frame[[column for column in order if column in frame]]


def _join(before: PatternRows, now: PatternRows) -> PatternRows:
    """Rows of one text from two calls; keys that came later have weight 0 in earlier rows."""
    n_keys = max(before.weights.shape[1], now.weights.shape[1])
    weights = [
        torch.nn.functional.pad(part.weights, (0, n_keys - part.weights.shape[1]))
        for part in (before, now)
    ]
    return PatternRows(torch.cat([before.rows, now.rows]), torch.cat(weights))
