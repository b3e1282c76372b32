"""What an observation is asked for: checked against the model before anything runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from interp.kernels.edits import Edit
from interp.observe_reductions import PER_KEY, PER_QUERY, REDUCTIONS, Reduction
from interp.observe_sites import AttentionSite

STATISTICS = (*PER_QUERY, PER_KEY)

# Positions counted from a text's first real token, or a function of the tokens of a batch so far
# [batch, pos] that returns bool [batch, pos].
KeySet = Sequence[int] | Callable[[Tensor], Tensor]
Heads = Sequence[int] | Mapping[int, Sequence[int]]
Patterns = Sequence[tuple[int, int]] | Mapping[tuple[int, int], Sequence[int] | None]

# The key set behind "first_mass"; the kernel puts the sets side by side, this one in front.
FIRST_TOKEN = "the first token"


@dataclass(frozen=True, kw_only=True, eq=False)
class ObservationRequest:
    """The checked arguments of `interp.observe`; see there for their meaning."""

    statistics: tuple[str, ...]
    layers: tuple[int, ...] | None
    heads: Mapping[int, tuple[int, ...]] | tuple[int, ...] | None
    stacks: tuple[str, ...] | None
    key_sets: Mapping[str, KeySet]
    edits: Mapping[int, Edit] | Edit | None
    reduce: Reduction
    patterns: Mapping[tuple[int, int], tuple[int, ...] | None]
    from_query: int
    extrapolate: bool
    backend: str

    def observes(self, stack: str, layer: int) -> bool:
        """Whether this layer is among the observed ones."""
        if self.stacks is not None and stack not in self.stacks:
            return False
        if self.layers is not None and layer not in self.layers:
            return False
        return not (isinstance(self.heads, Mapping) and layer not in self.heads)

    def heads_of(self, layer: int) -> tuple[int, ...] | None:
        """The observed heads of a layer; None for all."""
        return self.heads[layer] if isinstance(self.heads, Mapping) else self.heads

    def edit_of(self, stack: str, layer: int) -> Edit | None:
        if not self.observes(stack, layer):
            return None
        return self.edits.get(layer) if isinstance(self.edits, Mapping) else self.edits

    def patterns_of(self, layer: int) -> dict[int, tuple[int, ...] | None]:
        """Chosen heads of a layer and their rows (None: all)."""
        return {head: rows for (at, head), rows in self.patterns.items() if at == layer}

    def kernel_statistics(self) -> tuple[str, ...]:
        """The kernel's names for what is asked for; lse always, since it tells the dead rows."""
        names = ["lse"]
        for name in self.statistics:
            names.append("mass" if name == "first_mass" else name)
        return tuple(dict.fromkeys(names))


def read_request(
    *,
    statistics: Any,
    layers: Any,
    heads: Any,
    stacks: Any,
    key_sets: Any,
    edit: Any,
    reduce: Any,
    patterns: Any,
    from_query: int,
    extrapolate: bool,
    backend: str,
) -> ObservationRequest:
    """Check each argument of `interp.observe` by itself."""
    if isinstance(statistics, str):
        raise TypeError(f"statistics: got the string {statistics!r}, expected names in a tuple")
    unknown = [name for name in statistics if name not in STATISTICS]
    if unknown:
        raise ValueError(f"statistics: unknown {unknown[0]!r}; known are {', '.join(STATISTICS)}")
    if not statistics and not patterns and edit is None:
        raise ValueError(
            "statistics: is empty, and neither patterns nor edit is given: there is nothing to do"
        )
    sets = dict(key_sets or {})
    if ("mass" in statistics) != bool(sets):
        raise ValueError(
            "key_sets: 'mass' among the statistics and key_sets={'name': [positions]} belong "
            f"together; got statistics={tuple(statistics)} and key_sets={sorted(sets)}. The mass "
            "on the first token alone is the statistic 'first_mass'"
        )
    if FIRST_TOKEN in sets:
        raise ValueError(
            f"key_sets: the name {FIRST_TOKEN!r} stands for 'first_mass', take another"
        )
    for name, keys in sets.items():
        _check_key_set(name, keys)
    if reduce not in REDUCTIONS:
        raise ValueError(f"reduce: got {reduce!r}, expected one of {', '.join(REDUCTIONS)}")
    if from_query < 0:
        raise ValueError(f"from_query: got {from_query}, expected a position of at least 0")
    chosen = patterns if isinstance(patterns, Mapping) else dict.fromkeys(patterns or ())
    for pair in chosen:
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise TypeError(f"patterns: got {pair!r}, expected (layer, head) pairs")
    for each in edit.values() if isinstance(edit, Mapping) else [] if edit is None else [edit]:
        if not isinstance(each, Edit):
            raise TypeError(
                f"edit: got {type(each).__name__}, expected an interp.kernels.edits.Edit or a "
                "mapping from layers to them"
            )
    return ObservationRequest(
        statistics=tuple(dict.fromkeys(statistics)),
        layers=None if layers is None else tuple(layers),
        heads=(
            {layer: tuple(found) for layer, found in heads.items()}
            if isinstance(heads, Mapping)
            else None
            if heads is None
            else tuple(heads)
        ),
        stacks=None if stacks is None else tuple(stacks),
        key_sets=sets,
        edits=edit,
        reduce=reduce,
        patterns={pair: None if rows is None else tuple(rows) for pair, rows in chosen.items()},
        from_query=from_query,
        extrapolate=extrapolate,
        backend=backend,
    )


def _check_key_set(name: str, keys: Any) -> None:
    if callable(keys):
        return
    if isinstance(keys, str) or not isinstance(keys, Sequence) or not keys:
        raise TypeError(
            f"key_sets[{name!r}]: got {keys!r}, expected positions such as [0, 1], or a function "
            "from tokens [batch, pos] to bool [batch, pos]"
        )
    for key in keys:
        if not isinstance(key, int) or isinstance(key, bool) or key < 0:
            raise ValueError(
                f"key_sets[{name!r}]: names {key!r}, expected positions from 0, counted from a "
                "text's first real token"
            )


def check_against_model(
    request: ObservationRequest, sites: Mapping[nn.Module, AttentionSite], *, model: str
) -> None:
    """Raise ValueError for a layer, head, stack or statistic that this model does not have."""
    reach: dict[str, dict[int, AttentionSite]] = {}
    for site in sites.values():
        reach.setdefault(site.stack, {})[site.layer] = site
    for stack in request.stacks or ():
        if stack not in reach:
            raise ValueError(f"stacks: {model} has no {stack!r}, expected among {sorted(reach)}")
    observed = {
        stack: layers
        for stack, layers in reach.items()
        if request.stacks is None or stack in request.stacks
    }
    served = sorted({layer for layers in observed.values() for layer in layers})
    for layer in request.layers or ():
        if layer not in served:
            raise ValueError(
                f"layers: {model} has no attention in layer {layer} that goes through "
                f"transformers' interface; expected among {served}"
            )
    if isinstance(request.heads, Mapping):
        for layer in request.heads:
            _check_layer("heads", layer, request, served)
    for layer, site in ((n, s) for layers in observed.values() for n, s in layers.items()):
        if request.observes(site.stack, layer):
            _check_heads("heads", request.heads_of(layer) or (), site)
    for layer, head in request.patterns:
        _check_layer("patterns", layer, request, served)
        for layers in observed.values():
            if layer in layers:
                _check_heads("patterns", (head,), layers[layer])
        among = request.heads_of(layer)
        if among is not None and head not in among:
            raise ValueError(
                f"patterns: head {head} of layer {layer} is not observed; add it to heads"
            )
    _check_edits(request, observed, served)
    if "sink_mass" in request.statistics:
        chosen = [s for layers in observed.values() for n, s in layers.items()]
        if not any(s.takes_sinks and request.observes(s.stack, s.layer) for s in chosen):
            raise ValueError(
                f"statistics: 'sink_mass' is the weight of a learned sink, and {model} has none in "
                "the observed layers; the weight of the first token is 'first_mass'"
            )


def _check_layer(
    argument: str, layer: int, request: ObservationRequest, served: Sequence[int]
) -> None:
    if layer not in served:
        raise ValueError(f"{argument}: names layer {layer}, expected among {list(served)}")
    if request.layers is not None and layer not in request.layers:
        raise ValueError(
            f"{argument}: names layer {layer}, which is not observed; add it to "
            f"layers={list(request.layers)}"
        )


def _check_heads(argument: str, heads: Sequence[int], site: AttentionSite) -> None:
    for head in heads:
        if head < 0 or (site.n_heads is not None and head >= site.n_heads):
            last = "" if site.n_heads is None else f" to {site.n_heads - 1}"
            raise ValueError(f"{argument}: layer {site.layer} has no head {head}, expected 0{last}")


def _check_edits(
    request: ObservationRequest,
    observed: Mapping[str, Mapping[int, AttentionSite]],
    served: Sequence[int],
) -> None:
    if request.edits is None:
        return
    if isinstance(request.edits, Mapping):
        for layer in request.edits:
            _check_layer("edit", layer, request, served)
    for stack, layers in observed.items():
        for layer, site in layers.items():
            edit = request.edit_of(stack, layer)
            if edit is None:
                continue
            touched = edited_heads(edit)
            _check_heads("edit", touched or (), site)
            among = request.heads_of(layer)
            missing = [] if among is None or touched is None else sorted({*touched} - {*among})
            if missing or (touched is None and among is not None):
                which = f"head {missing[0]}" if missing else "every head"
                raise ValueError(
                    f"edit: changes {which} of layer {layer}, which is not observed: "
                    f"heads={list(among or ())}; observe what is edited"
                )


def edited_heads(edit: Edit) -> tuple[int, ...] | None:
    """Heads that an edit changes; None for all of them."""
    heads: set[int] = set()
    for name in ("temperature", "window", "random", "pattern", "queries", "keys", "output"):
        heads |= set(getattr(edit, name) or {})
    if edit.knock_out is not None:
        groups = edit.knock_out.head_groups
        if groups is None:
            return None
        heads |= set(groups.nonzero().flatten().tolist())
    return tuple(sorted(heads))


def key_set_members(
    request: ObservationRequest, keys: Tensor, tokens: Tensor | None
) -> dict[str, Tensor]:
    """Which keys are in which set, bool [batch, key_pos]; the first token's set comes first.

    ``keys`` [batch, key_pos] are positions in the text, -1 for padding; ``tokens`` the batch's
    tokens so far [batch, pos].
    """
    members: dict[str, Any] = {}
    if "first_mass" in request.statistics:
        members[FIRST_TOKEN] = keys == 0
    for name, chosen in request.key_sets.items():
        members[name] = (
            _members_by_token(name, chosen, keys, tokens)
            if callable(chosen)
            else (keys[..., None] == keys.new_tensor(list(chosen))).any(-1)
        )
    return members


def _members_by_token(
    name: str, choose: Callable[[Tensor], Tensor], keys: Tensor, tokens: Tensor | None
) -> Tensor:
    if tokens is None:
        raise ValueError(
            f"key_sets[{name!r}]: is a function of tokens, and the model was called without "
            "input_ids; name positions instead"
        )
    chosen = choose(tokens)
    if chosen.shape != tokens.shape or chosen.dtype.is_floating_point:
        raise ValueError(
            f"key_sets[{name!r}]: returned {chosen.dtype} {tuple(chosen.shape)}, expected bool "
            f"{tuple(tokens.shape)}, as the tokens it was given"
        )
    if tokens.shape[1] < keys.shape[1]:
        raise ValueError(
            f"key_sets[{name!r}]: {tokens.shape[1]} tokens are known but there are "
            f"{keys.shape[1]} keys; begin the observation before the cache is filled"
        )
    return chosen.bool()[:, -keys.shape[1] :] & (keys >= 0)
