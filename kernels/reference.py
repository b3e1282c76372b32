"""The definition: attention that materialises everything, for any option, in any precision.

Letters as in `interp.kernels.options`. Computed in float32, in float64 for float64 inputs; its
gradients are autograd's own. `row_weights` is also what gives single rows of a pattern and what
strips fall back on, strip by strip, for the variants that they have no formula for.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from interp.kernels.options import AttentionOptions, statistics_dtype
from interp.kernels.scores import Selection, masked_scores, pick, select_all
from interp.kernels.variants import ClippedSoftmax, ReluOverLength, Sigmoid, Softpick


@dataclass(frozen=True, eq=False)
class RowWeights:
    """Attention of some rows: weights [B, H, R, K] as used, and statistics [B, H, R]."""

    weights: Tensor
    lse: Tensor
    entropy: Tensor
    max: Tensor
    sink_mass: Tensor


def refusal(options: AttentionOptions) -> str | None:
    """Why this backend cannot serve a call; the reference serves them all."""
    return None


def attend(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> dict[str, Tensor]:
    """``"out"`` [B, H, Q, E] in the type of q and each of ``options.statistics``."""
    dtype = statistics_dtype(q.dtype)
    rows = row_weights(q.to(dtype), k.to(dtype), options, select_all(options, q.device))
    return collect(rows, v.to(dtype).repeat_interleave(options.n_groups, 1), options, q.dtype)


def collect(
    rows: RowWeights, v: Tensor, options: AttentionOptions, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Output and the statistics asked for, from the weights of all rows; v [B, H, K, E]."""
    results = {"out": (rows.weights @ v).to(dtype)}
    for name in options.statistics:
        if name == "mass":
            assert options.key_sets is not None
            sets = options.key_sets.to(rows.weights.dtype)
            results[name] = torch.einsum("bhqk,bsk->bhqs", rows.weights, sets)
        elif name == "received":
            results[name] = rows.weights.sum(-2)
        else:
            results[name] = getattr(rows, name)
    return results


def row_weights(
    q: Tensor, k: Tensor, options: AttentionOptions, selection: Selection
) -> RowWeights:
    """Weights and statistics of the selected rows, differentiable; q and k in the type to use."""
    scores, allowed, cut = masked_scores(q, k, options, selection)
    slot = None
    if options.slot is not None:
        slot = pick(options.slot, options, selection).to(scores.dtype)
    return weights_of_scores(scores, allowed, cut, slot, options)


def weights_of_scores(
    scores: Tensor,
    allowed: Tensor,
    cut: Tensor | None,
    slot: Tensor | None,
    options: AttentionOptions,
) -> RowWeights:
    """Weights and statistics from scores [B, H, R, K] and the logit of a slot [B, H, R]."""
    weights, lse, sink_mass = _softmax(scores, allowed, slot)
    if options.is_softmax:
        surprise = torch.where(allowed, _finite(lse)[..., None] - scores, 0.0)
        entropy = (weights * surprise).sum(-1)
        if slot is not None:
            entropy = entropy + sink_mass * (_finite(lse) - slot)
    else:
        weights = _other_variant(scores, allowed, weights, options)
        entropy = _normalized_entropy(weights)
    largest = weights.max(-1).values
    if cut is not None:
        weights = weights.masked_fill(cut, 0.0)
    return RowWeights(weights, lse, entropy, largest, sink_mass)


def _finite(lse: Tensor) -> Tensor:
    return torch.where(lse == -torch.inf, 0.0, lse)


def _softmax(scores: Tensor, allowed: Tensor, slot: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax over the keys and a slot: weights, log-sum-exp, the slot's weight."""
    peak = scores.detach().amax(-1)
    is_dead = peak == -torch.inf
    peak = peak.masked_fill(is_dead, 0.0)
    if slot is not None:
        peak = torch.maximum(peak, slot.detach())
    powers = torch.where(allowed, torch.exp(scores - peak[..., None]), 0.0)
    total = powers.sum(-1)
    slot_power = torch.zeros_like(total)
    if slot is not None:
        slot_power = torch.exp(slot - peak).masked_fill(is_dead, 0.0)
        total = total + slot_power
    total = total.masked_fill(is_dead, 1.0)
    lse = (peak + torch.log(total)).masked_fill(is_dead, -torch.inf)
    return powers / total[..., None], lse, slot_power / total


def _other_variant(
    scores: Tensor, allowed: Tensor, softmax: Tensor, options: AttentionOptions
) -> Tensor:
    """Weights of the variants that are no softmax."""
    variant = options.variant
    if isinstance(variant, ClippedSoftmax):
        stretched = (variant.upper - variant.lower) * softmax + variant.lower
        return torch.where(allowed, stretched.clamp(0.0, 1.0), 0.0)
    safe = torch.where(allowed, scores, 0.0)
    if isinstance(variant, Softpick):
        # scaling numerator and denominator by e^-peak keeps large scores finite
        peak = safe.detach().amax(-1, keepdim=True).clamp_min(0.0)
        shifted = torch.where(allowed, torch.exp(safe - peak) - torch.exp(-peak), 0.0)
        total = shifted.abs().sum(-1, keepdim=True) + variant.eps * torch.exp(-peak)
        # where peak is huge and eps underflows, a row still has its largest key in the sum
        return torch.relu(shifted) / total
    assert isinstance(variant, ReluOverLength | Sigmoid)
    n_keys = allowed.sum(-1, keepdim=True).clamp_min(1).to(scores.dtype)
    if variant.length is not None:
        n_keys = torch.full_like(n_keys, float(variant.length))
    if isinstance(variant, ReluOverLength):
        return torch.where(allowed, torch.relu(safe), 0.0) / n_keys
    shift = torch.log(n_keys) if variant.is_shifted else 0.0
    return torch.where(allowed, torch.sigmoid(safe - shift), 0.0)


def _normalized_entropy(weights: Tensor) -> Tensor:
    """Entropy of rows scaled to sum to 1, 0 for empty rows."""
    total = weights.sum(-1, keepdim=True)
    is_empty = total == 0
    shares = weights / torch.where(is_empty, 1.0, total)
    has_weight = shares > 0
    surprise = -torch.log(torch.where(has_weight, shares, 1.0))
    return (shares * surprise).sum(-1)
