"""The protocol of every benchmark: it must be able to tell fast from slow and large from small."""

import time

import pytest

from interp.benchmarks import measure


def burn(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_a_contender_that_works_three_times_as_long_has_a_ratio_of_three():
    timings = measure.time_interleaved(
        {"base": lambda: burn(0.004), "slow": lambda: burn(0.012)}, baseline="base", rounds=3
    )
    assert timings["base"].ratio == 1.0
    assert timings["slow"].ratio == pytest.approx(3.0, rel=0.1)
    assert timings["slow"].seconds == pytest.approx(0.012, rel=0.1)
    assert timings["slow"].n_rounds == 3


def test_sleeping_counts_with_many_threads_and_not_with_one():
    for threads, low, high in ((1, 0.0, 0.005), (2, 0.01, 1.0)):
        timing = measure.time_interleaved(
            {"sleep": lambda: time.sleep(0.01)}, baseline="sleep", rounds=1, threads=threads
        )
        assert low <= timing["sleep"].seconds <= high


def test_contenders_take_turns_and_each_round_starts_with_another():
    order = []

    def contender(name):
        return lambda: order.append(name)

    names = ("a", "b", "c")
    measure.time_interleaved(
        {name: contender(name) for name in names}, baseline="a", rounds=3, least_seconds=0.0
    )
    warm_up, rounds = order[:6], order[6:]
    assert warm_up == ["a", "a", "b", "b", "c", "c"]
    assert rounds == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]


def test_memory_is_that_of_the_work_and_not_of_the_parent():
    ballast = bytearray(200 << 20)  # what the parent holds must not hide what the child takes
    grown = measure.peak_memory("", "x = bytearray(b'1') * (64 << 20)")
    assert ballast[0] == 0
    assert 62 <= grown <= 70
    assert measure.peak_memory("x = bytearray(b'1') * (64 << 20); del x", "y = 1") < 2


def test_a_process_that_fails_gives_its_last_lines():
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        measure.peak_memory("", "1 / 0")


def test_a_row_has_a_cell_for_every_column():
    result = measure.BenchResult("speed", ["T", "ratio"], [[512, 0.5], [1024, 0.75]])
    assert result.column("ratio") == [0.5, 0.75]
    with pytest.raises(ValueError, match="column: got 'nonsense'"):
        result.column("nonsense")
    with pytest.raises(ValueError, match="2 cells, expected 1"):
        measure.BenchResult("speed", ["T"], [[1, 2]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"threads": 0}, "threads: got 0"),
        ({"rounds": 0}, "rounds: got 0"),
        ({"device": "abacus"}, "device: got 'abacus'"),
        ({"dtype": "int8"}, "dtype: got 'int8'"),
    ],
)
def test_what_no_benchmark_can_do_is_refused_by_the_arguments_name(change, message):
    arguments = {"threads": 1, "rounds": 1, "device": "cpu", "dtype": "float32"}
    with pytest.raises(ValueError, match=message):
        measure.check_arguments(**{**arguments, **change}, devices=("cpu", "cuda"))


def test_the_baseline_is_one_of_the_contenders():
    with pytest.raises(ValueError, match="baseline: got 'b'"):
        measure.time_interleaved({"a": int}, baseline="b", rounds=1)


def test_the_environment_tells_load_threads_and_versions():
    told = measure.describe_environment(threads=1, device="cpu", dtype="float32")
    assert {"processor", "load", "threads", "torch", "OMP_WAIT_POLICY"} <= set(told)
