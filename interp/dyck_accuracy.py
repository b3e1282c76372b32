"""How often a model knows which bracket must close: by threshold, by argmax, and by position.

A position counts when at least one bracket is open after it, whatever token comes next. There

- *argmax*: the right close bracket has the largest logit of all close brackets;
- *threshold*: it has more than 0.8 of the probability that all close brackets share (the criterion
  of Hewitt et al. 2020, arXiv 2010.07515, section 6).

The two differ a lot on strings longer than those of training, so both are always given.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from interp.models.dyck_language import DyckLanguage

HEWITT_THRESHOLD = 0.8
# attention scores held at once while a model is evaluated: 64 MB a head in float32
MAX_SCORES = 2**24


@dataclass(frozen=True)
class ClosingAccuracy:
    """Counts by position; the accuracies pool all positions that count."""

    threshold_hits: Int[np.ndarray, " pos"]
    argmax_hits: Int[np.ndarray, " pos"]
    counts: Int[np.ndarray, " pos"]

    @property
    def threshold(self) -> float:
        """Share in [0, 1] of positions where the right close passes the threshold."""
        return float(self.threshold_hits.sum() / self.counts.sum())

    @property
    def argmax(self) -> float:
        """Share in [0, 1] of positions where the right close has the largest logit."""
        return float(self.argmax_hits.sum() / self.counts.sum())

    def __add__(self, other: "ClosingAccuracy") -> "ClosingAccuracy":
        return ClosingAccuracy(
            self.threshold_hits + other.threshold_hits,
            self.argmax_hits + other.argmax_hits,
            self.counts + other.counts,
        )


def closing_accuracy(
    logits: Float[Tensor, "batch pos d_vocab"],
    tokens: Int[Tensor, "batch pos"],
    language: DyckLanguage,
    *,
    threshold: float = HEWITT_THRESHOLD,
) -> ClosingAccuracy:
    """Closing accuracy of logits.

    Args:
        logits: ``[batch, pos, d_vocab]``, what the model says after each token.
        tokens: ``[batch, pos]``, what it has read: prefixes of well-nested strings.
        language: says which bracket must close.
        threshold: share of the closing probability that counts as knowing, in [0, 1).

    Returns:
        Counts by position.

    Raises:
        ValueError: logits that are not finite, tokens that are not well nested or leave no
            position with an open bracket, or a threshold out of range.
    """
    if not 0 <= threshold < 1:
        raise ValueError(f"threshold: got {threshold}, expected a share of at least 0, below 1")
    closes = logits[..., language.close_tokens.start : language.close_tokens.stop].double()
    if not torch.isfinite(closes).all():
        raise ValueError(
            "logits: some are not finite, expected finite numbers; a hand-built model that "
            "overflows needs float64 or a smaller depth"
        )
    wanted = language.closing_bracket(tokens)
    is_counted = wanted >= 0
    if not is_counted.any():
        raise ValueError("tokens: no position has an open bracket, so there is nothing to score")
    index = (wanted - language.close_tokens.start).clamp(min=0)[..., None]
    share = closes.softmax(-1).gather(-1, index)[..., 0]
    # a tie is no knowledge: the right bracket must be ahead of every other one
    others = closes.scatter(-1, index, -torch.inf).amax(-1)
    is_ahead = closes.gather(-1, index)[..., 0] > others
    return ClosingAccuracy(
        threshold_hits=((share > threshold) & is_counted).sum(0).cpu().numpy(),
        argmax_hits=(is_ahead & is_counted).sum(0).cpu().numpy(),
        counts=is_counted.sum(0).cpu().numpy(),
    )


def model_closing_accuracy(
    model: nn.Module,
    tokens: Int[Tensor, "batch pos"],
    language: DyckLanguage,
    *,
    threshold: float = HEWITT_THRESHOLD,
    batch_size: int | None = None,
) -> ClosingAccuracy:
    """Closing accuracy of a model, a few strings at a time so that long ones fit in memory.

    Args:
        model: maps tokens to logits ``[batch, pos, d_vocab]``.
        tokens: ``[batch, pos]`` with START in front, what the model reads.
        language: says which bracket must close.
        threshold: share of the closing probability that counts as knowing.
        batch_size: strings at a time; by default as many as keep the attention scores of a head
            below ``MAX_SCORES``.

    Returns:
        Counts by position over all strings.

    Raises:
        ValueError: as ``closing_accuracy``, or a batch size below 1.
    """
    if batch_size is None:
        batch_size = max(1, MAX_SCORES // tokens.shape[1] ** 2)
    if batch_size < 1:
        raise ValueError(f"batch_size: got {batch_size}, expected at least 1")
    with torch.no_grad():
        parts = [
            closing_accuracy(model(part), part, language, threshold=threshold)
            for part in tokens.split(batch_size)
        ]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
