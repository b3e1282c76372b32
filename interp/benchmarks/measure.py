"""How everything is timed here: contenders interleaved, ratios per round, medians of the ratios.

A machine that others use gets slower and faster by the minute. So every contender runs once in
every round, in a rotated order, and what is reported is the median over rounds of its time *divided
by the baseline's time in the same round*. With one thread the clock counts the processor time of
this thread alone; with more, it is the wall clock, and the load is reported beside it. Memory is
measured in a fresh process, since the largest size that a process ever had never shrinks.
"""

import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Cell = str | int | float | None


@dataclass(frozen=True)
class BenchResult:
    """A table of measurements: one cell per column in every row, and what it was measured on."""

    name: str
    columns: list[str]
    rows: list[list[Cell]]
    notes: list[str] = field(default_factory=list)
    environment: dict[str, Cell] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"rows: a row of {self.name!r} has {len(row)} cells, expected "
                    f"{len(self.columns)}, one for each of {self.columns}"
                )

    def column(self, name: str) -> list[Cell]:
        """The cells under one heading."""
        if name not in self.columns:
            raise ValueError(f"column: got {name!r}, expected one of {self.columns}")
        return [row[self.columns.index(name)] for row in self.rows]


@dataclass(frozen=True)
class Timing:
    """Times of one contender over the rounds, in seconds, and their ratio to the baseline's."""

    seconds: float
    ratio: float
    lowest_ratio: float
    highest_ratio: float
    n_rounds: int


def time_interleaved(
    contenders: Mapping[str, Callable[[], object]],
    *,
    baseline: str,
    rounds: int,
    threads: int = 1,
    synchronize: Callable[[], None] | None = None,
    least_seconds: float = 0.02,
) -> dict[str, Timing]:
    """Time every contender in every round.

    A contender is called once to warm up and then as often per round as ``least_seconds`` need.
    ``synchronize`` waits for a device. ``seconds`` is the median over rounds; ``ratio`` the median
    of the per-round ratios to ``baseline``.
    """
    if baseline not in contenders:
        raise ValueError(f"baseline: got {baseline!r}, expected one of {list(contenders)}")
    if rounds < 1:
        raise ValueError(f"rounds: got {rounds}, expected at least 1")
    clock = choose_clock(threads) if synchronize is None else time.perf_counter
    wait = synchronize or _nothing

    def once(run: Callable[[], object], repeats: int) -> float:
        wait()
        start = clock()
        for _ in range(repeats):
            run()
        wait()
        return (clock() - start) / repeats

    repeats = {}
    for name, run in contenders.items():
        once(run, 1)
        first = once(run, 1)
        repeats[name] = max(1, math.ceil(least_seconds / max(first, 1e-9)))
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            taken[name].append(once(contenders[name], repeats[name]))
    timings = {}
    for name, seconds in taken.items():
        ratios = [own / base for own, base in zip(seconds, taken[baseline], strict=True)]
        timings[name] = Timing(
            seconds=statistics.median(seconds),
            ratio=statistics.median(ratios),
            lowest_ratio=min(ratios),
            highest_ratio=max(ratios),
            n_rounds=rounds,
        )
    return timings


def choose_clock(threads: int) -> Callable[[], float]:
    """Processor time of this thread for one thread, the wall clock for more."""
    return time.thread_time if threads == 1 else time.perf_counter


def _nothing() -> None:
    pass


# What a fresh process runs: set up, note the largest size so far, do the work, note it again.
_MEMORY_PROGRAM = """
from interp.benchmarks.measure import largest_size as peak
{setup}
before = peak()
{work}
print("peak", before, peak())
"""


def peak_memory(setup: str, work: str, *, environment: Mapping[str, str] | None = None) -> float:
    """MiB by which ``work`` raises the largest size of a fresh process, after ``setup``.

    Both are Python source. ``setup`` should warm up on something small, so that what a library
    allocates once is not counted. Raises RuntimeError with the last lines of a process that fails.
    """
    program = _MEMORY_PROGRAM.format(setup=setup, work=work)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = "\n".join(done.stderr.splitlines()[-5:])
        raise RuntimeError(f"measuring memory failed with status {done.returncode}:\n{last}")
    before, after = done.stdout.split("peak")[-1].split()
    return float(after) - float(before)


def describe_environment(*, threads: int, device: str, dtype: str) -> dict[str, Cell]:
    """What a measurement depends on: processor, load, versions, threads, device, type."""
    import torch

    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else _processor()
    return {
        "device": device,
        "processor": name,
        "dtype": dtype,
        "threads": threads,
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "unset"),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def largest_size() -> float:
    """The largest size that this process has had, in MiB."""
    try:
        # getrusage would count what the parent held when it started this process
        with open("/proc/self/status") as lines:
            for line in lines:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) / 1024
    except OSError:
        pass
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def check_arguments(
    *, threads: Any, rounds: Any, device: str, dtype: str, devices: tuple[str, ...]
) -> None:
    """Refuse what no benchmark can do, with a message that begins with the argument's name."""
    if threads < 1:
        raise ValueError(f"threads: got {threads}, expected at least 1")
    if rounds < 1:
        raise ValueError(f"rounds: got {rounds}, expected at least 1")
    if device.split(":")[0] not in devices:
        raise ValueError(f"device: got {device!r}, expected one of {', '.join(devices)}")
    if device.startswith("cuda"):
        import torch

        if not torch.cuda.is_available():
            raise ValueError("device: 'cuda' was asked for and torch sees no GPU here")
    if dtype not in ("float64", "float32", "bfloat16", "float16"):
        raise ValueError(f"dtype: got {dtype!r}, expected float64, float32, bfloat16 or float16")
