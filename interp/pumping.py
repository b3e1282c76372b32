"""Pumping: the same required answer after ever more matched pairs.

The prefix o_1 ... o_d leaves d brackets open. Appending n copies of a matched pair changes nothing
about what must close next, but it adds n times the pair's contribution to an attention output. A
model that is balanced never changes its mind; any other does so at some n, which is how perfect
balance is proved to be necessary (Wen et al. 2023, arXiv 2312.01429).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from interp.models.dyck_language import START, DyckLanguage

MAX_STRINGS = 512


@dataclass(frozen=True)
class PumpedStrings:
    """Strings of one prefix depth, and what must close after each number of pairs."""

    tokens: Int[Tensor, "string pos"]
    """START, d opens, then pairs."""
    answers: Int[Tensor, " string"]
    """The close bracket that is right after every whole number of pairs."""
    depth: int


@dataclass(frozen=True)
class PumpingCurve:
    """What a model does as pairs are pumped in."""

    n_pairs: tuple[int, ...]
    flip_rates: Float[np.ndarray, " n"]
    """Share of strings whose preferred close bracket is not the one preferred without pairs."""
    error_rates: Float[np.ndarray, " n"]
    """Share of strings whose preferred close bracket is wrong."""


def pumped_strings(
    language: DyckLanguage, *, depth: int, n_pairs: int, seed: int = 0
) -> PumpedStrings:
    """Every prefix of a depth followed by pairs of every type, or a seeded choice of them.

    Args:
        language: the bracket language.
        depth: open brackets of the prefix, 1 to ``max_depth - 1`` so that a pair still fits.
        n_pairs: pairs appended.
        seed: draws ``MAX_STRINGS`` of the strings where there are more.

    Returns:
        The strings ``[string, 1 + depth + 2 * n_pairs]``, at most ``MAX_STRINGS``.

    Raises:
        ValueError: a depth that leaves no room for a pair, or fewer than no pairs.
    """
    if not 1 <= depth < language.max_depth:
        raise ValueError(
            f"depth: got {depth}, expected 1 to {language.max_depth - 1}: the prefix must leave a "
            "bracket open and room for a pair inside it"
        )
    if n_pairs < 0:
        raise ValueError(f"n_pairs: got {n_pairs}, expected at least 0")
    k = language.n_types
    if k ** (depth + 1) <= MAX_STRINGS:
        types = torch.tensor(list(product(range(k), repeat=depth + 1)))
    else:
        generator = torch.Generator().manual_seed(seed)
        types = torch.randint(k, (MAX_STRINGS, depth + 1), generator=generator)
    prefix, pair = types[:, :depth], types[:, depth:]
    opens, closes = language.open_tokens.start, language.close_tokens.start
    pairs = torch.cat([pair + opens, pair + closes], dim=1).repeat(1, n_pairs)
    start = torch.full((len(types), 1), START)
    return PumpedStrings(
        tokens=torch.cat([start, prefix + opens, pairs], dim=1),
        answers=prefix[:, -1] + closes,
        depth=depth,
    )


def pumping_curve(
    model: nn.Module,
    language: DyckLanguage,
    *,
    n_pairs: Sequence[int],
    seed: int = 0,
) -> PumpingCurve:
    """How often inserted pairs change which close bracket a model prefers, and how often it errs.

    One causal run of the longest strings answers for every number of pairs. Every prefix depth
    weighs the same.

    Args:
        model: a causal model of the language.
        language: the bracket language, of depth at least 2.
        n_pairs: numbers of pairs to report.
        seed: see ``pumped_strings``.

    Returns:
        Rates in [0, 1] for each number of pairs, averaged over prefix depths.

    Raises:
        ValueError: no numbers of pairs, a negative one, or a language without room for a pair.
    """
    if len(n_pairs) == 0 or min(n_pairs) < 0:
        raise ValueError(f"n_pairs: got {list(n_pairs)}, expected numbers of at least 0")
    if language.max_depth < 2:
        raise ValueError(
            f"language: got max_depth {language.max_depth}, expected at least 2: a pair must fit "
            "inside an open bracket"
        )
    flips, errors = [], []
    for depth in range(1, language.max_depth):
        strings = pumped_strings(language, depth=depth, n_pairs=max(n_pairs), seed=seed)
        preferred = _preferred_closes(model, strings.tokens, language)
        after = preferred[:, [depth + 2 * n for n in n_pairs]]
        flips.append((after != preferred[:, depth, None]).double().mean(0))
        errors.append((after != strings.answers[:, None]).double().mean(0))
    return PumpingCurve(
        n_pairs=tuple(n_pairs),
        flip_rates=torch.stack(flips).mean(0).numpy(),
        error_rates=torch.stack(errors).mean(0).numpy(),
    )


def _preferred_closes(
    model: nn.Module, tokens: Int[Tensor, "string pos"], language: DyckLanguage
) -> Int[Tensor, "string pos"]:
    """Which close bracket has the largest logit after each token, a few strings at a time."""
    first, last = language.close_tokens.start, language.close_tokens.stop
    with torch.no_grad():
        best = [model(part)[..., first:last].argmax(-1) for part in tokens.split(8)]
    return torch.cat(best) + first
