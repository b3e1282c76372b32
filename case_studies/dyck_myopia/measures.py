"""The numbers that judge the claims of the Dyck study, from the results of a run."""

from collections.abc import Callable

import numpy as np

from interp.audit import Audit, audit_scores
from interp.bootstrap import (
    CorrelationKind,
    correlation,
    jackknife_interval,
    two_sample_interval,
)
from interp.case_studies.claims import Measurement, NotMeasured
from interp.case_studies.study import Results

LEARNED = 0.97  # train threshold accuracy from which a model counts as having learned the task
FLIPS_AT = 128  # inserted pairs at which flips are judged
MIN_FOR_CORRELATION = 24
NULL_QUANTILE = 0.95  # of the distances between equally good models: the margin of equivalence

Measure = Callable[[Results], Measurement]


def _column(results: Results, prefix: str, name: str) -> np.ndarray:
    if not results.names(prefix):
        raise NotMeasured(f"no {prefix.rstrip('/')} in this run")
    return results.column(prefix, name)


def p_open(results: Results) -> Measurement:
    """The sampler's share of opens, with its binomial interval."""
    numbers = results["language"].numbers
    p, n = numbers["p_open"], numbers["n_choices"]
    half_width = 1.96 * (p * (1 - p) / n) ** 0.5
    return Measurement(value=p, interval=(p - half_width, p + half_width), detail=f"{n} choices")


def subset_sum_error(results: Results) -> Measurement:
    """Median error of imitating a weight by 14 products, with those of other numbers."""
    numbers = results["subset_sum"].numbers
    by_products = sorted((int(name.rsplit("_", 1)[1]), value) for name, value in numbers.items())
    return Measurement(
        value=numbers["median_error_14"],
        detail="median error by products: " + ", ".join(f"{n}: {v:.2g}" for n, v in by_products),
    )


def recogniser_accuracy(prefix: str, length: int) -> Measure:
    """Least argmax accuracy of hand-built recognisers at one length."""

    def measure(results: Results) -> Measurement:
        if length not in results.config.construction_lengths:
            raise NotMeasured(f"construction_lengths has no {length}")
        return worst(prefix, f"argmax_{length}", np.min)(results)

    return measure


def mean(prefix: str, name: str) -> Measure:
    """Mean of a number over a family of models."""

    def measure(results: Results) -> Measurement:
        values = _column(results, prefix, name)
        return Measurement(
            samples=values,
            detail=f"{values.min():.4g} to {values.max():.4g}, sd {values.std():.2g}",
        )

    return measure


def worst(prefix: str, name: str, statistic: Callable[[np.ndarray], float]) -> Measure:
    """The worst model decides; the interval is over which models there happen to be."""

    def measure(results: Results) -> Measurement:
        values = _column(results, prefix, name)
        return Measurement(
            samples=values,
            statistic=statistic,
            detail=f"worst of {len(values)}; mean {values.mean():.4g}",
        )

    return measure


def share_learned(prefix: str) -> Measure:
    """Share of models whose train threshold accuracy reaches `LEARNED`."""

    def measure(results: Results) -> Measurement:
        values = _column(results, prefix, "train_threshold")
        return Measurement(
            samples=values >= LEARNED,
            detail=f"{np.sum(values >= LEARNED)} of {len(values)}; least {values.min():.3f}",
        )

    return measure


def long_accuracy(results: Results) -> Measurement:
    """E1's threshold accuracy at length 400, with what the norm's epsilon does to it."""
    values = _column(results, "e1/", "long_threshold")
    exact = _column(results, "e1/", "long_threshold_exact").mean()
    argmax = _column(results, "e1/", "long_argmax").mean()
    return Measurement(
        samples=values,
        detail=(
            f"sd {values.std():.3f}; {exact:.3f} with LayerNorm eps 1e-12 instead of 1e-5; "
            f"argmax {argmax:.3f}"
        ),
    )


def balance_and_length(results: Results) -> Measurement:
    """Rank correlation of balance violation with length-400 accuracy over E1."""
    violation = _column(results, "e1/", "balance_violation")
    if len(violation) < MIN_FOR_CORRELATION:
        raise NotMeasured(
            f"{len(violation)} E1 models; a correlation needs at least {MIN_FOR_CORRELATION}"
        )
    ranks = correlation(violation, _column(results, "e1/", "long_threshold"), kind="spearman")
    others: dict[str, tuple[str, CorrelationKind]] = {
        "Pearson": ("long_threshold", "pearson"),
        "with LayerNorm eps 1e-12": ("long_threshold_exact", "spearman"),
        "with argmax accuracy, which judges nothing": ("long_argmax", "spearman"),
    }
    details = [f"Fisher interval [{ranks.fisher[0]:.2f}, {ranks.fisher[1]:.2f}]"]
    for words, (name, kind) in others.items():
        outcome = _column(results, "e1/", name)
        if np.ptp(outcome) > 0:
            found = correlation(violation, outcome, kind=kind)
            low, high = found.bootstrap
            details.append(f"{words} {found.value:.2f} [{low:.2f}, {high:.2f}]")
    return Measurement(value=ranks.value, interval=ranks.bootstrap, detail="; ".join(details))


def ratio_of_means(first: str, second: str, name: str) -> Measure:
    """Mean of one family over the mean of another."""

    def measure(results: Results) -> Measurement:
        found = two_sample_interval(
            _column(results, first, name),
            _column(results, second, name),
            lambda a, b: float(a.mean() / b.mean()),
        )
        return Measurement(value=found.estimate, interval=(found.low, found.high))

    return measure


def gain(first: str, second: str, name: str) -> Measure:
    """Mean of one family minus the mean of another."""

    def measure(results: Results) -> Measurement:
        found = two_sample_interval(
            _column(results, first, name),
            _column(results, second, name),
            lambda a, b: float(a.mean() - b.mean()),
        )
        return Measurement(value=found.estimate, interval=(found.low, found.high))

    return measure


def variation(prefix: str, layer: int) -> Measure:
    """Attention variation of a family of models, causal and without START."""

    def measure(results: Results) -> Measurement:
        units = results.select(prefix)
        if len(units) < 2:
            raise NotMeasured(f"{len(units)} {prefix.rstrip('/')} models; a pair needs two")
        from interp.attention_variation import attention_variation, random_attention_variation

        patterns, unmasked, started = (
            np.stack([unit.arrays[name][layer] for unit in units])
            for name in ("pattern", "pattern_unmasked", "pattern_start")
        )
        interval = None
        if len(units) > 2:
            found = jackknife_interval(patterns, attention_variation)
            interval = (found.low, found.high)
        return Measurement(
            value=attention_variation(patterns),
            interval=interval,
            detail=(
                f"{attention_variation(unmasked):.2f} without mask, "
                f"{attention_variation(started):.2f} with START; random attention "
                f"{random_attention_variation(patterns.shape[-1]):.3f}"
            ),
        )

    return measure


def stack_top(prefix: str, layer: int) -> Measure:
    """Greatest stack-top share of a layer over a family of models."""

    def measure(results: Results) -> Measurement:
        units = results.select(prefix)
        if not units:
            raise NotMeasured(f"no {prefix.rstrip('/')} in this run")
        shares = [unit.numbers["stack_top_share"][layer] for unit in units]
        return Measurement(
            samples=shares,
            statistic=np.max,
            detail=f"greatest of {len(shares)}; mean {np.mean(shares):.3f}",
        )

    return measure


def flips(array: str, statistic: Callable[[np.ndarray], float]) -> Measure:
    """Share of prefixes that `FLIPS_AT` inserted pairs flip, over E1."""

    def measure(results: Results) -> Measurement:
        units = results.select("e1/")
        pairs = list(results.config.pumped_pairs)
        if FLIPS_AT not in pairs:
            raise NotMeasured(f"pumped_pairs has no {FLIPS_AT}")
        curves = np.stack([unit.arrays[array] for unit in units])
        shown = ", ".join(f"{n}: {r:.3f}" for n, r in zip(pairs, curves.mean(0), strict=True))
        return Measurement(
            samples=curves[:, pairs.index(FLIPS_AT)],
            statistic=statistic,
            detail=f"mean by number of pairs: {shown}",
        )

    return measure


def shares_that_differ(unit: str, replacement: str) -> Measure:
    """Share of models that another pattern turns into another function."""

    def measure(results: Results) -> Measurement:
        if unit not in results:
            raise NotMeasured(f"no {unit}: fewer than two models")
        from interp.equivalence import judge_equivalence

        arrays = results[unit].arrays
        margin = float(np.quantile(arrays["null/pair"], NULL_QUANTILE))
        distances = arrays[f"distance/{replacement}"]
        verdicts = [judge_equivalence(row, margin=margin).verdict for row in distances]
        counts = ", ".join(f"{verdicts.count(v)} {v}" for v in sorted(set(verdicts)))
        return Measurement(
            samples=[verdict == "different" for verdict in verdicts],
            detail=(
                f"{counts}; mean distance {distances.mean():.3g}, margin {margin:.3g} "
                f"(95% quantile over pairs of models), under 1% noise "
                f"{arrays['null/noise'].mean():.2g}"
            ),
        )

    return measure


def audit_component(results: Results, component: str) -> Audit:
    """One component's score over the E1 models against accuracy at length 400.

    The claim held is what balance, or the natural reading of attention, would demand of it.
    """
    holds = {
        "value_cosine": lambda score: score < -0.95,
        "score_tie": lambda score: score < 0.05,
        "stack_top_share": lambda score: score > 0.5,
    }[component]
    units = results.select("e1/")
    scores = [np.mean(unit.numbers[component]) for unit in units]
    return audit_scores(
        np.array(scores),
        _column(results, "e1/", "long_threshold"),
        claim=component,
        holds=np.array([bool(holds(score)) for score in scores]),
        full_scores=_column(results, "e1/", "balance_violation"),
    )


def predictive(component: str) -> Measure:
    """Rank correlation of one component's score with length-400 accuracy over E1."""

    def measure(results: Results) -> Measurement:
        audit = audit_component(results, component)
        if audit.spearman is None or audit.n_models < MIN_FOR_CORRELATION:
            raise NotMeasured(f"needs {MIN_FOR_CORRELATION} models whose scores differ")
        found = audit.spearman
        return Measurement(
            value=found.value,
            interval=found.bootstrap,
            detail=f"{audit.verdict}; claim true of {audit.n_holding} of {audit.n_models}",
        )

    return measure


def whole_tells_more(component: str) -> Measure:
    """|Spearman| of balance violation minus that of one component's score."""

    def measure(results: Results) -> Measurement:
        audit = audit_component(results, component)
        if audit.spearman is None or audit.advantage is None:
            raise NotMeasured("needs models whose scores differ")
        if audit.n_models < MIN_FOR_CORRELATION:
            raise NotMeasured(f"needs {MIN_FOR_CORRELATION} models, has {audit.n_models}")
        low, high = audit.spearman.bootstrap
        return Measurement(
            value=audit.advantage.estimate,
            interval=(audit.advantage.low, audit.advantage.high),
            detail=(
                f"Spearman of the component {audit.spearman.value:.2f} [{low:.2f}, {high:.2f}], "
                f"{audit.verdict}; claim true of {audit.n_holding} of {audit.n_models}"
            ),
        )

    return measure
