"""Scores and masks of some rows of some heads, in plain torch: what the other files mean by them.

Letters: B batch, H selected query heads, R selected rows, K keys, D head size.

Everything is written for a *selection*: heads by a slice or an index tensor, rows by an index
tensor, keys by a range ``[low, high)``. The reference selects everything, strips a block of rows,
`AttentionOutput.pattern` whatever its caller asks for.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from interp.kernels.edits import random_scores
from interp.kernels.options import OPEN, AttentionOptions


@dataclass(frozen=True, eq=False)
class Selection:
    """The rows, heads and keys of one strip: ``heads`` int64 [H], ``rows`` int64 [R]."""

    heads: Tensor
    rows: Tensor
    low: int
    high: int

    @property
    def keys(self) -> slice:
        return slice(self.low, self.high)


def select_all(options: AttentionOptions, device: torch.device) -> Selection:
    """Every row of every head against every key."""
    return Selection(
        heads=torch.arange(options.n_heads, device=device),
        rows=torch.arange(options.query_pos, device=device),
        low=0,
        high=options.key_pos,
    )


def pick(x: Tensor, options: AttentionOptions, selection: Selection) -> Tensor:
    """The selection from a [B or 1, H or 1, Q or 1, K or 1] tensor; axes of size 1 stay so.

    Without a key axis, [B or 1, H or 1, Q or 1], the same.
    """
    if x.ndim == 4 and x.shape[3] == options.key_pos:
        x = x[..., selection.keys]
    if x.shape[1] == options.n_heads:
        x = x.index_select(1, selection.heads)
    return x.index_select(2, selection.rows) if x.shape[2] == options.query_pos else x


def dot_products(q: Tensor, k: Tensor, options: AttentionOptions, selection: Selection) -> Tensor:
    """``q . k`` for the selection: [B, H, R, high - low]."""
    groups = torch.div(selection.heads, options.n_groups, rounding_mode="floor")
    q = q.index_select(1, selection.heads).index_select(2, selection.rows)
    k = k[:, :, selection.keys].index_select(1, groups)
    return q @ k.transpose(-1, -2)


def distances(options: AttentionOptions, selection: Selection) -> Tensor:
    """How far each key lies before each query: int64 [R, high - low]."""
    keys = torch.arange(selection.low, selection.high, device=selection.rows.device)
    return (selection.rows + options.offset)[:, None] - keys


def finish_scores(dots: Tensor, options: AttentionOptions, selection: Selection) -> Tensor:
    """Scores from dot products, before any mask but the caller's additive one."""
    dtype = dots.dtype
    heads = selection.heads
    scores = dots * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if options.alibi is not None:
        slopes = options.alibi.to(dtype).index_select(0, heads)
        scores = scores - slopes[:, None, None] * distances(options, selection).abs()
    if options.bias is not None:
        bias = pick(options.bias, options, selection).to(dtype)
        scores = scores + bias
    if options.temperature is not None:
        factor = options.temperature.to(dtype).index_select(0, heads)[:, None, None]
        # 0 * -inf is no number; a key that the bias excludes stays excluded
        factor = torch.where(scores == -torch.inf, 1.0, factor)
        scores = scores * factor
    if options.random_heads is not None and options.random_rows is not None:
        is_random = options.random_heads.index_select(0, heads)[:, None, None]
        rows = pick(options.random_rows, options, selection)
        drawn = random_scores(rows, selection.low, selection.high, dtype)
        scores = torch.where(is_random, drawn, scores)
    if options.mask_added is not None:
        scores = scores + pick(options.mask_added, options, selection).to(dtype)
    return scores


def knocked_out(options: AttentionOptions, selection: Selection) -> Tensor | None:
    """Edges that an edit cuts: bool [B, H, R, high - low], or None where there is no such edit."""
    if options.query_groups is None or options.key_groups is None or options.head_groups is None:
        return None
    queries = options.query_groups.index_select(1, selection.rows)[:, None, :, None]
    keys = options.key_groups[:, selection.keys][:, None, None, :]
    heads = options.head_groups.index_select(0, selection.heads)[None, :, None, None]
    return (queries & keys & heads) != 0


def allowed_keys(options: AttentionOptions, selection: Selection) -> Tensor | None:
    """Keys that the masks allow: bool, broadcastable to [B, H, R, high - low]; None if all are.

    Scores of -inf and knock-outs are not looked at here.
    """
    masks: list[Tensor] = []
    distance = None
    if options.nearest > -OPEN or options.farthest < OPEN or options.head_window is not None:
        distance = distances(options, selection)
    if distance is not None and (options.nearest > -OPEN or options.farthest < OPEN):
        near = ((distance >= options.nearest) & (distance <= options.farthest))[None, None]
        if options.prefix is not None:
            keys = torch.arange(selection.low, selection.high, device=selection.rows.device)
            near = near | (keys < options.prefix[:, None])[:, None, None, :]
        masks.append(near)
    if options.key_mask is not None:
        masks.append(options.key_mask[:, selection.keys][:, None, None, :])
    if options.query_documents is not None and options.key_documents is not None:
        queries = options.query_documents.index_select(1, selection.rows)
        keys = options.key_documents[:, selection.keys]
        masks.append((queries[:, :, None] == keys[:, None, :])[:, None])
    if options.mask_allowed is not None:
        masks.append(pick(options.mask_allowed, options, selection))
    if distance is not None and options.head_window is not None:
        window = options.head_window.index_select(0, selection.heads)[:, :, None, None]
        masks.append(((distance >= window[:, 0]) & (distance <= window[:, 1]))[None])
    if not masks:
        return None
    allowed = masks[0]
    for mask in masks[1:]:
        allowed = allowed & mask
    return allowed


def masked_scores(
    q: Tensor, k: Tensor, options: AttentionOptions, selection: Selection
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Scores with -inf where a key is not allowed, what is allowed, and the cut after softmax.

    Scores and allowed are [B, H, R, high - low]; the last is None unless there is such a cut.
    """
    scores = finish_scores(dot_products(q, k, options, selection), options, selection)
    allowed = scores > -torch.inf
    masks = allowed_keys(options, selection)
    if masks is not None:
        allowed = allowed & masks
    cut = knocked_out(options, selection)
    if cut is not None and not options.is_cut_after:
        allowed = allowed & ~cut
    scores = scores.masked_fill(~allowed, -torch.inf)
    return scores, allowed, cut if options.is_cut_after else None
