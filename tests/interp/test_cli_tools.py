"""``interp bench``, ``doctor`` and ``cache``: what they print, refuse, and leave alone."""

import json
import math
import sys
import types

import pytest
from typer.testing import CliRunner

from interp import caches, cli_tools, doctor
from interp.benchmarks import start
from interp.benchmarks.measure import BenchResult
from interp.cli import app


def call(*arguments, **options):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], **options)


@pytest.fixture
def a_benchmark(monkeypatch):
    """A benchmark named ``toy`` that notes what it is asked; set ``toy.error`` to make it raise."""
    module = types.ModuleType("interp.benchmarks.toy")
    module.error = None

    def run(*, threads=1, rounds=5, device="cpu", dtype="float64"):
        if module.error:
            raise module.error
        module.asked = (threads, rounds, device, dtype)
        rows = [["ours", 0.5, None], ["theirs", math.nan, 3]]
        return BenchResult("toy", ["what", "seconds", "n"], rows, ["a [note]"], {"load": 0.1})

    module.run = run
    monkeypatch.setitem(sys.modules, "interp.benchmarks.toy", module)
    monkeypatch.setattr(cli_tools, "_benchmarks", lambda: ["attention", "toy"])
    return module


def test_benchmarks_are_the_modules_that_have_a_run():
    listed = call("bench").stdout.split()
    assert "start" in listed
    assert "measure" not in listed
    assert json.loads(call("bench", "--json").stdout) == listed


def test_a_benchmark_is_told_what_was_asked_and_keeps_its_own_defaults(a_benchmark):
    assert call("bench", "toy").exit_code == 0
    assert a_benchmark.asked == (1, 5, "cpu", "float64")
    call("bench", "toy", "--threads", 2, "--rounds", 3, "--device", "cuda", "--dtype", "bfloat16")
    assert a_benchmark.asked == (2, 3, "cuda", "bfloat16")


def test_a_benchmark_prints_its_table_notes_and_environment(a_benchmark):
    said = call("bench", "toy").stdout
    for words in ("what", "seconds", "theirs", "a [note]", "load 0.1"):
        assert words in said
    quiet = call("bench", "toy", "--quiet").stdout
    assert "theirs" in quiet
    assert "a [note]" not in quiet


def test_a_benchmark_is_strict_json_on_screen_and_in_a_file(a_benchmark, tmp_path):
    out = tmp_path / "result.json"
    done = call("bench", "toy", "--json", "--out", out)
    said = json.loads(done.stdout, parse_constant=lambda name: pytest.fail(name))
    assert said["rows"] == [["ours", 0.5, None], ["theirs", None, 3]]
    assert json.loads(out.read_text()) == said
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_what_a_benchmark_refuses_is_one_line_and_its_bugs_are_tracebacks(a_benchmark, tmp_path):
    unknown = call("bench", "toi")
    assert unknown.exit_code == 2
    assert "did you mean 'toy'? it is one of attention, toy" in unknown.stderr
    a_benchmark.error = ValueError("device: got 'tpu', expected one of cpu")
    refused = call("bench", "toy", "--device", "tpu")
    assert refused.exit_code == 2
    assert refused.stderr.strip() == (
        "interp: benchmark toy: device: got 'tpu', expected one of cpu"
    )
    a_benchmark.error = ValueError("shapes do not match")
    assert isinstance(call("bench", "toy").exception, ValueError)
    a_benchmark.error = None
    assert call("bench", "toy", "--out", tmp_path / "no" / "folder.json").exit_code == 1


def test_starting_is_measured_and_stays_within_its_limits():
    result = start.run(rounds=1)
    processor = dict(zip(result.column("what"), result.column("processor"), strict=True))
    assert processor["import interp"] - processor["python"] < 0.25
    assert processor["interp list"] < 2 * 0.7  # twice, since one round on a busy machine is noisy
    assert processor["wheel"] is None or processor["wheel"] < start.LARGEST_WHEEL


@pytest.fixture
def cache_folders(monkeypatch, tmp_path):
    """Caches below a temporary folder: ours with 1,007 bytes, and one of other programs."""
    for name in ("ours", "theirs"):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "file").write_bytes(b"x" * 1000)
        (tmp_path / name / "deep" / "file").write_bytes(b"x" * 7)
    known = [
        caches.Cache("ours", tmp_path / "ours", "kernels", True),
        caches.Cache("theirs", tmp_path / "theirs", "models", False),
    ]
    monkeypatch.setattr(caches, "caches", lambda: known)
    return tmp_path


def test_caches_are_told_with_place_and_size(cache_folders):
    said = json.loads(call("cache", "--json").stdout)
    assert [(cache["name"], cache["bytes"]) for cache in said] == [("ours", 1007), ("theirs", 1007)]
    assert "1.0 kB" in call("cache").stdout


def test_a_cache_is_cleared_after_a_yes_and_not_otherwise(cache_folders):
    refused = call("cache", "--clear", "ours", input="n\n")
    assert refused.exit_code == 1
    assert "Delete 1.0 kB in" in refused.stderr
    assert (cache_folders / "ours" / "file").exists()
    assert call("cache", "--clear", "ours", input="").exit_code == 1
    assert (cache_folders / "ours" / "file").exists()
    assert call("cache", "--clear", "ours", input="y\n").exit_code == 0
    assert not (cache_folders / "ours").exists()
    assert (cache_folders / "theirs" / "file").exists()
    again = call("cache", "--clear", "ours", "--yes", "--json")
    assert json.loads(again.stdout) == {"cleared": "ours", "bytes": 0}


def test_what_other_programs_keep_is_never_cleared(cache_folders):
    refused = call("cache", "--clear", "theirs", "--yes")
    assert refused.exit_code == 2
    assert "delete" in refused.stderr
    assert (cache_folders / "theirs" / "file").exists()
    with pytest.raises(ValueError, match="is not cleared from here"):
        caches.clear(caches.caches()[1])


def test_an_unknown_cache_is_refused_with_the_nearest(cache_folders):
    refused = call("cache", "--clear", "our")
    assert refused.exit_code == 2
    assert "did you mean 'ours'" in refused.stderr


def test_the_environment_says_where_caches_are(monkeypatch, tmp_path):
    for variable, name in (
        ("INTERP_CACHE", "interp"),
        ("TRITON_CACHE_DIR", "triton"),
        ("TORCHINDUCTOR_CACHE_DIR", "inductor"),
        ("HF_HOME", "hugging-face"),
    ):
        monkeypatch.setenv(variable, str(tmp_path / name))
    assert {c.name: c.folder for c in caches.caches()} == {
        name: tmp_path / name for name in ("interp", "triton", "inductor", "hugging-face")
    }


def test_the_doctor_looks_at_everything(cache_folders):
    findings = doctor.examine()
    assert {found.area for found in findings} == {
        "versions",
        "devices",
        "threads",
        "compiler",
        "attention",
        "caches",
        "disk",
    }
    by_name = {(found.area, found.what): found for found in findings}
    assert by_name["versions", "torch"].state == "ok"
    assert by_name["devices", "cpu"].state == "ok"
    assert by_name["attention", "reference"].state == "ok"
    assert all("\n" not in found.said for found in findings)


def test_the_doctor_says_what_would_be_slow_and_why(monkeypatch, cache_folders):
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor.os, "getloadavg", lambda: (999.0, 0, 0))
    slow = {found.what: found.said for found in doctor._threads() if found.state == "slow"}
    assert "Haswell" in slow["numpy kernels"]
    assert "thousands of times slower" in slow["triton"]
    assert "others compute here too" in slow["load"]
    compiler = next(doctor._backends("cpu", "float32"))
    assert (compiler.state, "install gcc or clang" in compiler.said) == ("slow", True)


def test_a_device_that_is_asked_for_and_absent_is_broken_and_exits_1(cache_folders):
    import torch

    if torch.backends.mps.is_available():
        pytest.skip("this machine has the device that the test expects to be absent")
    done = call("doctor", "--device", "mps", "--json")
    assert done.exit_code == 1
    found = {said["what"]: said for said in json.loads(done.stdout) if said["area"] == "devices"}
    assert list(found) == ["mps"]
    assert found["mps"]["state"] == "broken"
    refused = call("doctor", "--device", "tpu")
    assert refused.exit_code == 2
    assert "the doctor cannot use 'tpu'; it can use cpu, cuda, mps" in refused.stderr


def test_a_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(doctor, "TESTED", {"surely-not-installed": "1.0", "numpy": "0.1"})
    _, missing, other = doctor._versions()
    assert (missing.state, missing.said) == ("broken", "not installed")
    assert other.said.endswith("(tested with 0.1)")
