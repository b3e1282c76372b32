"""Figures of what attention and the residual stream do. Each function returns a new Figure.

No pyplot, no theme, no global state: figures are drawn by whoever shows or saves them. Arrays are
torch tensors or numpy arrays.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

Array = Tensor | np.ndarray

_SEQUENTIAL = "viridis"
_INK = "#14519c"
_ACCENT = "#b3541e"


def heatmap(
    values: Float[Array, "row column"],
    *,
    title: str = "",
    row_label: str = "query position",
    column_label: str = "key position",
    colour_label: str = "attention",
    max_cells: int = 400,
    log: bool = False,
    limits: tuple[float, float] | None = None,
) -> Figure:
    """A matrix of any size as colours; more than ``max_cells`` a side are pooled, and it says so.

    A pooled cell shows the largest value in it, so that a thin line or a single sink stays visible.
    Axes keep the numbers of the full matrix. ``log`` colours by logarithm and leaves out what is
    not positive; ``limits`` fixes the ends of the colours.
    """
    matrix = _numpy(values)
    if 0 in matrix.shape:
        raise ValueError(f"values is empty: its shape is {matrix.shape}")
    if max_cells < 1:
        raise ValueError(f"max_cells must be at least 1, got {max_cells}")
    pooled, pool = pool_matrix(matrix, max_cells)
    figure, axes = _figure(width=5.4, height=4.5)
    _colours(
        axes,
        pooled,
        extent=(-0.5, matrix.shape[1] - 0.5, matrix.shape[0] - 0.5, -0.5),
        colour_label=colour_label,
        log=log,
        limits=limits,
    )
    axes.set(xlabel=column_label, ylabel=row_label)
    note = f"each cell: the largest of {pool[0]} x {pool[1]}" if max(pool) > 1 else ""
    axes.set_title("\n".join(part for part in (title, note) if part))
    return figure


def pool_matrix(
    matrix: Float[np.ndarray, "row column"], max_cells: int
) -> tuple[Float[np.ndarray, "pooled_row pooled_column"], tuple[int, int]]:
    """Largest values of equal tiles, at most ``max_cells`` a side, and the tile's size."""
    rows, columns = (-(-n // max_cells) for n in matrix.shape)
    padding = [(0, -n % size) for n, size in zip(matrix.shape, (rows, columns), strict=True)]
    padded = np.pad(matrix, padding, mode="edge")
    tiles = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    # where all is missing it stays so; one number beats missing ones
    filled = np.where(np.isnan(tiles), -np.inf, tiles).max((1, 3))
    return np.where(np.isneginf(filled), np.nan, filled), (rows, columns)


def layer_head_grid(
    values: Float[Array, "layer head_index"],
    *,
    title: str = "",
    colour_label: str = "",
    limits: tuple[float, float] | None = None,
    layers: Sequence[int] | None = None,
) -> Figure:
    """One coloured cell per layer and head; ``layers`` are their numbers where some are missing."""
    matrix = _numpy(values)
    n_layers, n_heads = matrix.shape
    numbers = range(n_layers) if layers is None else layers
    if len(numbers) != n_layers:
        raise ValueError(f"layers has {len(numbers)} numbers for {n_layers} rows of values")
    figure, axes = _figure(
        width=max(3.5, 1.8 + 0.3 * min(n_heads, 40)), height=max(2.4, 1.2 + 0.17 * n_layers)
    )
    extent = (-0.5, n_heads - 0.5, n_layers - 0.5, -0.5)
    _colours(axes, matrix, extent=extent, colour_label=colour_label, log=False, limits=limits)
    step = -(-n_layers // 20)
    axes.set_yticks(range(0, n_layers, step), [str(number) for number in numbers[::step]])
    axes.set(xlabel="head", ylabel="layer", title=title)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def profile_by_layer(
    values: Float[Array, "layer head_index"],
    *,
    title: str = "",
    label: str = "",
    limits: tuple[float, float] | None = None,
    layers: Sequence[int] | None = None,
) -> Figure:
    """A statistic through the layers: a dot per head, a line through the layers' means."""
    matrix = _numpy(values)
    numbers = np.arange(len(matrix)) if layers is None else np.asarray(layers)
    figure, axes = _figure(width=6.4, height=3.2)
    across = np.repeat(numbers, matrix.shape[1])
    axes.plot(across, matrix.ravel(), ".", color=_INK, alpha=0.45, markersize=5, label="heads")
    axes.plot(numbers, np.nanmean(matrix, 1), color=_ACCENT, label="mean of the layer")
    axes.set(xlabel="layer", ylabel=label, title=title)
    if limits is not None:
        axes.set_ylim(*limits)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    return figure


def curves_by_layer(
    curves: Mapping[str, Float[Array, " layer"]],
    *,
    title: str = "",
    label: str = "",
    log: bool = False,
) -> Figure:
    """Several named numbers through the layers, one line each."""
    figure, axes = _figure(width=6.4, height=3.2)
    for name, values in curves.items():
        axes.plot(_numpy(values), marker=".", label=name)
    axes.set(xlabel="layer", ylabel=label, title=title)
    if log:
        axes.set_yscale("log")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    return figure


def norm_profile(
    norms: Float[Array, "layer pos"],
    *,
    title: str = "",
    tokens: Sequence[str] | None = None,
    max_cells: int = 400,
) -> Figure:
    """Norms of the residual stream by layer and position, coloured by logarithm.

    tokens: the text, written under the positions when there are at most 40.
    """
    matrix = _numpy(norms)
    if tokens is not None and len(tokens) != matrix.shape[1]:
        raise ValueError(f"tokens has {len(tokens)} words for {matrix.shape[1]} positions")
    figure = heatmap(
        matrix,
        title=title,
        row_label="layer",
        column_label="position",
        colour_label="norm of the residual stream",
        max_cells=max_cells,
        log=True,
    )
    axes = figure.axes[0]
    axes.invert_yaxis()  # deeper is higher
    figure.set_size_inches(7.2, 3.8)
    if tokens is not None and len(tokens) <= 40:
        axes.set_xticks(range(len(tokens)), [_visible(word) for word in tokens], rotation=90)
        axes.tick_params(axis="x", labelsize="small")
    return figure


def _colours(
    axes: Axes,
    matrix: Float[np.ndarray, "row column"],
    *,
    extent: tuple[float, float, float, float],
    colour_label: str,
    log: bool,
    limits: tuple[float, float] | None,
) -> None:
    settings: dict[str, Any] = {}
    if log:
        matrix = np.where(matrix > 0, matrix, np.nan)
        low, high = limits or (_finite(matrix, np.min), _finite(matrix, np.max))
        settings["norm"] = LogNorm(low, max(high, low * 1.0001))
    elif limits is not None:
        settings["vmin"], settings["vmax"] = limits
    image = axes.imshow(
        matrix,
        aspect="auto",
        interpolation="nearest",
        cmap=_SEQUENTIAL,
        extent=extent,
        **settings,
    )
    assert axes.figure is not None
    axes.figure.colorbar(image, ax=axes, label=colour_label)


def _finite(matrix: Float[np.ndarray, "row column"], reduce: Any) -> float:
    finite = matrix[np.isfinite(matrix)]
    if not finite.size:
        raise ValueError("values has no positive number to colour by its logarithm")
    return float(reduce(finite))


def _figure(*, width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _numpy(values: Float[Array, "..."]) -> Float[np.ndarray, "..."]:
    if isinstance(values, Tensor):
        values = values.detach().float().cpu().numpy()
    return np.asarray(values, dtype=np.float64)


def _visible(word: str) -> str:
    """A token as a tick label: blanks are seen, and a dollar sign is no formula."""
    return word.replace(" ", "\N{OPEN BOX}").replace("\n", "\\n").replace("$", r"\$") or "''"
