"""Intervals over seeds: how far a number would move had other seeds been drawn.

A *sample* is one seed (one trained model, one random draw); everything measured on it stays
together when seeds are resampled. The resampling itself is ``scipy.stats.bootstrap``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from jaxtyping import Num

# scipy.stats takes about a second to import, so it is imported where it is used: claims that
# mention this module must still list instantly.

IntervalMethod = Literal["percentile", "bca"]
CorrelationKind = Literal["pearson", "spearman"]
# statistics that take all resamples at once: a hundred times faster than one by one
_ALONG_AXIS = (np.mean, np.median, np.min, np.max, np.std, np.var)

# [sample, ...]; the lengths of two groups may differ, so the axes have no names here
Samples = Num[np.ndarray, "_ ..."] | Sequence[float]


@dataclass(frozen=True)
class BootstrapInterval:
    """A statistic of the samples and the interval that resampling them gives."""

    estimate: float
    low: float
    high: float
    level: float
    method: str
    n_samples: int

    def contains(self, value: float) -> bool:
        """True where ``value`` lies in the closed interval."""
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return f"{self.estimate:.3g} [{self.low:.3g}, {self.high:.3g}]"


@dataclass(frozen=True)
class Correlation:
    """A correlation over samples with two intervals that make different assumptions."""

    kind: CorrelationKind
    value: float
    n_samples: int
    level: float
    bootstrap: tuple[float, float]
    """Percentile interval from resampling the pairs."""
    fisher: tuple[float, float]
    """Normal interval for atanh(r): exact in form for bivariate normal pairs (Pearson)."""

    def excludes_zero(self) -> bool:
        """True where both intervals lie on the same side of 0."""
        lows = (self.bootstrap[0], self.fisher[0])
        highs = (self.bootstrap[1], self.fisher[1])
        return min(lows) > 0 or max(highs) < 0


def bootstrap_interval(
    values: Samples,
    statistic: Callable[[Any], float] = np.mean,
    *,
    n_resamples: int = 2000,
    seed: int = 0,
    level: float = 0.95,
    method: IntervalMethod = "percentile",
) -> BootstrapInterval:
    """Bootstrap interval of a statistic over samples (usually seeds).

    Args:
        values: ``[sample, ...]``, finite; axis 0 is resampled and the rest travels with it.
        statistic: takes an array shaped like ``values`` (any number of repeats along axis 0)
            and returns one number.
        n_resamples: bootstrap resamples drawn.
        seed: seeds a generator of its own; the global random state is not touched.
        level: coverage in (0, 1).
        method: ``"percentile"``, or ``"bca"`` (bias-corrected and accelerated; Efron 1987).

    Returns:
        The interval; where all samples are equal (or there is one), it is a single point.

    Raises:
        ValueError: no samples, values that are not finite, a level or number of resamples out of
            range, or a BCa interval that does not exist for these samples.
    """
    samples = _finite("values", values)
    _check_resampling(n_resamples, level)
    if method not in get_args(IntervalMethod):
        raise ValueError(f"method: got {method!r}, expected one of {get_args(IntervalMethod)}")
    n_samples = len(samples)
    estimate = float(statistic(samples))
    if np.all(samples == samples[:1]):
        return BootstrapInterval(estimate, estimate, estimate, level, method, n_samples)

    from scipy import stats

    is_along_axis = samples.ndim == 1 and statistic in _ALONG_AXIS
    # Resampling positions rather than values lets one sample be an array of any shape.
    data = samples if is_along_axis else np.arange(n_samples)
    with warnings.catch_warnings():
        warnings.simplefilter("error", stats.DegenerateDataWarning)
        try:
            result = stats.bootstrap(
                (data,),
                statistic if is_along_axis else lambda chosen: float(statistic(samples[chosen])),
                n_resamples=n_resamples,
                vectorized=is_along_axis,
                confidence_level=level,
                method=method,
                rng=np.random.default_rng(seed),
            )
        except stats.DegenerateDataWarning as degenerate:
            raise ValueError(
                "method: 'bca' is undefined for these values (the statistic does not vary over "
                "resamples as its correction needs); use method='percentile'"
            ) from degenerate
    low, high = (float(bound) for bound in result.confidence_interval)
    return BootstrapInterval(estimate, low, high, level, method, n_samples)


def jackknife_interval(
    values: Samples, statistic: Callable[[Any], float], *, level: float = 0.95
) -> BootstrapInterval:
    """Student's interval from leaving out one sample at a time, for statistics of *pairs*.

    A bootstrap resample repeats samples, and a pair of the same sample has distance 0, which pulls
    a mean over pairs down. Leaving out does not repeat (Arvesen 1969, on U-statistics).

    Args:
        values: ``[sample, ...]``, at least 3, finite.
        statistic: takes an array shaped like ``values`` with fewer samples, returns one number.
        level: coverage in (0, 1).

    Raises:
        ValueError: fewer than 3 samples, values that are not finite, or a level out of range.
    """
    from scipy import special

    samples = _finite("values", values)
    _check_resampling(1, level)
    n_samples = len(samples)
    if n_samples < 3:
        raise ValueError(f"values: got {n_samples} samples, expected at least 3 to leave one out")
    left_out = np.array([statistic(np.delete(samples, i, axis=0)) for i in range(n_samples)])
    variance = (n_samples - 1) / n_samples * ((left_out - left_out.mean()) ** 2).sum()
    quantile = float(special.stdtrit(n_samples - 1, 0.5 + level / 2))
    half_width = quantile * math.sqrt(variance)
    estimate = float(statistic(samples))
    low, high = estimate - half_width, estimate + half_width
    return BootstrapInterval(estimate, low, high, level, "jackknife", n_samples)


def two_sample_interval(
    first: Samples,
    second: Samples,
    statistic: Callable[[Any, Any], float],
    *,
    n_resamples: int = 2000,
    seed: int = 0,
    level: float = 0.95,
) -> BootstrapInterval:
    """Percentile interval of a statistic of two independent groups, such as a ratio of means.

    Args:
        first, second: ``[sample, ...]`` each, finite; each group is resampled by itself.
        statistic: takes two arrays shaped like ``first`` and ``second`` and returns one number.
        n_resamples: bootstrap resamples drawn.
        seed: seeds a generator of its own.
        level: coverage in (0, 1).

    Returns:
        The interval; ``n_samples`` is that of the smaller group.

    Raises:
        ValueError: no samples, values that are not finite, a level or number of resamples out of
            range.
    """
    groups = _finite("first", first), _finite("second", second)
    _check_resampling(n_resamples, level)
    rng = np.random.default_rng(seed)
    resampled = [
        statistic(*(group[rng.integers(len(group), size=len(group))] for group in groups))
        for _ in range(n_resamples)
    ]
    low, high = (float(q) for q in np.quantile(resampled, [(1 - level) / 2, (1 + level) / 2]))
    estimate = float(statistic(*groups))
    return BootstrapInterval(estimate, low, high, level, "percentile", min(map(len, groups)))


def correlation(
    x: Samples,
    y: Samples,
    *,
    kind: CorrelationKind = "pearson",
    n_resamples: int = 2000,
    seed: int = 0,
    level: float = 0.95,
) -> Correlation:
    """Correlation of two measurements over samples, with bootstrap and Fisher-z intervals.

    A resample in which one side happens to be constant shows no relation and counts as 0. For
    Spearman the standard error of atanh(r) is sqrt((1 + r^2 / 2) / (n - 3)) (Bonett & Wright 2000,
    equation 4), for Pearson 1 / sqrt(n - 3) (Fisher 1921).

    Args:
        x: ``[sample]``, finite.
        y: ``[sample]``, finite, paired with ``x``.
        kind: ``"pearson"`` or ``"spearman"`` (ties share the mean rank).
        n_resamples: bootstrap resamples of the pairs.
        seed: seeds a generator of its own.
        level: coverage in (0, 1).

    Returns:
        The correlation in [-1, 1] with both intervals.

    Raises:
        ValueError: lengths differ, fewer than 4 pairs, a side without spread, or values that are
            not finite.
    """
    left, right = _finite("x", x), _finite("y", y)
    _check_resampling(n_resamples, level)
    if kind not in get_args(CorrelationKind):
        raise ValueError(f"kind: got {kind!r}, expected one of {get_args(CorrelationKind)}")
    if left.ndim != 1 or left.shape != right.shape:
        raise ValueError(
            f"x, y: got shapes {left.shape} and {right.shape}, expected two vectors of one length; "
            "pass one number per sample"
        )
    n_samples = len(left)
    if n_samples < 4:
        raise ValueError(f"x, y: got {n_samples} pairs, expected at least 4; use more samples")
    for name, side in (("x", left), ("y", right)):
        if np.all(side == side[0]):
            raise ValueError(
                f"{name}: every value is {side[0]}, expected some spread; a correlation with a "
                "constant is undefined"
            )

    from scipy import special, stats

    def measure(a: np.ndarray, b: np.ndarray, axis: int = -1) -> np.ndarray:
        if kind == "spearman":
            a, b = stats.rankdata(a, axis=axis), stats.rankdata(b, axis=axis)
        return _pearson(a, b, axis)

    value = float(measure(left, right))
    resampled = stats.bootstrap(
        (left, right),
        measure,
        paired=True,
        vectorized=True,
        n_resamples=n_resamples,
        confidence_level=level,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    spread = 1 + value**2 / 2 if kind == "spearman" else 1.0
    half_width = float(special.ndtri(0.5 + level / 2)) * math.sqrt(spread / (n_samples - 3))
    # atanh(1) is infinite; a perfect correlation keeps a point at the end of its interval
    centre = math.atanh(max(-1 + 1e-15, min(1 - 1e-15, value)))
    return Correlation(
        kind=kind,
        value=value,
        n_samples=n_samples,
        level=level,
        bootstrap=(float(resampled.low), float(resampled.high)),
        fisher=(math.tanh(centre - half_width), math.tanh(centre + half_width)),
    )


def _pearson(a: np.ndarray, b: np.ndarray, axis: int) -> np.ndarray:
    a = a - a.mean(axis=axis, keepdims=True)
    b = b - b.mean(axis=axis, keepdims=True)
    scale = np.sqrt((a**2).sum(axis=axis) * (b**2).sum(axis=axis))
    product = (a * b).sum(axis=axis)
    return np.divide(product, scale, out=np.zeros_like(product), where=scale > 0)


def _finite(name: str, values: Samples) -> np.ndarray:
    samples = np.asarray(values, dtype=np.float64)
    if samples.ndim < 1 or len(samples) < 1:
        raise ValueError(f"{name}: got shape {samples.shape}, expected at least one sample")
    if not np.isfinite(samples).all():
        raise ValueError(
            f"{name}: {np.count_nonzero(~np.isfinite(samples))} of {samples.size} entries are not "
            "finite; drop those samples or find out why"
        )
    return samples


def _check_resampling(n_resamples: int, level: float) -> None:
    if n_resamples < 1:
        raise ValueError(f"n_resamples: got {n_resamples}, expected at least 1")
    if not 0 < level < 1:
        raise ValueError(f"level: got {level}, expected a coverage between 0 and 1, such as 0.95")
