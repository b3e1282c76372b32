"""Follow the forward passes of a model: which texts they carry and where each token stands.

Hooks on the transformers models within (the language model, its base model) tell where a forward
pass begins and ends, what tokens and which 2-D mask it was given, and whether it goes on from the
cache of the one before.
"""

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from interp.observe_masks import (
    LazyMask,
    MaskRequest,
    check_some_key_is_seen,
    check_some_token_is_real,
)
from interp.observe_placement import Frame, Placement, place_call, position_limit
from interp.observe_sites import AttentionSite, model_name, pretrained_models


@dataclass
class ForwardPass:
    """One call of the model: what it carries, and what attention has seen of it so far."""

    is_continued: bool
    batches: dict[str, tuple[int, bool]] = field(default_factory=dict)
    layers: dict[str, list[int]] = field(default_factory=dict)
    calls: dict[nn.Module, int] = field(default_factory=dict)
    requests: list[MaskRequest] = field(default_factory=list)
    placements: list[tuple[Any, str, int, Placement]] = field(default_factory=list)

    def number_layer(self, module: nn.Module, site: AttentionSite) -> int:
        """The layer that this call of a module stands for.

        A module that several layers share is numbered as if the layers were unrolled.
        """
        used = self.layers.setdefault(site.stack, [])
        self.calls[module] = self.calls.get(module, 0) + 1
        fresh = self.calls[module] == 1 and site.layer not in used
        layer = site.layer if fresh else max(used) + 1
        used.append(layer)
        return layer


class ForwardTracker:
    """Knows the forward pass that runs, and counts the texts of every stack."""

    def __init__(self, model: nn.Module, *, extrapolate: bool) -> None:
        self._model = model
        self._name = model_name(model)
        self._extrapolate = extrapolate
        self._open: list[tuple[PreTrainedModel, Tensor | None]] = []
        self._thread: int | None = None
        self._cache: weakref.ref[Cache] | None = None
        self._tokens: dict[nn.Module, Tensor] = {}
        self._n_texts: dict[str, int] = {}
        self._last_batch: dict[str, int] = {}
        self._checkpointed = [m for m in model.modules() if hasattr(m, "gradient_checkpointing")]
        self._pass: ForwardPass | None = None
        self.n_forwards = 0

    @property
    def n_texts(self) -> int:
        """Texts seen so far, in the stack that saw most."""
        return max(self._n_texts.values(), default=0)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Follow forward passes inside the block."""
        with ExitStack() as stack:
            for inner in pretrained_models(self._model):
                for handle in (
                    inner.register_forward_pre_hook(self._begin, with_kwargs=True),
                    inner.register_forward_hook(self._end, with_kwargs=True, always_call=True),
                ):
                    stack.callback(handle.remove)
            yield

    def current(self) -> ForwardPass:
        """The pass that runs."""
        if self._pass is None:
            raise RuntimeError(
                f"attention of {self._name} ran outside a forward pass that was followed from its "
                "beginning: call the model (model(...), not model.forward(...) or a layer of it), "
                "and begin the observation before it runs"
            )
        return self._pass

    def note_mask(self, request: MaskRequest) -> None:
        """Remember what a mask was asked to be; generation may ask before the pass begins."""
        if self._pass is not None:
            self._pass.requests.append(request)

    def text_mask(self, n_queries: int) -> Tensor | None:
        """The innermost 2-D mask that is at least as long as the queries."""
        for _, mask in reversed(self._open):
            if mask is not None and mask.shape[-1] >= n_queries:
                return mask.bool()
        return None

    def tokens(self, stack: str) -> Tensor | None:
        """Tokens [batch, pos] behind the keys of a stack, those before the cache included."""
        known = [self._tokens[module] for module, _ in self._open if module in self._tokens]
        if not known:
            return None
        return known[0] if stack == "cross" else known[-1]

    def _begin(
        self, module: PreTrainedModel, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        if any(module is inner for inner, _ in self._open):
            self._open.clear()  # an interrupted pass never ended
        if self._open and self._thread != threading.get_ident():
            raise RuntimeError(
                f"{self._name} runs in two threads while it is observed, and their texts cannot be "
                "told apart; run them one after the other"
            )
        mask = kwargs.get("attention_mask")
        mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
        if mask is not None:
            check_some_token_is_real(mask)
        if not self._open:
            self._begin_outermost(module, args, kwargs)
        self._open.append((module, mask))
        tokens, before = _input_ids(args, kwargs), self._tokens.pop(module, None)
        if tokens is not None:
            goes_on = before is not None and self.current().is_continued
            if goes_on and before is not None and len(before) == len(tokens):
                tokens = torch.cat([before, tokens], 1)
            self._tokens[module] = tokens

    def _begin_outermost(
        self, module: PreTrainedModel, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self._thread = threading.get_ident()
        if kwargs.get("output_attentions"):
            raise ValueError(
                "output_attentions: asks for every pattern, which an observation never builds; "
                "name heads and rows in observe(..., patterns=...), or run eager without observing"
            )
        if torch.is_grad_enabled() and any(
            m.gradient_checkpointing and m.training for m in self._checkpointed
        ):
            raise ValueError(
                f"{self._name} checkpoints its gradients: layers run again in the backward pass, "
                "where they would be counted twice or no longer edited. Switch that off first "
                "(activation_checkpointing_disable(), in older transformers "
                "gradient_checkpointing_disable()), or observe under torch.no_grad()"
            )
        cache = _find_cache(kwargs)
        is_continued = cache is not None and self._cache is not None and self._cache() is cache
        if cache is not None:
            self._cache = weakref.ref(cache)
        tokens, vectors = _input_ids(args, kwargs), kwargs.get("inputs_embeds")
        for name, inputs in (("input_ids", tokens), ("inputs_embeds", vectors)):
            if inputs is None:
                continue
            if inputs.shape[1] == 0:
                raise ValueError(f"{name}: the text is empty, expected at least one token")
            past = int(cache.get_seq_length()) if cache is not None else 0
            self._check_length(module, name, past + inputs.shape[1])
        self._pass = ForwardPass(is_continued)
        self.n_forwards += 1

    def _end(self, module: PreTrainedModel, args: Any, kwargs: Any, output: Any) -> None:
        if self._open and self._open[-1][0] is module:
            self._open.pop()
        if not self._open:
            self._pass = None
            returned = _find_cache(output) if isinstance(output, Mapping) else None
            if returned is not None:
                self._cache = weakref.ref(returned)

    def _check_length(self, module: PreTrainedModel, name: str, length: int) -> None:
        limit, is_learned = position_limit(module)
        if limit is None or length <= limit or (self._extrapolate and not is_learned):
            return
        advice = (
            "its position table has no more rows: cut the text, for example into windows"
            if is_learned
            else "cut the text, or say extrapolate=True to observe it beyond what it was made for"
        )
        raise ValueError(
            f"{name}: a text of {length} tokens is longer than the {limit} positions of "
            f"{self._name}; {advice}"
        )

    def place(self, site: AttentionSite, mask: Any, query: Tensor, *, n_keys: int) -> Placement:
        """Where queries and keys of a call stand; worked out once for all layers of one mask."""
        running = self.current()
        for known, stack, seen_keys, placement in running.placements:
            is_same = known is mask and stack == site.stack and seen_keys == n_keys
            if is_same and placement.queries.shape == (query.shape[0], query.shape[2]):
                return placement
        if isinstance(mask, Tensor) and not isinstance(mask, LazyMask):
            check_some_key_is_seen(mask)
        first_sample, is_continued = self._count(site.stack, query.shape[0], running)
        placement = place_call(
            self._frame(site, mask, query, n_keys),
            batch=query.shape[0],
            query_pos=query.shape[2],
            n_keys=n_keys,
            device=query.device,
            first_sample=first_sample,
            is_continued=is_continued,
            is_cross=site.stack == "cross",
            before=[p for _, stack, _, p in running.placements if stack != "encoder"],
        )
        running.placements.append((mask, site.stack, n_keys, placement))
        return placement

    def _frame(self, site: AttentionSite, mask: Any, query: Tensor, n_keys: int) -> Frame:
        """The absolute positions behind a call: as its mask says, or the mask it was made from."""
        if isinstance(mask, LazyMask):
            return Frame.of_request(mask.request)
        if site.stack == "cross":
            return Frame(self.text_mask(n_keys), 0, 0, n_keys)
        for request in reversed(self.current().requests):
            if (request.batch, request.query_pos) == (query.shape[0], query.shape[2]):
                return Frame.of_request(request)
        text = self.text_mask(query.shape[2])
        n_tokens = n_keys if text is None else text.shape[-1]
        return Frame(text, n_tokens - query.shape[2], 0, n_tokens)

    def _count(self, stack: str, batch: int, running: ForwardPass) -> tuple[int, bool]:
        """The number of a batch's first text, and whether these texts were seen before."""
        if stack not in running.batches:
            total = self._n_texts.get(stack, 0)
            goes_on = running.is_continued and self._last_batch.get(stack) == batch
            first = total - batch if goes_on else total
            self._n_texts[stack] = first + batch
            self._last_batch[stack] = batch
            running.batches[stack] = (first, goes_on)
        return running.batches[stack]


def _input_ids(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The tokens [batch, pos] that a transformers model was called with, if it was."""
    inputs = kwargs.get("input_ids", args[0] if args else None)
    is_tokens = isinstance(inputs, Tensor) and inputs.ndim == 2 and not inputs.is_floating_point()
    return inputs if is_tokens else None


def _find_cache(named: Mapping[str, Any]) -> Cache | None:
    """The cache among a model's arguments or outputs, by its name now and before."""
    for name in ("cache", "past_key_values"):
        if name in named and isinstance(named[name], Cache):
            return named[name]
    return None
