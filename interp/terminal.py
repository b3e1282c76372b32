"""What the command line shows: tables on standard output, progress on standard error."""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

_COLOURS = {
    "reproduced": "green",
    "not reproduced": "bold red",
    "not measured at this scale": "dim",
}
_ROOM_FOR_SOURCES = 116
_SECONDS_BETWEEN_LINES = 20.0


def print_table(table: Table) -> None:
    """Print a table as wide as the terminal, or 140 columns where there is none."""
    Console(highlight=False, width=_width()).print(table)


def claims_table(claims: Sequence[Mapping[str, Any]]) -> Table:
    """Statement, source, paper, ours, expected, verdict; sources go below the statements, as
    reasons do, where there is little room."""
    room = _width()
    is_narrow = room < _ROOM_FOR_SOURCES
    rows = []
    for claim in claims:
        source = Text(claim["source"], style="dim")
        statement = Text(claim["statement"])
        if is_narrow:
            statement.append("\n").append_text(source)
        reason = "; ".join(part for part in (claim["error"], claim["detail"]) if part)
        if reason and claim["expected_text"]:
            statement.append(f"\n{reason}", style="dim italic")
        numbers = [Text(claim[f"{name}_text"] or "–") for name in ("paper", "value", "expected")]
        verdict = Text(claim["verdict"], style=_COLOURS[claim["verdict"]])
        rows.append([statement, *([] if is_narrow else [source]), *numbers, verdict])
    headers = ["source", "paper", "ours [95%]", "expected", "verdict"][is_narrow:]
    widest = [10, 16, 12, 14] if is_narrow else [24, 16, 24, 20, 14]
    widths = [
        min(most, max(len(header), *(row[1 + i].cell_len for row in rows), 1))
        for i, (header, most) in enumerate(zip(headers, widest, strict=True))
    ]
    table = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    # two of padding and one of border go to each column
    left = room - sum(widths) - 3 * (len(widths) + 1)
    table.add_column("claim", width=max(left, 16))
    for header, width in zip(headers, widths, strict=True):
        table.add_column(header, width=width)
    for row in rows:
        table.add_row(*row, end_section=is_narrow)
    return table


def plain_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """A table of texts and numbers; numbers are aligned to the right."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1))
    for i, column in enumerate(columns):
        cells = [row[i] for row in rows]
        is_number = bool(cells) and all(
            isinstance(cell, (int, float)) and not isinstance(cell, bool) for cell in cells
        )
        table.add_column(column, justify="right" if is_number else "left")
    for row in rows:
        table.add_row(*(Text(_shown(cell)) for cell in row))
    return table


class TerminalProgress:
    """Progress of a run on standard error: a bar with the time left, or a line now and then where
    standard error is no terminal."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bar: Progress | None = None
        self._started = self._last_line = time.monotonic()
        self._cost = self._cost_done = self._cost_here = 0.0
        self._n_units = self._n_done = 0

    def begin(self, *, n_units: int, n_done: int, cost: float, cost_done: float) -> None:
        """Show how much there is to do and how much of it is on disk."""
        self._n_units, self._n_done = n_units, n_done
        self._cost, self._cost_done, self._cost_here = cost, cost_done, 0.0
        self._started = self._last_line = time.monotonic()
        if n_done == n_units:
            self._console.print(f"all {n_units} units are on disk", style="dim")
            return
        if n_done:
            self._console.print(f"{n_done} of {n_units} units are on disk", style="dim")
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("units"),
                TimeElapsedColumn(),
                TextColumn("{task.fields[left]}"),
                console=self._console,
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(
                "computing", total=n_units, completed=n_done, left="starting"
            )

    def unit_done(self, name: str, cost: float) -> None:
        """Move the bar; the time left follows the costs of the units that are still to come."""
        self._n_done += 1
        self._cost_done += cost
        self._cost_here += cost
        now = time.monotonic()
        share_left = (self._cost - self._cost_done) / self._cost_here
        left = f"about {_clock((now - self._started) * share_left)} left"
        if self._bar is not None:
            self._bar.update(self._task, completed=self._n_done, left=left)
        elif now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            done = f"{self._n_done} of {self._n_units} units"
            print(f"{done}, {_clock(now - self._started)} gone, {left}", file=sys.stderr)

    def end(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def say(text: str, *, style: str = "") -> None:
    """A line on standard output, without mark-up."""
    Console(highlight=False, soft_wrap=True).print(Text(text, style=style))


def complain(text: str) -> None:
    """One line on standard error."""
    line = " ".join(f"interp: {text}".split("\n"))
    Console(stderr=True, highlight=False, soft_wrap=True).print(Text(line, style="red"))


def size_text(n_bytes: int) -> str:
    """``"3.1 MB"``."""
    size, unit = float(n_bytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def _width() -> int:
    console = Console()
    return console.width if console.is_terminal or "COLUMNS" in os.environ else 140


def _shown(cell: Any) -> str:
    if isinstance(cell, float):
        return f"{cell:.4g}"
    return "" if cell is None else str(cell)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
