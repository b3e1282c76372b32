"""Attention sinks of a model on many texts, from statistics fused into its attention."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache

from interp.models.transformer import Transformer
from interp.observing import observe
from interp.rotary import cache_argument
from interp.sinks import sink_rate, value_drain
from interp.token_windows import check_tokens


@dataclass(frozen=True, eq=False)
class SinkProfile:
    """What `sink_profile` measured, for every text, layer and head.

    importance: alpha_k of every key (`interp.sinks.position_importance`).
    entropy: mean entropy of the queries, in nats.
    n_tokens: length of the texts; every number here depends on it.
    """

    importance: Float[Tensor, "batch layer head_index key_pos"]
    entropy: Float[Tensor, "batch layer head_index"]
    n_tokens: int

    def first_token_attention(
        self, *, include_first_query: bool = False
    ) -> Float[Tensor, "batch layer head_index"]:
        """F-Attn, without query 0 (which only sees itself) or with it."""
        alpha = self.importance[..., 0]
        if include_first_query:
            return alpha
        return (alpha * self.n_tokens - 1) / (self.n_tokens - 1)

    def sink_rate(self, *, epsilon: float = 0.3, position: int = 0) -> float:
        """Share of (text, layer, head) whose attention to a position exceeds epsilon."""
        return float(self.sink_rate_by_layer(epsilon=epsilon, position=position).mean())

    def sink_rate_by_layer(
        self, *, epsilon: float = 0.3, position: int = 0
    ) -> Float[Tensor, " layer"]:
        """The same, for each layer by itself."""
        return sink_rate(self.importance[..., position], epsilon=epsilon)

    def table(self) -> pd.DataFrame:
        """Means over the texts: one row per layer and head.

        Columns: ``layer head importance first_token_attention sink_rate_0.3 entropy``.
        """
        alpha = self.importance[..., 0]
        columns = {
            "importance": alpha.mean(0),
            "first_token_attention": self.first_token_attention().mean(0),
            "sink_rate_0.3": (alpha > 0.3).double().mean(0),
            "entropy": self.entropy.mean(0),
        }
        n_layers, n_heads = alpha.shape[1:]
        layer, head = np.divmod(np.arange(n_layers * n_heads), n_heads)
        flat = {name: values.flatten().numpy() for name, values in columns.items()}
        return pd.DataFrame({"layer": layer, "head": head, **flat})


@torch.no_grad()
def sink_profile(
    model: Any, tokens: Int[Tensor, "batch pos"], *, batch_size: int = 8
) -> SinkProfile:
    """Measure where a causal model's heads look, on texts of one length without padding.

    model: a transformers model that `interp.observe` serves, or one of our zoo.
    """
    check_tokens(model, tokens, at_least=2)
    measure = _zoo_statistics if isinstance(model, Transformer) else _statistics
    received, entropy = measure(model, tokens, batch_size)
    n_tokens = tokens.shape[1]
    n_seeing = torch.arange(n_tokens, 0, -1, dtype=received.dtype)
    return SinkProfile(received / n_seeing, entropy, n_tokens)


@torch.no_grad()
def value_drains(
    model: Any, tokens: Int[Tensor, "batch pos"], *, position: int = 0, batch_size: int = 8
) -> Float[Tensor, "batch layer key_value_head"]:
    """Value drain of a position in every layer and key-value head (`interp.sinks.value_drain`).

    The values are those of the model's own key-value cache.

    Raises ValueError for a model without one.
    """
    check_tokens(model, tokens, at_least=2)
    drains = []
    for batch in tokens.split(batch_size):
        if isinstance(model, Transformer):
            _, cache = model.run_with_cache(batch, names_filter=lambda n: n.endswith("attn.hook_v"))
            values = [value.transpose(1, 2) for value in cache.values()]
        else:
            values = _cached_values(model, batch)
        drains.append(torch.stack([value_drain(v, position=position).cpu() for v in values], 1))
    return torch.cat(drains)


def _statistics(
    model: Any, tokens: Int[Tensor, "batch pos"], batch_size: int
) -> tuple[Tensor, Tensor]:
    with observe(model, statistics=("received", "entropy"), reduce="sample") as seen:
        for batch in tokens.split(batch_size):
            model(input_ids=batch.to(model.device), use_cache=False)
    return seen.tensor("received").cpu(), seen.tensor("entropy").cpu()


def _zoo_statistics(
    model: Transformer, tokens: Int[Tensor, "batch pos"], batch_size: int
) -> tuple[Tensor, Tensor]:
    found: dict[str, list[Tensor]] = {"hook_received": [], "hook_entropy": []}
    for batch in tokens.split(batch_size):
        names = [f"blocks.{i}.attn.{point}" for i in range(model.cfg.n_layers) for point in found]
        _, cache = model.run_with_cache(batch, names_filter=names)
        for point, parts in found.items():
            layers = [cache[name] for name in names if name.endswith(point)]
            parts.append(torch.stack(layers, 1).cpu())
    received, entropy = (torch.cat(parts) for parts in found.values())
    return received, entropy.mean(-1)


def _cached_values(model: Any, batch: Int[Tensor, "batch pos"]) -> list[Tensor]:
    cache = DynamicCache()
    tokens = batch.to(model.device)
    model(input_ids=tokens, use_cache=True, **cache_argument(model, cache))
    if not cache.layers or any(getattr(layer, "values", None) is None for layer in cache.layers):
        raise ValueError(f"{type(model).__name__} keeps no values in a cache of its own")
    return [layer.values for layer in cache.layers]
