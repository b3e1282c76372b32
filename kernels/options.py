"""The one description of an attention call that every backend receives.

Letters: B batch, H query heads, G key-value heads, Q queries, K keys, D head size, E value size.
Query i stands at place ``i + K - Q`` among the keys (end-aligned); its *distance* to key j is
``i + K - Q - j``. Optional tensors are None when unused. Those that are said to be
expanded have the full shape and perhaps strides of 0; "or 1" axes are kept at size 1, so that a
gradient is never as large as what it was broadcast to.

    base    = softcap * tanh(scale * q k / softcap)  - alibi * |distance| + bias
    score   = temperature * base, or the seeded random score of a random head,  + mask_added
    allowed = (nearest <= distance <= farthest  or  j < prefix)
              and key_mask and equal documents and mask_allowed and the head's own window
              and score > -inf and not knocked out (where the cut is "before")

Softmax runs over the allowed keys and, if ``slot`` is given, one more column with that logit and
no value. A row without an allowed key is *dead*: output 0, lse -inf, everything else 0, slot or
not.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from interp.kernels.variants import SOFTMAX_NAMES, Softmax, Variant

STATISTICS = ("lse", "entropy", "max", "mass", "received", "sink_mass")

# Distances beyond any position: an open end of a window.
OPEN = 1 << 30


@dataclass(frozen=True, eq=False)
class AttentionOptions:
    """A checked, resolved attention call without its q, k and v.

    ``bias`` and ``slot`` may require gradients (``alibi`` and ``mask_added`` too, where the backend
    says so); nothing else does.
    """

    batch: int
    n_heads: int
    n_key_value_heads: int
    query_pos: int
    key_pos: int
    d_head: int
    d_value: int
    scale: float
    softcap: float | None = None
    nearest: int = -OPEN  # causal attention has nearest >= 0
    farthest: int = OPEN
    prefix: Tensor | None = None  # int32 [B]
    longest_prefix: int = 0
    key_mask: Tensor | None = None  # bool [B, K]
    query_documents: Tensor | None = None  # int32 [B, Q]
    key_documents: Tensor | None = None  # int32 [B, K]
    mask_allowed: Tensor | None = None  # bool [B or 1, H or 1, Q or 1, K or 1]
    mask_added: Tensor | None = None  # floating [B or 1, H or 1, Q or 1, K or 1]
    bias: Tensor | None = None  # floating [B or 1, H or 1, Q or 1, K or 1]
    alibi: Tensor | None = None  # floating [H]
    slot: Tensor | None = None  # floating [B, H, Q], expanded: a sink's logit, in float32 or q's
    temperature: Tensor | None = None  # float32 [H]
    head_window: Tensor | None = None  # int32 [H, 2]: nearest, farthest
    query_groups: Tensor | None = None  # int32 [B, Q]: bits of the groups that are knocked out
    key_groups: Tensor | None = None  # int32 [B, K]
    head_groups: Tensor | None = None  # int32 [H]
    is_cut_after: bool = False  # the knock-out comes after softmax
    random_heads: Tensor | None = None  # bool [H]
    random_rows: Tensor | None = None  # int32 [B, H, Q], see edits.random_scores
    key_sets: Tensor | None = None  # floating 0 or 1 [B, S, K], expanded: sets for "mass"
    variant: Variant = field(default_factory=Softmax)
    statistics: tuple[str, ...] = ("lse",)

    @property
    def offset(self) -> int:
        """The place of query 0 among the keys."""
        return self.key_pos - self.query_pos

    @property
    def n_groups(self) -> int:
        """Query heads that share one key-value head."""
        return self.n_heads // self.n_key_value_heads

    @property
    def is_softmax(self) -> bool:
        """Whether the variant is softmax, with a slot or without."""
        return self.variant.name in SOFTMAX_NAMES

    def key_range(self, first_row: int, last_row: int) -> tuple[int, int]:
        """Keys ``[low, high)`` outside which no row of ``[first_row, last_row)`` may look.

        It follows from causality, window and prefix alone and is what lets a backend skip half of
        the work.
        """
        low = min(max(first_row + self.offset - self.farthest, 0), self.key_pos)
        high = min(max(last_row + self.offset - self.nearest, low), self.key_pos)
        if self.prefix is not None:
            low, high = 0, max(high, min(self.longest_prefix, self.key_pos))
        return low, high


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which scores and statistics are computed for inputs of this type."""
    return torch.float64 if dtype == torch.float64 else torch.float32
