"""Attention variation: how far apart the patterns of equally good models lie.

Source: Wen et al. 2023 (arXiv 2312.01429), who report the mean over pairs of models of the squared
Frobenius distance between attention patterns on one probe string. Three choices change the value
up to threefold and are therefore arguments here: the layer, whether START is in front, and whether
queries see the keys after them.
"""

from typing import Literal, get_args

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.attention_terms import attention_terms
from interp.models.dyck_language import START
from interp.models.transformer import Transformer

PatternMask = Literal["causal", "none"]


def attention_variation(patterns: Float[np.ndarray, "model query_pos key_pos"]) -> float:
    """Mean over pairs of models of the squared Frobenius distance of their patterns.

    Args:
        patterns: ``[model, query_pos, key_pos]``, at least two.

    Returns:
        At least 0; at most 2 per query row for rows that sum to 1.

    Raises:
        ValueError: fewer than two patterns.
    """
    n_models = len(patterns)
    if n_models < 2:
        raise ValueError(f"patterns: got {n_models}, expected at least 2 to form a pair")
    # the mean squared distance over pairs is twice the unbiased variance, summed over entries
    return float(2 * patterns.astype(np.float64).var(axis=0, ddof=1).sum())


def random_attention(
    n_models: int, n_pos: int, *, mask: PatternMask = "causal", seed: int = 0
) -> Float[np.ndarray, "model query_pos key_pos"]:
    """Patterns whose rows are uniform on the simplex of the keys that the row may see.

    Args:
        n_models: how many patterns.
        n_pos: queries, and keys.
        mask: ``"causal"`` or ``"none"`` (every query sees every key).
        seed: seeds a generator of its own.

    Returns:
        ``[model, query_pos, key_pos]``, rows Dirichlet(1, ..., 1) over the allowed keys.

    Raises:
        ValueError: a size below 1 or an unknown mask.
    """
    _check_sizes(n_pos, mask)
    if n_models < 1:
        raise ValueError(f"n_models: got {n_models}, expected at least 1")
    weights = np.random.default_rng(seed).exponential(size=(n_models, n_pos, n_pos))
    if mask == "causal":
        weights = np.tril(weights)
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))


def random_attention_variation(n_pos: int, *, mask: PatternMask = "causal") -> float:
    """The attention variation that ``random_attention`` has on average, in closed form.

    Two independent Dirichlet(1) rows over i keys lie 2 (i - 1) / (i (i + 1)) apart. Over a causal
    pattern this sums to 2 H_n + 4 / (n + 1) - 4 with H_n the harmonic number: 2.997 at n = 16.

    Args:
        n_pos: queries, and keys.
        mask: ``"causal"`` or ``"none"``.

    Raises:
        ValueError: a size below 1 or an unknown mask.
    """
    _check_sizes(n_pos, mask)
    if mask == "none":
        return 2 * (n_pos - 1) / (n_pos + 1)
    return 2 * sum(1 / i for i in range(1, n_pos + 1)) + 4 / (n_pos + 1) - 4


def probe_pattern(
    model: Transformer,
    tokens: Int[Tensor, " pos"],
    *,
    layer: int,
    head: int = 0,
    mask: PatternMask = "causal",
    has_start: bool = False,
) -> Float[np.ndarray, "query_pos key_pos"]:
    """One head's attention pattern on a probe string.

    Args:
        model: a hookable transformer.
        tokens: ``[pos]``, the probe string without START.
        layer, head: which attention head.
        mask: ``"causal"``: as the model runs; ``"none"``: this head's scores without the mask.
        has_start: put START in front, as in training; the pattern then has one row and one column
            more.

    Returns:
        ``[query_pos, key_pos]``, rows sum to 1, float64.

    Raises:
        ValueError: a layer or head that the model lacks, or an unknown mask.
    """
    _check_sizes(len(tokens), mask)
    if has_start:
        tokens = torch.cat([tokens.new_tensor([START]), tokens])
    scores = attention_terms(model, tokens, layer=layer, head=head).scores
    if mask == "causal":
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return np.asarray(scores.softmax(-1).cpu().numpy())


def _check_sizes(n_pos: int, mask: str) -> None:
    if n_pos < 1:
        raise ValueError(f"n_pos: got {n_pos}, expected at least 1")
    if mask not in get_args(PatternMask):
        raise ValueError(f"mask: got {mask!r}, expected one of {get_args(PatternMask)}")
