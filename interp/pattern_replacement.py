"""Other patterns in place of a head's own, while everything else runs on.

Every replacement keeps the mask and the mass of each row: a row that sums to 1, to less (a learned
sink takes the rest) or to 0 (padding) goes on doing so, and keys that were out of sight stay so.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformer_lens import HookedRootModule

Replacement = Literal["uniform", "shuffled", "simplex", "donor"]
Head = tuple[int, int]  # (layer, head)


def replace_pattern(
    pattern: Float[Tensor, "batch query_pos key_pos"],
    replacement: Replacement,
    *,
    allowed: Bool[Tensor, "#batch query_pos key_pos"],
    generator: torch.Generator,
) -> Float[Tensor, "batch query_pos key_pos"]:
    """A pattern with the same mask and the same row sums, but other weights.

    Args:
        pattern: ``[batch, query_pos, key_pos]``.
        replacement: ``"uniform"``: every allowed key the same; ``"shuffled"``: each row's own
            weights in random order; ``"simplex"``: each row uniform on the simplex.
        allowed: ``[batch, query_pos, key_pos]``, the keys that each query may see.
        generator: where random numbers come from, on the CPU.

    Returns:
        ``[batch, query_pos, key_pos]``.

    Raises:
        ValueError: another replacement (a donor's pattern needs no making), or a pattern with
            weight on keys that are not allowed.
    """
    if replacement not in ("uniform", "shuffled", "simplex"):
        raise ValueError(
            f"replacement: got {replacement!r}, expected 'uniform', 'shuffled' or 'simplex'"
        )
    allowed = allowed.expand_as(pattern)
    outside = pattern.masked_fill(allowed, 0.0).abs().amax()
    if outside > 1e-6:
        raise ValueError(
            f"allowed: the pattern has a weight of {float(outside):.3g} on a key that is not "
            "allowed; pass the mask that the model uses"
        )
    mass = pattern.sum(-1, keepdim=True)
    if replacement == "uniform":
        weights = allowed.to(pattern.dtype)
        return weights / weights.sum(-1, keepdim=True).clamp(min=1) * mass
    random = torch.rand(pattern.shape, generator=generator, dtype=torch.float64)
    random = random.to(pattern.device)
    if replacement == "simplex":
        weights = (-random.clamp(min=1e-300).log()).masked_fill(~allowed, 0.0)
        total = weights.sum(-1, keepdim=True)
        return (weights / torch.where(total > 0, total, 1.0)).to(pattern.dtype) * mass
    # the i-th allowed key, in random order, gets the weight of the i-th allowed key in order
    ordered = (~allowed).double().argsort(dim=-1, stable=True)
    drawn = random.masked_fill(~allowed, 2.0).argsort(-1)
    shuffled = torch.empty_like(pattern).scatter_(-1, drawn, pattern.gather(-1, ordered))
    return shuffled.masked_fill(~allowed, 0.0)


def run_with_replaced_patterns(
    model: HookedRootModule,
    tokens: Int[Tensor, "batch pos"],
    *,
    heads: Sequence[Head],
    replacement: Replacement,
    donor: HookedRootModule | None = None,
    allowed: Bool[Tensor, "query_pos key_pos"] | None = None,
    seed: int = 0,
    batch_size: int = 64,
) -> Float[Tensor, "batch pos d_vocab"]:
    """Logits of a model whose chosen heads attend elsewhere.

    Args:
        model: answers tokens with logits and has ``blocks.{l}.attn.hook_pattern``.
        tokens: ``[batch, pos]``.
        heads: pairs ``(layer, head)``, at least one.
        replacement: what they attend to; ``"donor"`` takes the same heads' patterns on the same
            tokens from another model.
        donor: the other model, for ``"donor"`` alone.
        allowed: ``[query_pos, key_pos]``, the keys each query may see; causal by default.
        seed: seeds a generator of its own.
        batch_size: texts at a time; random replacements depend on it.

    Returns:
        ``[batch, pos, d_vocab]``.

    Raises:
        ValueError: no heads, a donor missing or given in vain, an unknown replacement, or weight
            on keys that are not allowed.
    """
    if replacement not in get_args(Replacement):
        raise ValueError(
            f"replacement: got {replacement!r}, expected one of {get_args(Replacement)}"
        )
    if not heads:
        raise ValueError("heads: got none, expected pairs (layer, head)")
    if (donor is not None) != (replacement == "donor"):
        raise ValueError(
            f"donor: {'got one' if donor is not None else 'got none'} for replacement="
            f"{replacement!r}; give a donor model for 'donor' and only there"
        )
    if allowed is None:
        n_pos = tokens.shape[1]
        allowed = torch.ones(n_pos, n_pos, dtype=torch.bool, device=tokens.device).tril()
    generator = torch.Generator().manual_seed(seed)
    outputs = []
    with torch.no_grad():
        for part in tokens.split(batch_size):
            new = _donated(donor, part, heads) if donor is not None else None

            def make(
                head: Head, own: Tensor, new: dict[Head, Tensor] | None = new
            ) -> Float[Tensor, "batch query_pos key_pos"]:
                if new is not None:
                    return new[head].to(own)
                return replace_pattern(own, replacement, allowed=allowed[None], generator=generator)

            with replaced_patterns(model, heads, make):
                outputs.append(model(part))
    return torch.cat(outputs)


@contextmanager
def replaced_patterns(
    model: HookedRootModule, heads: Sequence[Head], make: Callable[[Head, Tensor], Tensor]
) -> Iterator[None]:
    """Within the block, ``make((layer, head), own pattern)`` stands in for each head's pattern.

    Args:
        model: has ``blocks.{l}.attn.hook_pattern [batch, head_index, query_pos, key_pos]``.
        heads: pairs ``(layer, head)``.
        make: gets ``[batch, query_pos, key_pos]`` and returns the like.

    Raises:
        ValueError: a layer or head that the model lacks.
    """

    def swap(pattern: Tensor, hook: Any, *, layer: int) -> Tensor:
        new = pattern.clone()
        for chosen in heads:
            if chosen[0] == layer:
                if not 0 <= chosen[1] < pattern.shape[1]:
                    raise ValueError(
                        f"heads: got head {chosen[1]} of layer {layer}, expected 0 to "
                        f"{pattern.shape[1] - 1}"
                    )
                new[:, chosen[1]] = make(chosen, pattern[:, chosen[1]])
        return new

    layers = sorted({layer for layer, _ in heads})
    names = {layer: f"blocks.{layer}.attn.hook_pattern" for layer in layers}
    for layer, name in names.items():
        if name not in model.hook_dict:
            raise ValueError(f"heads: got layer {layer}, but the model has no {name}")
    hooks = [(names[layer], partial(swap, layer=layer)) for layer in layers]
    with model.hooks(fwd_hooks=hooks):
        yield


def _donated(donor: HookedRootModule, tokens: Tensor, heads: Sequence[Head]) -> dict[Head, Tensor]:
    names = sorted({f"blocks.{layer}.attn.hook_pattern" for layer, _ in heads})
    _, cache = donor.run_with_cache(tokens, names_filter=names)
    return {
        (layer, head): cache[f"blocks.{layer}.attn.hook_pattern"][:, head] for layer, head in heads
    }
