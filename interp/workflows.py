"""The joins that notebooks and the command line call: run a study, look at a finished run."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from interp.case_studies.catalogue import describe_studies
from interp.case_studies.record import open_run, read_record, read_units, stored_results, wishes
from interp.case_studies.report import PAGE, read_claims, summarize, write_report
from interp.case_studies.run import Progress, run
from interp.case_studies.study import JSON, Results, StudyError

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class RunResult:
    """A finished run: tables for pandas, arrays, and where the report is.

    ``judged`` holds the claims as JSON, in the order of the study. ``n_computed`` counts the units
    that this call computed (0 for a run that was loaded), ``figure_errors`` the figures that could
    not be drawn.
    """

    folder: Path
    record: Mapping[str, JSON]
    results: Results
    judged: list[dict[str, JSON]]
    n_computed: int = 0
    figure_errors: Mapping[str, str] | None = None

    @property
    def report(self) -> Path:
        """The page with claims, figures and provenance."""
        return self.folder / PAGE

    @property
    def title(self) -> str:
        """The study's title, the scale, and what was changed of it."""
        return f"{self.record['title']} ({wishes(self.record)})"

    @property
    def summary(self) -> str:
        """``"5 of 7 claims reproduced, 1 not reproduced, ..."``."""
        return summarize([claim["verdict"] for claim in self.judged])

    @property
    def result_hash(self) -> str:
        """One hash over everything that the run computed."""
        return str(self.record["result_hash"])

    @property
    def all_reproduced(self) -> bool:
        """True where no claim that was measured failed."""
        return all(claim["verdict"] != "not reproduced" for claim in self.judged)

    @cached_property
    def claims(self) -> "pd.DataFrame":
        """One row a claim: statement, paper, value, low, high, expected, verdict, reason."""
        import pandas as pd

        rows = [
            {
                "claim": claim["id"],
                "statement": claim["statement"],
                "source": claim["source"],
                "paper": claim["paper_text"],
                "value": claim["value"],
                "low": claim["interval_low"],
                "high": claim["interval_high"],
                "expected": claim["expected_text"],
                "verdict": claim["verdict"],
                "reason": "; ".join(filter(None, (claim["error"], claim["detail"]))),
            }
            for claim in self.judged
        ]
        table = pd.DataFrame(rows)
        return table.astype({"value": float, "low": float, "high": float})

    @cached_property
    def units(self) -> "pd.DataFrame":
        """One row a unit: name, seconds, result_hash, key, and a column for each parameter."""
        import pandas as pd

        rows = []
        for name in self.results.names():
            said = self.record["units"][name]
            own = {"unit": name, **{n: said[n] for n in ("seconds", "result_hash", "key")}}
            rows.append({**own, **{n: v for n, v in said["params"].items() if n not in own}})
        return pd.DataFrame(rows)

    @cached_property
    def numbers(self) -> "pd.DataFrame":
        """One row a number: unit, number, index (of a list's item, else missing), value.

        Numbers inside dicts are named ``outer.inner``, lists of lists ``name.0`` and so on. Texts
        and None are left out; ``results[unit].numbers`` has everything.
        """
        import pandas as pd

        rows = [
            {"unit": unit, "number": number, "index": index, "value": value}
            for unit in self.results.names()
            for number, index, value in _flatten(self.results[unit].numbers)
        ]
        table = pd.DataFrame(rows, columns=["unit", "number", "index", "value"])
        return table.astype({"index": "Int64", "value": float})

    def arrays(self, name: str, *, prefix: str = "") -> dict[str, np.ndarray]:
        """The array of that name of every unit that has it and whose name begins with ``prefix``.

        Raises ``ValueError`` naming the arrays there are if none does.
        """
        chosen = self.results.names(prefix)
        found = {
            unit: self.results[unit].arrays[name]
            for unit in chosen
            if name in self.results[unit].arrays
        }
        if not found:
            known = sorted({array for unit in chosen for array in self.results[unit].arrays})
            raise ValueError(
                f"name: no unit{f' below {prefix!r}' if prefix else ''} has an array {name!r}; "
                f"there are {', '.join(known) or 'none'}"
            )
        return found


def list_studies() -> "pd.DataFrame":
    """One row a study: name, title, paper, minutes at each scale, number of claims."""
    import pandas as pd

    rows = []
    for said in describe_studies():
        minutes = {f"minutes_{scale}": value for scale, value in said.pop("minutes").items()}
        rows.append({n: said[n] for n in ("name", "title", "paper", "n_claims")} | minutes)
    return pd.DataFrame(rows)


def run_study(
    name: str | os.PathLike[str],
    *,
    scale: str = "quick",
    seeds: int | None = None,
    overrides: Mapping[str, JSON] | None = None,
    out: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    backend: str = "local",
    device: str | None = None,
    dtype: str | None = None,
    progress: Progress | None = None,
) -> RunResult:
    """Run a study by name or by the path of its folder, and judge its claims.

    Only what is not in the run folder yet is computed. The arguments are those of
    ``interp.case_studies.run.run``, which says what each does and what is raised.
    """
    outcome = run(
        name,
        scale=scale,
        seeds=seeds,
        overrides=overrides,
        out=out,
        workers=workers,
        backend=backend,
        device=device,
        dtype=dtype,
        progress=progress,
    )
    finished = outcome.run
    judged = [judgement.as_json() for judgement in finished.judgements]
    return RunResult(
        finished.folder,
        finished.record,
        finished.results,
        judged,
        outcome.n_computed,
        outcome.figure_errors,
    )


def load_run(folder: str | os.PathLike[str]) -> RunResult:
    """A finished run from its folder: every unit file checked, claims as they were judged.

    Needs nothing but the folder, so runs of older versions of a study load as well; the config is
    ``results.config``, a dict. Raises ``StudyError`` (a ``ValueError``) where the folder is no run,
    the run is not finished, or a file is damaged.
    """
    place = Path(folder)
    record = read_record(place)
    read_units(place, record)
    judged = read_claims(place)
    return RunResult(place, record, stored_results(place, record, record["config"]), judged)


def redraw_report(folder: str | os.PathLike[str]) -> RunResult:
    """Judge and draw a finished run again from its folder; computes nothing.

    Raises ``StudyError`` as ``load_run`` does, and where the study or its config has changed so
    much that it no longer fits the run.
    """
    finished = open_run(folder)
    try:
        figure_errors = write_report(finished)
    except OSError as error:
        raise StudyError(
            f"cannot write the report into {folder}: {error.strerror or error}"
        ) from error
    judged = [judgement.as_json() for judgement in finished.judgements]
    return RunResult(finished.folder, finished.record, finished.results, judged, 0, figure_errors)


def _flatten(
    numbers: Mapping[str, JSON], prefix: str = ""
) -> Iterator[tuple[str, int | None, float]]:
    """``(name, index in a list, value)`` of every number in nested dicts and lists."""
    for name, value in numbers.items():
        if isinstance(value, (bool, int, float)):
            yield prefix + name, None, float(value)
        elif isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, (bool, int, float)):
                    yield prefix + name, index, float(item)
                else:
                    inside = item if isinstance(item, Mapping) else {str(index): item}
                    deeper = f"{name}.{index}." if isinstance(item, Mapping) else f"{name}."
                    yield from _flatten(inside, prefix + deeper)
