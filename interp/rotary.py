"""Turn rotary keys to other positions, after the model itself has shown how it turns them.

A key that was written at position p holds R(p) k. Multiplying by R(d) moves it to p + d. Models
differ in frequencies, in how many of a head's dimensions turn, in which dimensions form a pair,
and some layers turn nothing; instead of believing a config, `find_key_rotations` runs the model at
two offsets and keeps, per layer, the rotation that maps the one's keys to the other's.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache

# how a rotated vector's pairs lie: (i, i + half) or (2 i, 2 i + 1)
Pairing = Literal["halves", "neighbours"]

# Two fp32 forwards at different offsets differ by rounding in the angles; a wrong rotation by the
# size of the keys themselves.
_AGREES = 1e-3
_OFFSET = 23
_RESCALED = ("dynamic", "longrope")


@dataclass(frozen=True)
class KeyRotation:
    """R(d): pairs of the first ``2 * len(frequencies)`` dimensions of a key turn by d * frequency.

    frequencies: radians per position; empty for a layer that turns nothing.
    """

    frequencies: Float[Tensor, " pair"]
    pairing: Pairing = "halves"

    def turn(
        self,
        keys: Float[Tensor, "batch head_index pos d_head"],
        by: Int[Tensor, " pos"],
    ) -> Float[Tensor, "batch head_index pos d_head"]:
        """Keys moved ``by`` positions each."""
        n_pairs = len(self.frequencies)
        if n_pairs == 0:
            return keys
        angle = by.double()[:, None] * self.frequencies.double()
        cos, sin = angle.cos().to(keys), angle.sin().to(keys)
        turning, rest = keys[..., : 2 * n_pairs], keys[..., 2 * n_pairs :]
        if self.pairing == "halves":
            a, b = turning[..., :n_pairs], turning[..., n_pairs:]
            turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        else:
            a, b = turning[..., 0::2], turning[..., 1::2]
            turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        return torch.cat([turned, rest], -1)


@torch.no_grad()
def find_key_rotations(model: Any) -> list[KeyRotation]:
    """The rotation that each layer of a causal model gives its cached keys.

    Raises ValueError when a layer's keys follow none: learned or other absolute positions, or
    frequencies that change with the length (dynamic scaling).
    """
    name = type(model).__name__
    _refuse_rescaled(model, name)
    n_tokens = 7
    tokens = torch.arange(n_tokens, device=model.device)[None] % model.config.vocab_size
    here = torch.arange(n_tokens, device=model.device)[None]
    keys, moved_keys = (_cached_keys(model, tokens, here + offset) for offset in (0, _OFFSET))
    candidates = _candidates(model)
    by = torch.full((n_tokens,), _OFFSET, device=model.device)
    rotations = []
    for layer, (key, moved) in enumerate(zip(keys, moved_keys, strict=True)):
        for rotation in candidates:
            if 2 * len(rotation.frequencies) > key.shape[-1]:
                continue
            error = (rotation.turn(key, by) - moved).abs().max()
            if error <= _AGREES * key.abs().max():
                rotations.append(rotation)
                break
        else:
            raise ValueError(
                f"the keys of layer {layer} of {name} do not turn with their position by any of "
                f"the {len(candidates) - 1} rotations tried, so they cannot be moved: shifting "
                f"positions is for models with rotary embeddings"
            )
    return rotations


def _refuse_rescaled(model: Any, name: str) -> None:
    config = model.config
    settings = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    kind = (settings or {}).get("rope_type", "default")
    if kind in _RESCALED:
        raise ValueError(
            f"{name} changes its rotary frequencies with the length (rope_type {kind!r}), so a key "
            f"cannot be moved from one position to another"
        )


def _candidates(model: Any) -> list[KeyRotation]:
    """No rotation at all, then every table of frequencies in the model, in both pairings."""
    none = KeyRotation(torch.empty(0))
    tables = [b for n, b in model.named_buffers() if n.endswith("inv_freq") and b.ndim == 1]
    different: list[Tensor] = []
    for table in tables:
        if not any(torch.equal(table, other) for other in different):
            different.append(table)
    pairings: tuple[Pairing, Pairing] = ("halves", "neighbours")
    return [none, *(KeyRotation(table, pairing) for table in different for pairing in pairings)]


def _cached_keys(
    model: Any, tokens: Int[Tensor, "1 pos"], positions: Int[Tensor, "1 pos"]
) -> list[Tensor]:
    cache = DynamicCache()
    model(input_ids=tokens, position_ids=positions, use_cache=True, **cache_argument(model, cache))
    return [layer.keys.float() for layer in cache.layers]


def cache_argument(model: Any, cache: DynamicCache) -> dict[str, DynamicCache]:
    """The cache under the name that this version of transformers calls it by."""
    import inspect

    parameters = inspect.signature(model.forward).parameters
    return {"cache" if "cache" in parameters else "past_key_values": cache}
