"""The training loop, against the loop that everybody writes by hand."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interp.models.training import TrainingConfig, train

N_EXAMPLES, N_INPUTS, N_HIDDEN = 23, 5, 7


def small_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(N_INPUTS, N_HIDDEN), nn.Tanh(), nn.Linear(N_HIDDEN, 3))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return model.double()


def regression_data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(N_EXAMPLES, N_INPUTS, generator=generator, dtype=torch.float64)
    return inputs, inputs[:, :3].sin()


def squared_error(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.mse_loss(model(inputs), targets)


def configure(**changes: Any) -> TrainingConfig:
    return TrainingConfig(
        **{"n_epochs": 4, "batch_size": 5, "learning_rate": 0.03, "seed": 3, **changes}
    )


@pytest.mark.parametrize(
    "changes", [{}, {"weight_decay": 0.2}, {"max_gradient_norm": 0.05}, {"schedule": "constant"}]
)
def test_training_equals_the_loop_written_by_hand(changes: dict[str, Any]) -> None:
    config = configure(**changes)
    model, reference = small_model(), small_model()
    history = train(model, regression_data(), config, loss=squared_error)

    inputs, targets = regression_data()
    optimizer = torch.optim.AdamW(
        reference.parameters(), lr=0.03, weight_decay=config.weight_decay, foreach=False
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    generator = torch.Generator().manual_seed(3)
    losses, rates = [], []
    for _ in range(4):
        order = torch.randperm(N_EXAMPLES, generator=generator)
        for start in range(0, N_EXAMPLES, 5):
            rows = order[start : start + 5]
            optimizer.zero_grad()
            loss = F.mse_loss(reference(inputs[rows]), targets[rows])
            loss.backward()
            if config.max_gradient_norm is not None:
                torch.nn.utils.clip_grad_norm_(reference.parameters(), config.max_gradient_norm)
            losses.append(loss.detach())
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
        if config.schedule == "cosine":
            scheduler.step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(history.loss, torch.stack(losses), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(history.learning_rate, torch.tensor(rates))


def final_bits(config: TrainingConfig) -> list[Tensor]:
    model = small_model()
    train(model, regression_data(), config, loss=squared_error)
    return [parameter.detach() for parameter in model.parameters()]


def test_the_same_seed_ends_with_the_same_bits_and_another_seed_does_not() -> None:
    first, again, other = (final_bits(configure(seed=seed)) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_the_global_random_state_is_neither_read_nor_changed() -> None:
    models = small_model(), small_model()
    for model in models:
        before = torch.random.get_rng_state()
        train(model, regression_data(), configure(), loss=squared_error)
        assert torch.equal(torch.random.get_rng_state(), before)
        torch.rand(11)  # what follows finds another global state
    for first, again in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(first, again)


@pytest.mark.parametrize(
    ("frozen", "kept"),
    [(("0.weight",), {"0.weight"}), (("bias",), {"0.bias", "2.bias"})],
)
def test_frozen_parameters_keep_their_bits_and_the_others_move(
    frozen: tuple[str, ...], kept: set[str]
) -> None:
    model, untouched = small_model(), dict(small_model().named_parameters())
    train(model, regression_data(), configure(frozen=frozen, weight_decay=0.1), loss=squared_error)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, untouched[name]) is (name in kept)
        assert parameter.requires_grad


def test_a_parameter_that_was_frozen_before_stays_frozen() -> None:
    model = small_model()
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    train(model, regression_data(), configure(), loss=squared_error)
    assert torch.equal(model[0].weight, before)
    assert not model[0].weight.requires_grad


def test_the_model_is_left_in_its_mode_and_without_gradients_whatever_happens() -> None:
    modes = []

    def loss(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        modes.append(model.training)
        if len(modes) == 7:
            raise RuntimeError("seventh step")
        return squared_error(model, inputs, targets)

    model = small_model().eval()
    with pytest.raises(RuntimeError, match="seventh step"):
        train(model, regression_data(), configure(frozen=("0.bias",)), loss=loss)
    assert modes == [True] * 7
    assert not model.training
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_every_example_is_seen_once_an_epoch_in_an_order_that_changes() -> None:
    seen: list[list[int]] = []

    def loss(model: nn.Module, inputs: Tensor, index: Tensor) -> Tensor:
        seen.append(index.tolist())
        return model(inputs).square().mean()

    epochs_done: list[int] = []
    data = (regression_data()[0], torch.arange(N_EXAMPLES))
    train(small_model(), data, configure(), loss=loss, after_epoch=epochs_done.append)
    assert epochs_done == [1, 2, 3, 4]
    assert [len(batch) for batch in seen] == [5, 5, 5, 5, 3] * 4
    epochs = [sum(seen[start : start + 5], []) for start in range(0, 20, 5)]
    assert all(sorted(epoch) == list(range(N_EXAMPLES)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_a_loss_that_is_not_finite_stops_training_and_names_the_step() -> None:
    def loss(model: nn.Module, inputs: Tensor, index: Tensor) -> Tensor:
        return model(inputs).sum() * torch.where((index == index.max()).any(), torch.inf, 1.0)

    data = (regression_data()[0], torch.arange(N_EXAMPLES))
    with pytest.raises(FloatingPointError, match=r"not finite at step \d"):
        train(small_model(), data, configure(), loss=loss)


def test_data_that_does_not_belong_together_is_refused() -> None:
    inputs, targets = regression_data()
    for data in ((inputs, targets[1:]), (), (inputs[:0], targets[:0])):
        with pytest.raises(ValueError, match="same number of rows"):
            train(small_model(), data, configure(), loss=squared_error)


def test_frozen_names_that_fit_nothing_or_leave_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="'0.wieght' fits no parameter.*0.weight"):
        train(small_model(), regression_data(), configure(frozen=("0.wieght",)), loss=squared_error)
    with pytest.raises(ValueError, match="nothing to train"):
        train(
            small_model(),
            regression_data(),
            configure(frozen=("weight", "bias")),
            loss=squared_error,
        )


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"n_epochs": 0}, "n_epochs=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"seed": -1}, "seed=-1"),
        ({"learning_rate": 0.0}, "learning_rate=0.0"),
        ({"learning_rate": float("nan")}, "learning_rate=nan"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"max_gradient_norm": 0.0}, "max_gradient_norm=0.0"),
        ({"schedule": "linear"}, "schedule='linear' is unknown"),
        ({"schedule": "constant", "decay_fraction": 2.0}, "decay_fraction=2.0"),
    ],
)
def test_configs_that_cannot_train_are_refused(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        configure(**changes)
