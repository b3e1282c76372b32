"""Running a study: plan, compute what is not on disk yet, judge, report."""

import contextlib
import errno
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Protocol, runtime_checkable

from interp.case_studies import keys as identity
from interp.case_studies import record as records
from interp.case_studies.plan import Plan, make_plan
from interp.case_studies.registry import Study, find_study
from interp.case_studies.report import write_report
from interp.case_studies.settings import configure
from interp.case_studies.store import Store
from interp.case_studies.study import JSON, StudyError, Unit
from interp.case_studies.workers import BACKENDS, Execute, Outcome, Task, worker_pool
from interp.errors import UsageError, unknown
from interp.files import remove_leftovers, write_atomically


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a run; the message says what is kept."""


class UnitFailed(StudyError):
    """The study's code raised in a unit; the message names the unit, its params and the error."""


@runtime_checkable
class Progress(Protocol):
    """Who is told how far a run is. Costs are in the units' own measure."""

    def begin(self, *, n_units: int, n_done: int, cost: float, cost_done: float) -> None:
        """The plan is made; ``n_done`` units are on disk already."""

    def unit_done(self, name: str, cost: float) -> None:
        """One more unit is on disk."""

    def end(self) -> None:
        """No more units come, whether all are done or not."""


@dataclass(frozen=True)
class RunOutcome:
    """A run that ended well, how many of its units it computed, and figures that failed."""

    run: records.FinishedRun
    n_computed: int
    n_reused: int
    seconds: float
    figure_errors: Mapping[str, str]


def run(
    reference: str | os.PathLike[str],
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
) -> RunOutcome:
    """Run a study into a folder, computing only the units that are not there yet.

    Args:
        reference: name of a study, or the path of a study's folder.
        scale: ``"smoke"``, ``"quick"``, ``"paper"``, or another that the study has.
        seeds: scales the seeds of every part of the study; the scale's own numbers without it.
        overrides: config fields to change.
        out: run folder; ``runs/<study>-<scale>`` below the current one without it.
        workers: processes; as many as there are cores without it. 1 is this process itself.
        backend: ``"local"``.
        device: for studies that offer a choice.
        dtype: for studies that offer a choice.
        progress: is told how far the run is.

    Raises:
        UsageError: an unknown name or a value that does not fit; nothing is left behind.
        StudyError: a folder or file that cannot be written, a damaged unit file, a unit that
            failed, a killed worker. Finished units are kept; the same call goes on from there.
        Interrupted: Ctrl-C.
    """
    started = perf_counter()
    n_workers = _check_workers(workers)
    if backend not in BACKENDS:
        raise UsageError(unknown("backend", backend, BACKENDS))
    study = find_study(reference)
    config = configure(
        study.info,
        study.scales,
        scale=scale,
        seeds=seeds,
        overrides=overrides,
        device=device,
        dtype=dtype,
    )
    asked = {"scale": scale, "seeds": seeds, "overrides": dict(overrides or {})}
    folder = Path(out) if out is not None else Path("runs") / f"{study.name}-{scale}"
    plan = make_plan(study, config, folder, asked, n_workers)
    try:
        done = _prepare_folder(plan)
        n_computed = _compute_missing(plan, done, n_workers, backend, progress)
        plan.record["seconds"] = round(perf_counter() - started, 3)
        plan.record["computed"] = n_computed
        finished = _finish(plan)
        figure_errors = write_report(finished)
    except OSError as error:
        raise StudyError(
            f"cannot write the run into {folder}: {error.strerror or error}{_what_to_do(error)}"
        ) from error
    n_reused = len(plan.units) - n_computed
    return RunOutcome(finished, n_computed, n_reused, perf_counter() - started, figure_errors)


def _prepare_folder(plan: Plan) -> set[str]:
    """Make the folder, clear what dead runs left, and return the names of the finished units."""
    folder, store = plan.folder, Store(plan.folder)
    if (folder / records.RECORD).exists():
        there = records.read_record(folder)["study"]
        if there != plan.study.name:
            raise UsageError(
                f"out: {str(folder)!r} holds a run of {there}, not of {plan.study.name}; choose "
                "another folder with --out"
            )
    store.folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    store.remove_leftovers()
    done = {name for name, key in plan.keys.items() if store.has(key) and store.read(key)}
    for key in plan.keys.values():
        _trace_file(folder, key).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # there is none, or it holds traces of other units
        (folder / "failed").rmdir()
    records.write_record(folder, plan.record)
    return done


def _compute_missing(
    plan: Plan, done: set[str], workers: int, backend: str, progress: Progress | None
) -> int:
    """Compute the units that are not done, stage by stage; returns how many were computed here."""
    costs = {unit.name: unit.cost for unit in plan.units}
    missing = [unit for unit in plan.units if unit.name not in done]
    if progress is not None:
        cost_done = sum(costs[name] for name in done)
        progress.begin(
            n_units=len(costs), n_done=len(done), cost=sum(costs.values()), cost_done=cost_done
        )
    n_computed, n_kept = 0, len(done)
    try:
        if missing:
            # more processes than units are of no use; but one process would be this one
            n_processes = workers if workers == 1 else max(2, min(workers, len(missing)))
            with worker_pool(workers=n_processes, backend=backend) as execute:
                for outcome in _outcomes(plan, done, execute):
                    n_kept += 1
                    n_computed += outcome.status == "computed"
                    if progress is not None:
                        progress.unit_done(outcome.unit, costs[outcome.unit])
    except KeyboardInterrupt as error:
        raise Interrupted(
            f"interrupted: {n_kept} of {len(costs)} units are kept in {plan.folder}; the same "
            "command goes on from there"
        ) from error
    finally:
        if progress is not None:
            progress.end()
        Store(plan.folder).remove_leftovers()
    return n_computed


def _outcomes(plan: Plan, done: set[str], execute: Execute) -> Iterator[Outcome]:
    """Outcome of every unit that is finished now; raises at the end of those at work if one failed.

    A unit that another run is at is left until the others of its stage are through, and then
    computed here as well: waiting could be for ever.
    """
    for stage in identity.stages(plan.study.name, plan.units):
        tasks = [_task(plan, unit) for unit in stage if unit.name not in done]
        by_name = {task.unit.name: task for task in tasks}
        for shared in (False, True):
            queue = deque(_shared(task) if shared else task for task in tasks)
            tasks, failed = [], []
            for outcome in execute(_until_empty(queue)):
                if outcome.status == "busy":
                    tasks.append(by_name[outcome.unit])
                elif outcome.status in ("raised", "not stored", "outdated"):
                    failed.append(outcome)
                    queue.clear()
                else:
                    yield outcome
            if failed:
                raise _failure(plan, failed)


def _task(plan: Plan, unit: Unit) -> Task:
    study = plan.study
    needs = {name: plan.keys[name] for name in unit.needs}
    # a bare Study: the one in use has claims loaded, which need not travel
    bare = Study(study.name, study.folder, study.package)
    return Task(bare, unit, plan.keys[unit.name], needs, plan.folder.resolve(), plan.source)


def _shared(task: Task) -> Task:
    return Task(
        task.study, task.unit, task.key, task.needs, task.run_folder, task.source, shared=True
    )


def _until_empty(queue: deque[Task]) -> Iterator[Task]:
    """The tasks of a queue that may be cleared meanwhile, from another thread."""
    while True:
        try:
            yield queue.popleft()
        except IndexError:
            return


def _failure(plan: Plan, failed: Sequence[Outcome]) -> StudyError:
    store = Store(plan.folder)
    n_kept = sum(store.has(key) for key in plan.keys.values())
    kept = f"{n_kept} of {len(plan.units)} units are kept in {plan.folder}"
    first = failed[0]
    if first.status == "outdated":
        return StudyError(
            f"the source code changed while the run of {plan.study.name} was starting, so results "
            f"would be kept under the wrong keys; run the same command again. {kept}"
        )
    if first.status == "not stored":
        return StudyError(
            f"unit {first.unit!r}: {first.error}. {kept}; put that right and run the same command "
            "again"
        )
    for outcome in failed:
        path = _trace_file(plan.folder, plan.keys[outcome.unit])
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, outcome.trace)
    params = next(unit.params for unit in plan.units if unit.name == first.unit)
    return UnitFailed(
        f"unit {first.unit!r} of {plan.study.name} failed with {first.error} (params "
        f"{identity.canonical_json(params)}). {kept}; the traceback is in "
        f"{_trace_file(plan.folder, plan.keys[first.unit])}"
    )


def _finish(plan: Plan) -> records.FinishedRun:
    units = records.read_units(plan.folder, plan.record)
    for name, said in units.items():
        plan.record["units"][name].update(said)
    plan.record["result_hash"] = records.combined_hash(units)
    plan.record["status"] = "complete"
    plan.record["finished"] = records.now()
    records.write_record(plan.folder, plan.record)
    return records.judge_run(plan.folder, plan.record, plan.study)


def _trace_file(folder: Path, key: str) -> Path:
    return folder / "failed" / f"{key[:16]}.txt"


def _check_workers(workers: int | None) -> int:
    if workers is None:
        import joblib

        return joblib.cpu_count()
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise UsageError(f"workers: got {workers!r}, expected a whole number of at least 1")
    return workers


def _what_to_do(error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "; make room and run the same command again: finished units are kept"
    return "; choose another folder with --out"
