"""Computing units in other processes, one BLAS thread each.

A worker reads what a unit needs from the store, computes it, and writes it to the store itself;
only a few words travel back. So a killed run loses what was in flight and nothing else, and it is
the same on this machine and on a cluster that shares the folder.
"""

import contextlib
import os
import secrets
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, TypeAlias

from interp.case_studies.keys import source_hash
from interp.case_studies.registry import Compute, Study
from interp.case_studies.store import CorruptUnit, Store
from interp.case_studies.study import StudyError, Unit, UnitResult

BACKENDS = ("local",)

Status = Literal["computed", "found", "busy", "raised", "not stored", "outdated"]


@dataclass(frozen=True)
class Task:
    """A unit to be computed, with all that a process elsewhere has to know."""

    study: Study
    unit: Unit
    key: str
    needs: dict[str, str]
    run_folder: Path
    source: str
    shared: bool = False


@dataclass(frozen=True)
class Outcome:
    """How a task ended.

    ``found``: it was stored already; ``busy``: another run is computing it; ``raised``: the study's
    code did; ``not stored``: the disk would not have it; ``outdated``: the source code is no longer
    the one that the unit's key was made from.
    """

    unit: str
    status: Status
    result_hash: str = ""
    seconds: float = 0.0
    error: str = ""
    trace: str = ""


class SourceChanged(Exception):
    """The source on disk is not the one that the keys were made from."""


class WorkerDied(StudyError):
    """A worker process was killed from outside."""


def compute_unit(task: Task) -> Outcome:
    """Compute one unit and store it, unless it is stored or being computed by now."""
    store = Store(task.run_folder)
    name = task.unit.name
    try:
        file = store.begin(task.key, shared=task.shared)
    except BlockingIOError:
        return Outcome(name, "busy")
    except OSError as error:
        return Outcome(name, "not stored", error=_disk_error(error, store.folder))
    with file:
        if store.has(task.key):
            return Outcome(name, "found", store.read(task.key).result_hash)
        started = time.perf_counter()
        try:
            result = _compute(task, store)
        except SourceChanged:
            return Outcome(name, "outdated")
        except CorruptUnit as error:
            return Outcome(name, "not stored", error=str(error))
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            return Outcome(name, "raised", error=said, trace=traceback.format_exc())
        seconds = time.perf_counter() - started
        try:
            found = store.finish(task.key, file, result, unit=name, seconds=seconds)
        except CorruptUnit as error:
            return Outcome(name, "not stored", error=str(error))
        except OSError as error:
            return Outcome(name, "not stored", error=_disk_error(error, store.folder))
    return Outcome(name, "computed", found, seconds)


Execute: TypeAlias = Callable[[Iterable[Task]], Iterator[Outcome]]


@contextlib.contextmanager
def worker_pool(*, workers: int, backend: str = "local") -> Iterator[Execute]:
    """A function that computes tasks in ``workers`` processes and yields outcomes as they come.

    One worker is this process itself, which suits debuggers. The function raises ``WorkerDied``
    when a process is killed. Leaving the ``with`` ends the processes, at once if an error left it.
    """
    assert backend in BACKENDS, backend
    if workers == 1:
        with _one_thread():
            yield lambda tasks: map(compute_unit, tasks)
        return
    import joblib
    from joblib.externals.loky import get_reusable_executor

    # a token of its own gives each run fresh processes, which import the source as it is now
    options = {"initializer": _start_worker, "initargs": (os.getpid(), secrets.token_hex(8))}
    kill = True
    try:
        with joblib.parallel_config(backend="loky", inner_max_num_threads=1, **options):
            yield lambda tasks: _execute(tasks, workers)
        kill = False
    finally:
        get_reusable_executor(reuse=True).shutdown(wait=True, kill_workers=kill)


def _execute(tasks: Iterable[Task], workers: int) -> Iterator[Outcome]:
    import joblib
    from joblib.externals.loky.process_executor import BrokenProcessPool

    # no unit waits in a worker's queue, so that after a failure only those at work are finished
    parallel = joblib.Parallel(
        n_jobs=workers, batch_size=1, pre_dispatch=workers, return_as="generator_unordered"
    )
    at_work: set[str] = set()
    outcomes = None
    try:
        with _without_interrupts():
            calls = (joblib.delayed(compute_unit)(task) for task in _noting(tasks, at_work))
            outcomes = parallel(calls)
        for outcome in outcomes:
            at_work.discard(outcome.unit)
            yield outcome
    except BrokenProcessPool as error:
        raise WorkerDied(_why_killed(str(error), at_work)) from error
    finally:
        if outcomes is not None:
            with warnings.catch_warnings():
                # joblib warns of tasks that were given up, and giving them up is meant
                warnings.simplefilter("ignore", UserWarning)
                outcomes.close()


def _noting(tasks: Iterable[Task], at_work: set[str]) -> Iterator[Task]:
    for task in tasks:
        at_work.add(task.unit.name)
        yield task


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Hold Ctrl-C back while processes are started: they inherit that, and so leave it to us."""
    from multiprocessing import resource_tracker as standard_tracker

    from joblib.externals.loky.backend import resource_tracker

    # both let Ctrl-C through when they start, so they have to be running
    standard_tracker.ensure_running()
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _compute(task: Task, store: Store) -> UnitResult:
    compute = _load_compute(task.study, task.source)
    needs = {name: store.read(key).result for name, key in task.needs.items()}
    _limit_torch()
    result = compute(task.unit, needs)
    if not isinstance(result, UnitResult):
        raise TypeError(f"compute returned {type(result).__name__}, expected a UnitResult")
    return result


@cache
def _load_compute(study: Study, source: str) -> Compute:
    """Once a process: import the study, and make sure that it is what the keys were made from."""
    if source_hash(study.folder) != source:
        raise SourceChanged
    return study.compute


def _start_worker(parent: int, token: str) -> None:
    """Leave Ctrl-C to the parent, and end when the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _limit_torch() -> None:
    """torch counts its threads apart from the environment once it is set by hand."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """One BLAS thread in this process, and as many as before afterwards."""
    from threadpoolctl import threadpool_limits

    torch = sys.modules.get("torch")
    before = torch.get_num_threads() if torch is not None else None
    try:
        with threadpool_limits(limits=1):
            yield
    finally:
        torch = sys.modules.get("torch")
        if torch is not None and before is not None:
            torch.set_num_threads(before)


def _disk_error(error: OSError, folder: Path) -> str:
    return f"cannot write below {folder}: {error.strerror or error}"


def _why_killed(message: str, at_work: set[str]) -> str:
    how = "killed (SIGKILL), most often because memory ran out" if "SIGKILL" in message else "ended"
    names = " or ".join(repr(name) for name in sorted(at_work))
    return (
        f"a worker process was {how}, at unit {names}. Finished units are kept: run the same "
        "command again, with fewer --workers if memory is short"
    )
