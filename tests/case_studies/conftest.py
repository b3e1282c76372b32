"""A study small enough to run hundreds of times: draws of random numbers, and what gathers them.

It lives in a folder of its own outside the project, as a user's study does. Environment variables
tell it to be slow, to fail, to die, and to log what it computes.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = """
from dataclasses import dataclass, replace
from interp.case_studies.study import StudyInfo

@dataclass(frozen=True)
class Config:
    n_seeds: int = 4
    length: int = 13
    rate: float = 0.5
    label: str = "plain"
    lengths: tuple[int, ...] = (3, 5)

    def __post_init__(self):
        if self.length < 1:
            raise ValueError(f"length: got {self.length}, expected at least 1")

    def with_seeds(self, n):
        return replace(self, n_seeds=n)

SCALES = {"smoke": Config(n_seeds=2), "quick": Config(), "paper": Config(n_seeds=11)}
STUDY = StudyInfo(
    name="toy", title="Uniform draws", paper="Nobody, Means of draws", summary="Draws <numbers>.",
    minutes={"smoke": 0.05, "quick": 0.1, "paper": 2},
)
"""
STUDY = """
import os, time
import numpy as np
from interp.case_studies.study import Unit, UnitResult

def units(config):
    draws = [
        Unit(f"draw/seed={seed}", {"seed": seed, "length": config.length, "rate": config.rate})
        for seed in range(config.n_seeds)
    ]
    gather = Unit("gather", {"what": "mean"}, needs=tuple(unit.name for unit in draws))
    return [*draws, gather]

def compute(unit, needs):
    if log := os.environ.get("TOY_LOG"):
        with open(log, "a") as file:
            file.write(unit.name + "\\n")
    if os.environ.get("TOY_FAIL") == unit.name:
        raise RuntimeError("told to fail")
    if os.environ.get("TOY_DIE") == unit.name:
        os.kill(os.getpid(), 9)
    if unit.name == "gather":
        means = [result.numbers["mean"] for result in needs.values()]
        return UnitResult({"mean": np.mean(means)}, {"all": np.array(means)})
    time.sleep(float(os.environ.get("TOY_SECONDS", 0)))
    draw = np.random.default_rng(unit.params["seed"]).random(unit.params["length"])
    curve = [0.25, 0.5]
    return UnitResult({"mean": draw.mean(), "by": {"curve": curve}}, {"draw": draw})
"""
CLAIMS = """
from interp.case_studies.claims import Claim, Interval, Measurement

def mean_of_draws(results):
    return Measurement(samples=results.column("draw/", "mean"))

CLAIMS = [
    Claim("half", "Draws average one half", "Nobody, table 1", "mean over seeds",
          Interval(0.3, 0.7), mean_of_draws, paper_value=0.5, scales=("smoke", "quick", "paper")),
    Claim("size", "There are eleven | draws", "Nobody, section 2", "count",
          {"paper": Interval(11, 11)}, lambda r: Measurement(len(r.names("draw/")))),
]
"""
FIGURES = """
from interp.case_studies.study import Figure

def draw_means(results):
    from matplotlib.figure import Figure as Drawing
    drawing = Drawing(figsize=(3, 2))
    drawing.subplots().plot(results.column("draw/", "mean"), "o")
    return drawing

FIGURES = [Figure("means", "Means", "They scatter about one half.", "Dots about 0.5.", draw_means)]
"""


@pytest.fixture
def toy(tmp_path):
    """The folder of a fresh copy of the toy study."""
    folder = tmp_path / "studies" / "toy"
    folder.mkdir(parents=True)
    for name, text in (
        ("config", CONFIG),
        ("study", STUDY),
        ("claims", CLAIMS),
        ("figures", FIGURES),
    ):
        (folder / f"{name}.py").write_text(text)
    return folder


@pytest.fixture
def log(tmp_path, monkeypatch):
    """Names of the units computed so far, in any process, as a function to call."""
    path = tmp_path / "computed.log"
    monkeypatch.setenv("TOY_LOG", str(path))
    return lambda: path.read_text().split() if path.exists() else []


def interp_command(*arguments: object) -> list[str]:
    """The command line of ``interp`` with these arguments, with the interpreter of the tests."""
    # A test runner in the background is started deaf to Ctrl-C and would pass that on; a user's
    # shell in the foreground is not.
    hearing = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{hearing}; from interp.cli import main; main()"
    return [sys.executable, "-c", code, *map(str, arguments)]


@pytest.fixture
def interp_process(tmp_path):
    """Start ``interp`` with arguments; whatever still runs at the end of the test is killed."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: object, **options: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            interp_command(*arguments),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            **options,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, 9)
        process.communicate()


@pytest.fixture
def unit_files():
    """Names of the files below a run's ``units``, sorted, as a function of the run folder."""
    return lambda run: sorted(path.name for path in (Path(run) / "units").iterdir())


@pytest.fixture(autouse=True)
def toolkit_as_imported(monkeypatch):
    """Tests may run while the toolkit is being edited; a test of its own covers what that means."""
    from interp.case_studies import plan

    monkeypatch.setattr(plan, "_toolkit_at_start", [])
