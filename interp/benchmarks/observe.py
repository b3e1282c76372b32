"""`interp bench observe`: what observing a model costs, beside the ways in which one did without.

A random model of GPT-2-small's shape, without its output head, reads one text. *sdpa* is the model
as transformers runs it; *observe* adds every statistic of every head; *eager + statistics* builds
every pattern, takes the same statistics and lets it go; *cached patterns* keeps every pattern, as
`run_with_cache` does.
"""

from collections.abc import Callable
from typing import Any

from interp.benchmarks.measure import (
    BenchResult,
    Cell,
    check_arguments,
    describe_environment,
    peak_memory,
    time_interleaved,
)

STATISTICS = ("lse", "entropy", "max", "first_mass", "received")
_COLUMNS = [
    "contender",
    "tokens",
    "rounds",
    "seconds",
    "ratio",
    "lowest",
    "highest",
    "MiB",
    "MiB over sdpa",
]
# Longest text for which the contenders that build patterns are run: 12 layers of 12 heads in
# float32 are 2.4 GB at 2048 tokens.
_LONGEST_SQUARE = 2048


def run(
    *,
    threads: int = 1,
    rounds: int = 5,
    device: str = "cpu",
    dtype: str = "float32",
    n_tokens: tuple[int, ...] = (2048, 8192),
    n_layers: int = 12,
    backend: str = "auto",
) -> BenchResult:
    """Time and memory of one forward pass for each length of text.

    ``ratio`` is to *sdpa* in the same round, ``MiB`` what the pass adds to a fresh process. Goals
    at 2048 tokens: a ratio of at most 1.15, and at most 100 MiB over *sdpa*. Longer texts, and the
    contenders that build patterns, take a third of the rounds.
    """
    check_arguments(threads=threads, rounds=rounds, device=device, dtype=dtype, devices=("cpu",))
    import torch

    torch.set_num_threads(threads)
    rows: list[list[Cell]] = []
    used: set[str] = set()
    for length in n_tokens:
        model, tokens = build(n_layers=n_layers, length=length, dtype=dtype)
        passes = contenders(model, tokens, backend=backend, backends_used=used)
        few = max(1, rounds // 3)
        timings = time_interleaved(
            {name: passes[name] for name in ("sdpa", "observe")},
            baseline="sdpa",
            rounds=rounds if length <= _LONGEST_SQUARE else few,
            threads=threads,
        )
        if len(passes) > 2:
            others = {name: run for name, run in passes.items() if name != "observe"}
            slow = time_interleaved(others, baseline="sdpa", rounds=few, threads=threads)
            timings |= {name: slow[name] for name in slow if name != "sdpa"}
        del model, passes
        memory = {
            name: _memory(name, n_layers, length, dtype, threads, backend) for name in timings
        }
        rows += [
            [
                name,
                length,
                timing.n_rounds,
                round(timing.seconds, 3),
                round(timing.ratio, 3),
                round(timing.lowest_ratio, 3),
                round(timing.highest_ratio, 3),
                round(memory[name]),
                round(memory[name] - memory["sdpa"]),
            ]
            for name, timing in timings.items()
        ]
    return BenchResult(
        name="observe",
        columns=_COLUMNS,
        rows=rows,
        notes=[
            f"statistics of all heads: {', '.join(STATISTICS)}; kernel: {', '.join(sorted(used))}",
            f"{n_layers} layers of 12 heads, d_model 768, one text, no output head",
        ],
        environment=describe_environment(threads=threads, device=device, dtype=dtype),
    )


def build(*, n_layers: int, length: int, dtype: str) -> tuple[Any, Any]:
    """A random model of GPT-2-small's shape with as many positions, and one text."""
    import torch
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(n_layer=n_layers, n_positions=max(length, 1024), use_cache=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT2Model(config).eval().to(getattr(torch, dtype))
    generator = torch.Generator().manual_seed(1)
    return model, torch.randint(config.vocab_size, (1, length), generator=generator)


def contenders(
    model: Any, tokens: Any, *, backend: str, backends_used: set[str]
) -> dict[str, Callable[[], object]]:
    """Forward passes by name; those that build patterns only where these fit."""
    passes: dict[str, Callable[[], object]] = {
        "sdpa": lambda: _plain(model, tokens),
        "observe": lambda: backends_used.update(_observed(model, tokens, backend)),
    }
    if tokens.shape[1] <= _LONGEST_SQUARE:
        passes["eager + statistics"] = lambda: _eager_statistics(model, tokens)
        passes["cached patterns"] = lambda: _cached_patterns(model, tokens)
    return passes


def _plain(model: Any, tokens: Any) -> None:
    import torch

    with torch.no_grad():
        model(tokens)


def _observed(model: Any, tokens: Any, backend: str) -> set[str]:
    import torch

    from interp.observing import observe

    with torch.no_grad(), observe(model, statistics=STATISTICS, backend=backend) as seen:
        model(tokens)
    return seen.backends


def _eager_statistics(model: Any, tokens: Any) -> list[Any]:
    """Each layer's statistics as soon as its pattern is there, which is then forgotten."""
    import torch

    found: list[Any] = []

    def take(module: Any, args: Any, output: Any) -> Any:
        pattern = output[1]
        entropy = torch.special.entr(pattern).sum(-1)
        found.append((entropy, pattern.amax(-1), pattern[..., 0], pattern.sum(-2)))
        return output[0], None

    _eager(model, tokens, take)
    return found


def _cached_patterns(model: Any, tokens: Any) -> list[Any]:
    kept: list[Any] = []
    _eager(model, tokens, lambda module, args, output: kept.append(output[1]))
    return kept


def _eager(model: Any, tokens: Any, take: Callable[..., Any]) -> None:
    import torch

    handles = [block.attn.register_forward_hook(take) for block in model.h]
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            model(tokens)
    finally:
        model.set_attn_implementation("sdpa")
        for handle in handles:
            handle.remove()


def _memory(name: str, n_layers: int, length: int, dtype: str, threads: int, backend: str) -> float:
    """MiB that one pass adds to a fresh process that has made a short one before."""
    setup = f"""
import torch
from interp.benchmarks.observe import build, contenders
torch.set_num_threads({threads})
model, tokens = build(n_layers={n_layers}, length={length}, dtype={dtype!r})
contenders(model, tokens[:, :64], backend={backend!r}, backends_used=set())[{name!r}]()
"""
    work = f"contenders(model, tokens, backend={backend!r}, backends_used=set())[{name!r}]()"
    return peak_memory(setup, work, environment={"OMP_NUM_THREADS": str(threads)})
