"""Verdicts: what a run says of each claim.

A verdict is one of three: ``reproduced``, ``not reproduced``, ``not measured at this scale``. A
measure that raises, or returns NaN, has not reproduced anything: its verdict is ``not reproduced``
and ``error`` says why. Only a measure that raises ``NotMeasured`` (too few seeds, say) gets the
third verdict, with its reason.
"""

import math
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from interp.case_studies.claims import Claim, Interval, Measurement, NotMeasured
from interp.case_studies.study import JSON, Results

Verdict = Literal["reproduced", "not reproduced", "not measured at this scale"]


@dataclass(frozen=True)
class Judgement:
    """A claim held against a run."""

    claim: Claim
    verdict: Verdict
    expected: Interval | None = None
    interval_within: Interval | None = None
    value: float | None = None
    interval: tuple[float, float] | None = None
    n_samples: int | None = None
    detail: str = ""
    error: str = ""
    trace: str = field(default="", repr=False)

    def expected_text(self) -> str:
        """What was expected, in a few words; empty where nothing is expected at this scale."""
        if self.expected is None:
            return ""
        extra = f", interval {self.interval_within}" if self.interval_within else ""
        return f"{self.expected}{extra}"

    def paper_text(self) -> str:
        """The paper's value as it is shown; empty where the paper gives none."""
        value = self.claim.paper_value
        if value is None:
            return ""
        return value if isinstance(value, str) else f"{value:g}"

    def value_text(self) -> str:
        """Our value with its interval, as it is shown."""
        if self.error:
            return "failed to measure"
        if self.value is None:
            return ""
        if self.interval is None:
            return f"{self.value:.4g}"
        return f"{self.value:.4g} [{self.interval[0]:.3g}, {self.interval[1]:.3g}]"

    def as_json(self) -> dict[str, JSON]:
        """Everything but the measure, as JSON; ends at infinity and NaN become None."""
        low, high = (self.expected.low, self.expected.high) if self.expected else (None, None)
        return {
            "id": self.claim.id,
            "statement": self.claim.statement,
            "source": self.claim.source,
            "measured_by": self.claim.measured_by,
            "tolerance": self.claim.tolerance,
            "paper_value": self.claim.paper_value,
            "paper_text": self.paper_text(),
            "expected_low": _finite(low),
            "expected_high": _finite(high),
            "expected_text": self.expected_text(),
            "value": _finite(self.value),
            "interval_low": _finite(self.interval[0] if self.interval else None),
            "interval_high": _finite(self.interval[1] if self.interval else None),
            "value_text": self.value_text(),
            "n_samples": self.n_samples,
            "verdict": self.verdict,
            "detail": self.detail,
            "error": self.error,
            "trace": self.trace,
        }


def judge(claims: Sequence[Claim], results: Results, *, scale: str) -> list[Judgement]:
    """Hold every claim against the results of a run at ``scale``; a bad measure raises nothing."""
    return [_judge_one(claim, results, scale) for claim in claims]


def _judge_one(claim: Claim, results: Results, scale: str) -> Judgement:
    expected, within = claim.expected_at(scale), claim.interval_within_at(scale)
    if expected is None:
        detail = f"measured at {' and '.join(claim.scales)} scale"
        return Judgement(claim, "not measured at this scale", detail=detail)
    try:
        measured = claim.measure(results)
        if not isinstance(measured, Measurement):
            raise TypeError(f"measure returned {type(measured).__name__}, expected a Measurement")
        interval = _interval(measured)
    except NotMeasured as reason:
        return Judgement(claim, "not measured at this scale", expected, detail=str(reason))
    except Exception as error:
        # whatever a measure trips over is a claim that was not shown, and is told as such
        return Judgement(
            claim,
            "not reproduced",
            expected,
            within,
            error=f"{type(error).__name__}: {error}",
            trace=traceback.format_exc(),
        )
    error_text = ""
    holds = expected.contains(measured.number)
    if math.isnan(measured.number):
        error_text = "the measure returned NaN"
    elif within is not None and interval is None:
        holds = False
        error_text = f"the interval has to lie in {within}, but the measure gave none"
    elif within is not None and interval is not None:
        holds = holds and all(within.contains(end) for end in interval)
    return Judgement(
        claim,
        "reproduced" if holds else "not reproduced",
        expected,
        within,
        measured.number,
        interval,
        n_samples=None if measured.samples is None else len(measured.samples),
        detail=measured.detail,
        error=error_text,
    )


def _interval(measured: Measurement) -> tuple[float, float] | None:
    if measured.interval is not None:
        low, high = measured.interval
        return float(low), float(high)
    if measured.samples is None or len(measured.samples) < 2 or math.isnan(measured.number):
        return None
    from interp.bootstrap import bootstrap_interval

    found = bootstrap_interval(np.asarray(measured.samples), measured.statistic, seed=0)
    return found.low, found.high


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
