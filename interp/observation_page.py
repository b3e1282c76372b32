"""An observation as one HTML page that needs nothing beside it: figures, numbers, settings."""

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
from matplotlib.figure import Figure

from interp.figures import heatmap, layer_head_grid, profile_by_layer
from interp.files import write_atomically
from interp.observation import Observation

_TEMPLATE = Path(__file__).with_name("observation_page.html")

# statistic -> what it is called on the page, and the ends of its colours
_WORDS: dict[str, tuple[str, tuple[float, float] | None]] = {
    "entropy": ("entropy of attention (nats)", None),
    "first_mass": ("attention on the first token", (0.0, 1.0)),
    "sink_mass": ("attention on the learned sink", (0.0, 1.0)),
    "max": ("largest weight of a query", (0.0, 1.0)),
    "lse": ("log-sum-exp of the scores", None),
}


@dataclass(frozen=True)
class PageFigure:
    """A figure with what to see in it, and the words for those who do not see it."""

    figure: Figure
    title: str
    caption: str
    alt: str


def observation_figures(
    observation: Observation, *, patterns: Sequence[tuple[int, int]] = ()
) -> list[PageFigure]:
    """A layer x head grid and a profile through the layers for each statistic of an observation.

    Means over the texts and queries.

    patterns: (layer, head) pairs whose kept rows follow as heatmaps, of the first text.
    """
    figures = []
    table = observation.table()
    if "stack" not in table:
        table.insert(0, "stack", next(iter(observation.stacks)))
    for (stack, name), part in table.groupby(["stack", "statistic"], sort=False):
        if name not in _WORDS:
            continue
        words, limits = _WORDS[name]
        where = f" ({stack})" if table["stack"].nunique() > 1 else ""
        weighted = part.assign(total=part["value"] * part["n"])
        sums = weighted.groupby(["layer", "head"])[["total", "n"]].sum()
        grid = (sums["total"] / sums["n"]).unstack("head")
        layers, values = grid.index.tolist(), grid.to_numpy()
        lowest, highest = float(grid.min(axis=None)), float(grid.max(axis=None))
        spread = f"from {lowest:.3g} to {highest:.3g}"
        figures += [
            PageFigure(
                layer_head_grid(values, colour_label=words, limits=limits, layers=layers),
                f"{words}, by layer and head{where}".capitalize(),
                f"Mean over all queries of all texts: {spread}.",
                f"Grid of {len(layers)} layers and {values.shape[1]} heads: {words}, {spread}.",
            ),
            PageFigure(
                profile_by_layer(values, label=words, limits=limits, layers=layers),
                f"{words}, through the layers{where}".capitalize(),
                "A dot per head, a line through the layers' means.",
                f"Line through the means of {len(layers)} layers: {words}, {spread}.",
            ),
        ]
    return figures + [_pattern_figure(observation, layer, head) for layer, head in patterns]


def write_observation_page(
    path: str | Path,
    figures: Sequence[PageFigure],
    *,
    title: str,
    facts: Mapping[str, str],
    tables: Mapping[str, pd.DataFrame] | None = None,
    max_rows: int = 500,
) -> Path:
    """Write the page, whole or not at all, and return its path.

    facts: what a reader needs to get the numbers again: model, text, tokens, versions, ...
    tables: shown by their title, each cut after ``max_rows`` rows, and it says so.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    page = environment.from_string(_TEMPLATE.read_text()).render(
        title=title,
        facts=dict(facts),
        figures=[(figure, _data_uri(figure.figure)) for figure in figures],
        tables=[_table(name, table, max_rows) for name, table in (tables or {}).items()],
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    write_atomically(path, page)
    return path


def _pattern_figure(observation: Observation, layer: int, head: int) -> PageFigure:
    weights = observation.pattern(layer, head).weights
    size = f"{weights.shape[0]} queries by {weights.shape[1]} keys"
    return PageFigure(
        heatmap(weights.sqrt(), colour_label="square root of attention"),
        f"Pattern of layer {layer}, head {head}",
        f"The first text: {size}, in the order in which the rows were kept.",
        f"Heatmap of the attention pattern of layer {layer}, head {head}: {size}.",
    )


def _data_uri(figure: Figure) -> str:
    drawn = io.BytesIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    return "data:image/svg+xml;base64," + base64.b64encode(drawn.getvalue()).decode()


def _table(name: str, table: pd.DataFrame, max_rows: int) -> dict[str, Any]:
    shown = table.head(max_rows)
    cells = [[_cell(value) for value in row] for row in shown.itertuples(index=False, name=None)]
    return {"name": name, "columns": list(table.columns), "rows": cells, "n_all": len(table)}


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
