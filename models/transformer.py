"""A transformer in which every published activation can be read, edited and differentiated."""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from interp.models.activation_cache import SliceLike, TransformerCache
from interp.models.block import Block
from interp.models.config import TransformerConfig
from interp.models.embeddings import build_embedding
from interp.models.hook_point import Point
from interp.models.hook_table import PointRow, build_point_table
from interp.models.hooked_model import HookedModel, NamesFilter
from interp.models.normalization import Norm
from interp.models.positions import PosEmbed, positions_from_mask
from interp.models.token_ids import TokenIds
from interp.models.unembed import RETURN_TYPES, ReturnType, Unembed, next_token_loss
from interp.models.weights import WeightAccess


class Transformer(WeightAccess, TokenIds, HookedModel):
    """The transformer that a `TransformerConfig` describes, hookable by TransformerLens' names.

    ``model.cfg`` is the config; it follows the model when that moves to another dtype or device.
    Nothing differs between training and evaluation; a new model is in evaluation mode.
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

    def forward(
        self,
        tokens: Int[Tensor, "batch pos"],
        *,
        attention_mask: Bool[Tensor, "batch pos"] | Int[Tensor, "batch pos"] | None = None,
        return_type: ReturnType = "logits",
    ) -> Float[Tensor, "batch pos d_vocab"] | Float[Tensor, ""]:
        """Logits, or the mean cross-entropy (nats) of each next token.

        attention_mask: true at real tokens. Padding is seen by no query and positions count real
        tokens only, so padding on the left changes no logit of a real token; the loss counts a
        token if it and the one before it are real.

        Raises ValueError for tokens that are no integers [batch, pos], exceed n_ctx or the
        vocabulary, for a mask of another shape, and for a loss that does not exist.
        """
        if self.must_leave_graph:
            return self.outside_graph(
                tokens, attention_mask=attention_mask, return_type=return_type
            )
        self._check_input(tokens, attention_mask, return_type)
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
        return next_token_loss(logits, tokens, attention_mask)

    def run_with_cache(
        self,
        tokens: Int[Tensor, "batch pos"],
        *,
        attention_mask: Bool[Tensor, "batch pos"] | Int[Tensor, "batch pos"] | None = None,
        return_type: ReturnType = "logits",
        names_filter: NamesFilter = None,
        device: torch.device | str | None = None,
        remove_batch_dim: bool = False,
        incl_bwd: bool = False,
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        pos_slice: SliceLike = None,
    ) -> tuple[Tensor, TransformerCache]:
        """The forward pass and what the points saw in it.

        names_filter: which points, as in `resolve_names`; None for all, the [query_pos, key_pos]
        ones included. pos_slice: slice along each point's position axis. incl_bwd: call backward on
        the loss, and keep each point's gradient under ``name + "_grad"``; parameters collect theirs
        in ``.grad`` as after any backward pass.

        Raises ValueError for unknown names, for remove_batch_dim with more than one sequence, and
        for incl_bwd without ``return_type="loss"``.
        """
        if remove_batch_dim and tokens.shape[0] != 1:
            raise ValueError(
                f"remove_batch_dim=True needs one sequence, got a batch of {tokens.shape[0]}"
            )
        if incl_bwd and return_type != "loss":
            raise ValueError(
                f"incl_bwd=True needs a scalar to differentiate: pass return_type='loss', "
                f"got {return_type!r}"
            )
        cache, forward, backward = self.get_caching_hooks(
            names_filter, incl_bwd, device, remove_batch_dim, pos_slice=pos_slice
        )
        with self.hooks(forward, backward, reset_hooks_end, clear_contexts):
            output = self(tokens, attention_mask=attention_mask, return_type=return_type)
            if incl_bwd:
                output.backward()
        return output, TransformerCache(cache, self, has_batch_dim=not remove_batch_dim)

    def point_table(self) -> list[PointRow]:
        """Every published point in the order of the forward pass: shape, backends, what is dead.

        ``pandas.DataFrame(model.point_table())`` draws it as a table.
        """
        return build_point_table(self)

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

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Transformer":
        super()._apply(fn, recurse)
        weight = self.blocks[0].attn.W_Q
        dtype, device = weight.dtype, str(weight.device)
        if (dtype, device) != (self.cfg.dtype, self.cfg.device):
            self.cfg = replace(self.cfg, dtype=dtype, device=device)
        return self

    def _check_input(
        self, tokens: Tensor, attention_mask: Tensor | None, return_type: ReturnType
    ) -> None:
        is_integer = not tokens.is_floating_point() and tokens.dtype != torch.bool
        if tokens.ndim != 2 or tokens.numel() == 0 or not is_integer:
            raise ValueError(
                f"tokens: got {tokens.dtype} of shape {tuple(tokens.shape)}, expected integers "
                "[batch, pos], neither of them 0; add a batch axis to a single sequence"
            )
        if tokens.shape[1] > self.cfg.n_ctx:
            raise ValueError(
                f"tokens: {tokens.shape[1]} positions exceed n_ctx={self.cfg.n_ctx}; build the "
                "model with a larger n_ctx or cut the sequences"
            )
        if attention_mask is not None and (
            attention_mask.shape != tokens.shape or attention_mask.is_floating_point()
        ):
            raise ValueError(
                f"attention_mask: got {attention_mask.dtype} of shape "
                f"{tuple(attention_mask.shape)}, expected booleans, or integers 0 and 1, of the "
                f"tokens' shape {tuple(tokens.shape)}"
            )
        if return_type not in RETURN_TYPES:
            raise ValueError(f"return_type={return_type!r}: expected 'logits' or 'loss'")
        if return_type == "loss" and self.cfg.attention_dir != "causal":
            raise ValueError(
                "return_type='loss' is the loss of the next token, which bidirectional attention "
                "already sees; compute a loss of your own from the logits"
            )
