"""`interp bench families`: every text architecture of the installed transformers, tried one by one.

Each is built tiny and random, observed, and compared with its own eager attention. Workers are
processes of their own, since an architecture may crash or never end; what is known about one is on
disk at once, so that a walk that is stopped goes on where it was. Run as a module, this file is
such a worker: model types come in on standard input, one JSON line goes out for each.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import queue
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from interp.benchmarks.measure import BenchResult, check_arguments, describe_environment
from interp.files import write_atomically
from interp.model_cache import cache_folder

SECONDS_PER_FAMILY = 300
SECONDS_TO_END = 20
STATUSES = ("served", "refused", "cannot be built", "cannot run", "timed out", "wrong", "silent")
_COLUMNS = [
    "architecture",
    "class",
    "status",
    "layers",
    "statistics",
    "logits",
    "padding",
    "generation",
    "why",
]


def run(
    *,
    threads: int = 1,
    rounds: int = 1,
    device: str = "cpu",
    dtype: str = "float32",
    only: Sequence[str] | None = None,
    folder: Path | None = None,
    processes: int = 2,
    markdown: Path | None = None,
) -> BenchResult:
    """Try every architecture, or ``only`` some, and say which are served.

    ``statistics`` and ``logits`` are the largest differences from eager attention over an unpadded
    batch and batches padded on either side (of lse, relative where it is above 1); statistics of
    padded against single texts and of cached against uncached generation count as well.
    ``folder`` keeps what is known of each architecture (in our cache unless given), ``markdown``
    is where the table is written for people: after a whole walk in a checkout, docs/families.md.
    """
    check_arguments(threads=threads, rounds=rounds, device=device, dtype=dtype, devices=("cpu",))
    if dtype != "float32":
        raise ValueError(f"dtype: got {dtype!r}, expected float32: eager is compared to 2e-5")
    from interp.benchmarks.family_models import text_families

    names = [family.model_type for family in text_families()]
    unknown = sorted(set(only or ()) - set(names))
    if unknown:
        raise ValueError(f"only: {unknown[0]!r} is no text architecture of this transformers")
    if only is not None:
        names = [name for name in names if name in only]
    folder = folder or cache_folder() / "families"
    folder.mkdir(parents=True, exist_ok=True)
    reports = walk(names, folder, processes=processes)
    result = BenchResult(
        name="families",
        columns=_COLUMNS,
        rows=[_row(report) for report in reports],
        notes=_notes(reports),
        environment={
            **describe_environment(threads=threads, device=device, dtype=dtype),
            "transformers": _transformers_version(),
        },
    )
    page = markdown or (_documentation() if only is None else None)
    if page is not None:
        page.parent.mkdir(exist_ok=True)
        write_atomically(page, to_markdown(result))
    return result


def _documentation() -> Path | None:
    """The page in the checkout that this file lies in, if it lies in one."""
    root = Path(__file__).resolve().parent.parent.parent
    return root / "docs" / "families.md" if (root / "pyproject.toml").is_file() else None


def walk(names: Sequence[str], folder: Path, *, processes: int) -> list[dict[str, Any]]:
    """What is known of each architecture, found out where it is not on disk yet."""
    key = _key()
    found = {name: _known(folder, name, key) for name in names}
    todo: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name, report in found.items():
        if report is None:
            todo.put(name)

    errors: list[BaseException] = []

    def work() -> None:
        worker = _Worker()
        try:
            for name in _drain(todo):
                report = {**worker.ask(name), "key": key}
                write_atomically(folder / f"{name}.json", json.dumps(report, indent=1) + "\n")
                found[name] = report
        except BaseException as error:
            errors.append(error)
        finally:
            worker.stop()

    pool = [threading.Thread(target=work) for _ in range(min(processes, todo.qsize()))]
    for thread in pool:
        thread.start()
    try:
        for thread in pool:
            thread.join()
    finally:  # interrupted: leave the rest undone, and no process behind
        for _ in _drain(todo):
            pass
        for thread in pool:
            thread.join()
    if errors:
        raise errors[0]
    return [report for report in found.values() if report is not None]


def _drain(todo: "queue.SimpleQueue[str]") -> Iterator[str]:
    while True:
        try:
            yield todo.get_nowait()
        except queue.Empty:
            return


class _Worker:
    """A process that checks architectures, begun again when it dies or takes too long."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def ask(self, name: str) -> dict[str, Any]:
        process = self._process = self._process or _start_worker()
        assert process.stdin is not None and process.stdout is not None
        alarm = threading.Timer(SECONDS_PER_FAMILY, process.kill)
        alarm.start()
        try:
            process.stdin.write(f"{name}\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            is_late = not alarm.is_alive()
            alarm.cancel()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        self.stop()
        status = "timed out" if is_late else "cannot run"
        why = f"took more than {SECONDS_PER_FAMILY} s" if is_late else "the process died"
        return {"architecture": name, "class": "", "status": status, "why": why}

    def stop(self) -> None:
        """Let the process end by itself, which it does when nothing more comes; else end it."""
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        try:
            process.wait(timeout=SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _start_worker() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "interp.benchmarks.families"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"},
    )


def check_one(name: str) -> dict[str, Any]:
    """Build, observe and compare one architecture; every outcome is a report."""
    from interp.benchmarks.family_check import EagerError, check_family
    from interp.benchmarks.family_models import D_VOCAB, text_families, tiny_model

    family = next(f for f in text_families() if f.model_type == name)
    report: dict[str, Any] = {"architecture": name, "class": family.class_name}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = tiny_model(family)
        except Exception as failure:
            return {**report, "status": "cannot be built", "why": _in_a_line(failure)}
        try:
            checked = check_family(model, d_vocab=D_VOCAB)
        except EagerError as failure:
            return {**report, "status": "cannot run", "why": _in_a_line(failure)}
        except (TypeError, ValueError, RuntimeError) as refusal:
            return {**report, "status": "refused", "why": _in_a_line(refusal)}
    return {**report, **dataclasses.asdict(checked), "why": "; ".join(checked.notes)}


def _in_a_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 300 else text[:297] + "..."


def _known(folder: Path, name: str, key: str) -> dict[str, Any] | None:
    path = folder / f"{name}.json"
    if not path.is_file():
        return None
    report: dict[str, Any] = json.loads(path.read_text())
    return report if report.get("key") == key else None


def _key() -> str:
    """Changes with the installed transformers and with every line that a check depends on."""
    here = Path(__file__).resolve().parent
    digest = hashlib.sha256(_transformers_version().encode())
    sources = [*here.parent.glob("observ*.py"), *here.glob("famil*.py")]
    sources += here.parent.joinpath("kernels").glob("*.py")
    for path in sorted(sources):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _transformers_version() -> str:
    from importlib.metadata import version

    return version("transformers")


def _row(report: dict[str, Any]) -> list[Any]:
    layers = {stack: len(found) for stack, found in report.get("layers", {}).items()}
    return [
        report["architecture"],
        report["class"],
        report["status"],
        ", ".join(f"{n} {stack}" for stack, n in layers.items()),
        report.get("statistic_error"),
        report.get("logit_error"),
        ", ".join(report.get("padding", ())),
        report.get("generates", ""),
        report["why"],
    ]


def _notes(reports: Sequence[dict[str, Any]]) -> list[str]:
    counts = {status: sum(r["status"] == status for r in reports) for status in STATUSES}
    return [", ".join(f"{n} {status}" for status, n in counts.items() if n)]


def to_markdown(result: BenchResult) -> str:
    """The table that the documentation shows."""
    by_status = {
        status: [row for row in result.rows if row[2] == status]
        for status in STATUSES
        if any(row[2] == status for row in result.rows)
    }
    lines = [
        "# Which architectures can be observed",
        "",
        f"Every text architecture of transformers {result.environment['transformers']}, built tiny "
        "and random, observed with `interp.observe`, and held against its own eager attention: "
        "`interp bench families` writes this page. "
        f"{result.notes[0][0].upper()}{result.notes[0][1:]}.",
        "",
        "Columns: the largest difference of any statistic (lse, entropy, largest weight, mass on "
        "the first token, mass received) and of any logit, over an unpadded batch and batches "
        "padded on either side; on which sides padding changes nothing (where it changes nothing "
        "in eager attention either); whether greedy decoding with a cache gives eager's tokens and "
        "the statistics of the uncached text.",
        "",
    ]
    for status, rows in by_status.items():
        lines += [f"## {status.capitalize()} ({len(rows)})", ""]
        columns = [0, 1, 3, 4, 5, 6, 7, 8] if status in ("served", "wrong") else [0, 1, 8]
        lines.append("| " + " | ".join(result.columns[i] for i in columns) + " |")
        lines.append("|" + "---|" * len(columns))
        lines += ["| " + " | ".join(_cell(row[i]) for i in columns) + " |" for row in rows]
        lines.append("")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.1e}" if isinstance(value, float) else str(value).replace("|", "\\|")


def _serve() -> None:
    """A worker's loop. What libraries print goes where it disturbs nobody."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        answers.write(json.dumps(check_one(line.strip())) + "\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
