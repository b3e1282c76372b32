"""Claims: a statement with its source, the number that measures it, and what was expected of it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from interp.case_studies.study import Results, StudyError

Closed = Literal["both", "left", "right", "neither"]


class NotMeasured(Exception):
    """Raised by a measure that this run is too small for; the message says what it would need."""


@dataclass(frozen=True)
class Interval:
    """Numbers from ``low`` to ``high``; ``closed`` says which ends belong to it (pandas' words)."""

    low: float = -math.inf
    high: float = math.inf
    closed: Closed = "both"

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ValueError(f"Interval: got {self.low} to {self.high}, expected low <= high")
        if self.closed not in ("both", "left", "right", "neither"):
            raise ValueError(
                f"closed: got {self.closed!r}, expected 'both', 'left', 'right' or 'neither'"
            )

    @classmethod
    def at_least(cls, low: float) -> "Interval":
        """``low`` and above."""
        return cls(low=low)

    @classmethod
    def at_most(cls, high: float) -> "Interval":
        """``high`` and below."""
        return cls(high=high)

    @classmethod
    def above(cls, low: float) -> "Interval":
        """Above ``low``, which does not belong to it."""
        return cls(low=low, closed="neither")

    @classmethod
    def below(cls, high: float) -> "Interval":
        """Below ``high``, which does not belong to it."""
        return cls(high=high, closed="neither")

    def contains(self, value: float) -> bool:
        """True where ``value`` lies in the interval; NaN lies in none."""
        left = self.low <= value if self.closed in ("both", "left") else self.low < value
        right = value <= self.high if self.closed in ("both", "right") else value < self.high
        return left and right

    def __str__(self) -> str:
        low_open = self.closed in ("right", "neither")
        high_open = self.closed in ("left", "neither")
        if self.low == self.high:
            return f"{self.low:g}"
        if math.isinf(self.low) and math.isinf(self.high):
            return "any"
        if math.isinf(self.high):
            return f"{'>' if low_open else '≥'} {self.low:g}"
        if math.isinf(self.low):
            return f"{'<' if high_open else '≤'} {self.high:g}"
        if self.closed == "both":
            return f"{self.low:g} to {self.high:g}"
        return f"{'(' if low_open else '['}{self.low:g}, {self.high:g}{')' if high_open else ']'}"


@dataclass(frozen=True, eq=False)
class Measurement:
    """The number that a claim is judged by, with what its interval can be had from.

    Give ``samples`` (one number a seed) for a number that is a ``statistic`` of them: ``value`` is
    then computed where it is left out, and the interval is bootstrapped over the seeds. Give
    ``interval`` where it was computed otherwise (a correlation, a ratio of two groups).
    """

    value: float | None = None
    samples: Sequence[float] | np.ndarray | None = None
    interval: tuple[float, float] | None = None
    detail: str = ""
    statistic: Callable[[np.ndarray], Any] = np.mean

    def __post_init__(self) -> None:
        if self.value is None and self.samples is None:
            raise ValueError("Measurement: got neither value nor samples; give one of them")
        value = self.value
        if self.samples is not None:
            samples = np.asarray(self.samples, dtype=np.float64)
            if samples.ndim != 1 or samples.size == 0:
                raise ValueError(
                    f"samples: got shape {samples.shape}, expected one number a seed, at least one"
                )
            object.__setattr__(self, "samples", samples)
            own = float(self.statistic(samples))
            if value is None:
                value = own
            elif self.interval is None and not np.isclose(value, own, equal_nan=True):
                raise ValueError(
                    f"value: got {value:g}, but the statistic of the samples is {own:g}, so their "
                    "interval would be another number's; pass the statistic (such as np.min) or "
                    "the interval"
                )
        assert value is not None
        object.__setattr__(self, "value", float(value))

    @property
    def number(self) -> float:
        """The value, present in every measurement once it is built."""
        assert self.value is not None
        return self.value


@dataclass(frozen=True)
class Claim:
    """A statement that a run can bear out or not.

    ``expected`` is the interval the value has to lie in, or one for each scale; with a mapping the
    claim is measured at the scales it names, otherwise at ``scales``. ``interval_within``, where
    given, must hold the whole bootstrap interval as well ("and the interval excludes 0").
    ``tolerance`` says in words where the expected interval comes from.
    """

    id: str
    statement: str
    source: str
    measured_by: str
    expected: Interval | Mapping[str, Interval]
    measure: Callable[[Results], Measurement]
    paper_value: str | float | None = None
    scales: tuple[str, ...] = ()
    interval_within: Interval | Mapping[str, Interval] | None = None
    tolerance: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.expected, Mapping):
            if self.scales and set(self.scales) != set(self.expected):
                raise ValueError(
                    f"claim {self.id!r}, scales: got {self.scales}, but expected names "
                    f"{tuple(self.expected)}; leave scales out"
                )
            object.__setattr__(self, "scales", tuple(self.expected))
        if not self.scales:
            raise ValueError(f"claim {self.id!r}, scales: got none; name where it is measured")

    def expected_at(self, scale: str) -> Interval | None:
        """The interval expected at ``scale``, or None where the claim is not measured."""
        if isinstance(self.expected, Mapping):
            return self.expected.get(scale)
        return self.expected if scale in self.scales else None

    def interval_within_at(self, scale: str) -> Interval | None:
        """What the bootstrap interval has to lie within at ``scale``, or None if nothing."""
        if isinstance(self.interval_within, Mapping):
            return self.interval_within.get(scale)
        return self.interval_within


def check_claims(study: str, claims: Sequence[Claim], scales: Sequence[str]) -> None:
    """Raise ``StudyError`` for ids used twice and for scales that the study does not have."""
    seen: set[str] = set()
    for claim in claims:
        if claim.id in seen:
            raise StudyError(f"study {study}: two claims have the id {claim.id!r}")
        seen.add(claim.id)
        strange = [scale for scale in claim.scales if scale not in scales]
        if strange:
            raise StudyError(
                f"study {study}, claim {claim.id!r}: scale {strange[0]!r} is none of "
                f"{', '.join(scales)}"
            )
