"""Training steps: ours against bare PyTorch, and two processes against one."""

import multiprocessing
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import torch

from interp.benchmarks.bare_dyck import bare_twin, train_bare
from interp.benchmarks.measure import (
    BenchResult,
    Cell,
    check_arguments,
    describe_environment,
    time_interleaved,
)
from interp.models.config import TransformerConfig
from interp.models.dyck_language import DyckLanguage
from interp.models.dyck_presets import dyck_preset
from interp.models.dyck_training import DyckTrainingConfig, loss_targets, train_dyck
from interp.models.transformer import Transformer

COLUMNS = ["measurement", "ms", "baseline_ms", "speed_ratio", "lowest", "highest", "target"]
PRESETS = ("E1", "E5")
LANGUAGE = DyckLanguage(2, 4)
LENGTH = 28


def run(
    *,
    threads: int = 1,
    rounds: int = 5,
    device: str = "cpu",
    dtype: str = "float32",
    n_steps: int = 36,
    n_processes: int = 2,
) -> BenchResult:
    """Time a step of training.

    One row a preset: our loop with its hookable model beside a bare loop with a bare model, same
    weights, data, optimizer and order, ``n_steps`` steps of 100 strings in every round. Two rows
    for processes: ``n_processes`` that each train an E1 on ``threads`` threads, beside one.

    n_steps: steps in each measurement, 1 or more, 36 as in a published epoch; each process trains
        ten times as many, a whole E1.
    n_processes: 2 or more; 1 leaves these rows out, as does a device other than the CPU.

    ``speed_ratio`` is the median over rounds of our speed divided by the baseline's, ``lowest`` and
    ``highest`` are its extremes; ms are medians per step (of all processes together). Raises
    ValueError for arguments that cannot be measured.
    """
    check_arguments(
        threads=threads, rounds=rounds, device=device, dtype=dtype, devices=("cpu", "cuda")
    )
    for name, count in (("n_steps", n_steps), ("n_processes", n_processes)):
        if count < 1:
            raise ValueError(f"{name}: got {count}, expected at least 1")
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        rows = [
            _compare_with_bare(name, threads, rounds, device, dtype, n_steps) for name in PRESETS
        ]
        if n_processes > 1 and device == "cpu":
            rows += _compare_processes(threads, rounds, dtype, n_steps, n_processes)
    finally:
        torch.set_num_threads(threads_before)
    return BenchResult(
        name="train",
        columns=COLUMNS,
        rows=rows,
        notes=[
            f"steps of 100 strings of {LENGTH} brackets; processor time of one thread where "
            "threads=1"
        ],
        environment=describe_environment(threads=threads, device=device, dtype=dtype),
    )


def _prepare(
    name: str, device: str, dtype: str, n_steps: int
) -> tuple[TransformerConfig, DyckTrainingConfig, torch.Tensor]:
    config, training = dyck_preset(name)
    config = replace(config, dtype=getattr(torch, dtype), device=device)
    tokens = LANGUAGE.sample(training.batch_size * n_steps, LENGTH, seed=0).to(device)
    return config, replace(training, n_epochs=1), tokens


def _compare_with_bare(
    name: str, threads: int, rounds: int, device: str, dtype: str, n_steps: int
) -> list[Cell]:
    config, training, tokens = _prepare(name, device, dtype, n_steps)
    ours = Transformer(config)
    bare = bare_twin(ours)
    inputs, targets = tokens[:, :-1].contiguous(), loss_targets(tokens, LANGUAGE)
    timings = time_interleaved(
        {
            "bare": lambda: train_bare(bare, inputs, targets, training),
            "ours": lambda: train_dyck(ours, tokens, LANGUAGE, training),
        },
        baseline="bare",
        rounds=rounds,
        threads=threads,
        synchronize=torch.cuda.synchronize if device.startswith("cuda") else None,
    )
    own, base = timings["ours"], timings["bare"]
    return [
        f"{name}, ours against bare PyTorch",
        1e3 * own.seconds / n_steps,
        1e3 * base.seconds / n_steps,
        1 / own.ratio,
        1 / own.highest_ratio,
        1 / own.lowest_ratio,
        ">= 0.9",
    ]


def _compare_processes(
    threads: int, rounds: int, dtype: str, n_steps: int, n_processes: int
) -> list[list[Cell]]:
    """By the wall clock, and by the processor time that the same work took in each process.

    On an idle machine the two agree. Where others take their share, the wall clock tells what was
    left over, and processor time what the processes cost each other.
    """
    work = (dtype, threads, 10 * n_steps)
    # spawned, because a forked child of a process that has used torch's threads may hang
    context = multiprocessing.get_context("spawn")
    wall: dict[int, list[float]] = {1: [], n_processes: []}
    processor: dict[int, list[float]] = {1: [], n_processes: []}
    with ProcessPoolExecutor(n_processes, mp_context=context) as pool:

        def train_on(n_tasks: int) -> tuple[float, float]:
            start = time.perf_counter()
            tasks = [pool.submit(_train_one, *work) for _ in range(n_tasks)]
            seconds = [task.result() for task in tasks]
            return time.perf_counter() - start, statistics.mean(seconds)

        train_on(n_processes)  # starts them and imports torch
        for number in range(rounds):
            for n_tasks in (1, n_processes) if number % 2 else (n_processes, 1):
                own_wall, own_processor = train_on(n_tasks)
                wall[n_tasks].append(own_wall)
                processor[n_tasks].append(own_processor)
    rows: list[list[Cell]] = []
    for clock, taken in (("wall clock", wall), ("processor time", processor)):
        pairs = zip(taken[1], taken[n_processes], strict=True)
        ratios = [n_processes * one / each for one, each in pairs]
        rows.append(
            [
                f"E1, {n_processes} processes against one, {clock}",
                1e3 * statistics.median(taken[n_processes]) / (n_processes * work[2]),
                1e3 * statistics.median(taken[1]) / work[2],
                statistics.median(ratios),
                min(ratios),
                max(ratios),
                ">= 1.5" if n_processes == 2 else None,
            ]
        )
    return rows


def _train_one(dtype: str, threads: int, n_steps: int) -> float:
    """Train one model; the processor time that it took."""
    torch.set_num_threads(threads)
    config, training, tokens = _prepare("E1", "cpu", dtype, n_steps)
    start = time.process_time()
    train_dyck(Transformer(config), tokens, LANGUAGE, training)
    return time.process_time() - start
