"""Loss per token of a transformers language model, and perplexity."""

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.token_windows import check_tokens


@torch.no_grad()
def token_losses(
    model: Any, tokens: Int[Tensor, "batch pos"], *, batch_size: int = 8
) -> Float[Tensor, "batch predicted"]:
    """Negative log likelihood, in nats, of every token after the first, at least in float32.

    Texts are of one length, without padding. The result is on the CPU.
    """
    check_tokens(model, tokens, at_least=2)
    losses = []
    for batch in tokens.split(batch_size):
        batch = batch.to(model.device)
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        losses.append(next_token_losses(logits, batch[:, 1:]).cpu())
    return torch.cat(losses)


def next_token_losses(
    logits: Float[Tensor, "batch pos d_vocab"], targets: Int[Tensor, "batch pos"]
) -> Float[Tensor, "batch pos"]:
    """Cross-entropy at every position, in nats, in float32 or what is finer."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")


def perplexity(losses: Float[Tensor, "..."]) -> float:
    """exp of the mean loss over all tokens; infinite where that overflows."""
    mean = float(losses.double().mean())
    return math.exp(mean) if mean < 709 else math.inf
