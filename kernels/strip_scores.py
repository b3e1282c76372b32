"""Scores and weights of one strip in plain torch, for its forward and its backward pass.

Letters: N units (key-value heads of samples) with M = G * R rows and W keys, D head size.

Masked scores are the lowest finite number of the type while nothing is added to scores (0 times it
is 0, which sums of weight times score need), and -inf, as in the reference, where something is.
"""

import math

import torch
from torch import Tensor

from interp.kernels.options import AttentionOptions
from interp.kernels.reference import RowWeights, weights_of_scores
from interp.kernels.scores import finish_scores, knocked_out
from interp.kernels.strip_plan import Strip, Unit, mask_in_place


class Buffers:
    """Memory for strips, taken once: every strip is a view of the same bytes."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self._device, self._dtype, self._held = device, dtype, dict[str, Tensor]()

    def get(self, name: str, *shape: int) -> Tensor:
        """Memory of this name and shape, with whatever was in it."""
        size = math.prod(shape)
        held = self._held.get(name)
        if held is None or held.numel() < size:
            held = torch.empty(size, dtype=self._dtype, device=self._device)
            self._held[name] = held
        return held[:size].view(shape)


def keys_of(x: Tensor, unit: Unit, dtype: torch.dtype) -> Tensor:
    """A unit's part of [B, key-value head, K, ...], as [N, K, ...]."""
    return x[unit.samples, unit.key_value_heads].to(dtype).flatten(0, 1)


def rows_of(x: Tensor, unit: Unit, dtype: torch.dtype, *, is_narrowed: bool = False) -> Tensor:
    """A unit's part of [B, H, Q, ...], as [N, G, Q, ...]."""
    mine = x[:, unit.heads] if is_narrowed else x[unit.samples, unit.heads]
    return mine.to(dtype).reshape(unit.n_units, -1, *x.shape[2:])


def has_extras(options: AttentionOptions) -> bool:
    """Whether scores are more than a scaled product."""
    o = options
    extras = (o.softcap, o.alibi, o.bias, o.temperature, o.random_heads, o.mask_added)
    return any(extra is not None for extra in extras)


def masked_score(options: AttentionOptions, dtype: torch.dtype) -> float:
    """What stands where a key is masked."""
    return -torch.inf if has_extras(options) else torch.finfo(dtype).min


def compute_scores(q: Tensor, k: Tensor, unit: Unit, strip: Strip, out: Tensor) -> Tensor | None:
    """Put masked scores [N, M, W] in ``out``, from q [N, M, D] and k [N, W, D].

    Returns the bare dot products that they were made of, where there are extras.
    """
    o = unit.options
    dots = None
    if has_extras(o):
        dots = torch.bmm(q, k.transpose(1, 2))
        out.copy_(finish_scores(unit.per_head(dots), o, strip).view_as(out))
    else:
        torch.bmm(q * o.scale, k.transpose(1, 2), out=out)
    mask_in_place(out, unit, strip, masked_score(o, out.dtype))
    return dots


def softmax_in(scores: Tensor, unit: Unit, buffers: Buffers) -> tuple[Tensor, Tensor | None]:
    """Softmax over the keys; also the dead rows [N, M], zeroed, where there may be any.

    Scores of -inf become finite in passing, where they have no weight any more.
    """
    o = unit.options
    weights = torch.softmax(scores, -1, out=buffers.get("weights", *scores.shape))
    is_dead = None
    if _may_have_dead_rows(o):
        is_dead = scores.amax(-1) == masked_score(o, scores.dtype)
        weights.masked_fill_(is_dead[..., None], 0.0)
    if has_extras(o):
        scores.clamp_(min=torch.finfo(scores.dtype).min)
    return weights, is_dead


def _may_have_dead_rows(options: AttentionOptions) -> bool:
    """Whether masks may leave a row without a key; causality alone never does."""
    o = options
    masks = (o.key_mask, o.query_documents, o.mask_allowed, o.mask_added, o.bias, o.head_window)
    if any(mask is not None for mask in (*masks, o.query_groups)):
        return True
    # the first query sees itself, and so does every later one
    sees_itself = o.nearest <= 0 <= o.farthest and o.offset >= 0
    return not sees_itself


def cut_after(weights: Tensor, unit: Unit, strip: Strip) -> None:
    """Zero the edges that an edit cuts after softmax, if it does."""
    if unit.options.is_cut_after:
        edges = knocked_out(unit.options, strip)
        if edges is not None:
            unit.per_head(weights).masked_fill_(edges, 0.0)


def variant_weights(scores: Tensor, unit: Unit, strip: Strip) -> RowWeights:
    """The definition's weights for masked scores [N, M, W], as [samples, heads, R, W]."""
    by_head = unit.per_head(scores)
    allowed = by_head > masked_score(unit.options, scores.dtype)
    exact = by_head.masked_fill(~allowed, -torch.inf)
    return weights_of_scores(exact, allowed, None, None, unit.options)
