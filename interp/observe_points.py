"""Observe models that have hook points: our zoo, and TransformerLens' bridges.

The zoo serves four statistics as points of their own, without a pattern. Everything else is
computed from the pattern that ``hook_pattern`` shows, which then has to be built.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from interp.observation import CallRecord, Observation
from interp.observe_masks import check_some_token_is_real
from interp.observe_placement import Frame, Placement, place_call
from interp.observe_request import FIRST_TOKEN, ObservationRequest, key_set_members
from interp.observe_sites import AttentionSite

_STACK = "self"
_READ_OUTS = ("lse", "entropy", "first_mass", "received")


def point_layers(model: Any) -> dict[int, dict[str, nn.Module]]:
    """The attention points of every layer, by their last names; empty for other models."""
    layers: dict[int, dict[str, nn.Module]] = {}
    for name, point in getattr(model, "hook_dict", {}).items():
        parts = name.split(".")
        if len(parts) == 4 and parts[0] == "blocks" and parts[2] == "attn":
            layers.setdefault(int(parts[1]), {})[parts[3]] = point
    return {layer: points for layer, points in layers.items() if "hook_pattern" in points}


def point_sites(model: Any) -> dict[nn.Module, AttentionSite]:
    """The layers as sites, so that a request is checked against them as against any model."""
    config = model.cfg
    return {
        points["hook_pattern"]: AttentionSite(
            name=f"blocks.{layer}.attn",
            stack=_STACK,
            layer=layer,
            n_heads=config.n_heads,
            takes_sinks=False,
        )
        for layer, points in point_layers(model).items()
    }


class PointsObserver:
    """Hooks the points of the observed layers for the length of each forward pass."""

    def __init__(self, model: Any, request: ObservationRequest, observation: Observation) -> None:
        if request.edits is not None:
            raise ValueError(
                f"edit: acts inside transformers' attention, and {type(model).__name__} has its "
                "own; edit with a hook on 'blocks.{layer}.attn.hook_pattern'"
            )
        self._model = model
        self._request = request
        self._observation = observation
        self._layers = {
            layer: points
            for layer, points in point_layers(model).items()
            if request.observes(_STACK, layer)
        }
        self._has_read_outs = all("hook_lse" in points for points in self._layers.values())
        self._n_texts = 0
        self._hooked: ExitStack | None = None
        self._seen: dict[int, dict[str, Tensor]] = {}
        self._tokens: Tensor | None = None
        self._mask: Tensor | None = None

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Follow forward passes inside the block."""
        with ExitStack() as stack:
            stack.callback(self._unhook)
            begin = self._model.register_forward_pre_hook(self._begin, with_kwargs=True)
            stack.callback(begin.remove)
            end = self._model.register_forward_hook(self._end, always_call=True)
            stack.callback(end.remove)
            yield

    def _begin(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._unhook()  # an interrupted pass never ended
        tokens = args[0] if args else kwargs.get("tokens", kwargs.get("input"))
        self._tokens = tokens if isinstance(tokens, Tensor) else None
        if self._tokens is not None and 0 in self._tokens.shape:
            raise ValueError("tokens: the text is empty, expected at least one token")
        mask = kwargs.get("attention_mask")
        self._mask = mask.bool() if isinstance(mask, Tensor) else None
        if self._mask is not None:
            check_some_token_is_real(self._mask)
        names = self._points_needed()
        self._hooked = ExitStack()
        for layer, points in self._layers.items():
            for name in names:
                handle = points[name].register_forward_hook(self._keep(layer, name))
                self._hooked.callback(handle.remove)

    def _points_needed(self) -> list[str]:
        """Read-outs alone where they say everything; otherwise the pattern."""
        request = self._request
        needs_pattern = bool(request.patterns) or not self._has_read_outs
        needs_pattern |= any(name not in _READ_OUTS for name in request.statistics)
        # what padding on the right gives to keys is in the read-out, and must not count
        needs_pattern |= "received" in request.statistics and self._mask is not None
        if not needs_pattern:
            return ["hook_lse", *(f"hook_{name}" for name in request.statistics)]
        return ["hook_pattern", "hook_attn_scores"]

    def _keep(self, layer: int, name: str) -> Any:
        def keep(module: nn.Module, args: Any, output: Tensor) -> None:
            self._seen.setdefault(layer, {})[name] = output.detach()

        return keep

    def _unhook(self) -> None:
        if self._hooked is not None:
            self._hooked.close()
            self._hooked = None
        self._seen = {}

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        seen = self._seen
        self._unhook()
        if output is None:  # the pass failed
            return
        for layer, points in seen.items():
            self._record(layer, points)
        self._n_texts = self._observation.n_texts

    def _record(self, layer: int, points: Mapping[str, Tensor]) -> None:
        pattern = points.get("hook_pattern")
        some = points["hook_lse"] if pattern is None else pattern
        batch, _, query_pos = some.shape[:3]
        n_keys = query_pos if pattern is None else pattern.shape[3]
        if n_keys != query_pos:
            raise ValueError(
                f"{type(self._model).__name__} goes on from a cache, and its points do not say "
                "which keys are whose; observe the transformers model itself, before it is bridged"
            )
        place = place_call(
            Frame(self._mask, 0, 0, n_keys),
            batch=batch,
            query_pos=query_pos,
            n_keys=n_keys,
            device=some.device,
            first_sample=self._n_texts,
        )
        if pattern is None:
            values = {name: points[f"hook_{name}"] for name in self._request.statistics}
            lse = points["hook_lse"]
        else:
            lse = points["hook_attn_scores"].logsumexp(-1)
            values = self._from_pattern(pattern, lse, place)

        def rows(heads: Sequence[int], wanted: Sequence[int]) -> Tensor:
            assert pattern is not None
            return pattern[:, list(heads)][:, :, list(wanted)]

        self._observation.record(CallRecord(_STACK, layer, place, values, lse, rows, "hook points"))

    def _from_pattern(self, pattern: Tensor, lse: Tensor, place: Placement) -> dict[str, Tensor]:
        """Every statistic by its definition."""
        values: dict[str, Tensor] = {}
        sets = key_set_members(self._request, place.keys, self._tokens)
        for name in self._request.statistics:
            if name == "lse":
                values[name] = lse
            elif name == "entropy":
                values[name] = torch.special.entr(pattern).sum(-1)
            elif name == "max":
                values[name] = pattern.amax(-1)
            elif name == "received":
                is_real = (place.queries >= 0)[:, None, :, None]
                values[name] = torch.where(is_real, pattern, 0.0).sum(-2)
            elif name == "first_mass":
                values[name] = _mass(pattern, sets[FIRST_TOKEN])
            elif name == "mass":
                masses = [_mass(pattern, sets[key]) for key in self._request.key_sets]
                values[name] = torch.stack(masses, -1)
        return values


def _mass(pattern: Tensor, members: Tensor) -> Tensor:
    return (pattern * members[:, None, None, :].to(pattern.dtype)).sum(-1)
