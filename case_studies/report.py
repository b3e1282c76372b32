"""The report of a finished run: one page, one Markdown table, one JSON file, drawn from disk.

``report.html`` needs nothing but itself: pictures are embedded, nothing is fetched, light and dark
follow the reader. Everything is written at once or not at all.
"""

import base64
import io
import json
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import jinja2

from interp.case_studies.judge import Judgement, Verdict
from interp.case_studies.record import FinishedRun, wishes
from interp.case_studies.strip import strip_svg
from interp.case_studies.study import JSON, Figure, StudyError
from interp.files import write_atomically

PAGE, TABLE, CLAIMS = "report.html", "report.md", "claims.json"
_TEMPLATE = Path(__file__).with_name("report_template.html")
_DPI = 150


@dataclass(frozen=True)
class DrawnFigure:
    """A figure's PNG, or why there is none."""

    figure: Figure
    png: bytes | None
    error: str = ""
    trace: str = ""

    @property
    def data_uri(self) -> str:
        """The picture as text that a page can hold."""
        assert self.png is not None
        return "data:image/png;base64," + base64.b64encode(self.png).decode()


def write_report(run: FinishedRun) -> dict[str, str]:
    """Write page, table, claims and pictures into the run's folder.

    Returns the error of every figure that could not be drawn, by name; the page shows it in the
    figure's place. Raises ``OSError`` where a file cannot be written.
    """
    drawn = [_draw(figure, run) for figure in run.study.figures]
    judged = [judgement.as_json() for judgement in run.judgements]
    text = json.dumps(judged, indent=1, ensure_ascii=False, allow_nan=False)
    write_atomically(run.folder / CLAIMS, text + "\n")
    write_atomically(run.folder / TABLE, markdown(run))
    if drawn:
        (run.folder / "figures").mkdir(exist_ok=True)
    for picture in drawn:
        if picture.png is not None:
            path = run.folder / "figures" / f"{picture.figure.name}.png"
            write_atomically(path, picture.png)
    write_atomically(run.folder / PAGE, html(run, drawn))
    return {picture.figure.name: picture.error for picture in drawn if picture.png is None}


def markdown(run: FinishedRun) -> str:
    """The claims as a Markdown table, with a line of provenance."""
    rows = [
        "| claim | source | paper | ours | expected | verdict |",
        "|---|---|---|---|---|---|",
    ]
    for judgement in run.judgements:
        cells = [
            judgement.claim.statement,
            judgement.claim.source,
            judgement.paper_text(),
            judgement.value_text(),
            judgement.expected_text(),
            _verdict_with_reason(judgement),
        ]
        rows.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    record = run.record
    title = f"# {record['title']}\n\n{summarize(_verdicts(run))} ({wishes(record)})\n"
    origin = f"Result hash `{record['result_hash']}`, {record['finished']}, {_commit(record)}.\n"
    return "\n".join([title, *rows, "", origin])


def html(run: FinishedRun, drawn: list[DrawnFigure]) -> str:
    """The page."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    counts = {verdict: _verdicts(run).count(verdict) for verdict in get_args(Verdict)}
    return template.render(
        record=run.record,
        info=run.study.info,
        judgements=run.judgements,
        strip=lambda judgement: jinja2.utils.markupsafe.Markup(strip_svg(judgement)),
        reason=_reason,
        wishes=wishes(run.record),
        summary=summarize(_verdicts(run)),
        counts=counts,
        figures=drawn,
        groups=_time_by_group(run.record["units"]),
        unit_seconds=_duration(sum(unit["seconds"] for unit in run.record["units"].values())),
        wall=_duration(run.record["seconds"]),
        duration=_duration,
        commit=_commit(run.record),
        config=_shown(run.record["config"]),
        data=_data_files(run.record["units"]),
        verdict_class=lambda verdict: verdict.replace(" ", "-"),
    )


def summarize(verdicts: list[str]) -> str:
    """``"5 of 7 claims reproduced, 1 not reproduced, 1 not measured at this scale"``."""
    words = f"{verdicts.count('reproduced')} of {len(verdicts)} claims reproduced"
    for verdict in get_args(Verdict)[1:]:
        if verdict in verdicts:
            words += f", {verdicts.count(verdict)} {verdict}"
    return words


def read_claims(folder: Path) -> list[dict[str, JSON]]:
    """The claims of a finished run as they were judged when its report was last drawn."""
    path = folder / CLAIMS
    try:
        return list(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise StudyError(
            f"cannot read the claims in {path} ({type(error).__name__}); 'interp report {folder}' "
            "judges and draws the run again"
        ) from error


def _draw(figure: Figure, run: FinishedRun) -> DrawnFigure:
    try:
        drawing = figure.draw(run.results)
        buffer = io.BytesIO()
        drawing.savefig(buffer, format="png", dpi=_DPI, facecolor="white", bbox_inches="tight")
    except Exception as error:
        # a picture that fails must not take the claims with it: the page and the caller are told
        return DrawnFigure(figure, None, f"{type(error).__name__}: {error}", traceback.format_exc())
    return DrawnFigure(figure, buffer.getvalue())


def _verdicts(run: FinishedRun) -> list[str]:
    return [judgement.verdict for judgement in run.judgements]


def _reason(judgement: Judgement) -> str:
    """What is to be said about a verdict beside the numbers."""
    return "; ".join(part for part in (judgement.error, judgement.detail) if part)


def _verdict_with_reason(judgement: Judgement) -> str:
    reason = _reason(judgement)
    return f"{judgement.verdict} ({reason})" if reason else judgement.verdict


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _time_by_group(units: Mapping[str, JSON]) -> list[tuple[str, int, str]]:
    """Name before the first slash, number of units and time of each group of units."""
    groups: dict[str, list[float]] = {}
    for name, unit in units.items():
        groups.setdefault(name.partition("/")[0], []).append(unit["seconds"])
    return [(name, len(times), _duration(sum(times))) for name, times in groups.items()]


def _data_files(units: Mapping[str, JSON]) -> dict[str, str]:
    """sha256 of every data file by name, over all units."""
    return {name: digest for unit in units.values() for name, digest in unit["data"].items()}


def _shown(config: Mapping[str, JSON]) -> dict[str, str]:
    return {name: json.dumps(value, ensure_ascii=False) for name, value in config.items()}


def _commit(record: Mapping[str, JSON]) -> str:
    state = record["git"]
    if not state or not state["commit"]:
        return "not in a git checkout"
    return f"commit {state['commit'][:12]}{' with changes' if state['changed'] else ''}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
