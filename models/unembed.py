"""From the last residual stream to logits, and from logits to the loss of the next token."""

from typing import Any, Literal

import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from interp.models.config import TransformerConfig
from interp.models.parameters import add_bias, empty_weight

ReturnType = Literal["logits", "loss"]
RETURN_TYPES: tuple[ReturnType, ...] = ("logits", "loss")


class Unembed(nn.Module):
    """Logits from the last residual stream: ``x W_U + b_U``, W_U [d_model, d_vocab].

    With tied embeddings W_U is the transposed W_E of the embedding it is given.
    """

    b_U: Tensor

    def __init__(self, config: TransformerConfig, embed: nn.Module) -> None:
        super().__init__()
        # In a tuple, so that the embedding is not registered, and saved, a second time.
        self.tied_to: tuple[Any, ...] = (embed,) if config.tie_embeddings else ()
        if not self.tied_to:
            self.W_U = nn.Parameter(empty_weight(config.d_model, config.d_vocab))
        add_bias(self, "b_U", config.d_vocab, is_learned=config.unembed_bias)
        self.has_bias = config.unembed_bias

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_vocab"]:
        rows = self.tied_to[0].W_E if self.tied_to else self.W_U.t()
        return F.linear(x, rows, self.b_U if self.has_bias else None)


def next_token_loss(
    logits: Float[Tensor, "batch pos d_vocab"],
    tokens: Int[Tensor, "batch pos"],
    attention_mask: Bool[Tensor, "batch pos"] | None,
) -> Float[Tensor, ""]:
    """Mean cross-entropy in nats of each token given those before it.

    A token counts if it and the one before it are real. Raises ValueError when none counts.
    """
    targets = tokens[:, 1:].long()
    losses = F.cross_entropy(logits[:, :-1].transpose(1, 2), targets, reduction="none")
    if losses.numel() == 0:
        raise ValueError(f"the loss needs two positions, got tokens of shape {tuple(tokens.shape)}")
    if attention_mask is None:
        return losses.mean()
    counts = attention_mask[:, 1:] & attention_mask[:, :-1]
    if not bool(counts.any()):
        raise ValueError("attention_mask leaves no pair of real neighbours to compute a loss from")
    return losses.masked_fill(~counts, 0.0).sum() / counts.sum()
