"""The attention function that an observed model calls: transformers' interface on our kernel."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from interp.kernels.attention import AttentionOutput, attention
from interp.kernels.edits import Edit
from interp.observation import CallRecord, Observation
from interp.observe_forwards import ForwardTracker
from interp.observe_masks import KernelMask, LazyMask, lazy_mask
from interp.observe_placement import Placement
from interp.observe_request import ObservationRequest, key_set_members
from interp.observe_sites import AttentionSite

# Keywords that reach the attention function and change nothing about attention itself: positions
# are in the queries already, the window is in the mask, and the rest steers the model around it.
_WITHOUT_EFFECT = frozenset(
    {
        "position_ids",
        "cache_position",
        "position_embeddings",
        "sliding_window",
        "use_cache",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "seq_idx",
        "deterministic",
        "num_items_in_batch",
    }
)


@dataclass(frozen=True, eq=False)
class CallOptions:
    """What a model's keywords say about one call of attention."""

    scaling: float | None = None
    softcap: float | None = None
    bias: Tensor | None = None
    sink: Tensor | None = None
    selected_keys: Tensor | None = None
    is_causal: bool | None = None


def read_keywords(keywords: Mapping[str, Any], *, module: str) -> CallOptions:
    """Translate the interface's keywords; ValueError for one that we would have to ignore."""
    given = {k: v for k, v in keywords.items() if v is not None and k not in _WITHOUT_EFFECT}
    dropout = given.pop("dropout", 0.0)
    if dropout:
        raise ValueError(
            f"{module} drops attention weights at random (dropout={dropout}), and what is observed "
            "would not be what acts: call model.eval(), or set the attention dropout to 0"
        )
    if given.pop("output_attentions", False):
        raise ValueError(
            f"{module} was asked for output_attentions, which an observation never builds; name "
            "heads and rows in observe(..., patterns=...)"
        )
    sinks = [given.pop(name) for name in ("s_aux", "sinks") if name in given]
    sink = sinks[0] if sinks else None
    if sink is not None and sink.ndim != 1:
        raise ValueError(
            f"{module} has a learned sink of shape {tuple(sink.shape)}, one for every token; "
            "expected one per head"
        )
    scaling = given.pop("scaling", None)
    options = CallOptions(
        scaling=None if scaling is None else float(scaling),
        softcap=given.pop("softcap", None),
        bias=given.pop("position_bias", None),
        sink=sink,
        selected_keys=given.pop("indices", None),
        is_causal=given.pop("is_causal", None),
    )
    if given:
        raise ValueError(
            f"{module} passes {sorted(given)} to attention, which this observation does not know "
            "and will not ignore"
        )
    return options


class AttentionObserver:
    """Computes attention for one observed model and records what is asked for."""

    def __init__(
        self,
        sites: dict[nn.Module, AttentionSite],
        request: ObservationRequest,
        tracker: ForwardTracker,
        observation: Observation,
    ) -> None:
        self._sites = sites
        self._request = request
        self._tracker = tracker
        self._observation = observation

    def make_mask(self, **asked: Any) -> LazyMask:
        """transformers' mask interface: what was asked for, also told to the pass that asks."""
        mask = lazy_mask(**asked)
        self._tracker.note_mask(mask.request)
        return mask

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **keywords: Any,
    ) -> tuple[Tensor, None]:
        """transformers' interface: [batch, head, pos, d] in, [batch, pos, head, d_value] out."""
        site = self._sites.get(module)
        if site is None:
            raise RuntimeError(
                f"a {type(module).__name__} joined the model after the observation began; build "
                "the model first, then observe it"
            )
        options = read_keywords(keywords, module=f"{site.name} ({type(module).__name__})")
        layer = self._tracker.current().number_layer(module, site)
        mask = _read_mask(attention_mask, module, options, query, key)
        key, value = key[:, :, : mask.n_keys], value[:, :, : mask.n_keys]
        is_observed = self._request.observes(site.stack, layer)
        place = self._tracker.place(site, attention_mask, query, n_keys=mask.n_keys)
        call = _KernelCall(query, key, value, mask, options)
        if not is_observed:
            out = call.run((), None, None, "auto").out
        else:
            out = self._observe(call, site, layer, place)
        return out.to(value.dtype).transpose(1, 2).contiguous(), None

    def _observe(
        self, call: "_KernelCall", site: AttentionSite, layer: int, place: Placement
    ) -> Tensor:
        request = self._request
        edit = request.edit_of(site.stack, layer)
        names = request.kernel_statistics()
        if call.options.sink is None:
            names = tuple(name for name in names if name != "sink_mass")
        sets = None
        if "mass" in names:
            tokens = self._tracker.tokens(site.stack)
            sets = key_set_members(request, place.keys, tokens)
        output = call.run(names, sets, edit, request.backend)
        received = output.received if "received" in names else None
        if received is not None and bool((place.queries < 0).any()):
            received = call.received_from_real_queries(place, edit, request.backend)
        self._observation.record(
            CallRecord(
                stack=site.stack,
                layer=layer,
                place=place,
                values=_values(request, output, received),
                lse=output.lse,
                pattern=output.pattern,
                backend=output.backend,
            )
        )
        return output.out


def _values(
    request: ObservationRequest, output: AttentionOutput, received: Tensor | None
) -> dict[str, Tensor]:
    """Statistics by our names; a layer without a learned sink has no sink_mass."""
    values = {}
    for name in request.statistics:
        if name == "first_mass":
            values[name] = output.mass[..., 0]
        elif name == "mass":
            values[name] = output.mass[..., "first_mass" in request.statistics :]
        elif name == "received":
            assert received is not None
            values[name] = received
        elif name in output.statistics:
            values[name] = output.statistics[name]
    return values


@dataclass(frozen=True, eq=False)
class _KernelCall:
    """The operands of one call and its mask, ready for the kernel."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: KernelMask
    options: CallOptions

    def run(
        self,
        statistics: tuple[str, ...],
        key_sets: Mapping[str, Tensor] | None,
        edit: Edit | None,
        backend: str,
    ) -> AttentionOutput:
        options, mask = self.options, self.mask
        dtype = self.query.dtype
        for operand in (self.key, self.value):
            dtype = torch.promote_types(dtype, operand.dtype)
        q, k, v = (_dense(x.to(dtype)) for x in (self.query, self.key, self.value))
        bias = options.bias
        if bias is not None:
            bias = bias[..., : mask.n_keys]
        return attention(
            q,
            k,
            v,
            causal=mask.causal,
            window=mask.window,
            key_mask=mask.key_mask,
            documents=mask.documents,
            mask=mask.mask,
            scale=options.scaling,
            softcap=options.softcap,
            bias=_as_parameter(bias, dtype),
            sink=_as_parameter(options.sink, dtype),
            statistics=statistics,
            key_sets=key_sets,
            edit=edit,
            backend=backend,
        )

    def received_from_real_queries(
        self, place: Placement, edit: Edit | None, backend: str
    ) -> Tensor:
        """Column sums over the queries that are no padding.

        Padding on the right looks back at real tokens, and its output is none of our business, but
        what it gives to keys must not count: a second pass puts padded queries alone in a document.
        """
        is_real = place.queries >= 0
        of_queries, of_keys = self.mask.documents or (
            torch.zeros_like(place.queries),
            torch.zeros_like(place.keys),
        )
        nobody = torch.full_like(of_queries, -1)
        documents = (torch.where(is_real, of_queries, nobody), of_keys)
        if edit is not None and edit.pattern:
            given = {h: p * is_real[..., None].to(p.dtype) for h, p in edit.pattern.items()}
            edit = replace(edit, pattern=given)
        call = replace(self, mask=replace(self.mask, documents=documents))
        return call.run(("lse", "received"), None, edit, backend).received


def _read_mask(
    attention_mask: Tensor | None,
    module: nn.Module,
    options: CallOptions,
    query: Tensor,
    key: Tensor,
) -> KernelMask:
    """What the kernel is to hide."""
    if isinstance(attention_mask, LazyMask):
        mask = attention_mask.kernel()
        asked = attention_mask.request
        if (asked.query_pos, asked.key_pos) != (query.shape[2], key.shape[2]):
            raise RuntimeError(
                f"{type(module).__name__} made its mask for {asked.query_pos} queries and "
                f"{asked.key_pos} keys, and calls attention with {query.shape[2]} and "
                f"{key.shape[2]}"
            )
    elif attention_mask is not None:
        mask = KernelMask(key.shape[2], causal=False, mask=attention_mask[..., : key.shape[2]])
    else:
        mask = KernelMask(key.shape[2], causal=_is_causal(module, options, query, key))
    if options.selected_keys is None:
        return mask
    selected = _selected(options.selected_keys, key.shape[2])[..., : mask.n_keys]
    if mask.mask is not None:
        return replace(mask, mask=_combine(mask.mask, selected))
    return replace(mask, mask=selected)


def _is_causal(module: nn.Module, options: CallOptions, query: Tensor, key: Tensor) -> bool:
    """Without a mask: as transformers' own torch attention reads ``is_causal``."""
    says = options.is_causal
    is_causal = bool(getattr(module, "is_causal", True) if says is None else says)
    if not is_causal or query.shape[2] == 1:
        return False
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            f"{type(module).__name__} calls causal attention without a mask for {query.shape[2]} "
            f"queries and {key.shape[2]} keys, and does not say which keys come before the queries"
        )
    return True


def _selected(indices: Tensor, n_keys: int) -> Tensor:
    """Key indices [batch, query_pos, n] (-1: none) as bool [batch, 1, query_pos, key_pos]."""
    chosen = torch.where(indices < 0, n_keys, indices).to(torch.int64)
    marks = torch.zeros((*chosen.shape[:2], n_keys + 1), dtype=torch.bool, device=chosen.device)
    return marks.scatter(-1, chosen, True)[:, None, :, :n_keys]


def _combine(mask: Tensor, selected: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return mask & selected
    return mask.masked_fill(~selected, -torch.inf)


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _as_parameter(x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return x if x is None or x.dtype in (dtype, torch.float32) else x.to(dtype)
