import numpy as np
import pytest
from scipy import stats

from interp.bootstrap import (
    bootstrap_interval,
    correlation,
    jackknife_interval,
    two_sample_interval,
)


def _normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


@pytest.mark.parametrize("method", ["percentile", "bca"])
def test_interval_of_the_mean_covers_the_truth_about_as_often_as_it_says(method):
    covered = [
        bootstrap_interval(
            _normal(trial, 31), n_resamples=400, seed=trial, level=0.9, method=method
        ).contains(0.0)
        for trial in range(150)
    ]
    # binomial standard deviation .024; bootstrap intervals run a little short at n = 31
    assert 0.80 < np.mean(covered) < 0.97


def test_interval_agrees_with_the_normal_theory_for_a_mean():
    values = _normal(3, 211)
    interval = bootstrap_interval(values, n_resamples=4000)
    half_width = 1.96 * values.std(ddof=1) / np.sqrt(len(values))
    assert interval.estimate == pytest.approx(values.mean())
    # quantiles of 4000 resamples have a Monte-Carlo error of about 5% of the half width
    assert interval.low == pytest.approx(values.mean() - half_width, abs=0.1 * half_width)
    assert interval.high == pytest.approx(values.mean() + half_width, abs=0.1 * half_width)


def test_bca_moves_the_interval_of_a_skewed_statistic():
    values = np.exp(_normal(5, 29))
    percentile = bootstrap_interval(values, n_resamples=4000)
    bca = bootstrap_interval(values, n_resamples=4000, method="bca")
    assert bca.low > percentile.low
    assert bca.high > percentile.high


def test_a_statistic_may_use_several_measurements_of_one_sample():
    pairs = _normal(7, 17, 2)
    interval = bootstrap_interval(pairs, lambda s: float((s[:, 0] - s[:, 1]).mean()))
    assert interval.estimate == pytest.approx((pairs[:, 0] - pairs[:, 1]).mean())
    assert interval.low < interval.estimate < interval.high


def test_same_seed_same_interval_and_the_global_state_is_left_alone():
    values = _normal(11, 13)
    before = np.random.get_state()[1].copy()
    first = bootstrap_interval(values, np.median, seed=5)
    assert first == bootstrap_interval(values, np.median, seed=5)
    assert (first.low, first.high) != (
        bootstrap_interval(values, np.median, seed=6, n_resamples=37).low,
        first.high,
    )
    assert np.array_equal(before, np.random.get_state()[1])


@pytest.mark.parametrize("method", ["percentile", "bca"])
@pytest.mark.parametrize("statistic", [np.mean, np.median, np.max])
def test_taking_all_resamples_at_once_gives_what_one_by_one_gives(statistic, method):
    values = _normal(17, 23)
    at_once = bootstrap_interval(values, statistic, method=method, n_resamples=300)
    one_by_one = bootstrap_interval(
        values, lambda sample: float(statistic(sample)), method=method, n_resamples=300
    )
    assert (at_once.low, at_once.high) == pytest.approx((one_by_one.low, one_by_one.high))


@pytest.mark.parametrize("method", ["percentile", "bca"])
def test_equal_samples_give_a_point(method):
    interval = bootstrap_interval([2.5, 2.5, 2.5], method=method)
    assert (interval.low, interval.estimate, interval.high) == (2.5, 2.5, 2.5)


def test_two_groups_are_resampled_independently():
    first, second = _normal(41, 97) + 3, _normal(43, 31) + 1
    interval = two_sample_interval(first, second, lambda a, b: float(a.mean() - b.mean()))
    error = np.sqrt(first.var() / 97 + second.var() / 31)
    assert interval.estimate == pytest.approx(first.mean() - second.mean())
    # 2000 resamples: the ends have a Monte-Carlo error of about 5% of the half width
    assert interval.high - interval.low == pytest.approx(2 * 1.96 * error, rel=0.1)
    assert interval.n_samples == 31
    again = two_sample_interval(first, second, lambda a, b: float(a.mean() - b.mean()))
    assert interval == again


def test_the_jackknife_of_a_mean_is_its_textbook_interval():
    values = _normal(47, 19)
    interval = jackknife_interval(values, np.mean, level=0.9)
    error = values.std(ddof=1) / np.sqrt(19)
    # 1.7341: the 95% quantile of Student's t with 18 degrees of freedom
    assert interval.low == pytest.approx(values.mean() - 1.7341 * error, abs=1e-4)
    assert interval.high == pytest.approx(values.mean() + 1.7341 * error, abs=1e-4)


def test_the_jackknife_covers_a_mean_over_pairs_that_a_bootstrap_would_pull_down():
    def mean_square_distance(points):
        return float(2 * points.var(axis=0, ddof=1).sum())

    intervals = [jackknife_interval(_normal(i, 61, 5), mean_square_distance) for i in range(150)]
    covered = np.mean([interval.contains(2 * 5.0) for interval in intervals])
    # binomial standard deviation .018
    assert covered > 0.95 - 3 * 0.018
    pulled = bootstrap_interval(_normal(1, 5, 7), mean_square_distance)
    assert pulled.low + pulled.high < 2 * pulled.estimate


@pytest.mark.parametrize(
    ("kind", "reference"), [("pearson", stats.pearsonr), ("spearman", stats.spearmanr)]
)
def test_correlation_equals_scipys_ties_included(kind, reference):
    x = np.round(_normal(13, 41), 1)
    y = x + 2 * np.round(_normal(17, 41), 1)
    assert correlation(x, y, kind=kind).value == pytest.approx(reference(x, y).statistic, abs=1e-12)


def test_fishers_interval_equals_scipys_for_pearson():
    x = _normal(19, 23)
    y = x + _normal(23, 23)
    expected = stats.pearsonr(x, y).confidence_interval(0.9)
    measured = correlation(x, y, level=0.9)
    assert measured.fisher == pytest.approx((expected.low, expected.high))


def test_spearmans_interval_is_wider_by_the_square_of_half_the_correlation():
    x = _normal(19, 23)
    measured = correlation(x, x + _normal(23, 23), kind="spearman", level=0.9)
    # Bonett and Wright 2000: atanh(r) has the variance (1 + r^2 / 2) / (n - 3)
    half_width = 1.6449 * np.sqrt((1 + measured.value**2 / 2) / 20)
    expected = np.tanh(np.arctanh(measured.value) + np.array([-half_width, half_width]))
    assert measured.fisher == pytest.approx(tuple(expected), abs=1e-4)


@pytest.mark.parametrize("kind", ["pearson", "spearman"])
def test_intervals_exclude_zero_for_a_strong_relation_and_not_for_none(kind):
    x, noise = _normal(29, 43), _normal(31, 43)
    strong = correlation(x, x + 0.5 * noise, kind=kind)
    none = correlation(x, noise, kind=kind)
    assert strong.excludes_zero()
    assert strong.bootstrap[0] < strong.value < strong.bootstrap[1]
    assert not none.excludes_zero()
    assert correlation(x, -x - 0.5 * noise, kind=kind).value == pytest.approx(-strong.value)


def test_a_perfect_correlation_has_finite_intervals():
    x = _normal(37, 7)
    measured = correlation(x, 3 * x + 1)
    assert measured.value == pytest.approx(1)
    assert np.isfinite(measured.fisher).all()
    assert measured.excludes_zero()


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: bootstrap_interval([]), "values"),
        (lambda: bootstrap_interval([1.0, float("nan")]), "values"),
        (lambda: bootstrap_interval([1.0, 2.0], level=95.0), "level"),
        (lambda: bootstrap_interval([1.0, 2.0], n_resamples=0), "n_resamples"),
        (lambda: jackknife_interval([1.0, 2.0], np.mean), "values: got 2 samples"),
        (lambda: two_sample_interval([1.0], [], lambda a, b: 0.0), "second"),
        (lambda: correlation([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]), "at least 4"),
        (lambda: correlation([1.0] * 5, [1.0, 2.0, 3.0, 4.0, 5.0]), "x: every value"),
        (lambda: correlation([1.0] * 5, [1.0] * 4), "shapes"),
    ],
)
def test_refusals_name_the_argument(call, named):
    with pytest.raises(ValueError, match=named):
        call()
