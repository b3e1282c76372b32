"""The training loop: AdamW over shuffled batches, the same bits for the same seeds.

It knows no task. A task is a tuple of tensors with one row per example, and a loss: a callable
that gets the model and the same tensors cut down to one batch. `interp.models.dyck_training` is
one such task; next-token prediction is another::

    train(model, (tokens,), config, loss=lambda model, batch: model(batch, return_type="loss"))
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from interp.models.schedules import SCHEDULES, learning_rate_factors

Loss = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How a model is trained.

    n_epochs, batch_size: at least 1; the last batch of an epoch holds what is left.
    learning_rate: the highest one; `schedule` says how it moves (see `interp.models.schedules`,
        which also explains ``warmup_fraction`` and ``decay_fraction``).
    weight_decay: AdamW's, decoupled from the gradient.
    max_gradient_norm: gradients are scaled down to this norm over all parameters; None: never.
    frozen: parameters that keep their values, each by its full name or by the last part of it:
        ``"W_Q"`` is the query weight of every layer.
    seed: decides the order of the examples, anew in every epoch.

    Raises ValueError, naming the field, what came and what was expected.
    """

    n_epochs: int
    batch_size: int
    learning_rate: float
    weight_decay: float = 0.0
    schedule: str = "cosine"
    warmup_fraction: float = 0.0
    decay_fraction: float = 0.0
    max_gradient_norm: float | None = None
    frozen: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        for name, minimum in (("n_epochs", 1), ("batch_size", 1), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
                raise ValueError(
                    f"{name}={value!r}: expected an integer that is at least {minimum}"
                )
        if not 0 < self.learning_rate < math.inf:
            raise ValueError(f"learning_rate={self.learning_rate}: expected a positive number")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay={self.weight_decay}: expected a number of at least 0")
        if self.max_gradient_norm is not None and not self.max_gradient_norm > 0:
            raise ValueError(
                f"max_gradient_norm={self.max_gradient_norm}: expected a positive number, or None "
                "to leave gradients as they are"
            )
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule={self.schedule!r} is unknown: expected one of {SCHEDULES}")
        self.learning_rates(n_examples=1)  # checks the fractions

    def learning_rates(self, *, n_examples: int) -> list[float]:
        """The learning rate of every step of a run over this many examples."""
        factors = learning_rate_factors(
            self.schedule,
            n_epochs=self.n_epochs,
            steps_per_epoch=-(-n_examples // self.batch_size),
            warmup_fraction=self.warmup_fraction,
            decay_fraction=self.decay_fraction,
        )
        return [self.learning_rate * factor for factor in factors]


@dataclass(frozen=True)
class TrainingHistory:
    """What happened at each step: the loss before it, and its learning rate."""

    loss: Float[Tensor, " step"]
    learning_rate: Float[Tensor, " step"]


def train(
    model: nn.Module,
    data: Sequence[Tensor],
    config: TrainingConfig,
    *,
    loss: Loss,
    after_epoch: Callable[[int], None] | None = None,
) -> TrainingHistory:
    """Train ``model`` in place.

    data: tensors that have one row per example, on the model's device.
    loss: ``loss(model, *batch)`` is the scalar to minimise, where ``batch`` holds the same rows of
        every tensor in ``data``.
    after_epoch: called with the number of epochs done, to measure or to save.

    Two runs from the same weights, data and config end with the same bits on the same machine; the
    global random state is neither read nor changed. Raises ValueError when the tensors do not
    belong together or a frozen name fits no parameter, and FloatingPointError after an epoch whose
    loss was not finite.
    """
    n_examples = _n_examples(data)
    learning_rates = config.learning_rates(n_examples=n_examples)
    generator = torch.Generator().manual_seed(config.seed)
    losses: list[Tensor] = []

    with _training(model, config.frozen) as parameters:
        # fused: on the small Dyck models a third of the time that foreach takes, on a CPU as well
        optimizer = torch.optim.AdamW(
            parameters, lr=config.learning_rate, weight_decay=config.weight_decay, fused=True
        )
        for epoch in range(config.n_epochs):
            order = torch.randperm(n_examples, generator=generator).to(data[0].device)
            n_before = len(losses)
            for rows in order.split(config.batch_size):
                optimizer.param_groups[0]["lr"] = learning_rates[len(losses)]
                step_loss = loss(model, *(tensor[rows] for tensor in data))
                optimizer.zero_grad()
                step_loss.backward()
                if config.max_gradient_norm is not None:
                    nn.utils.clip_grad_norm_(parameters, config.max_gradient_norm)
                optimizer.step()
                losses.append(step_loss.detach())
            _refuse_divergence(losses[n_before:], n_before)
            if after_epoch is not None:
                after_epoch(epoch + 1)
    return TrainingHistory(torch.stack(losses).cpu(), torch.tensor(learning_rates))


@contextmanager
def _training(model: nn.Module, frozen: Sequence[str]) -> Iterator[list[nn.Parameter]]:
    """The parameters to train, with the model in training mode; afterwards all is as it was."""
    names = [name for name, _ in model.named_parameters()]
    for given in frozen:
        if not any(_is_called(name, given) for name in names):
            raise ValueError(
                f"frozen: {given!r} fits no parameter; expected a full name or the last part of "
                f"one, of {', '.join(names)}"
            )
    was_training = model.training
    had_gradient = {parameter: parameter.requires_grad for parameter in model.parameters()}
    try:
        model.train()
        for name, parameter in model.named_parameters():
            if any(_is_called(name, given) for given in frozen):
                parameter.requires_grad_(False)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not trained:
            raise ValueError("frozen: every parameter is frozen, so there is nothing to train")
        yield trained
    finally:
        model.train(was_training)
        for parameter, required in had_gradient.items():
            parameter.requires_grad_(required)
            parameter.grad = None


def _is_called(full_name: str, given: str) -> bool:
    return given in (full_name, full_name.rsplit(".", 1)[-1])


def _n_examples(data: Sequence[Tensor]) -> int:
    if isinstance(data, Tensor):
        raise ValueError("data is one tensor: expected a tuple of tensors, such as (tokens,)")
    lengths = {len(tensor) for tensor in data}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(
            f"data: expected tensors with the same number of rows, at least 1, got rows "
            f"{[len(tensor) for tensor in data]}"
        )
    return lengths.pop()


def _refuse_divergence(losses: list[Tensor], n_before: int) -> None:
    is_bad = ~torch.stack(losses).isfinite()
    if is_bad.any():
        step = n_before + int(is_bad.nonzero()[0])
        raise FloatingPointError(
            f"the loss is not finite at step {step}: try a smaller learning_rate, or "
            "max_gradient_norm"
        )
