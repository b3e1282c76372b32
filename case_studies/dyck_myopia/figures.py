"""The pictures of the Dyck study."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure as Drawing

from interp.attention_variation import attention_variation, random_attention_variation
from interp.bootstrap import bootstrap_interval, correlation, jackknife_interval
from interp.case_studies.study import Figure, Results, UnitResult

# one colour a family of models, readable by the colour-blind (Okabe & Ito 2008)
COLOURS = {
    "E1": "#0072B2",
    "E2": "#009E73",
    "E5": "#D55E00",
    "E6": "#CC79A7",
    "operated": "#E69F00",
    "built": "#56B4E9",
    "random": "#555555",
}
LABELS = {
    "E1": "one layer (E1)",
    "E2": "contrastive (E2)",
    "E5": "two layers (E5)",
    "E6": "with positions (E6)",
}
GLYPHS = ("[]", "()", "{}", "<>")
MAX_SHOWN = 4
SMALLEST_SHOWN = 1e-6  # where a distance of 0 goes on a logarithmic axis


def draw_attention(results: Results) -> Drawing:
    """Attention of several equally good models on the probe string, one row a family."""
    families = [
        ("built by hand", results.select("recogniser/pair_tied"), 0),
        (LABELS["E1"], results.select("e1/"), 0),
        (LABELS["E5"] + ", layer 2", results.select("e5/"), 1),
        (LABELS["E6"] + ", layer 2", results.select("e6/"), 1),
    ]
    families = [family for family in families if family[1]]
    n_columns = max(min(MAX_SHOWN, len(units)) for _, units, _ in families)
    figure = Drawing(
        figsize=(2.3 * n_columns + 1.2, 2.35 * len(families) + 0.3), layout="constrained"
    )
    axes = figure.subplots(len(families), n_columns, squeeze=False)
    symbols = _probe_symbols(results)
    image = None
    for row, (label, units, layer) in zip(axes, families, strict=True):
        for column, axis in enumerate(row):
            if column >= len(units):
                axis.axis("off")
                continue
            pattern = units[column].arrays["pattern"][layer]
            image = axis.imshow(pattern, vmin=0, vmax=1, cmap="magma_r", interpolation="nearest")
            axis.set_xticks(range(len(symbols)), symbols, fontsize=6)
            axis.set_yticks(range(len(symbols)), symbols, fontsize=6)
            axis.tick_params(length=0, pad=1)
            axis.set_title(_accuracy_title(units[column]), fontsize=8)
        row[0].set_ylabel(label, fontsize=9)
    assert image is not None
    figure.colorbar(image, ax=axes, shrink=0.5, label="attention weight")
    return figure


def draw_balance(results: Results) -> Drawing:
    """Balance violation against accuracy at length 400, with a line fitted to E1."""
    figure = Drawing(figsize=(5.6, 4.2), layout="constrained")
    axis = figure.subplots()
    for family in ("E1", "E2"):
        units = results.select(f"{family.lower()}/")
        violation, accuracy = _columns(units, "balance_violation", "long_threshold")
        axis.scatter(
            violation,
            accuracy,
            color=COLOURS[family],
            label=LABELS[family],
            s=22,
        )
    violation, accuracy = _columns(results.select("e1/"), "balance_violation", "long_threshold")
    if len(violation) >= 4 and violation.std() > 0 and accuracy.std() > 0:
        grid = np.linspace(violation.min(), violation.max(), 50)
        axis.plot(grid, np.polyval(np.polyfit(violation, accuracy, 1), grid), color=COLOURS["E1"])
        low, high = _fit_band(violation, accuracy, grid)
        axis.fill_between(grid, low, high, color=COLOURS["E1"], alpha=0.15, linewidth=0)
        found = correlation(violation, accuracy, kind="spearman")
        axis.set_title(
            f"E1: Spearman {found.value:.2f} [{found.bootstrap[0]:.2f}, {found.bootstrap[1]:.2f}]",
            fontsize=10,
        )
    axis.set_xlabel("balance violation (0: perfectly balanced)")
    axis.set_ylabel("threshold accuracy at length 400")
    axis.legend(frameon=False)
    return figure


def draw_positions(results: Results) -> Drawing:
    """Threshold accuracy by position in the long strings."""
    figure = Drawing(figsize=(7, 3.8), layout="constrained")
    axis = figure.subplots()
    families = [
        ("E1", "e1/", "long", LABELS["E1"]),
        ("operated", "e1/", "surgery_long", "E1 after surgery"),
        ("E2", "e2/", "long", LABELS["E2"]),
        ("E5", "e5/", "long", LABELS["E5"]),
        ("E6", "e6/", "long", LABELS["E6"]),
    ]
    for colour, prefix, name, label in families:
        units = results.select(prefix)
        if units:
            positions, rate = _rate_by_position(units, name)
            axis.plot(positions, rate, color=COLOURS[colour], label=label, linewidth=1.5)
    length = results.config.train_length
    lowest = min((np.min(line.get_ydata()) for line in axis.lines), default=0.0)
    axis.axvline(length, color="black", linestyle=":", linewidth=1)
    axis.set(xlabel="position", ylabel="threshold accuracy", ylim=(lowest - 0.12, 1.02))
    axis.annotate(
        "longest training string",
        (length, lowest - 0.1),
        (4, 0),
        textcoords="offset points",
        fontsize=8,
    )
    axis.legend(frameon=False, fontsize=8, loc="lower right", ncols=2)
    return figure


def draw_pumping(results: Results) -> Drawing:
    """How often inserted pairs change the answer, before and after surgery."""
    figure = Drawing(figsize=(5.6, 3.8), layout="constrained")
    axis = figure.subplots()
    pairs = np.array(results.config.pumped_pairs)
    curves = [
        ("E1", "e1/", "flips", LABELS["E1"], "-"),
        ("E2", "e2/", "flips", LABELS["E2"], "-"),
        ("operated", "e1/", "surgery_flips", "E1 after surgery", "--"),
    ]
    for colour, prefix, name, label, style in curves:
        units = results.select(prefix)
        if units:
            rates = np.stack([unit.arrays[name] for unit in units])
            axis.plot(pairs, rates.mean(0), style, color=COLOURS[colour], label=label, marker="o")
            low, high = _band(rates)
            axis.fill_between(pairs, low, high, color=COLOURS[colour], alpha=0.15, linewidth=0)
    axis.set_xscale("symlog", base=2, linthresh=1)
    axis.set_xticks(pairs, [str(n) for n in pairs])
    axis.set(xlabel="matched pairs inserted", ylabel="share of prefixes that flip")
    axis.set_ylim(bottom=-0.02)
    axis.legend(frameon=False, loc="upper left")
    return figure


def draw_variation(results: Results) -> Drawing:
    """Attention variation of each family beside that of random attention."""
    families = [
        (LABELS["E1"], "e1/", 0, "E1"),
        (LABELS["E2"], "e2/", 0, "E2"),
        ("E5, layer 1", "e5/", 0, "E5"),
        ("E5, layer 2", "e5/", 1, "E5"),
        ("E6, layer 1", "e6/", 0, "E6"),
        ("E6, layer 2", "e6/", 1, "E6"),
        ("built by hand,\npair-tied random", "recogniser/pair_tied", 0, "built"),
    ]
    families = [family for family in families if len(results.select(family[1])) >= 2]
    figure = Drawing(figsize=(6.2, 0.5 * len(families) + 1.3), layout="constrained")
    axis = figure.subplots()
    for row, (_, prefix, layer, colour) in enumerate(families):
        patterns = np.stack([unit.arrays["pattern"][layer] for unit in results.select(prefix)])
        value = attention_variation(patterns)
        spread = 0.0
        if len(patterns) > 2:
            spread = jackknife_interval(patterns, attention_variation).high - value
        error = [[min(spread, value)], [spread]]  # a distance is not below 0
        axis.barh(row, value, color=COLOURS[colour], xerr=error if spread else None, capsize=3)
        axis.annotate(
            f"{value:.2f}",
            (value + spread, row),
            (5, 0),
            textcoords="offset points",
            va="center",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
        )
    baseline = random_attention_variation(len(_probe_symbols(results)))
    axis.axvline(baseline, color=COLOURS["random"], linestyle="--", linewidth=1.2)
    axis.annotate(
        f"random attention {baseline:.2f}",
        (baseline, -0.75),
        (4, 0),
        textcoords="offset points",
        fontsize=8,
        color=COLOURS["random"],
        va="center",
    )
    axis.set_yticks(range(len(families)), [family[0] for family in families])
    axis.set_ylim(len(families) - 0.4, -1.1)
    axis.set_xlim(0, 1.12 * axis.get_xlim()[1])
    axis.set_xlabel("attention variation (mean squared distance between two models)")
    return figure


def draw_equivalence(results: Results) -> Drawing:
    """Output distance after a head's pattern was replaced, beside distances that mean nothing."""
    families = [
        (family, results[f"equivalence/{family.lower()}"].arrays)
        for family in ("E1", "E5", "E6")
        if f"equivalence/{family.lower()}" in results
    ]
    rows = [
        ("null/noise", "itself, 1% noise"),
        ("null/pair", "another model"),
        ("distance/donor", "another's pattern"),
        ("distance/uniform", "uniform pattern"),
        ("distance/shuffled", "shuffled rows"),
        ("distance/simplex", "random simplex"),
    ]
    figure = Drawing(figsize=(6.6, 3.4), layout="constrained")
    axis = figure.subplots()
    for index, (family, arrays) in enumerate(families):
        offset = 0.22 * (index - (len(families) - 1) / 2)
        for row, (name, _) in enumerate(rows):
            found = arrays[name] if arrays[name].ndim == 1 else arrays[name].mean(1)
            height = np.full(len(found), row + offset)
            axis.scatter(
                np.maximum(found, SMALLEST_SHOWN),
                height,
                s=14,
                alpha=0.5,
                linewidths=0,
                color=COLOURS[family],
                label=LABELS[family] if row == 0 else None,
            )
    axis.axhline(1.5, color="black", linewidth=0.8)
    axis.set_xscale("log")
    axis.set_yticks(range(len(rows)), [label for _, label in rows])
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_xlabel("total variation of the next-token distribution from the model's own")
    if families:
        figure.legend(frameon=False, loc="outside upper center", ncols=3, fontsize=8)
    return figure


def draw_audit(results: Results) -> Drawing:
    """What single components and the whole model tell about accuracy at length 400."""
    scores = [
        ("balance violation\n(whole model)", "balance_violation", "operated"),
        ("cosine of a pair's values\n(W_V)", "value_cosine", "E1"),
        ("spread of a pair's scores\n(W_Q, W_K)", "score_tie", "E1"),
        ("stack-top share\n(attention head)", "stack_top_share", "E1"),
    ]
    units = results.select("e1/")
    figure = Drawing(figsize=(6.2, 3.2), layout="constrained")
    axis = figure.subplots()
    (outcome,) = _columns(units, "long_threshold")
    for row, (_, name, colour) in enumerate(scores):
        values = np.array([np.mean(unit.numbers[name]) for unit in units])
        if len(values) >= 4 and np.ptp(values) > 0 and np.ptp(outcome) > 0:
            found = correlation(values, outcome, kind="spearman")
            low, high = found.bootstrap
            axis.plot([low, high], [row, row], color=COLOURS[colour], linewidth=2)
            axis.plot(found.value, row, "o", color=COLOURS[colour])
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_yticks(range(len(scores)), [label for label, _, _ in scores])
    axis.set_ylim(len(scores) - 0.5, -0.5)
    axis.set_xlim(-1, 1)
    axis.set_xlabel(f"Spearman correlation with length-400 accuracy, {len(units)} E1")
    return figure


def _probe_symbols(results: Results) -> list[str]:
    """The probe string as it is written on an axis."""
    config = results.config
    return [
        glyph if kind < len(GLYPHS) else f"{kind}{'()'[side]}"
        for kind in range(config.n_types)
        for side, glyph in enumerate(GLYPHS[kind % len(GLYPHS)])
        for _ in range(config.max_depth)
    ]


def _accuracy_title(unit: UnitResult) -> str:
    """Accuracy where the model was trained; of a hand-built one, where it was evaluated first."""
    evaluated = [name for name in unit.numbers if name.startswith("threshold_")]
    accuracy = unit.numbers["train_threshold" if not evaluated else evaluated[0]]
    return f"accuracy {accuracy:.3f}"


def _columns(units: Sequence[UnitResult], *names: str) -> list[np.ndarray]:
    return [np.array([unit.numbers[name] for unit in units], dtype=float) for name in names]


def _rate_by_position(
    units: Sequence[UnitResult], name: str, window: int = 11
) -> tuple[np.ndarray, np.ndarray]:
    """Pooled threshold accuracy over models, in a running window of positions."""
    kernel = np.ones(window)
    hits, counts = (
        np.convolve(
            np.sum([unit.arrays[f"{name}_{what}"] for unit in units], axis=0), kernel, mode="same"
        )
        for what in ("threshold_hits", "counts")
    )
    positions = np.arange(len(hits))
    return positions[counts > 0], hits[counts > 0] / counts[counts > 0]


def _band(rates: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bootstrap interval of the mean at each point of curves ``[model, point]``."""
    intervals = [bootstrap_interval(column, n_resamples=500) for column in rates.T]
    return np.array([i.low for i in intervals]), np.array([i.high for i in intervals])


def _fit_band(x: np.ndarray, y: np.ndarray, grid: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bootstrap band of the least-squares line, resampling models."""
    rng = np.random.default_rng(0)
    lines = []
    for _ in range(500):
        chosen = rng.integers(len(x), size=len(x))
        if np.ptp(x[chosen]) > 0:
            lines.append(np.polyval(np.polyfit(x[chosen], y[chosen], 1), grid))
    low, high = np.quantile(lines, [0.025, 0.975], axis=0)
    return low, high


FIGURES = [
    Figure(
        name="attention",
        title="Equally good models, different attention",
        caption=(
            "Each square is one model's attention on the probe string: queries downwards, keys to "
            "the right. Models in a row are right about the same strings; what they look at has "
            "little in common."
        ),
        alt="Grid of attention heat maps on the probe string, one row for each family of models.",
        draw=draw_attention,
    ),
    Figure(
        name="variation",
        title="How differently equally good models attend",
        caption=(
            "Mean squared Frobenius distance between the patterns of two models, with a jackknife "
            "interval. The dashed line is random attention: beyond it, two trained models are "
            "further apart than two models that attend at random."
        ),
        alt="Horizontal bars of attention variation by family and layer, with a line at 3.00.",
        draw=draw_variation,
    ),
    Figure(
        name="balance",
        title="Balance predicts length",
        caption=(
            "One dot a model. The further from perfect balance, the worse on strings of 400; "
            "contrastive training moves models up and to the left. The band is a bootstrap over "
            "models."
        ),
        alt="Scatter plot of balance violation against accuracy at length 400 with a falling line.",
        draw=draw_balance,
    ),
    Figure(
        name="positions",
        title="Where accuracy is lost",
        caption=(
            "Threshold accuracy by position in strings of 400, pooled over models, in a running "
            "window of 11. Surgery keeps one-layer models right far beyond the longest string they "
            "were trained on."
        ),
        alt="Lines of threshold accuracy by position up to 400, one for each family of models.",
        draw=draw_positions,
    ),
    Figure(
        name="pumping",
        title="Pumping in matched pairs",
        caption=(
            "Inserting matched pairs changes nothing about what must close next, yet the answer of "
            "trained models flips once there are enough of them. After surgery it never does."
        ),
        alt="Share of flipped answers against the number of inserted pairs, for three groups.",
        draw=draw_pumping,
    ),
    Figure(
        name="equivalence",
        title="The same function does not survive another's attention",
        caption=(
            "Above the line, distances that mean nothing: a model from itself under 1% noise, and "
            "from another model. Below it, a model from itself with the last layer's pattern "
            "replaced. Models that are almost the same function become another one when they "
            "swap patterns. One dot a model, or a pair of models."
        ),
        alt="Dots of output distance on a logarithmic axis, one row for each replacement.",
        draw=draw_equivalence,
    ),
    Figure(
        name="audit",
        title="What a component tells about longer strings",
        caption=(
            "Rank correlation with accuracy at length 400 over equally good models, with a "
            "bootstrap interval. An interval that holds 0 tells nothing. Some components are "
            "blind, and some are not: ask before believing either."
        ),
        alt="Four correlations with intervals: the whole model's measure and three components'.",
        draw=draw_audit,
    ),
]
