"""A run folder as a whole: ``run.json``, what made it, and what was found in it.

``run.json`` is written before the first unit is computed (so that an unfinished folder can say what
is missing) and again at the end, with the result hashes.
"""

import json
import os
import platform
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from interp.case_studies.judge import Judgement, judge
from interp.case_studies.keys import data_hashes, run_hash
from interp.case_studies.registry import Study, find_study
from interp.case_studies.settings import config_from_json
from interp.case_studies.store import CorruptUnit, Store, StoredResults
from interp.case_studies.study import JSON, Results, StudyError, Unit
from interp.files import write_atomically

FORMAT = "interp-run-1"
RECORD = "run.json"


@dataclass(frozen=True)
class FinishedRun:
    """A run that is complete on disk: its record, its results, and every claim judged."""

    folder: Path
    record: Mapping[str, JSON]
    study: Study
    results: Results
    judgements: list[Judgement]


def describe_units(units: list[Unit], keys: Mapping[str, str]) -> dict[str, JSON]:
    """What ``run.json`` says of each unit before it is computed."""
    return {
        unit.name: {
            "key": keys[unit.name],
            "params": unit.params,
            "needs": list(unit.needs),
            "data": data_hashes(unit),
        }
        for unit in units
    }


def write_record(folder: Path, record: Mapping[str, JSON]) -> None:
    """Write ``run.json`` at once."""
    text = json.dumps({"format": FORMAT, **record}, indent=1, ensure_ascii=False)
    write_atomically(folder / RECORD, text + "\n")


def read_record(folder: Path) -> dict[str, JSON]:
    """``run.json`` of a run folder. Raises ``StudyError`` if there is none, or it is damaged."""
    path = folder / RECORD
    if not path.is_file():
        state = f"has no {RECORD}" if folder.is_dir() else "is no folder"
        raise StudyError(
            f"run folder {str(folder)!r} {state}; expected one that 'interp run' made, such as "
            "runs/<study>-<scale>"
        )
    try:
        record = json.loads(path.read_bytes())
        said = record["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise StudyError(
            f"{path} is damaged ({type(error).__name__}); delete it and run the same command "
            "again: finished units are kept"
        ) from error
    if said != FORMAT:
        raise StudyError(f"{path} says format {said!r}, expected {FORMAT!r}; run the study again")
    return record


def read_units(folder: Path, record: Mapping[str, JSON]) -> dict[str, dict[str, JSON]]:
    """Check every unit file of a run: result hash, seconds and time by unit name.

    Raises ``StudyError`` for units that are missing, damaged, or other than ``run.json`` recorded.
    """
    store = Store(folder)
    units: Mapping[str, JSON] = record["units"]
    missing = [name for name, said in units.items() if not store.has(said["key"])]
    if missing:
        raise StudyError(
            f"run {str(folder)!r} is not finished: {len(units) - len(missing)} of {len(units)} "
            f"units are there, missing is {missing[0]!r}"
            f"{' and others' if len(missing) > 1 else ''}; run the study into it again"
        )
    found = {}
    for name, said in units.items():
        stored = store.read(said["key"])
        if said.get("result_hash", stored.result_hash) != stored.result_hash:
            raise CorruptUnit(
                f"unit file {store.path(said['key'])} is not the one that {RECORD} recorded for "
                f"{name!r}; delete it and run the study again"
            )
        found[name] = {
            "result_hash": stored.result_hash,
            "seconds": stored.seconds,
            "finished": stored.finished,
        }
    return found


def stored_results(folder: Path, record: Mapping[str, JSON], config: object) -> Results:
    """The results of a run, read when asked for."""
    keys = {name: said["key"] for name, said in record["units"].items()}
    return Results(StoredResults(Store(folder), keys), config=config)


def open_run(folder: str | os.PathLike[str]) -> FinishedRun:
    """A finished run from disk, its units checked and its claims judged anew; computes nothing."""
    folder = Path(folder)
    record = read_record(folder)
    read_units(folder, record)
    study = find_study(Path(record["study_folder"]) if record["study_folder"] else record["study"])
    return judge_run(folder, record, study)


def judge_run(folder: Path, record: Mapping[str, JSON], study: Study) -> FinishedRun:
    """Hold the claims of a study against a run whose units were checked."""
    scale = record["scale"]
    if scale not in study.scales:
        raise StudyError(f"study {study.name} has no scale {scale!r} any more; run it again")
    config = config_from_json(type(study.scales[scale]), record["config"])
    results = stored_results(folder, record, config)
    return FinishedRun(folder, record, study, results, judge(study.claims, results, scale=scale))


def wishes(record: Mapping[str, JSON]) -> str:
    """The scale of a run and what was changed of it, as on the command line."""
    words = [f"{record['scale']} scale"]
    if record["seeds"] is not None:
        words.append(f"--seeds {record['seeds']}")
    words += [f"--set {name}={json.dumps(value)}" for name, value in record["overrides"].items()]
    return " ".join(words)


def combined_hash(units: Mapping[str, Mapping[str, JSON]]) -> str:
    """One hash over the results of a run."""
    return run_hash({name: said["result_hash"] for name, said in units.items()})


def machine() -> dict[str, JSON]:
    """Processor, cores, system and Python of this machine."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def git_state(study_folder: Path) -> dict[str, JSON] | None:
    """Commit of the checkout that the toolkit (and the study) is in; None outside of one.

    ``changed`` is True where files differ from the commit.
    """
    house = Path(__file__).resolve().parent.parent
    toolkit = _git(house) if (house / ".git").exists() else None
    own = None if study_folder.resolve().is_relative_to(house) else _git(study_folder)
    if own is None:
        return toolkit
    return {**(toolkit or {"commit": None}), "study": own}


def now() -> str:
    """UTC time to the second."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _git(folder: Path) -> dict[str, JSON] | None:
    def ask(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *words],
            check=True,
            capture_output=True,
            text=True,
            timeout=10,
        ).stdout.strip()

    try:
        return {
            "commit": ask("rev-parse", "HEAD"),
            "changed": bool(ask("status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):
        return None  # no git, or no repository: provenance says so


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()
