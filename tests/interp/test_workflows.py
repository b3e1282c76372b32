"""Runs and finished runs as a notebook sees them: tables, arrays, nothing computed twice."""

import json
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from interp.case_studies import plan
from interp.workflows import list_studies, load_run, redraw_report, run_study

STUDY = """
import numpy as np
from interp.case_studies.study import Unit, UnitResult

def units(config):
    return [Unit(f"d/seed={s}", {"seed": s, "unit": "kept apart"}) for s in range(config.n_seeds)]

def compute(unit, needs):
    seed = unit.params["seed"]
    numbers = {"mean": seed / 2, "ok": True, "text": "x", "none": None, "curve": [seed, 0.5],
               "by": {"depth": {"1": 3}}, "grid": [[1, 2], [3]]}
    return UnitResult(numbers, {"row": np.full(3, seed)} if seed else {})
"""
CONFIG = """
from dataclasses import dataclass, replace
from interp.case_studies.study import StudyInfo

@dataclass(frozen=True)
class Config:
    n_seeds: int = 12
    def with_seeds(self, n):
        return replace(self, n_seeds=n)

SCALES = {"smoke": Config(3), "quick": Config(), "paper": Config(99)}
STUDY = StudyInfo("shelf", "Title", "Paper", "Summary", {"smoke": 1})
"""
CLAIMS = """
from interp.case_studies.claims import Claim, Interval, Measurement
CLAIMS = [
    Claim("one", "s", "src", "how", Interval.above(9), lambda r: Measurement(1.0),
          paper_value=0.5, scales=("quick",)),
    Claim("two", "s", "src", "how", Interval(0, 9), lambda r: Measurement(1.0, interval=(0, 2)),
          scales=("quick",)),
]
"""


@pytest.fixture(autouse=True)
def toolkit_as_imported(monkeypatch):
    """Tests may run while the toolkit is being edited."""
    monkeypatch.setattr(plan, "_toolkit_at_start", [])


@pytest.fixture
def shelf(tmp_path):
    folder = tmp_path / "shelf"
    folder.mkdir()
    for name, text in (("config", CONFIG), ("claims", CLAIMS), ("study", STUDY)):
        (folder / f"{name}.py").write_text(text)
    return folder


@pytest.fixture
def result(shelf, tmp_path):
    return run_study(shelf, out=tmp_path / "run", workers=1)


def test_claims_are_a_table_of_numbers_and_verdicts(result):
    claims = result.claims.set_index("claim")
    assert list(claims["verdict"]) == ["not reproduced", "reproduced"]
    assert claims.loc["two", ["value", "low", "high"]].tolist() == [1.0, 0.0, 2.0]
    assert np.isnan(claims.loc["one", "low"])
    assert claims.loc["one", "paper"] == "0.5"
    assert result.all_reproduced is False
    assert result.summary == "1 of 2 claims reproduced, 1 not reproduced"


def test_units_are_a_table_with_their_params(result):
    assert list(result.units["unit"][:3]) == ["d/seed=0", "d/seed=1", "d/seed=2"]
    assert list(result.units["seed"]) == list(range(12))
    assert (result.units["seconds"] >= 0).all()
    assert result.units["result_hash"].str.len().eq(64).all()


def test_numbers_are_tidy_one_a_row(result):
    numbers = result.numbers
    of_two = numbers[numbers["unit"] == "d/seed=2"].drop(columns="unit")
    found = [
        (number, None if pd.isna(index) else index, value)
        for number, index, value in of_two.itertuples(index=False)
    ]
    assert found == [
        ("by.depth.1", None, 3.0),
        ("curve", 0, 2.0),
        ("curve", 1, 0.5),
        ("grid.0", 0, 1.0),
        ("grid.0", 1, 2.0),
        ("grid.1", 0, 3.0),
        ("mean", None, 1.0),
        ("ok", None, 1.0),
    ]
    means = numbers[numbers["number"] == "mean"]["value"]
    assert means.tolist() == [seed / 2 for seed in range(12)]


def test_arrays_come_by_name_from_the_units_that_have_them(result):
    rows = result.arrays("row")
    assert list(rows) == [f"d/seed={seed}" for seed in range(1, 12)]
    assert rows["d/seed=10"].tolist() == [10, 10, 10]
    assert list(result.arrays("row", prefix="d/seed=1")) == ["d/seed=1", "d/seed=10", "d/seed=11"]
    with pytest.raises(ValueError, match="name: no unit has an array 'column'; there are row"):
        result.arrays("column")


def test_a_loaded_run_is_the_run_and_computes_nothing(result, shelf):
    loaded = load_run(result.folder)
    assert loaded.n_computed == 0
    assert loaded.result_hash == result.result_hash
    assert loaded.claims.equals(result.claims)
    assert loaded.numbers.equals(result.numbers)
    assert loaded.units.equals(result.units)
    assert loaded.report.is_file()


def test_a_run_loads_without_its_study(result, shelf):
    for path in shelf.glob("*.py"):
        path.unlink()
    loaded = load_run(result.folder)
    assert loaded.results.config == {"n_seeds": 12}
    assert loaded.claims.equals(result.claims)
    with pytest.raises(ValueError, match=r"has no config.py"):
        redraw_report(result.folder)


def test_redrawing_judges_by_the_claims_of_today(result, shelf):
    (shelf / "claims.py").write_text(CLAIMS.replace("Interval.above(9)", "Interval.above(0)"))
    assert redraw_report(result.folder).all_reproduced
    assert load_run(result.folder).all_reproduced


def test_a_folder_that_is_no_run_is_a_value_error(tmp_path):
    with pytest.raises(ValueError, match="has no run.json"):
        load_run(tmp_path)


def test_studies_are_a_table():
    studies = list_studies()
    assert len(studies) == 0 or set(studies.columns) >= {"name", "title", "paper", "n_claims"}


def test_loading_a_run_and_its_tables_needs_no_torch(result, tmp_path):
    code = (
        "import sys, interp; run = interp.load_run(sys.argv[1]); run.claims; run.numbers\n"
        "print('torch' in sys.modules)"
    )
    argv = [sys.executable, "-c", code, str(result.folder)]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert json.loads((result.folder / "run.json").read_text())["study"] == "shelf"
