"""Running a study: what is computed, what is answered from disk, what is refused and how."""

import json
import os
import re

import pytest

from interp.case_studies import plan, record
from interp.case_studies.record import open_run
from interp.case_studies.run import UnitFailed, run
from interp.case_studies.store import CorruptUnit, Store
from interp.case_studies.study import StudyError
from interp.errors import UsageError


@pytest.fixture
def out(tmp_path):
    return tmp_path / "run"


def run_here(study, out, **options):
    return run(study, out=out, **{"workers": 1, **options})


def the_record(out):
    return json.loads((out / "run.json").read_text())


def test_the_same_run_in_two_fresh_folders_gives_the_same_hashes(toy, tmp_path):
    first, second = (run_here(toy, tmp_path / name) for name in "ab")
    hashes = [
        {name: unit["result_hash"] for name, unit in outcome.run.record["units"].items()}
        for outcome in (first, second)
    ]
    assert len(hashes[0]) == 5
    assert hashes[0] == hashes[1]
    assert first.run.record["result_hash"] == second.run.record["result_hash"]


def test_processes_compute_what_this_process_computes(toy, tmp_path, log):
    here = run_here(toy, tmp_path / "here")
    elsewhere = run(toy, out=tmp_path / "elsewhere", workers=2)
    assert elsewhere.n_computed == here.n_computed == 5
    assert elsewhere.run.record["result_hash"] == here.run.record["result_hash"]
    assert len(log()) == 10


def test_a_single_unit_that_is_missing_is_not_computed_in_this_process_unasked(toy, out):
    with (toy / "study.py").open("a") as file:
        file.write(
            "\ndef compute(unit, needs):\n"
            "    return UnitResult({'mean': 0.5, 'process': os.getpid()})\n"
        )
    run_here(toy, out)
    assert run_here(toy, out, seeds=5).run.results["draw/seed=4"].numbers["process"] == os.getpid()
    later = run(toy, out=out, seeds=6, workers=2).run.results
    assert later["draw/seed=5"].numbers["process"] != os.getpid()


def test_a_second_run_is_answered_from_disk(toy, out, log):
    assert run_here(toy, out).n_computed == 5
    again = run_here(toy, out)
    assert (again.n_computed, again.n_reused) == (0, 5)
    assert len(log()) == 5


def test_units_are_shared_between_scales_and_seeds(toy, out, log):
    run_here(toy, out, scale="smoke")
    assert run_here(toy, out).n_computed == 2 + 1  # two more draws, and what gathers them
    assert run_here(toy, out, seeds=3).n_computed == 1
    assert run_here(toy, out, scale="smoke").n_computed == 0


def test_other_params_are_other_units(toy, out):
    run_here(toy, out)
    changed = run_here(toy, out, overrides={"length": 7})
    assert changed.n_computed == 5
    assert changed.run.record["config"]["length"] == 7
    assert run_here(toy, out, overrides={"label": "no unit depends on it"}).n_computed == 0


def test_other_source_is_other_units(toy, out):
    run_here(toy, out)
    with (toy / "claims.py").open("a") as file:
        file.write("# judged, not computed\n")
    assert run_here(toy, out).n_computed == 0
    with (toy / "study.py").open("a") as file:
        file.write("# computed\n")
    assert run_here(toy, out).n_computed == 5


def test_a_unit_gets_the_results_that_it_needs_and_no_others(toy, out):
    results = run_here(toy, out).run.results
    means = results.column("draw/", "mean")
    assert results["gather"].numbers["mean"] == pytest.approx(means.mean())
    assert results["gather"].arrays["all"].tolist() == means.tolist()


def test_the_record_says_what_is_needed_to_get_the_run_again(toy, out):
    run_here(toy, out, seeds=3, overrides={"rate": 1})
    said = the_record(out)
    assert (said["study"], said["scale"], said["seeds"]) == ("toy", "quick", 3)
    assert said["overrides"] == {"rate": 1}
    assert said["config"] == {
        "n_seeds": 3,
        "length": 13,
        "rate": 1.0,
        "label": "plain",
        "lengths": [3, 5],
    }
    assert said["status"] == "complete"
    assert said["versions"]["numpy"]
    assert said["machine"]["cores"] >= 1
    assert re.fullmatch(r"[0-9a-f]{64}", said["source_hash"])
    for unit in said["units"].values():
        assert Store(out).path(unit["key"]).exists()
        assert unit["seconds"] >= 0
        assert re.fullmatch(r"[0-9a-f]{64}", unit["result_hash"])


def test_a_unit_that_raises_is_named_with_its_params_and_the_others_are_kept(
    toy, out, monkeypatch, log
):
    monkeypatch.setenv("TOY_FAIL", "draw/seed=2")
    with pytest.raises(UnitFailed) as error:
        run_here(toy, out)
    said = str(error.value)
    assert "unit 'draw/seed=2' of toy failed with RuntimeError: told to fail" in said
    assert '"seed":2' in said
    assert "2 of 5 units are kept" in said
    assert "\n" not in said
    (trace,) = (out / "failed").iterdir()
    assert str(trace) in said
    assert 'raise RuntimeError("told to fail")' in trace.read_text()
    assert the_record(out)["status"] == "running"
    monkeypatch.delenv("TOY_FAIL")
    assert run_here(toy, out).n_computed == 3
    assert not (out / "failed").exists()


def test_after_a_failure_no_new_unit_is_begun(toy, out, monkeypatch, log):
    monkeypatch.setenv("TOY_FAIL", "draw/seed=0")
    monkeypatch.setenv("TOY_SECONDS", "0.3")
    with pytest.raises(UnitFailed):
        run(toy, out=out, scale="paper", workers=2)
    assert len(log()) <= 4  # of twelve


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ("None", "compute returned NoneType, expected a UnitResult"),
        ("UnitResult({}, {'x': 'text'})", "numpy.ndarray"),
    ],
)
def test_a_unit_that_returns_something_else_has_failed(toy, out, result, said):
    text = (toy / "study.py").read_text()
    (toy / "study.py").write_text(f"{text}\ndef compute(unit, needs):\n    return {result}\n")
    with pytest.raises(UnitFailed, match=said):
        run_here(toy, out)


def test_a_damaged_unit_file_is_named_and_neither_used_nor_computed_again(toy, out, log):
    run_here(toy, out)
    key = the_record(out)["units"]["draw/seed=1"]["key"]
    path = Store(out).path(key)
    path.write_bytes(path.read_bytes()[:-3])
    for do in (lambda: run_here(toy, out), lambda: open_run(out)):
        with pytest.raises(CorruptUnit, match="Delete it and run the same command") as error:
            do()
        assert str(path) in str(error.value)
    assert len(log()) == 5
    path.unlink()
    assert run_here(toy, out).n_computed == 1
    assert log()[-1] == "draw/seed=1"


def test_a_unit_file_that_was_exchanged_for_a_sound_one_is_found_out(toy, out):
    run_here(toy, out)
    said = the_record(out)
    said["units"]["draw/seed=1"]["result_hash"] = "0" * 64
    (out / "run.json").write_text(json.dumps(said))
    with pytest.raises(CorruptUnit, match=r"is not the one that run.json recorded for 'draw/se"):
        open_run(out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": "papers"}, "unknown scale 'papers'.*did you mean 'paper'"),
        ({"overrides": {"lenght": 3}}, "unknown --set key 'lenght'.*did you mean 'length'"),
        ({"overrides": {"length": 0}}, "config refused .*length: got 0"),
        ({"seeds": 0}, "seeds: got 0"),
        ({"workers": 0}, "workers: got 0, expected a whole number of at least 1"),
        ({"backend": "dusk"}, "unknown backend 'dusk'"),
        ({"device": "cuda"}, "device: study toy cannot use 'cuda'"),
    ],
)
def test_what_cannot_be_run_is_refused_and_leaves_nothing_behind(toy, out, options, message):
    with pytest.raises(UsageError, match=message):
        run_here(toy, out, **options)
    assert not out.exists()


def test_a_folder_below_a_regular_file_is_refused_and_the_file_is_left_alone(toy, tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    for out in (file, file / "run"):
        with pytest.raises(StudyError, match=r"cannot write the run into .*Not a directory"):
            run_here(toy, out)
    assert file.read_text() == "mine"


def test_a_folder_with_another_studys_run_is_left_alone(toy, out, tmp_path):
    run_here(toy, out)
    before = (out / "run.json").read_bytes()
    other = toy.rename(tmp_path / "other_toy")
    config = (other / "config.py").read_text().replace('name="toy"', 'name="other_toy"')
    (other / "config.py").write_text(config)
    with pytest.raises(UsageError, match="holds a run of toy, not of other_toy"):
        run_here(other, out)
    assert (out / "run.json").read_bytes() == before


@pytest.mark.parametrize("part", ["claims", "figures"])
def test_a_slip_in_claims_or_figures_is_told_before_anything_is_computed(toy, out, log, part):
    (toy / f"{part}.py").write_text("x y")
    with pytest.raises(UsageError, match=rf"{part}\.py, line 1"):
        run_here(toy, out)
    assert log() == []
    assert not out.exists()


def test_the_default_folder_is_named_after_study_and_scale(toy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(toy, scale="smoke", workers=1)
    assert (tmp_path / "runs" / "toy-smoke" / "report.html").exists()


def test_a_study_without_work_is_refused(toy, out):
    with (toy / "study.py").open("a") as file:
        file.write("\ndef units(config):\n    return []\n")
    with pytest.raises(StudyError, match="asks for no unit of work"):
        run_here(toy, out)
    assert not out.exists()


def test_a_run_that_is_not_finished_says_what_is_missing(toy, out, monkeypatch):
    monkeypatch.setenv("TOY_FAIL", "gather")
    with pytest.raises(UnitFailed):
        run_here(toy, out)
    with pytest.raises(StudyError, match=r"is not finished: 4 of 5 units.*missing is 'gather'"):
        open_run(out)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "has no run.json; expected one that 'interp run' made"),
        ("{", "run.json is damaged"),
        ("[]", "run.json is damaged"),
        ('{"format": "interp-run-9"}', "says format 'interp-run-9', expected 'interp-run-1'"),
    ],
)
def test_a_folder_that_holds_no_sound_record_is_no_run(tmp_path, content, message):
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(StudyError, match=message):
        open_run(tmp_path)


def test_what_a_dead_run_left_is_cleared(toy, out):
    run_here(toy, out)
    for folder in (out, out / "units"):
        (folder / "old.partial").write_text("half a file")
    run_here(toy, out)
    assert not [*out.glob("*.partial"), *(out / "units").glob("*.partial")]


def test_a_disk_that_fills_up_at_the_end_is_told_and_the_run_goes_on(toy, out, monkeypatch, log):
    def full(folder, record):
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patched:
        patched.setattr(record, "write_record", full)
        with pytest.raises(StudyError, match=r"No space left on device; make room and run"):
            run_here(toy, out)
    run_here(toy, out)
    assert len(log()) == 5


def test_source_that_changes_while_a_run_starts_is_not_stored_under_the_wrong_key(
    toy, out, monkeypatch, unit_files
):
    make = plan.Plan

    def make_and_edit(*arguments):
        with (toy / "study.py").open("a") as file:
            file.write("# saved in an editor\n")
        return make(*arguments)

    monkeypatch.setattr(plan, "Plan", make_and_edit)
    with pytest.raises(StudyError, match="source code changed while the run of toy was starting"):
        run_here(toy, out)
    assert unit_files(out) == []


def test_a_process_whose_toolkit_is_older_than_the_disk_does_not_compute_itself(
    toy, out, monkeypatch
):
    monkeypatch.setattr(plan, "_toolkit_at_start", ["an older hash"])
    with pytest.raises(StudyError, match="restart Python, or use two workers"):
        run_here(toy, out)
    assert not out.exists()


def test_progress_is_told_what_is_done_and_what_is_left(toy, out):
    told = []

    class Listener:
        def begin(self, *, n_units, n_done, cost, cost_done):
            told.append(("begin", n_units, n_done, cost, cost_done))

        def unit_done(self, name, cost):
            told.append((name, cost))

        def end(self):
            told.append("end")

    run_here(toy, out, scale="smoke")
    run_here(toy, out, progress=Listener())
    assert told[0] == ("begin", 5, 2, 5.0, 2.0)
    assert {name for name, _ in told[1:-1]} == {"draw/seed=2", "draw/seed=3", "gather"}
    assert told[-1] == "end"


def test_tiny_units_cost_less_than_five_milliseconds_each(toy, out):
    """Of this process's own time, so that it holds on a busy machine; imports come before."""
    (toy / "study.py").write_text(
        "from interp.case_studies.study import Unit, UnitResult\n"
        "def units(config):\n"
        "    return [Unit(f'u/{i}', {'i': i}) for i in range(config.n_seeds)]\n"
        "def compute(unit, needs):\n"
        "    return UnitResult({'mean': 0.5})\n"
    )
    (toy / "figures.py").unlink()
    (toy / "claims.py").write_text("CLAIMS = []\n")
    run_here(toy, out, seeds=1)
    before = os.times()
    assert run_here(toy, out, seeds=301).n_computed == 300
    after = os.times()
    assert after.user + after.system - before.user - before.system < 300 * 0.005
