"""A claim is reproduced, not reproduced, or not measured: and never the first by accident."""

import json
import math

import numpy as np
import pytest

from interp.case_studies.claims import Claim, Interval, Measurement, NotMeasured, check_claims
from interp.case_studies.judge import judge
from interp.case_studies.study import Results, StudyError


def claim(measure, expected=None, **options):
    options.setdefault("scales", ("quick",))
    if isinstance(expected, dict):
        del options["scales"]
    return Claim("id", "statement", "source", "how", expected or Interval(0, 1), measure, **options)


def verdict_of(*arguments, scale="quick", **options):
    return judge([claim(*arguments, **options)], Results({}), scale=scale)[0]


def measuring(*arguments, **options):
    return lambda results: Measurement(*arguments, **options)


@pytest.mark.parametrize(
    ("interval", "inside", "outside", "text"),
    [
        (Interval(0.5, 0.6), [0.5, 0.6], [0.4999, 0.6001], "0.5 to 0.6"),
        (Interval.at_least(0.97), [0.97, 2.0], [0.9699], "≥ 0.97"),
        (Interval.at_most(0.6), [0.6, -9.0], [0.6001], "≤ 0.6"),
        (Interval.above(3), [3.0001], [3.0, 2.0], "> 3"),
        (Interval.below(0), [-1e-9], [0.0, 1.0], "< 0"),
        (Interval(0, 0), [0.0], [1e-12], "0"),
        (Interval(0, 1, "left"), [0.0, 0.5], [1.0], "[0, 1)"),
        (Interval(0, 1, "right"), [1.0], [0.0], "(0, 1]"),
        (Interval(), [0.0, math.inf], [math.nan], "any"),
    ],
)
def test_an_interval_knows_its_ends_and_how_to_say_them(interval, inside, outside, text):
    assert all(interval.contains(value) for value in inside)
    assert not any(interval.contains(value) for value in [*outside, math.nan])
    assert str(interval) == text


def test_an_interval_upside_down_is_refused():
    with pytest.raises(ValueError, match="expected low <= high"):
        Interval(2, 1)


def test_the_value_decides():
    assert verdict_of(measuring(0.5)).verdict == "reproduced"
    assert verdict_of(measuring(1.5)).verdict == "not reproduced"


def test_a_value_over_seeds_comes_with_a_bootstrap_interval_of_its_own_statistic():
    samples = np.array([0.2, 0.4, 0.4, 0.6, 0.9])
    mean = verdict_of(measuring(samples=samples))
    assert mean.value == pytest.approx(0.5)
    assert mean.interval[0] < 0.5 < mean.interval[1]
    assert mean.n_samples == 5
    assert mean.interval == verdict_of(measuring(samples=samples)).interval
    least = verdict_of(measuring(samples=samples, statistic=np.min))
    assert least.value == 0.2
    assert least.interval[0] == 0.2


def test_one_seed_has_a_value_and_no_interval():
    judged = verdict_of(measuring(samples=[0.5]))
    assert (judged.verdict, judged.interval) == ("reproduced", None)


def test_a_value_that_is_not_the_statistic_of_its_samples_is_refused():
    judged = verdict_of(measuring(0.2, samples=[0.2, 0.9]))
    assert judged.verdict == "not reproduced"
    assert "pass the statistic (such as np.min) or the interval" in judged.error
    given = verdict_of(measuring(0.2, samples=[0.2, 0.9], interval=(0.1, 0.3)))
    assert (given.verdict, given.interval) == ("reproduced", (0.1, 0.3))


@pytest.mark.parametrize(
    ("measure", "said"),
    [
        (lambda results: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda results: results["missing"], "KeyError"),
        (lambda results: 0.5, "measure returned float, expected a Measurement"),
        (measuring(math.nan), "the measure returned NaN"),
        (measuring(samples=[0.5, math.nan]), "the measure returned NaN"),
        (measuring(), "got neither value nor samples"),
        (measuring(samples=np.array([[0.5]])), "expected one number a seed"),
    ],
)
def test_a_measure_that_breaks_reproduces_nothing_and_says_why(measure, said):
    judged = verdict_of(measure, Interval())
    assert judged.verdict == "not reproduced"
    assert said in judged.error
    assert judged.value_text() == "failed to measure"


def test_a_measure_that_breaks_keeps_where_it_broke():
    assert "test_claim_verdicts.py" in verdict_of(lambda results: 1 / 0).trace


def test_the_whole_interval_may_have_to_lie_somewhere():
    below = Interval.below(0)
    options = {"expected": Interval.at_most(-0.4), "interval_within": below}
    assert verdict_of(measuring(-0.6, interval=(-0.8, -0.1)), **options).verdict == "reproduced"
    crossing = verdict_of(measuring(-0.6, interval=(-0.9, 0.1)), **options)
    assert crossing.verdict == "not reproduced"
    assert crossing.expected_text() == "≤ -0.4, interval < 0"
    none = verdict_of(measuring(-0.6), **options)
    assert none.verdict == "not reproduced"
    assert "the measure gave none" in none.error


def test_a_claim_of_another_scale_is_not_measured_and_its_measure_is_not_called():
    judged = verdict_of(lambda results: 1 / 0, {"paper": Interval(0, 1)}, scale="quick")
    assert judged.verdict == "not measured at this scale"
    assert judged.detail == "measured at paper scale"
    assert verdict_of(measuring(0.5), {"paper": Interval(0, 1)}, scale="paper").value == 0.5


def test_scales_may_expect_different_intervals():
    expected = {"quick": Interval(0, 1), "paper": Interval(0.6, 1)}
    assert verdict_of(measuring(0.5), expected, scale="quick").verdict == "reproduced"
    assert verdict_of(measuring(0.5), expected, scale="paper").verdict == "not reproduced"


def test_a_measure_may_say_that_the_run_is_too_small():
    def measure(results):
        raise NotMeasured("needs 24 models, there are 2")

    judged = verdict_of(measure)
    assert judged.verdict == "not measured at this scale"
    assert judged.detail == "needs 24 models, there are 2"


def test_a_judgement_is_strict_json_even_with_nan_and_open_ends():
    for measure in (measuring(math.nan), measuring(math.inf, interval=(0, math.inf))):
        said = json.dumps(verdict_of(measure, Interval.above(1)).as_json(), allow_nan=False)
        assert json.loads(said)["value"] is None
        assert json.loads(said)["expected_high"] is None


def test_claims_that_cannot_be_meant_are_refused():
    measure = measuring(1)
    with pytest.raises(ValueError, match="scales: got none"):
        claim(measure, scales=())
    with pytest.raises(ValueError, match="leave scales out"):
        Claim("x", "s", "s", "m", {"quick": Interval()}, measure, scales=("paper",))
    with pytest.raises(StudyError, match="two claims have the id 'id'"):
        check_claims("s", [claim(measure), claim(measure)], ["quick"])
    with pytest.raises(StudyError, match="scale 'quick' is none of smoke, paper"):
        check_claims("s", [claim(measure)], ["smoke", "paper"])
