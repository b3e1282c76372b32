"""A run that is killed, interrupted, doubled, starved of disk or memory ends well all the same."""

import json
import os
import random
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest

CLAIMS = """
from interp.case_studies.claims import Claim, Interval, Measurement
CLAIMS = [Claim("half", "Draws average one half", "Nobody", "mean", Interval(0.3, 0.7),
                lambda r: Measurement(r["gather"].numbers["mean"]), scales=("quick",))]
"""
N_UNITS = 12  # of the toy at paper scale


@pytest.fixture
def bare_toy(toy):
    """The toy without intervals and figures, whose imports would take most of these tests' time."""
    (toy / "figures.py").unlink()
    (toy / "claims.py").write_text(CLAIMS)
    return toy


def wait_for(condition, *, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def finished_units(run: Path) -> int:
    return len(list((run / "units").glob("*.safetensors")))


def result_hash(run: Path) -> str:
    return json.loads((run / "run.json").read_text())["result_hash"]


def run_to_the_end(start, *arguments) -> subprocess.Popen:
    process = start("run", *arguments)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return process


@pytest.mark.slow
def test_a_run_killed_five_times_ends_with_the_same_numbers_and_loses_only_units_in_flight(
    bare_toy, log, tmp_path, interp_process, monkeypatch, unit_files
):
    n_units = 25
    asked = ("run", bare_toy, "--seeds", n_units - 1, "-q")
    plain, killed = tmp_path / "plain", tmp_path / "killed"
    run_to_the_end(interp_process, *asked[1:], "--out", plain, "--workers", 1)
    n_before = len(log())
    assert n_before == n_units

    monkeypatch.setenv("TOY_SECONDS", "0.25")
    moments = random.Random(20231)
    for _ in range(5):
        n_computed = len(log())
        process = interp_process(*asked, "--out", killed, "--workers", 2)
        wait_for(lambda: len(log()) > n_computed)  # noqa: B023
        time.sleep(moments.uniform(0.0, 0.6))
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    monkeypatch.setenv("TOY_SECONDS", "0")
    run_to_the_end(interp_process, *asked[1:], "--out", killed, "--workers", 2)

    assert result_hash(killed) == result_hash(plain)
    # every kill may cost the units that its two workers were at, and no other
    assert n_units <= len(log()) - n_before <= n_units + 5 * 2
    assert len(unit_files(killed)) == n_units
    assert all(name.endswith(".safetensors") for name in unit_files(killed))


def test_workers_end_soon_after_the_run_that_started_them_is_killed(
    bare_toy, log, interp_process, tmp_path, monkeypatch
):
    monkeypatch.setenv("TOY_SECONDS", "60")
    process = interp_process("run", bare_toy, "--out", tmp_path / "run", "--workers", 2, "-q")
    wait_for(lambda: len(log()) == 2)
    group = os.getpgid(process.pid)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()

    def is_gone() -> bool:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        return False

    wait_for(is_gone, seconds=20)


def test_two_runs_into_one_folder_at_once_share_the_work_and_both_end_well(
    bare_toy, log, tmp_path, interp_process, monkeypatch, unit_files
):
    monkeypatch.setenv("TOY_SECONDS", "0.4")
    run = tmp_path / "run"
    arguments = ("run", bare_toy, "--scale", "paper", "--out", run, "--workers", 2, "--json")
    first, second = interp_process(*arguments), interp_process(*arguments)
    told = []
    for process in (first, second):
        output, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        told.append(json.loads(output))
    assert told[0]["result_hash"] == told[1]["result_hash"] == result_hash(run)
    assert sum(said["computed"] for said in told) >= N_UNITS - 1
    # at the end of a stage a run may repeat what the other is at: two draws each, one gathering
    assert N_UNITS <= len(log()) <= N_UNITS + 5
    assert len(unit_files(run)) == N_UNITS


def test_a_run_does_not_wait_for_another_that_is_stopped_in_the_middle_of_a_unit(
    bare_toy, log, tmp_path, interp_process, monkeypatch
):
    monkeypatch.setenv("TOY_SECONDS", "1")
    run = tmp_path / "run"
    arguments = ("run", bare_toy, "--scale", "smoke", "--out", run, "-q")
    stopped = interp_process(*arguments, "--workers", 1)
    wait_for(lambda: len(log()) == 1)
    os.kill(stopped.pid, signal.SIGSTOP)
    run_to_the_end(interp_process, *arguments[1:], "--workers", 1)
    os.kill(stopped.pid, signal.SIGCONT)
    _, errors = stopped.communicate(timeout=60)
    assert stopped.returncode == 0, errors
    assert log().count("draw/seed=0") == 2


def test_ctrl_c_ends_at_once_with_130_and_one_line_and_the_run_goes_on_later(
    bare_toy, log, tmp_path, interp_process, monkeypatch, unit_files
):
    monkeypatch.setenv("TOY_SECONDS", "0.5")
    run = tmp_path / "run"
    process = interp_process("run", bare_toy, "--scale", "paper", "--out", run, "--workers", 2)
    wait_for(lambda: finished_units(run) >= 1)
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert output == ""
    lines = errors.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("interp: interrupted: ")
    assert "goes on from there" in lines[0]
    assert all(name.endswith(".safetensors") for name in unit_files(run))
    n_kept = finished_units(run)
    monkeypatch.setenv("TOY_SECONDS", "0")
    again = interp_process(
        "run", bare_toy, "--scale", "paper", "--out", run, "--workers", 1, "--json"
    )
    assert json.loads(again.communicate(timeout=60)[0])["computed"] == N_UNITS - n_kept


def test_ctrl_c_while_workers_start_is_one_line_too(
    bare_toy, tmp_path, interp_process, monkeypatch
):
    monkeypatch.setenv("TOY_SECONDS", "2")
    process = interp_process("run", bare_toy, "--out", tmp_path / "run", "--workers", 2)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not children.exists():
        pytest.skip("this system does not tell a process's children; Linux's /proc does")
    # two workers, and two processes that look after semaphores
    wait_for(lambda: len(children.read_text().split()) >= 3)
    time.sleep(0.3)
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert output == ""
    assert len(errors.strip().splitlines()) == 1, errors


def test_a_worker_killed_from_outside_is_told_in_one_line_and_costs_only_its_unit(
    bare_toy, log, tmp_path, interp_process, monkeypatch
):
    monkeypatch.setenv("TOY_DIE", "draw/seed=1")
    run = tmp_path / "run"
    process = interp_process("run", bare_toy, "--out", run, "--workers", 2, "-q")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert len(errors.strip().splitlines()) == 1
    assert "a worker process was killed" in errors
    assert "'draw/seed=1'" in errors
    monkeypatch.delenv("TOY_DIE")
    run_to_the_end(interp_process, bare_toy, "--out", run, "--workers", 2, "-q")


def test_a_file_that_may_not_grow_is_one_line_and_leaves_no_file_behind(
    bare_toy, tmp_path, interp_process, unit_files
):
    run = tmp_path / "run"

    def limit_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))

    arguments = ("run", bare_toy, "--out", run, "--set", "length=9001", "--workers", 2, "-q")
    process = interp_process(*arguments, preexec_fn=limit_files)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert len(errors.strip().splitlines()) == 1
    assert "File too large" in errors
    assert "0 of 5 units are kept" in errors
    assert unit_files(run) == []
    run_to_the_end(interp_process, *arguments[1:])


def test_a_full_disk_is_one_line_and_the_run_goes_on_once_there_is_room(
    bare_toy, tmp_path, interp_process
):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("no right to mount a small file system here; run as root to test a full disk")
    try:
        arguments = ("run", bare_toy, "--out", disk / "run", "--set", "length=9001", "-q")
        process = interp_process(*arguments, "--workers", 2)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 1
        assert len(errors.strip().splitlines()) == 1
        assert "No space left on device" in errors
        n_kept = finished_units(disk / "run")
        assert 1 <= n_kept < 5
        assert not list((disk / "run" / "units").glob("*.partial"))
        subprocess.run(["mount", "-o", "remount,size=4m", str(disk)], check=True)
        again = interp_process(*arguments[:-1], "--json", "--workers", 1)
        assert json.loads(again.communicate(timeout=60)[0])["computed"] == 5 - n_kept
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=False)
