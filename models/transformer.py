"""A transformer in which every published activation can be read, edited and differentiated."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformer_lens import HookedRootModule

from interp.models.attention import Attention
from interp.models.config import TransformerConfig
from interp.models.embeddings import build_embedding
from interp.models.hook_point import Point
from interp.models.mlp import MLP, add_bias
from interp.models.normalization import Norm
from interp.models.positions import PosEmbed, positions_from_mask


class Block(nn.Module):
    """Attention, then an MLP; each reads the (normalized) stream and is added to it, or replaces it."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        stream = ("batch", "pos", "d_model")
        self.attention_residual = config.attention_residual
        self.mlp_residual = config.mlp_residual
        self.hook_resid_pre = Point(*stream)
        if config.attention_norm is not None:
            self.ln1 = Norm(config.attention_norm, config.d_model, eps=config.eps)
        self.attn = Attention(config)
        self.hook_attn_out = Point(*stream)
        if config.d_mlp is not None:
            self.hook_resid_mid = Point(*stream)
            if config.mlp_norm is not None:
                self.ln2 = Norm(config.mlp_norm, config.d_model, eps=config.eps)
            self.mlp = MLP(config)
            self.hook_mlp_out = Point(*stream)
        self.hook_resid_post = Point(*stream)
        self.has_ln1 = config.attention_norm is not None
        self.has_ln2 = config.d_mlp is not None and config.mlp_norm is not None
        self.has_mlp = config.d_mlp is not None

    def forward(
        self,
        x: Float[Tensor, "batch pos d_model"],
        attention_mask: Bool[Tensor, "batch pos"] | None = None,
        positions: Int[Tensor, "batch pos"] | None = None,
    ) -> Float[Tensor, "batch pos d_model"]:
        x = self.hook_resid_pre(x)
        attn_in = self.ln1(x) if self.has_ln1 else x
        attn_out = self.hook_attn_out(self.attn(attn_in, attention_mask, positions))
        x = x + attn_out if self.attention_residual else attn_out
        if self.has_mlp:
            x = self.hook_resid_mid(x)
            mlp_out = self.hook_mlp_out(self.mlp(self.ln2(x) if self.has_ln2 else x))
            x = x + mlp_out if self.mlp_residual else mlp_out
        return self.hook_resid_post(x)


class Unembed(nn.Module):
    """Logits from the last residual stream: ``x W_U + b_U``, W_U [d_model, d_vocab].

    With tied embeddings W_U is the transposed W_E of the embedding it is given.
    """

    def __init__(self, config: TransformerConfig, embed: nn.Module) -> None:
        super().__init__()
        # In a tuple, so that the embedding is not registered, and saved, a second time.
        self.tied_to = (embed,) if config.tie_embeddings else ()
        if not self.tied_to:
            self.W_U = nn.Parameter(torch.empty(config.d_model, config.d_vocab))
        add_bias(self, "b_U", config.d_vocab, is_learned=config.unembed_bias)
        self.has_bias = config.unembed_bias

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_vocab"]:
        rows = self.tied_to[0].W_E if self.tied_to else self.W_U.t()
        return F.linear(x, rows, self.b_U if self.has_bias else None)


class Transformer(HookedRootModule):
    """The transformer that a :class:`TransformerConfig` describes, hookable by TransformerLens' names.

    ``model.cfg`` is the config. Nothing differs between training and evaluation mode; a new model is
    in evaluation mode.
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.cfg = config
        self.embed = build_embedding(config)
        self.hook_embed = Point("batch", "pos", "d_model")
        self.has_pos_embed = config.positional_embedding_type not in ("rotary", "none")
        if self.has_pos_embed:
            self.pos_embed = PosEmbed(config)
            self.hook_pos_embed = Point("batch", "pos", "d_model")
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.has_ln_final = config.final_norm is not None
        if config.final_norm is not None:
            self.ln_final = Norm(config.final_norm, config.d_model, eps=config.eps)
        self.unembed = Unembed(config, self.embed)
        self._draw_weights()
        self.to(device=config.device, dtype=config.dtype)
        self.eval()
        self.setup()

    @torch.no_grad()
    def _draw_weights(self) -> None:
        generator = torch.Generator().manual_seed(self.cfg.seed)
        for name, parameter in self.named_parameters():
            kind = name.rsplit(".", 1)[-1]
            if not kind.startswith("W_"):
                continue  # biases are born 0, the gains of norms 1
            std = self.cfg.initializer_range
            if kind in ("W_O", "W_out"):
                std /= math.sqrt(2 * self.cfg.n_layers)
            draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(std * draw)

    @property
    def W_U(self) -> Float[Tensor, "d_model d_vocab"]:
        """The head; the transposed embedding where they are tied."""
        return self.embed.W_E.t() if self.cfg.tie_embeddings else self.unembed.W_U

    def forward(
        self,
        tokens: Int[Tensor, "batch pos"],
        *,
        attention_mask: Bool[Tensor, "batch pos"] | None = None,
        return_type: Literal["logits", "loss"] = "logits",
    ) -> Tensor:
        """Logits [batch, pos, d_vocab], or the mean next-token loss.

        attention_mask: True (1) at real tokens; positions count from the first of them.
        """
        positions = None
        if attention_mask is not None:
            attention_mask = attention_mask.bool()
            positions = positions_from_mask(attention_mask)
        x = self.hook_embed(self.embed(tokens, attention_mask))
        if self.has_pos_embed:
            x = x + self.hook_pos_embed(self.pos_embed(tokens, positions))
        for block in self.blocks:
            x = block(x, attention_mask, positions)
        if self.has_ln_final:
            x = self.ln_final(x)
        logits = self.unembed(x)
        if return_type == "logits":
            return logits
        log_probs = logits[:, :-1].log_softmax(-1)
        losses = -log_probs.gather(-1, tokens[:, 1:, None]).squeeze(-1)
        if attention_mask is None:
            return losses.mean()
        weight = (attention_mask[:, 1:] & attention_mask[:, :-1]).to(losses.dtype)
        return (losses * weight).sum() / weight.sum()

    @contextmanager
    def materialize(self, *names: str) -> Iterator[None]:
        """Compute these points inside the block although no hook is attached to them."""
        points = [
            point
            for full_name, point in self.hook_dict.items()
            if full_name in names or full_name.rsplit(".", 1)[-1] in names
        ]
        for point in points:
            point.n_requests += 1
        try:
            yield
        finally:
            for point in points:
                point.n_requests -= 1
