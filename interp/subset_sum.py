"""Pruned random networks hide trained ones: the subset-sum argument, made a number.

A weight w is imitated by a random two-layer gadget of width n, sum_i m_i a_i b_i with a_i, b_i
drawn once from U(-1, 1) and only the mask m in {0, 1}^n chosen. Since the best of 2^n masked sums
is exponentially close to w, no statistic of one weight matrix alone can tell a trained network
from a random one with parts left out (Wen et al. 2023, arXiv 2312.01429, indistinguishability of
single components; the gadget is that of Pensia et al. 2020, arXiv 2006.07990).
"""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float

MAX_PRODUCTS = 40  # 2^20 sums a half: about 16 MB a target


def best_masked_sums(
    targets: Float[np.ndarray, " target"], products: Float[np.ndarray, "row n_products"]
) -> tuple[Float[np.ndarray, " target"], Bool[np.ndarray, "target n_products"]]:
    """The masked sum of each row of products that comes closest to its target.

    Exact, by meeting in the middle: all sums of the left half are looked up among the sorted sums
    of the right half, n 2^(n/2) steps a target instead of 2^n.

    Args:
        targets: ``[target]``, the numbers to be imitated.
        products: ``[target, n_products]``, the terms that a mask may keep or drop.

    Returns:
        The sums ``[target]`` and the masks ``[target, n_products]`` that make them.

    Raises:
        ValueError: no products, more than ``MAX_PRODUCTS``, or another number of rows than targets.
    """
    n_targets, n_products = products.shape
    if n_targets != len(targets):
        raise ValueError(
            f"products: got {n_targets} rows for {len(targets)} targets, give one each"
        )
    if not 1 <= n_products <= MAX_PRODUCTS:
        raise ValueError(f"products: got {n_products} columns, expected 1 to {MAX_PRODUCTS}")
    n_left = n_products // 2
    left_masks, right_masks = _all_masks(n_left), _all_masks(n_products - n_left)
    sums = np.empty(n_targets)
    masks = np.empty((n_targets, n_products), dtype=bool)
    for row, (target, terms) in enumerate(zip(targets, products, strict=True)):
        left_sums = left_masks @ terms[:n_left]
        right_sums = right_masks @ terms[n_left:]
        order = np.argsort(right_sums)
        ordered = right_sums[order]
        wanted = target - left_sums
        # leaving out both ends keeps `above` between the second and the last
        above = 1 + ordered[1:-1].searchsorted(wanted)
        nearest = above - (wanted - ordered[above - 1] < ordered[above] - wanted)
        errors = np.abs(ordered[nearest] - wanted)
        left = int(np.argmin(errors))
        right = int(order[nearest[left]])
        sums[row] = left_sums[left] + right_sums[right]
        masks[row] = np.concatenate([left_masks[left], right_masks[right]])
    return sums, masks


def subset_sum_errors(
    n_products: int, *, n_targets: int = 1000, seed: int = 0
) -> Float[np.ndarray, " target"]:
    """Absolute errors of imitating w ~ U(-1, 1) by masked sums of products of U(-1, 1).

    Args:
        n_products: width n of the gadget.
        n_targets: how many w to draw.
        seed: seeds a generator of its own.

    Returns:
        ``[target]``, |w - best sum|, at least 0.

    Raises:
        ValueError: fewer than one target, or ``n_products`` out of range.
    """
    if n_targets < 1:
        raise ValueError(f"n_targets: got {n_targets}, expected at least 1")
    rng = np.random.default_rng(seed)
    targets = rng.uniform(-1, 1, n_targets)
    sums, _ = best_masked_sums(targets, _random_products(rng, n_targets, n_products))
    return np.abs(targets - sums)


def imitate_weights(
    weights: Float[np.ndarray, "*shape"], *, n_products: int = 14, seed: int | Sequence[int] = 0
) -> Float[np.ndarray, "*shape"]:
    """Replace every weight by its best masked sum of random products.

    The array is divided by its largest absolute value first and multiplied by it afterwards, as
    the statement is about weights in [-1, 1]: one scale a matrix is all that is not random.

    Args:
        weights: any shape, finite.
        n_products: width n of each weight's gadget.
        seed: one number, or several (such as model and matrix), that seed a generator of its own.

    Returns:
        The imitation, in the shape and precision of ``weights``.

    Raises:
        ValueError: weights that are not finite, or ``n_products`` out of range.
    """
    if not np.isfinite(weights).all():
        raise ValueError("weights: some are not finite, expected finite numbers")
    scale = float(np.abs(weights).max(initial=0.0))
    if scale == 0:
        return weights.copy()
    targets = (weights / scale).astype(np.float64).ravel()
    products = _random_products(np.random.default_rng(seed), targets.size, n_products)
    sums, _ = best_masked_sums(targets, products)
    return (sums * scale).reshape(weights.shape).astype(weights.dtype)


def _random_products(
    rng: np.random.Generator, n_targets: int, n_products: int
) -> Float[np.ndarray, "target n_products"]:
    if not 1 <= n_products <= MAX_PRODUCTS:
        raise ValueError(f"n_products: got {n_products}, expected 1 to {MAX_PRODUCTS}")
    factors = rng.uniform(-1, 1, (2, n_targets, n_products))
    return np.asarray(factors[0] * factors[1])


def _all_masks(n: int) -> Bool[np.ndarray, "mask n"]:
    """All 2^n masks over n terms."""
    return (np.arange(2**n)[:, None] >> np.arange(n)) & 1 == 1
