"""What a run will do: the study's units, their keys, and the record that says so."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import interp
from interp.case_studies.keys import source_hash, toolkit_hash, unit_keys, versions
from interp.case_studies.record import describe_units, git_state, machine, now
from interp.case_studies.registry import Study
from interp.case_studies.settings import config_as_json
from interp.case_studies.study import JSON, StudyError, Unit

_toolkit_at_start: list[str] = []


@dataclass(frozen=True)
class Plan:
    """Units with their keys, the folder they go to, and what ``run.json`` says before they do."""

    study: Study
    units: list[Unit]
    keys: dict[str, str]
    folder: Path
    source: str
    record: dict[str, JSON]


def make_plan(
    study: Study, config: Any, folder: Path, asked: Mapping[str, JSON], workers: int
) -> Plan:
    """Ask the study for its units and give each its key; nothing is written.

    ``asked`` is scale, seeds and overrides as they were given. Raises ``StudyError`` for units that
    contradict each other, and where this process no longer has the source that is on disk.
    """
    toolkit = toolkit_hash()
    if not _toolkit_at_start:
        _toolkit_at_start.append(toolkit)
    if workers == 1 and _toolkit_at_start[0] != toolkit:
        raise StudyError(
            "the toolkit's source changed since this process read it, and with one worker units "
            "are computed here; restart Python, or use two workers"
        )
    # imported before the work begins: a slip in them should not wait for its end
    _ = study.claims, study.figures
    source = source_hash(study.folder)
    packages = versions()
    units = list(study.units(config))
    if not units:
        raise StudyError(f"study {study.name}: this config asks for no unit of work")
    keys = unit_keys(study.name, units, source=source, packages=packages)
    is_ours = study.package.startswith("interp.")
    record = {
        "study": study.name,
        "study_folder": None if is_ours else str(study.folder),
        "title": study.info.title,
        "paper": study.info.paper,
        **asked,
        "config": config_as_json(config),
        "status": "running",
        "started": now(),
        "workers": workers,
        "source_hash": source,
        "versions": {"interp": interp.__version__, **packages},
        "git": git_state(study.folder),
        "machine": machine(),
        "units": describe_units(units, keys),
    }
    return Plan(study, units, keys, folder, source, record)
