"""What the Dyck study claims, and how each claim is judged.

Sources, in falling order of how far they can be relied on: *derived* from a proof or a closed
form, *code* (the released configurations), *measured* (an independent re-implementation at full
size). Expected intervals come from these. Numbers that are only remembered from the paper are
shown beside ours and judge nothing.
"""

from collections.abc import Callable

import numpy as np

from interp.bootstrap import (
    CorrelationKind,
    correlation,
    jackknife_interval,
    two_sample_interval,
)
from interp.case_studies.claims import Claim, Interval, Measurement, NotMeasured
from interp.case_studies.study import Results

DERIVED = "derived; Wen et al. 2023"
MEASURED = "Wen et al. 2023; independent run at full size"

LEARNED = 0.97  # train threshold accuracy from which a model counts as having learned the task
FLIPS_AT = 128  # inserted pairs at which flips are judged
MIN_FOR_CORRELATION = 24

ALL = ("smoke", "quick", "paper")
FULL = ("quick", "paper")

Measure = Callable[[Results], Measurement]


def _column(results: Results, prefix: str, name: str) -> np.ndarray:
    if not results.names(prefix):
        raise NotMeasured(f"no {prefix.rstrip('/')} in this run")
    return results.column(prefix, name)


def _p_open(results: Results) -> Measurement:
    numbers = results["language"].numbers
    p, n = numbers["p_open"], numbers["n_choices"]
    half_width = 1.96 * (p * (1 - p) / n) ** 0.5
    return Measurement(value=p, interval=(p - half_width, p + half_width), detail=f"{n} choices")


def _recogniser_accuracy(prefix: str, length: int) -> Measure:
    def measure(results: Results) -> Measurement:
        if length not in results.config.construction_lengths:
            raise NotMeasured(f"construction_lengths has no {length}")
        return _worst(prefix, f"argmax_{length}", np.min)(results)

    return measure


def _mean(prefix: str, name: str) -> Measure:
    return lambda results: Measurement(samples=_column(results, prefix, name))


def _worst(prefix: str, name: str, statistic: Callable[[np.ndarray], float]) -> Measure:
    """The worst model decides; the interval is over which models there happen to be."""

    def measure(results: Results) -> Measurement:
        values = _column(results, prefix, name)
        return Measurement(
            samples=values,
            statistic=statistic,
            detail=f"worst of {len(values)}; mean {values.mean():.4g}",
        )

    return measure


def _share_learned(prefix: str) -> Measure:
    def measure(results: Results) -> Measurement:
        values = _column(results, prefix, "train_threshold")
        return Measurement(
            samples=values >= LEARNED,
            detail=f"{np.sum(values >= LEARNED)} of {len(values)}; least {values.min():.3f}",
        )

    return measure


def _long_accuracy(results: Results) -> Measurement:
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


def _balance_and_length(results: Results) -> Measurement:
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


def _ratio_of_means(first: str, second: str, name: str) -> Measure:
    def measure(results: Results) -> Measurement:
        found = two_sample_interval(
            _column(results, first, name),
            _column(results, second, name),
            lambda a, b: float(a.mean() / b.mean()),
        )
        return Measurement(value=found.estimate, interval=(found.low, found.high))

    return measure


def _gain(first: str, second: str, name: str) -> Measure:
    def measure(results: Results) -> Measurement:
        found = two_sample_interval(
            _column(results, first, name),
            _column(results, second, name),
            lambda a, b: float(a.mean() - b.mean()),
        )
        return Measurement(value=found.estimate, interval=(found.low, found.high))

    return measure


def _variation(prefix: str, layer: int) -> Measure:
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


def _stack_top(prefix: str, layer: int) -> Measure:
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


def _flips(array: str, statistic: Callable[[np.ndarray], float]) -> Measure:
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


CLAIMS = [
    Claim(
        id="sampler-length",
        statement="Training strings have 28 brackets",
        source="Wen et al. 2023, released configuration",
        measured_by="brackets after START in the training set",
        expected=Interval(28, 28),
        scales=ALL,
        measure=lambda results: Measurement(value=results["language"].numbers["length"]),
        paper_value=28,
    ),
    Claim(
        id="sampler-depth",
        statement="No more than 4 brackets are open at once, and 4 sometimes are",
        source="Wen et al. 2023, released configuration",
        measured_by="greatest depth in the training set",
        expected=Interval(4, 4),
        scales=ALL,
        measure=lambda results: Measurement(value=results["language"].numbers["max_depth"]),
        paper_value=4,
    ),
    Claim(
        id="sampler-open",
        statement="Between the bottom and the depth limit a bracket opens with probability 1/2",
        source="Wen et al. 2023, released configuration",
        measured_by="share of opens where 0 < depth < 4 in the training set",
        expected=Interval(0.49, 0.51),
        scales=FULL,
        measure=_p_open,
        paper_value=0.5,
        tolerance="binomial: three standard deviations are .008 on the full set",
    ),
    Claim(
        id="uniform-400",
        statement="Uniform attention is enough: a model built by hand is right at length 400",
        source=DERIVED,
        measured_by="argmax accuracy of the hand-built recogniser, float64",
        expected=Interval(1, 1),
        scales=ALL,
        measure=_recogniser_accuracy("recogniser/uniform", 400),
        paper_value=1,
    ),
    Claim(
        id="uniform-4000",
        statement="... and at length 4000",
        source=DERIVED,
        measured_by="argmax accuracy of the hand-built recogniser, float64",
        expected=Interval(1, 1),
        scales=FULL,
        measure=_recogniser_accuracy("recogniser/uniform", 4000),
        paper_value=1,
    ),
    Claim(
        id="random-attention-works",
        statement="Nearly random attention is enough: only the two brackets of a pair are tied",
        source=DERIVED,
        measured_by="least argmax accuracy at length 400 over draws of the scores, sd 1, beta 100",
        expected=Interval(1, 1),
        scales=ALL,
        measure=_recogniser_accuracy("recogniser/pair_tied", 400),
        paper_value=1,
    ),
    Claim(
        id="random-attention-varies",
        statement="... and two such models attend about as differently as random attention does",
        source=DERIVED,
        measured_by="attention variation between the draws, causal, without START",
        expected=Interval.at_least(2),
        scales=FULL,
        measure=_variation("recogniser/pair_tied", 0),
        paper_value="random rows: 2.997",
    ),
    Claim(
        id="e1-learns",
        statement="Every one-layer model (E1) learns the training strings",
        source=MEASURED,
        measured_by="least train threshold accuracy (Hewitt et al. 2020: .8 of the closing mass)",
        expected={"quick": Interval.at_least(0.97), "paper": Interval.at_least(0.99)},
        measure=_worst("e1/", "train_threshold", np.min),
        paper_value="1.000 (measured, n = 40)",
    ),
    Claim(
        id="e1-long",
        statement="... and gets worse on strings of 400",
        source=MEASURED,
        measured_by="mean threshold accuracy at length 400, LayerNorm eps 1e-5",
        expected={"quick": Interval(0.78, 0.90), "paper": Interval(0.82, 0.87)},
        measure=_long_accuracy,
        paper_value=".845 ± .027 (measured, n = 40)",
    ),
    Claim(
        id="e1-balance",
        statement="Trained models are not balanced: some matched pair leaves a remainder",
        source=MEASURED,
        measured_by="mean balance violation of E1",
        expected={"quick": Interval(0.30, 0.65), "paper": Interval(0.38, 0.50)},
        measure=_mean("e1/", "balance_violation"),
        paper_value=".441 ± .091 (measured, n = 40)",
    ),
    Claim(
        id="balance-predicts-length",
        statement="The less balanced a model, the worse it is on strings of 400",
        source=MEASURED,
        measured_by="Spearman correlation of balance violation and length-400 threshold accuracy",
        expected={"quick": Interval.below(0), "paper": Interval.at_most(-0.4)},
        interval_within={"paper": Interval.below(0)},
        measure=_balance_and_length,
        paper_value="-.66; Pearson -.60 [-.77, -.35] (measured, n = 40)",
    ),
    Claim(
        id="contrastive-balances",
        statement="Contrastive training (E2) makes models more balanced",
        source=MEASURED,
        measured_by="mean balance violation of E2 over that of E1",
        expected={"quick": Interval.at_most(0.6), "paper": Interval.at_most(0.5)},
        measure=_ratio_of_means("e2/", "e1/", "balance_violation"),
        paper_value=".34 (measured, .150 over .441)",
    ),
    Claim(
        id="contrastive-helps",
        statement="... and better on strings of 400",
        source=MEASURED,
        measured_by="mean threshold accuracy at length 400, E2 minus E1",
        expected={"quick": Interval.at_least(0.05), "paper": Interval.at_least(0.08)},
        measure=_gain("e2/", "e1/", "long_threshold"),
        paper_value=".120 (measured, .965 against .845)",
    ),
    Claim(
        id="surgery-long",
        statement="Balancing a trained model by surgery makes it right at length 400",
        source="derived and measured; this study",
        measured_by="least argmax accuracy at length 400 after surgery on each E1",
        expected=Interval.at_least(0.999),
        scales=FULL,
        measure=_worst("e1/", "surgery_long_argmax", np.min),
        paper_value="1.000 (measured, n = 40)",
    ),
    Claim(
        id="surgery-train",
        statement="... costs nothing on the training strings",
        source="measured; this study",
        measured_by="least train threshold accuracy after surgery",
        expected=Interval.at_least(0.99),
        scales=FULL,
        measure=_worst("e1/", "surgery_train_threshold", np.min),
        paper_value="1.000 (measured, n = 40)",
    ),
    Claim(
        id="surgery-balance",
        statement="... and leaves no violation",
        source="derived; this study",
        measured_by="greatest balance violation after surgery, float32",
        expected=Interval.below(1e-5),
        scales=ALL,
        measure=_worst("e1/", "surgery_balance_violation", np.max),
        paper_value=0,
    ),
    Claim(
        id="pumping-flips",
        statement="Inserting 128 matched pairs flips the answer of trained models",
        source="measured; this study",
        measured_by="mean share of prefixes whose preferred close bracket changes",
        expected=Interval.above(0.15),
        scales=FULL,
        measure=_flips("flips", np.mean),
    ),
    Claim(
        id="pumping-surgery",
        statement="... and never of a balanced one",
        source="derived; this study",
        measured_by="greatest share over the E1 after surgery",
        expected=Interval(0, 0),
        scales=FULL,
        measure=_flips("surgery_flips", np.max),
        paper_value=0,
    ),
    Claim(
        id="e5-learns",
        statement="Most two-layer models without positions (E5) learn the training strings",
        source=MEASURED,
        measured_by="share with train threshold accuracy of at least .97",
        expected={"quick": Interval.at_least(0.75), "paper": Interval.at_least(0.85)},
        measure=_share_learned("e5/"),
        paper_value="mean accuracy .989 (measured, n = 8)",
    ),
    Claim(
        id="e6-learns",
        statement="... and so do those with linear positions (E6)",
        source=MEASURED,
        measured_by="share with train threshold accuracy of at least .97",
        expected={"quick": Interval.at_least(0.75), "paper": Interval.at_least(0.85)},
        measure=_share_learned("e6/"),
    ),
    Claim(
        id="e5-varies",
        statement="Equally good models attend more differently than random attention does (E5)",
        source=MEASURED,
        measured_by="attention variation of layer 2, causal, without START",
        expected=Interval.above(3),
        scales=FULL,
        measure=_variation("e5/", 1),
        paper_value="8.1 (measured, n = 8)",
    ),
    Claim(
        id="e6-varies",
        statement="... with linear positions, too (E6)",
        source=MEASURED,
        measured_by="attention variation of layer 2, causal, without START",
        expected=Interval.above(3),
        scales=FULL,
        measure=_variation("e6/", 1),
    ),
    Claim(
        id="e5-stack-top",
        statement="No E5 needs a head that looks at the bracket to be closed",
        source=MEASURED,
        measured_by="greatest share of layer-2 queries whose largest weight is on the stack top",
        expected=Interval.below(0.6),
        scales=FULL,
        measure=_stack_top("e5/", 1),
    ),
    Claim(
        id="subset-sum",
        statement="A weight is imitated by a pruned random gadget of 14 products",
        source=DERIVED,
        measured_by="median error of the best masked sum, weights U(-1, 1)",
        expected=Interval.below(5e-4),
        scales=ALL,
        measure=lambda results: Measurement(
            value=results["subset_sum"].numbers["median_error_14"],
            detail=", ".join(
                f"n = {name.rsplit('_', 1)[1]}: {value:.2g}"
                for name, value in results["subset_sum"].numbers.items()
            ),
        ),
        paper_value="6.9e-5 (measured)",
    ),
    Claim(
        id="imitation-works",
        statement="... and a whole trained model by such gadgets",
        source=DERIVED,
        measured_by="least train threshold accuracy, every weight of each E1 imitated",
        expected=Interval.at_least(0.99),
        scales=FULL,
        measure=_worst("e1/", "imitation_train_threshold", np.min),
    ),
]
