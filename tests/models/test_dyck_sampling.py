"""Random bracket paths, against enumeration and against one step at a time."""

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from interp.models import dyck_sampling
from interp.models.dyck_sampling import (
    conditioned_probabilities,
    sample_complete_steps,
    sample_prefix_steps,
)

Path = tuple[int, ...]


def prefix_paths(length: int, max_depth: int, p_open: float) -> dict[Path, float]:
    """Every prefix path and its probability, by walking the tree of choices."""
    paths = {(): 1.0}
    for _ in range(length):
        longer: dict[Path, float] = {}
        for path, probability in paths.items():
            height = sum(path)
            p_up = 1.0 if height == 0 else 0.0 if height == max_depth else p_open
            for step, p_step in ((1, p_up), (-1, 1 - p_up)):
                if p_step > 0:
                    longer[(*path, step)] = probability * p_step
        paths = longer
    return paths


def complete_paths(
    min_length: int, max_length: int, max_depth: int, p_open: float, p_end: float
) -> dict[Path, float]:
    """Every complete path of an admissible length and its probability given such a length."""

    def walk(path: Path, probability: float) -> Iterator[tuple[Path, float]]:
        height = sum(path)
        if height == 0:
            if min_length <= len(path) <= max_length:
                yield path, probability * p_end
            probability *= 1 - p_end
        if len(path) == max_length:
            return
        p_up = 1.0 if height == 0 else 0.0 if height == max_depth else p_open
        if p_up > 0:
            yield from walk((*path, 1), probability * p_up)
        if p_up < 1:
            yield from walk((*path, -1), probability * (1 - p_up))

    paths = dict(walk((), 1.0))
    total = sum(paths.values())
    return {path: probability / total for path, probability in paths.items()}


def assert_frequencies_match(counts: Counter[Path], expected: dict[Path, float]) -> None:
    """No foreign path, and Pearson's statistic within five standard deviations of its mean.

    Paths too rare for the statistic share one cell.
    """
    assert set(counts) <= set(expected)
    n_draws = counts.total()
    cells: list[tuple[int, float]] = []
    n_rare, expected_rare = 0, 0.0
    for path, probability in sorted(expected.items(), key=lambda item: item[1]):
        n_rare, expected_rare = n_rare + counts[path], expected_rare + n_draws * probability
        if expected_rare > 5:
            cells.append((n_rare, expected_rare))
            n_rare, expected_rare = 0, 0.0
    chi_square = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    n_free = len(cells) - 1
    assert n_free > 0
    assert chi_square < n_free + 5 * np.sqrt(2 * n_free)


@pytest.mark.parametrize(("max_depth", "p_open", "length"), [(2, 0.3, 7), (4, 0.5, 8), (3, 0.7, 7)])
def test_prefix_paths_have_the_enumerated_distribution(
    max_depth: int, p_open: float, length: int
) -> None:
    steps = sample_prefix_steps(
        np.random.default_rng(3), 50_000, length, max_depth=max_depth, p_open=p_open
    )
    counts = Counter(map(tuple, steps.tolist()))
    assert_frequencies_match(counts, prefix_paths(length, max_depth, p_open))


@pytest.mark.parametrize("max_depth", [1, 2, 5])
def test_long_paths_cut_into_blocks_equal_one_walk_over_the_same_coins(
    max_depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, n_paths, length, n_blocks = 7, 3, 53, 8
    monkeypatch.setattr(dyck_sampling, "BLOCK_LENGTH", block)
    steps = sample_prefix_steps(
        np.random.default_rng(11), n_paths, length, max_depth=max_depth, p_open=0.6
    )
    coins = np.random.default_rng(11).random((block, n_paths, n_blocks)) < 0.6
    for path in range(n_paths):
        height = 0
        for time in range(length):
            wants_up = coins[time % block, path, time // block]
            goes_up = height == 0 or (wants_up and height < max_depth)
            assert steps[path, time] == (1 if goes_up else -1)
            height += 1 if goes_up else -1


COMPLETE_CASES = [
    (1, 8, 3, 0.5, 0.5),
    (3, 9, 2, 0.3, 0.2),
    (6, 6, 4, 0.7, 0.5),
    (2, 10, 5, 0.6, 0.4),
    (4, 8, 1, 0.5, 0.7),
]


@pytest.mark.parametrize(("low", "high", "max_depth", "p_open", "p_end"), COMPLETE_CASES)
def test_the_conditioned_chain_gives_every_string_its_exact_conditional_probability(
    low: int, high: int, max_depth: int, p_open: float, p_end: float
) -> None:
    p_up, p_stay_open = conditioned_probabilities(
        low, high, max_depth=max_depth, p_open=p_open, p_end=p_end
    )
    for path, expected in complete_paths(low, high, max_depth, p_open, p_end).items():
        probability, height = 1.0, 0
        for time, step in enumerate(path):
            if height == 0:
                probability *= p_stay_open[time]
            probability *= p_up[time, height] if step > 0 else 1 - p_up[time, height]
            height += step
        if len(path) < high - high % 2:
            probability *= 1 - p_stay_open[len(path)]
        assert probability == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("low", "high", "max_depth", "p_open", "p_end"), COMPLETE_CASES)
def test_complete_paths_have_the_enumerated_distribution(
    low: int, high: int, max_depth: int, p_open: float, p_end: float
) -> None:
    steps = sample_complete_steps(
        np.random.default_rng(5), 50_000, low, high, max_depth=max_depth, p_open=p_open, p_end=p_end
    )
    assert steps.shape == (50_000, high)
    counts = Counter(tuple(step for step in row if step) for row in steps.tolist())
    assert_frequencies_match(counts, complete_paths(low, high, max_depth, p_open, p_end))


def test_strings_much_longer_than_the_language_likes_are_drawn_without_rejection() -> None:
    # without conditioning, a string gets this long with a probability below any float64
    steps = sample_complete_steps(
        np.random.default_rng(2), 7, 7000, 7001, max_depth=3, p_open=0.5, p_end=0.9
    )
    height = steps.cumsum(axis=1, dtype=np.int64)
    assert height.min() == 0
    assert height.max() <= 3
    assert (height[:, 6999] == 0).all()
    assert (np.abs(steps).sum(axis=1) == 7000).all()
