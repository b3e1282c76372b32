"""How the learning rate moves over a training run, as a list of factors known before it starts."""

import math

SCHEDULES = ("constant", "cosine", "warmup_stable_decay")


def learning_rate_factors(
    schedule: str,
    *,
    n_epochs: int,
    steps_per_epoch: int,
    warmup_fraction: float = 0.0,
    decay_fraction: float = 0.0,
) -> list[float]:
    """The factor in (0, 1] by which each step's learning rate differs from the highest one.

    "constant": 1 throughout.
    "cosine": ``(1 + cos(pi e / n_epochs)) / 2`` during epoch e = 0, 1, ...: annealing that is
        stepped once an epoch and would reach 0 after the last one.
    "warmup_stable_decay": a linear rise over the first ``warmup_fraction`` of all steps, 1, and a
        linear fall over the last ``decay_fraction``. Neither end is 0, so that no step is wasted.

    Returns ``n_epochs * steps_per_epoch`` factors. Raises ValueError for an unknown schedule,
    counts below 1, or fractions outside [0, 1] or of more than 1 together.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r} is unknown: expected one of {SCHEDULES}")
    if n_epochs < 1 or steps_per_epoch < 1:
        raise ValueError(
            f"n_epochs={n_epochs} and steps_per_epoch={steps_per_epoch} must be at least 1"
        )
    is_split = warmup_fraction >= 0 and decay_fraction >= 0
    if not (is_split and warmup_fraction + decay_fraction <= 1):
        raise ValueError(
            f"warmup_fraction={warmup_fraction} and decay_fraction={decay_fraction} must be at "
            "least 0 and at most 1 together"
        )
    n_steps = n_epochs * steps_per_epoch
    if schedule == "constant":
        return [1.0] * n_steps
    if schedule == "cosine":
        by_epoch = [(1 + math.cos(math.pi * epoch / n_epochs)) / 2 for epoch in range(n_epochs)]
        return [factor for factor in by_epoch for _ in range(steps_per_epoch)]
    n_rising, n_falling = round(warmup_fraction * n_steps), round(decay_fraction * n_steps)
    return [
        min(1.0, (step + 1) / (n_rising + 1), (n_steps - step) / (n_falling + 1))
        for step in range(n_steps)
    ]
