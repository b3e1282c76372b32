"""Training on bracket strings: which positions count, and the contrastive regulariser.

Source: Wen, Li, Liu and Risteski, NeurIPS 2023 (arXiv 2312.01429) and its released code: the loss
is taken only where the next token closes a bracket, because no model can know what is opened next.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from interp.models.dyck_language import DyckLanguage
from interp.models.dyck_vocabulary import PAD, START
from interp.models.training import TrainingConfig, TrainingHistory, train

LOSS_POSITIONS = ("close_brackets", "all")


@dataclass(frozen=True, kw_only=True)
class DyckTrainingConfig(TrainingConfig):
    """How a model is trained on bracket strings.

    loss_positions: "close_brackets" counts a position where the next token closes a bracket,
        "all" every position but those before PAD.
    contrastive_weight: how much the contrastive regulariser counts beside the cross-entropy; 0
        leaves it out.

    The other fields are those of `TrainingConfig`.
    """

    loss_positions: str = "close_brackets"
    contrastive_weight: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss_positions not in LOSS_POSITIONS:
            raise ValueError(
                f"loss_positions={self.loss_positions!r} is unknown: expected one of "
                f"{LOSS_POSITIONS}"
            )
        if not self.contrastive_weight >= 0:
            raise ValueError(
                f"contrastive_weight={self.contrastive_weight}: expected a number of at least 0"
            )


def train_dyck(
    model: nn.Module,
    tokens: Int[Tensor, "batch pos"],
    language: DyckLanguage,
    config: DyckTrainingConfig,
    *,
    after_epoch: Callable[[int], None] | None = None,
) -> TrainingHistory:
    """Train ``model`` in place on strings of the language, as `DyckLanguage.sample` draws them.

    ``tokens`` have START in front; the model reads all but the last of each row. The seed of
    ``config`` decides the order of the strings and the pairs that the regulariser inserts.
    Raises as `train` does, and ValueError when no position has a loss.
    """
    targets = loss_targets(tokens, language, loss_positions=config.loss_positions)
    if not (targets != PAD).any():
        raise ValueError(
            f"tokens: no position has a loss with loss_positions={config.loss_positions!r}"
        )
    loss = next_token_loss
    if config.contrastive_weight > 0:
        loss = _ContrastiveLoss(language, weight=config.contrastive_weight, seed=config.seed)
    data = (tokens[:, :-1].contiguous(), targets)
    return train(model, data, config, loss=loss, after_epoch=after_epoch)


def loss_targets(
    tokens: Int[Tensor, "batch pos"],
    language: DyckLanguage,
    *,
    loss_positions: str = "close_brackets",
) -> Int[Tensor, "batch target_pos"]:
    """The token after each but the last, PAD where it does not count: one column less."""
    following = tokens[:, 1:]
    if loss_positions == "all":
        return following.contiguous()
    return torch.where(language.is_close(following), following, PAD)


def next_token_loss(
    model: nn.Module, inputs: Int[Tensor, "batch pos"], targets: Int[Tensor, "batch pos"]
) -> Float[Tensor, ""]:
    """Mean cross-entropy, in nats, over the positions whose target is not PAD."""
    return _cross_entropy(model(inputs), targets)


def contrastive_distance(
    model: nn.Module,
    inputs: Int[Tensor, "batch pos"],
    logits: Float[Tensor, "batch pos d_vocab"],
    inserted: Int[Tensor, " inserted_pos"],
) -> Float[Tensor, ""]:
    """Mean squared change of the logits when ``inserted`` stands between START and the string.

    ``inserted`` is well nested, so no prediction about the string should change. ``logits`` are
    the model's for ``inputs`` alone; the column of START is left out, where the two differ.
    """
    head = torch.cat([inputs.new_tensor([START]), inserted.to(inputs.device)])
    longer = torch.cat([head.expand(len(inputs), -1), inputs[:, 1:]], dim=1)
    return F.mse_loss(model(longer)[:, len(head) :], logits[:, 1:])


class _ContrastiveLoss:
    """Cross-entropy plus weight * `contrastive_distance` for one random insertion a step.

    The insertion is the probe string with one more pair, of a type and at a depth drawn anew.
    """

    def __init__(self, language: DyckLanguage, *, weight: float, seed: int) -> None:
        self.weight = weight
        self.insertions = [
            language.probe_with_pair(bracket_type, depth)
            for bracket_type in range(language.n_types)
            for depth in range(language.max_depth)
        ]
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = model(inputs)
        drawn = int(torch.randint(len(self.insertions), (), generator=self.generator))
        distance = contrastive_distance(model, inputs, logits, self.insertions[drawn])
        return _cross_entropy(logits, targets) + self.weight * distance


def _cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD)
