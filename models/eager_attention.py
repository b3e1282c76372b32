"""Attention with its pattern: what a layer computes when somebody looks at the pattern itself."""

from collections.abc import Callable, Collection

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def masked_scores(
    q: Float[Tensor, "batch head_index query_pos d_head"],
    k: Float[Tensor, "batch head_index key_pos d_head"],
    *,
    scale: float,
    allowed: Bool[Tensor, "*broadcast query_pos key_pos"] | None,
) -> Float[Tensor, "batch head_index query_pos key_pos"]:
    """Scores, -inf where a key may not be seen; None allows every key."""
    scores = (q * scale) @ k.transpose(-1, -2)
    return scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)


def softmax_rows(
    scores: Float[Tensor, "batch head_index query_pos key_pos"], *, may_be_dead: bool
) -> Float[Tensor, "batch head_index query_pos key_pos"]:
    """Softmax over keys; with ``may_be_dead``, a row of -inf gives zeros and passes on no NaN."""
    if not may_be_dead:
        return scores.softmax(-1)
    is_dead = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(is_dead, 0.0).softmax(-1).masked_fill(is_dead, 0.0)


def pattern_statistics(
    scores: Float[Tensor, "batch head_index query_pos key_pos"],
    pattern: Float[Tensor, "batch head_index query_pos key_pos"],
    names: Collection[str],
    first: Bool[Tensor, "batch key_pos"],
) -> dict[str, Tensor]:
    """The statistics of the fused path, from scores and pattern as hooks have left them."""
    dtype = torch.promote_types(pattern.dtype, torch.float32)
    scores, pattern = scores.to(dtype), pattern.to(dtype)

    def lse() -> Tensor:
        is_dead = (scores == -torch.inf).all(-1)
        alive = scores.masked_fill(is_dead[..., None], 0.0)
        return alive.logsumexp(-1).masked_fill(is_dead, -torch.inf)

    def entropy() -> Tensor:
        smallest = torch.finfo(dtype).tiny  # 0 log 0 = 0, and so is its gradient
        return -(pattern * pattern.clamp_min(smallest).log()).sum(-1)

    compute: dict[str, Callable[[], Tensor]] = {
        "lse": lse,
        "entropy": entropy,
        "first_mass": lambda: (pattern * first[:, None, None, :]).sum(-1),
        "received": lambda: pattern.sum(-2),
    }
    return {name: compute[name]() for name in names}


def first_keys(
    key_mask: Bool[Tensor, "batch key_pos"] | None,
    k: Float[Tensor, "batch head key_pos d_head"],
) -> Bool[Tensor, "batch key_pos"]:
    """True at each sequence's first key that is not padding."""
    if key_mask is not None:
        return key_mask & (key_mask.cumsum(-1) == 1)
    first = torch.zeros(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device)
    first[:, 0] = True
    return first
