"""How long one waits before anything happens, and how much one downloads.

Every start is a fresh process. What counts is its processor time, which other processes on the
machine disturb least; the wall clock stands beside it.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from interp.benchmarks.measure import BenchResult, Cell, check_arguments, describe_environment

# what is started, and the seconds it may take
STARTS = {
    "python": ("pass", None),
    "import interp": ("import interp", 0.25),
    "interp --version": (
        "import sys; sys.argv = ['interp', '--version']; from interp.cli import main; main()",
        0.7,
    ),
    "interp list": (
        "import sys; sys.argv = ['interp', 'list']; from interp.cli import main; main()",
        0.7,
    ),
    "import interp.workflows": ("import interp.workflows", None),
}
LARGEST_WHEEL = 2_000_000


def run(
    *, threads: int = 1, rounds: int = 5, device: str = "cpu", dtype: str = "float32"
) -> BenchResult:
    """Median seconds of each start over ``rounds`` fresh processes, and the size of a wheel.

    The wheel is built from the checkout; without one, or without hatchling, that row is empty.
    ``device`` can only be ``"cpu"``, and nothing here depends on ``dtype``.
    """
    check_arguments(threads=threads, rounds=rounds, device=device, dtype=dtype, devices=("cpu",))
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in STARTS}
    for _ in range(rounds):
        for name, (code, _) in STARTS.items():
            seconds[name].append(_time_process(code))
    rows: list[list[Cell]] = []
    for name, (_, limit) in STARTS.items():
        processor = statistics.median(own for own, _ in seconds[name])
        wall = statistics.median(wall for _, wall in seconds[name])
        rows.append([name, round(processor, 3), round(wall, 3), "s", limit])
    size, why_not = _wheel_size()
    rows.append(["wheel", size, None, "bytes", LARGEST_WHEEL])
    return BenchResult(
        name="start",
        columns=["what", "processor", "wall", "unit", "limit"],
        rows=rows,
        notes=[why_not] if why_not else [],
        environment=describe_environment(threads=threads, device=device, dtype=dtype),
    )


def _time_process(code: str) -> tuple[float, float]:
    """Processor and wall seconds of a fresh interpreter that runs ``code``."""
    started = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise RuntimeError(f"{code!r} ended with status {process.returncode}")
    return usage.ru_utime + usage.ru_stime, wall


def _wheel_size() -> tuple[int | None, str]:
    """Bytes of a wheel built from this checkout, or why there is none."""
    root = Path(__file__).resolve().parent.parent.parent
    if not (root / "pyproject.toml").is_file():
        return None, "no wheel was built: this is no checkout"
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder],
            cwd=root,
            capture_output=True,
            text=True,
            check=False,
        )
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode != 0 or not wheels:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            return None, f"no wheel was built: {last}"
        return wheels[0].stat().st_size, ""
