"""Learning rates over a run, against torch's own scheduler and by hand."""

import pytest
import torch

from interp.models.schedules import learning_rate_factors


def test_cosine_is_torchs_annealing_stepped_once_an_epoch() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=7)
    expected = []
    for _ in range(7):
        for _ in range(3):
            expected.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
        scheduler.step()
    factors = learning_rate_factors("cosine", n_epochs=7, steps_per_epoch=3)
    assert factors == pytest.approx(expected, abs=1e-12)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-12)


def test_constant_never_moves() -> None:
    assert learning_rate_factors("constant", n_epochs=3, steps_per_epoch=2) == [1.0] * 6


def test_warmup_stable_decay_rises_stays_and_falls_without_a_wasted_step() -> None:
    factors = learning_rate_factors(
        "warmup_stable_decay",
        n_epochs=2,
        steps_per_epoch=5,
        warmup_fraction=0.3,
        decay_fraction=0.4,
    )
    assert factors == pytest.approx([1 / 4, 2 / 4, 3 / 4, 1, 1, 1, 4 / 5, 3 / 5, 2 / 5, 1 / 5])


def test_without_warmup_and_decay_nothing_is_left_but_a_constant() -> None:
    factors = learning_rate_factors("warmup_stable_decay", n_epochs=2, steps_per_epoch=5)
    assert factors == [1.0] * 10


@pytest.mark.parametrize(
    ("schedule", "sizes", "complaint"),
    [
        ("linear", {}, "schedule='linear' is unknown"),
        ("cosine", {"n_epochs": 0}, "n_epochs=0"),
        ("cosine", {"steps_per_epoch": 0}, "steps_per_epoch=0"),
        ("constant", {"warmup_fraction": -0.1}, "warmup_fraction=-0.1"),
        ("constant", {"warmup_fraction": 0.6, "decay_fraction": 0.5}, "at most 1 together"),
    ],
)
def test_schedules_that_cannot_be_are_refused(
    schedule: str, sizes: dict[str, float], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint):
        learning_rate_factors(schedule, **{"n_epochs": 2, "steps_per_epoch": 2, **sizes})
