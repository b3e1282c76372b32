"""The command line as a stranger meets it: what it prints, where, and how it exits."""

import json
import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import interp
from interp.case_studies import plan
from interp.cli import app

CONFIG = """
from dataclasses import dataclass, replace
from interp.case_studies.study import StudyInfo

@dataclass(frozen=True)
class Config:
    n_seeds: int = 3
    label: str = "plain"
    def with_seeds(self, n):
        return replace(self, n_seeds=n)

SCALES = {"smoke": Config(1), "quick": Config(), "paper": Config(99)}
STUDY = StudyInfo("mini", "A mini study", "Nobody 2020", "It counts.", {"smoke": 0.1, "quick": 2})
"""
STUDY = """
from interp.case_studies.study import Unit, UnitResult

def units(config):
    return [Unit(f"u/{s}", {"s": s, "label": config.label}) for s in range(config.n_seeds)]

def compute(unit, needs):
    if unit.params["label"] == "bug":
        raise ZeroDivisionError("told to")
    return UnitResult({"s": unit.params["s"], "nan": float("nan")})
"""
CLAIMS = """
from interp.case_studies.claims import Claim, Interval, Measurement
CLAIMS = [Claim("count", "It counts to [three]", "Nobody, p. 3", "counting", Interval(3, 3),
                lambda r: Measurement(len(r)), paper_value="3", scales=("smoke", "quick"))]
"""


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    """Tests may run while the toolkit is being edited, and write runs/ where they stand."""
    monkeypatch.setattr(plan, "_toolkit_at_start", [])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "150")


@pytest.fixture
def mini(tmp_path):
    folder = tmp_path / "mini"
    folder.mkdir()
    for name, text in (("config", CONFIG), ("claims", CLAIMS), ("study", STUDY)):
        (folder / f"{name}.py").write_text(text)
    return folder


def call(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def run_mini(*arguments):
    return call("run", "./mini", "--workers", 1, *arguments)


def test_a_run_shows_its_claims_and_where_the_report_is(mini, tmp_path):
    done = run_mini()
    assert done.exit_code == 0
    assert "A mini study (quick scale)" in done.stdout
    (row,) = [line for line in done.stdout.splitlines() if "It counts to" in line]
    assert row.split("  ")[0].strip() == "It counts to [three]"  # and not taken for mark-up
    assert {"Nobody, p. 3", "3", "reproduced"} <= {cell.strip() for cell in row.split("  ")}
    assert "1 of 1 claims reproduced" in done.stdout
    assert "report: runs/mini-quick/report.html" in done.stdout
    assert (tmp_path / "runs" / "mini-quick" / "report.html").is_file()


def test_a_broken_claim_fails_in_the_table_and_with_strict_in_the_exit_status(mini):
    (mini / "claims.py").write_text(CLAIMS.replace("Interval(3, 3)", "Interval(4, 4)"))
    lenient = run_mini()
    assert lenient.exit_code == 0
    assert "not reproduced" in lenient.stdout
    assert "0 of 1 claims reproduced, 1 not reproduced" in lenient.stdout
    strict = run_mini("--strict")
    assert strict.exit_code == 3
    assert strict.stderr.splitlines()[-1] == "interp: not reproduced: count"
    assert call("report", "runs/mini-quick", "--strict").exit_code == 3


def test_a_measure_that_raises_fails_with_strict_too(mini):
    (mini / "claims.py").write_text(CLAIMS.replace("Measurement(len(r))", "1 / 0"))
    done = run_mini("--strict")
    assert done.exit_code == 3
    assert "failed to measure" in done.stdout
    assert "ZeroDivisionError: division by zero" in done.stdout


def test_json_is_one_document_on_standard_output_and_nothing_else(mini):
    done = run_mini("--json")
    said = json.loads(done.stdout, parse_constant=lambda name: pytest.fail(name))
    assert done.stderr == ""
    assert said["computed"] == said["units"] == 3
    assert [claim["verdict"] for claim in said["claims"]] == ["reproduced"]
    again = json.loads(run_mini("--json").stdout)
    assert again["computed"] == 0
    assert again["result_hash"] == said["result_hash"]
    redrawn = json.loads(call("report", "runs/mini-quick", "--json").stdout)
    assert redrawn["result_hash"] == said["result_hash"]


def test_quiet_prints_nothing(mini):
    done = run_mini("--quiet")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "")


def test_seeds_scale_set_and_out_do_what_they_say(mini, tmp_path):
    done = run_mini(
        "--scale", "smoke", "--seeds", 2, "--set", "label=x", "--out", "here/run", "--json"
    )
    said = json.loads(done.stdout)
    assert (said["scale"], said["units"], said["folder"]) == ("smoke", 2, "here/run")
    record = json.loads((tmp_path / "here" / "run" / "run.json").read_text())
    assert record["config"] == {"n_seeds": 2, "label": "x"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "./mini", "--scale", "quik"], "unknown scale 'quik'.*did you mean 'quick'"),
        (["run", "./mini", "--set", "lable=x"], "unknown --set key 'lable'.*mean 'label'"),
        (["run", "./mini", "--set", "label"], "--set: got 'label', expected key=value"),
        (["run", "./mini", "--set", "n_seeds=x"], r'--set n_seeds: got "x" \(str\), expected int'),
        (["run", "./mini", "--seeds", "0"], "seeds: got 0"),
        (["run", "./mini", "--workers", "0"], "workers: got 0"),
        (["run", "./mini", "--backend", "dusk"], "unknown backend 'dusk'.*it is one of local"),
        (["run", "./mini", "--device", "cuda"], "study mini cannot use 'cuda'; it can use cpu"),
        (["run", "./mini", "--dtype", "float16"], "cannot use 'float16'; it fixes its own"),
        (["run", "./nowhere"], "is no folder; a study is a folder with"),
        (["run", "no_such_study"], "unknown study 'no_such_study'"),
        (["show", "no_such_study"], "unknown study 'no_such_study'"),
        (["show", "./mini", "--device", "cuda"], "--device: study ./mini cannot use 'cuda'"),
        (["report", "mini", "--device", "cuda"], "drawing a report cannot use 'cuda'"),
        (["report", "mini", "--dtype", "float32"], "it has no use for --dtype"),
    ],
)
def test_what_is_asked_for_wrongly_is_one_line_and_exit_2_and_leaves_nothing(
    mini, tmp_path, arguments, message
):
    done = call(*arguments)
    assert done.exit_code == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("interp: ")
    assert re.search(message, line), line
    assert [path.name for path in tmp_path.iterdir()] == ["mini"]


def test_what_goes_wrong_is_one_line_and_exit_1(mini, tmp_path):
    (tmp_path / "file").touch()
    for arguments, message in (
        (["run", "./mini", "--out", "file/run"], "cannot write the run into file/run"),
        (["report", "mini"], "run folder 'mini' has no run.json"),
        (["run", "./mini", "--set", "label=bug", "--workers", "1"], "unit 'u/0' of mini failed"),
    ):
        done = call(*arguments)
        assert done.exit_code == 1
        lines = done.stderr.strip().splitlines()
        assert message in lines[-1]
        assert not any("Traceback" in line for line in lines)


def test_a_bug_of_ours_shows_its_traceback(monkeypatch):
    from interp.case_studies import catalogue

    def broken():
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(catalogue, "describe_studies", broken)
    assert isinstance(call("list").exception, ZeroDivisionError)


def test_list_can_be_read_by_people_and_by_programs():
    assert call("list").exit_code == 0
    listed = json.loads(call("list", "--json").stdout)
    names = call("list", "--quiet").stdout.split()
    assert [said["name"] for said in listed] == names
    assert call("list", "--device", "no_such_device", "--quiet").stdout == ""


def test_show_tells_scales_and_what_each_claim_expects(mini):
    done = call("show", "./mini")
    assert done.exit_code == 0
    for said in (
        "Nobody 2020",
        "smoke (6 s)",
        "quick (2 min)",
        "paper (?)",
        "n_seeds",
        "Nobody, p",
    ):
        assert said in done.stdout
    said = json.loads(call("show", "./mini", "--json").stdout)
    assert said["scales"]["paper"] == {"n_seeds": 99, "label": "plain"}
    assert said["claims"][0]["expected"] == {"smoke": "3", "quick": "3"}


def test_version_and_help():
    assert call("--version").stdout.strip() == f"interp {interp.__version__}"
    done = call("--help")
    for command in ("list", "show", "run", "report", "bench", "doctor", "cache"):
        assert command in done.stdout


@pytest.mark.parametrize("command", ["list", "show", "run", "report", "bench", "doctor", "cache"])
def test_every_command_knows_the_common_options(command):
    said = call(command, "--help").stdout
    for option in ("--device", "--dtype", "--json", "--quiet"):
        assert option in said


def test_the_installed_command_starts_without_torch(tmp_path):
    code = (
        "import sys; sys.argv = ['interp', 'list']\n"
        "from interp.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'torch', 'transformers', 'transformer_lens', 'nnsight', 'pandas', 'scipy'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
