"""Where a token stands: its position, and what each kind of position embedding makes of it."""

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from interp.models.config import TransformerConfig


def positions_from_mask(
    attention_mask: Bool[Tensor, "batch pos"],
) -> Int[Tensor, "batch pos"]:
    """Position of each token, counted from the first real one; padding before it gets 0."""
    return (attention_mask.long().cumsum(-1) - 1).clamp_min(0)


class PosEmbed(nn.Module):
    """The position embedding that is added to the residual stream.

    "standard": rows of the learned W_pos [n_ctx, d_model].
    "sinusoidal": W_pos[p, 2i] = sin(p / 10000^(2i / d_model)), W_pos[p, 2i + 1] the cosine
    (Vaswani et al. 2017, section 3.5).
    "linear": p / divisor in the last dimension, nothing elsewhere.
    """

    W_pos: Tensor

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        shape = (config.n_ctx, config.d_model)
        match config.positional_embedding_type:
            case "standard":
                self.W_pos = nn.Parameter(torch.empty(shape))
            case "sinusoidal":
                self.register_buffer("W_pos", _sinusoids(*shape))
            case "linear":
                table = torch.zeros(shape, dtype=torch.float64)
                steps = torch.arange(config.n_ctx, dtype=torch.float64)
                table[:, -1] = steps / config.linear_position_divisor
                self.register_buffer("W_pos", table)
            case kind:
                raise AssertionError(f"{kind} positions are not added to the residual stream")

    def forward(
        self, tokens: Int[Tensor, "batch pos"], positions: Int[Tensor, "batch pos"] | None
    ) -> Float[Tensor, "batch pos d_model"]:
        if positions is not None:
            return self.W_pos[positions]
        n_batch, n_pos = tokens.shape
        return self.W_pos[:n_pos].expand(n_batch, -1, -1)


class Rotary(nn.Module):
    """Rotary positions: each pair (i, i + d_head / 2) of a query or key turns by
    ``position * base^(-2i / d_head)`` (Su et al. 2021, section 3.2, in the half-split layout).
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        half = config.d_head // 2
        rates = config.rotary_base ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(config.n_ctx, dtype=torch.float64)[:, None] * rates
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(
        self,
        x: Float[Tensor, "batch pos head_index d_head"],
        positions: Int[Tensor, "batch pos"] | None,
    ) -> Float[Tensor, "batch pos head_index d_head"]:
        index = slice(0, x.shape[1]) if positions is None else positions
        cos, sin = self.cos[index].unsqueeze(-2), self.sin[index].unsqueeze(-2)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _sinusoids(n_ctx: int, d_model: int) -> Float[Tensor, "n_ctx d_model"]:
    steps = torch.arange(n_ctx, dtype=torch.float64)[:, None]
    even = torch.arange(0, d_model, 2, dtype=torch.float64)
    angles = steps * torch.exp(-math.log(10000.0) * even / d_model)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)
