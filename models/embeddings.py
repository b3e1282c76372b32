"""Token embeddings: learned, frozen one-hot, and those that write a Dyck token's depth.

A depth embedding is a frozen table with a row for each (token, depth); which row a token reads
follows from the brackets before it, so that the same bracket at two depths is two vectors.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from interp.models.config import DYCK_EMBEDDINGS, TransformerConfig
from interp.models.dyck_vocabulary import N_SPECIAL_TOKENS


def build_embedding(config: TransformerConfig) -> "Embed | DyckEmbed":
    """The token embedding that a config names."""
    return DyckEmbed(config) if config.embedding in DYCK_EMBEDDINGS else Embed(config)


class Embed(nn.Module):
    """A row of W_E [d_vocab, d_model] for each token: learned, or the frozen identity."""

    W_E: Tensor

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        if config.embedding == "learned":
            self.W_E = nn.Parameter(torch.empty(config.d_vocab, config.d_model))
        else:
            self.register_buffer("W_E", torch.eye(config.d_vocab, config.d_model))

    def forward(
        self,
        tokens: Int[Tensor, "batch pos"],
        attention_mask: Bool[Tensor, "batch pos"] | None = None,
    ) -> Float[Tensor, "batch pos d_model"]:
        try:
            return F.embedding(tokens, self.W_E)
        except IndexError:
            raise _unknown_token(tokens, len(self.W_E)) from None


class DyckEmbed(nn.Module):
    """A frozen vector for each (token, depth) of a bounded Dyck language.

    "dyck_joint": one dimension for each special token, then one for each (bracket, depth).
    "dyck_separate": a one-hot token beside a one-hot depth.
    "dyck_angle": a one-hot token beside (cos t, sin t), tan t = d / (max_depth + 2 - d).
    In the first two a bracket that closes carries the depth being closed, the same as the bracket
    that opened it; in the third d is the depth after the token. Depth runs over 0..max_depth.
    Source: Wen et al., NeurIPS 2023 (arXiv 2312.01429), section 4 and its released code.
    """

    step: Tensor
    first_row: Tensor
    table: Tensor

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        assert config.max_depth is not None
        self.kind = config.embedding
        self.max_depth = config.max_depth
        n_types = (config.d_vocab - N_SPECIAL_TOKENS) // 2
        step = torch.zeros(config.d_vocab, dtype=torch.long)
        step[N_SPECIAL_TOKENS : N_SPECIAL_TOKENS + n_types] = 1
        step[N_SPECIAL_TOKENS + n_types :] = -1
        first_row = torch.arange(config.d_vocab) * (self.max_depth + 1)
        if self.kind != "dyck_angle":
            first_row = first_row + (step < 0)  # a close is one deeper than what it leaves behind
        self.register_buffer("step", step, persistent=False)
        self.register_buffer("first_row", first_row, persistent=False)
        self.register_buffer("table", _depth_table(config))

    def row(self, token: int, depth: int) -> int:
        """Row of ``table`` that ``token`` reads at ``depth``, as this embedding counts depth.

        Raises ValueError outside the vocabulary or 0..max_depth.
        """
        if not 0 <= token < len(self.step):
            raise ValueError(f"token={token}: expected 0..{len(self.step) - 1}")
        if not 0 <= depth <= self.max_depth:
            raise ValueError(f"depth={depth}: expected 0..{self.max_depth}")
        return token * (self.max_depth + 1) + depth

    def rows(
        self,
        tokens: Int[Tensor, "batch pos"],
        attention_mask: Bool[Tensor, "batch pos"] | None = None,
    ) -> Int[Tensor, "batch pos"]:
        """Row of ``table`` that each token reads; padded tokens leave the depth as it is.

        Raises ValueError, naming sequence and position, where the depth leaves 0..max_depth.
        """
        try:
            step = self.step.index_select(0, tokens.flatten()).view_as(tokens)
        except IndexError:
            raise _unknown_token(tokens, len(self.step)) from None
        if attention_mask is not None:
            step = step * attention_mask
        depth = step.cumsum(-1)
        lowest, highest = depth.aminmax()
        if int(lowest) < 0 or int(highest) > self.max_depth:
            self._refuse(depth)
        return self.first_row[tokens] + depth

    def forward(
        self,
        tokens: Int[Tensor, "batch pos"],
        attention_mask: Bool[Tensor, "batch pos"] | None = None,
    ) -> Float[Tensor, "batch pos d_model"]:
        return F.embedding(self.rows(tokens, attention_mask), self.table)

    def _refuse(self, depth: Int[Tensor, "batch pos"]) -> None:
        sequence, position = ((depth < 0) | (depth > self.max_depth)).nonzero()[0].tolist()
        reached = int(depth[sequence, position])
        raise ValueError(
            f"tokens: sequence {sequence} reaches depth {reached} at position {position}, but "
            f"embedding={self.kind!r} has vectors for depths 0..{self.max_depth} only; nest less "
            "deeply, or build the model with a larger max_depth"
        )


def _unknown_token(tokens: Tensor, d_vocab: int) -> ValueError:
    unknown = tokens[(tokens < 0) | (tokens >= d_vocab)]
    return ValueError(
        f"tokens: got {int(unknown[0])}, expected 0..{d_vocab - 1} (d_vocab={d_vocab})"
    )


def _depth_table(config: TransformerConfig) -> Float[Tensor, "row d_model"]:
    """Rows in the order of token, then depth."""
    assert config.max_depth is not None
    n_depths = config.max_depth + 1
    table = torch.zeros(config.d_vocab, n_depths, config.d_model, dtype=torch.float64)
    token, depth = torch.arange(config.d_vocab), torch.arange(n_depths)
    if config.embedding == "dyck_joint":
        special = token[:N_SPECIAL_TOKENS]
        table[special, :, special] = 1
        n_brackets = config.d_vocab - N_SPECIAL_TOKENS
        cell = torch.arange(n_brackets * n_depths).view(n_brackets, n_depths)
        bracket = token[N_SPECIAL_TOKENS:, None]
        table[bracket, depth[None, :], N_SPECIAL_TOKENS + cell] = 1
        return table.flatten(0, 1)
    table[token, :, token] = 1
    if config.embedding == "dyck_separate":
        table[:, depth, config.d_vocab + depth] = 1
    else:
        for d in range(n_depths):
            angle = math.atan2(d, config.max_depth + 2 - d)
            table[:, d, config.d_vocab] = math.cos(angle)
            table[:, d, config.d_vocab + 1] = math.sin(angle)
    return table.flatten(0, 1)
