"""One layer: attention, then an MLP, around a residual stream that they add to or replace."""

from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.models.attention import Attention
from interp.models.config import TransformerConfig
from interp.models.hook_point import ObservedModule, Point
from interp.models.mlp import MLP
from interp.models.normalization import Norm


class Block(ObservedModule):
    """Attention, then an MLP: each reads the (normalized) stream and adds to it, or replaces it.

    ``hook_resid_pre/mid/post`` are the stream before, between and after the two, ``hook_attn_out``
    and ``hook_mlp_out`` what they write. Without an MLP there is no resid_mid and no mlp_out.
    """

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
        if self.must_leave_graph:
            return self.outside_graph(x, attention_mask, positions)
        x = self.hook_resid_pre(x)
        attn_in = self.ln1(x) if self.has_ln1 else x
        attn_out = self.hook_attn_out(self.attn(attn_in, attention_mask, positions))
        x = x + attn_out if self.attention_residual else attn_out
        if self.has_mlp:
            x = self.hook_resid_mid(x)
            mlp_out = self.hook_mlp_out(self.mlp(self.ln2(x) if self.has_ln2 else x))
            x = x + mlp_out if self.mlp_residual else mlp_out
        return self.hook_resid_post(x)
