"""Perplexity of a language model that keeps a few first tokens and the recent ones: StreamingLLM.

A token attends to the ``n_sinks`` first tokens, the ``n_recent`` tokens before it, and itself; all
others have been evicted from the key-value cache. What positions the model then believes in is a
choice of its own, and matters as much as the number of sinks:

original  every token keeps the position it has in the text, so the sinks drift away.
shifted   positions are counted within the cache, so a sink is never farther than the cache is long
          (Xiao et al.). Only differences matter to rotary attention: this moves nothing but the
          sinks, and with no sinks it changes nothing.
stuck     keys stay as they were written while the next token's position is the cache's length: once
          the cache is full, every new token is written at the same position. It is what an
          implementation does that derives positions from the length of a cache it evicts from.

Source: Xiao et al., ICLR 2024 (arXiv 2309.17453).
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache

from interp.language_loss import next_token_losses, perplexity
from interp.rotary import KeyRotation, cache_argument, find_key_rotations
from interp.token_windows import check_tokens

POSITIONS = ("original", "shifted", "stuck")

# Tokens that are read in one forward; each sees only what it may, whatever the number.
_CHUNK = 64
_SERVED_LAYERS = {"full_attention", "sliding_attention"}


@torch.no_grad()
def streaming_losses(
    model: Any,
    tokens: Int[Tensor, "batch pos"],
    *,
    n_sinks: int,
    n_recent: int,
    positions: str = "original",
    gap: int = 0,
    batch_size: int = 8,
) -> Float[Tensor, "batch predicted"]:
    """Loss in nats of every token after the first, with ``n_sinks + n_recent`` tokens in the cache.

    tokens: texts of one length, without padding.
    positions: see the top of this file. "shifted" needs rotary embeddings.
    gap: how many positions further from the sinks everything else lies, as in a stream that has
        been running for so long. Without effect on "shifted" and "stuck", where it is refused.

    Raises ValueError for models whose cache is no plain list of keys and values per layer, that
    look less far back than the cache, or that cannot take such positions.
    """
    _check(model, tokens, n_sinks=n_sinks, n_recent=n_recent, positions=positions, gap=gap)
    rotations = find_key_rotations(model) if positions == "shifted" and n_sinks else None
    losses = []
    for batch in tokens.split(batch_size):
        stream = _Stream(model, n_sinks, n_recent, positions, gap, rotations)
        pieces = _chunks(batch.to(model.device), n_sinks)
        read = [stream.read(piece, start) for piece, start in pieces]
        losses.append(torch.cat(read, 1).cpu())
    return torch.cat(losses)


def streaming_table(
    model: Any,
    tokens: Int[Tensor, "batch pos"],
    *,
    caches: Iterable[tuple[int, int]],
    positions: Sequence[str] = ("original", "shifted"),
    gaps: Sequence[int] = (0,),
    batch_size: int = 8,
) -> pd.DataFrame:
    """Perplexity for every (n_sinks, n_recent), mode of positions and gap.

    Columns: ``n_sinks n_recent positions gap perplexity``; a gap other than 0 goes with "original"
    alone. Sinks and positions are crossed: neither number means much by itself.
    """
    rows = []
    for n_sinks, n_recent in caches:
        for mode in positions:
            for gap in gaps if mode == "original" else (0,):
                losses = streaming_losses(
                    model,
                    tokens,
                    n_sinks=n_sinks,
                    n_recent=n_recent,
                    positions=mode,
                    gap=gap,
                    batch_size=batch_size,
                )
                rows.append((n_sinks, n_recent, mode, gap, perplexity(losses)))
    return pd.DataFrame(rows, columns=["n_sinks", "n_recent", "positions", "gap", "perplexity"])


class _Stream:
    """One batch of texts on its way through the model, and the cache of what may still be seen."""

    def __init__(
        self,
        model: Any,
        n_sinks: int,
        n_recent: int,
        positions: str,
        gap: int,
        rotations: list[KeyRotation] | None,
    ) -> None:
        self._model = model
        self._n_sinks, self._n_recent = n_sinks, n_recent
        self._positions, self._gap = positions, gap
        self._rotations = rotations
        self._cache = DynamicCache()
        self._kept = torch.empty(0, dtype=torch.long, device=model.device)  # index in the text

    def read(
        self, tokens: Int[Tensor, "batch pos"], start: int
    ) -> Float[Tensor, "batch predicted"]:
        """Losses of all ``tokens`` but the first; that one stands at ``start`` in the text."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        now = torch.arange(start, start + inputs.shape[1], device=tokens.device)
        keys = torch.cat([self._kept, now])
        visible = self._visible(now, keys)
        moved = 0
        if self._rotations is not None:
            visible, moved = self._move_sinks(now, visible)
        mask = torch.zeros(visible.shape, dtype=self._model.dtype, device=tokens.device)
        mask.masked_fill_(~visible, torch.finfo(mask.dtype).min)
        logits = self._model(
            input_ids=inputs,
            attention_mask=mask.expand(len(inputs), 1, -1, -1),
            position_ids=self._position_of(now).expand(len(inputs), -1),
            use_cache=True,
            **cache_argument(self._model, self._cache),
        ).logits
        self._evict(keys, next_index=start + inputs.shape[1], n_moved=moved)
        return next_token_losses(logits, targets)

    def _visible(
        self, now: Int[Tensor, " query"], keys: Int[Tensor, " key"]
    ) -> Bool[Tensor, "query key"]:
        behind = now[:, None] - keys
        return (behind >= 0) & ((keys < self._n_sinks) | (behind <= self._n_recent))

    def _position_of(self, index: Int[Tensor, " pos"]) -> Int[Tensor, " pos"]:
        if self._positions == "stuck":
            return index.clamp(max=self._n_sinks + self._n_recent)
        if self._positions == "shifted":
            return index  # where the sinks are is what counts: see _move_sinks
        return index + self._gap * (index >= self._n_sinks)

    def _move_sinks(
        self, now: Int[Tensor, " query"], visible: Bool[Tensor, "query key"]
    ) -> tuple[Bool[Tensor, "query moved_and_key"], int]:
        """Give each query of a full cache its own copy of the sinks, at the distance it should see.

        In a full cache the query's position is its length and sink j's is j, so that seen from a
        query at ``index`` the sink stands at ``index - length + j``. The copies go in front of the
        cached keys and are taken away again by `_evict`.
        """
        assert self._rotations is not None
        full = now[now > self._n_sinks + self._n_recent]
        if not len(full):
            return visible, 0
        by = (full - self._n_sinks - self._n_recent).repeat_interleave(self._n_sinks)
        for layer, rotation in zip(self._cache.layers, self._rotations, strict=True):
            sinks = (layer.keys[:, :, : self._n_sinks], layer.values[:, :, : self._n_sinks])
            keys, values = (part.repeat(1, 1, len(full), 1) for part in sinks)
            layer.keys = torch.cat([rotation.turn(keys, by), layer.keys], 2)
            layer.values = torch.cat([values, layer.values], 2)
        is_full = now > self._n_sinks + self._n_recent
        own = (now[:, None] == full).repeat_interleave(self._n_sinks, 1)
        visible = visible.clone()
        visible[is_full, : self._n_sinks] = False  # the copies stand for the sinks
        return torch.cat([own, visible], 1), own.shape[1]

    def _evict(self, keys: Int[Tensor, " key"], *, next_index: int, n_moved: int) -> None:
        """Drop the moved copies of the sinks, and what the next token may no longer see."""
        stays = (keys < self._n_sinks) | (keys >= next_index - self._n_recent)
        self._kept = keys[stays]
        for layer in self._cache.layers:
            if layer.keys.shape[2] != n_moved + len(keys):
                raise ValueError(
                    f"{type(self._model).__name__} keeps {layer.keys.shape[2]} keys in its cache "
                    f"where {n_moved + len(keys)} were read: its cache is of a kind that nothing "
                    f"can be evicted from here"
                )
            layer.keys = layer.keys[:, :, n_moved:][:, :, stays]
            layer.values = layer.values[:, :, n_moved:][:, :, stays]


def _chunks(
    tokens: Int[Tensor, "batch pos"], n_sinks: int
) -> Iterable[tuple[Int[Tensor, "batch piece"], int]]:
    """The sinks first, so that they are in the cache before it is full; then piece by piece.

    Overlapping by one: the last token of a piece is the first input of the next.
    """
    end = tokens.shape[1] - 1
    starts = [0, *range(n_sinks, end, _CHUNK)] if n_sinks else range(0, end, _CHUNK)
    for start, stop in pairwise([*starts, end]):
        if start < stop:
            yield tokens[:, start : min(stop, end) + 1], start


def _check(
    model: Any,
    tokens: Int[Tensor, "batch pos"],
    *,
    n_sinks: int,
    n_recent: int,
    positions: str,
    gap: int,
) -> None:
    check_tokens(model, tokens, at_least=2)
    if n_sinks < 0 or n_recent < 0:
        raise ValueError(f"n_sinks and n_recent must be at least 0, got {n_sinks} and {n_recent}")
    if positions not in POSITIONS:
        known = ", ".join(map(repr, POSITIONS))
        raise ValueError(f"positions must be one of {known}, got {positions!r}")
    if gap < 0 or (gap and positions != "original"):
        raise ValueError(
            f"gap is a distance that 'original' positions have to the sinks; got {gap} with "
            f"positions={positions!r}"
        )
    others = set(getattr(model.config, "layer_types", None) or ()) - _SERVED_LAYERS
    if others:
        raise ValueError(
            f"{type(model).__name__} has layers of type {', '.join(sorted(others))}: only the keys "
            f"and values of attention can be evicted"
        )
    window = getattr(model.config, "sliding_window", None)
    if window is not None and n_sinks + n_recent >= window:
        raise ValueError(
            f"layers of {type(model).__name__} see only {window} tokens; n_sinks + n_recent must "
            f"be less, got {n_sinks} + {n_recent}"
        )
    is_rotary = any(name.endswith("inv_freq") for name, _ in model.named_buffers())
    limit = getattr(model.config, "max_position_embeddings", None)
    n_read = tokens.shape[1] - 1
    n_needed = min(n_read, n_sinks + n_recent + 1) if positions == "stuck" else n_read + gap
    if not is_rotary and limit is not None and n_needed > limit:
        raise ValueError(
            f"{type(model).__name__} has {limit} learned positions, and {n_needed} would be needed"
        )
