"""Random walks under a ceiling: the heights of bracket strings, many at once.

A bounded Dyck string is a path that starts at height 0, steps up for an open bracket and down for
a close, and never leaves ``0..max_depth``. This file draws such paths; which *type* each bracket
has, and which token that is, is the business of `interp.models.dyck_language`.

Paths are arrays of steps, ``+1`` for an open, ``-1`` for a close and ``0`` once a string has
ended. The chain at height ``d`` is

======  ==========================================  =============================
height  prefix mode                                 complete mode
======  ==========================================  =============================
0       up                                          end with ``p_end``, else up
between up with ``p_open``, else down               the same
ceiling down                                        the same
======  ==========================================  =============================
"""

import numpy as np
from numpy.typing import NDArray

# Paths longer than this are cut into blocks that are walked side by side.
BLOCK_LENGTH = 1024


def sample_prefix_steps(
    rng: np.random.Generator, n_paths: int, length: int, *, max_depth: int, p_open: float
) -> NDArray[np.int8]:
    """Draw paths of exactly ``length`` steps that may stop at any height: ``[n_paths, length]``.

    A path is a loop over its steps, so one very long path would be slow to walk. Long paths are
    therefore cut into blocks. First every block is walked from *every* starting height on the
    same coin flips, which gives the height it would end at; the blocks of a path are then chained,
    which says where each one really starts; last, all blocks are walked once more from there. The
    result is the same path that a single walk over the same coin flips would have taken.
    """
    block = min(length, BLOCK_LENGTH)
    n_blocks = -(-length // block)
    # time first, so that one step of all walks is one contiguous row
    is_up = rng.random((block, n_paths * n_blocks)) < p_open

    start = np.zeros(n_paths * n_blocks, dtype=np.int32)
    if n_blocks > 1:
        every_start = np.arange(max_depth + 1, dtype=np.int32)[:, None]
        end_from = np.broadcast_to(every_start, (max_depth + 1, n_paths * n_blocks)).copy()
        for flips in is_up:
            end_from += _reflect(end_from, flips, max_depth)
        end_from = end_from.reshape(max_depth + 1, n_paths, n_blocks)
        starts = start.reshape(n_paths, n_blocks)
        paths = np.arange(n_paths)
        for index in range(1, n_blocks):
            starts[:, index] = end_from[starts[:, index - 1], paths, index - 1]

    steps = np.empty((block, n_paths * n_blocks), dtype=np.int8)
    height = start
    for time, flips in enumerate(is_up):
        steps[time] = _reflect(height, flips, max_depth)
        height += steps[time]
    return np.ascontiguousarray(steps.T).reshape(n_paths, n_blocks * block)[:, :length]


def sample_complete_steps(
    rng: np.random.Generator,
    n_paths: int,
    min_length: int,
    max_length: int,
    *,
    max_depth: int,
    p_open: float,
    p_end: float,
) -> NDArray[np.int8]:
    """Draw paths that return to 0 and end there: ``[n_paths, max_length]``, 0 after the end.

    Each path has the chain's own distribution *conditioned on its length* lying in
    ``min_length..max_length``. Nothing is rejected: the walk uses the transition probabilities of
    the conditioned chain (Doob's transform), computed backwards from the last admissible length.
    """
    p_up, p_stay_open = conditioned_probabilities(
        min_length, max_length, max_depth=max_depth, p_open=p_open, p_end=p_end
    )
    steps = np.zeros((max_length, n_paths), dtype=np.int8)
    height = np.zeros(n_paths, dtype=np.int32)
    is_running = np.ones(n_paths, dtype=bool)
    for time in range(max_length):
        uniform = rng.random(n_paths)
        at_zero = height == 0
        is_running &= ~at_zero | (uniform < p_stay_open[time])
        # at height 0 the coin has been used to decide about the end, and the only way is up
        is_up = at_zero | (uniform < p_up[time].take(height))
        steps[time] = np.where(is_up, 1, -1) * is_running
        height += steps[time]
    return np.ascontiguousarray(steps.T)


def conditioned_probabilities(
    min_length: int, max_length: int, *, max_depth: int, p_open: float, p_end: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The complete-mode chain given that its length will lie in ``min_length..max_length``.

    Returns ``p_up [time, height]``, the probability of an open bracket after ``time`` steps (at
    height 0: given that the string goes on), and ``p_stay_open [time]``, the probability that a
    string at height 0 goes on. Entries of states that cannot be reached are 0.
    """
    up = np.full(max_depth + 1, p_open)
    up[0], up[max_depth] = 1.0, 0.0
    p_up = np.zeros((max_length, max_depth + 1))
    p_stay_open = np.zeros(max_length)

    # future[d]: the probability, from height d after `time` steps, to end at an admissible length
    future = np.zeros(max_depth + 1)
    future[0] = p_end
    for time in range(max_length - 1, -1, -1):
        via_up = up * np.append(future[1:], 0.0)
        via_down = (1 - up) * np.append(0.0, future[:-1])
        going_on = via_up + via_down
        np.divide(via_up, going_on, out=p_up[time], where=going_on > 0)
        ending = p_end if time >= min_length else 0.0
        going_on[0] *= 1 - p_end
        total_at_zero = ending + going_on[0]
        if total_at_zero > 0:
            p_stay_open[time] = going_on[0] / total_at_zero
        future = going_on
        future[0] = total_at_zero
        if time <= min_length and future.max() > 0:
            # Before the first admissible length only ratios matter: keep them from underflowing.
            future /= future.max()
    return p_up, p_stay_open


def _reflect(
    height: NDArray[np.int32], is_up: NDArray[np.bool_], max_depth: int
) -> NDArray[np.int8]:
    """The next step of each path: its coin's, except at the floor and at the ceiling."""
    goes_up = (is_up & (height < max_depth)) | (height == 0)
    return 2 * goes_up.view(np.int8) - np.int8(1)
