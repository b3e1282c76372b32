"""Multi-head attention that computes what is observed and no more.

Without anybody looking at a [query_pos, key_pos] tensor the layer asks `_fused` for the output
alone; with a listener on ``hook_attn_scores`` or ``hook_pattern`` it materialises both.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from interp.models.biases import add_bias
from interp.models.config import TransformerConfig
from interp.models.hook_point import ObservedModule, Point
from interp.models.positions import Rotary

_HEAD = ("batch", "pos", "head_index", "d_head")
_KEY_VALUE_HEAD = ("batch", "pos", "key_value_head", "d_head")
_SQUARE = ("batch", "head_index", "query_pos", "key_pos")


class Attention(ObservedModule):
    """Causal or bidirectional attention with n_heads queries and n_key_value_heads keys and values.

    W_Q [head_index, d_model, d_head], W_K and W_V [key_value_head, d_model, d_head],
    W_O [head_index, d_head, d_model]; biases b_Q, b_K, b_V [.., d_head], b_O [d_model].

    ``hook_q/k/v`` [batch, pos, head, d_head] are the projections; ``hook_rot_q/rot_k`` the rotated
    ones where positions are rotary. ``hook_attn_scores`` [batch, head_index, query_pos, key_pos] is
    scaled, and -inf where a key may not be seen; ``hook_pattern`` is its softmax: rows sum to 1, or
    to 0 where no key may be seen. ``hook_z`` [batch, pos, head_index, d_head] is what W_O
    multiplies; ``hook_result`` [batch, pos, head_index, d_model] is what each head writes to the
    residual stream, b_O not included.
    """

    W_O: Tensor
    b_Q: Tensor
    b_K: Tensor
    b_V: Tensor
    b_O: Tensor

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        n_heads, d_head, d_model = config.n_heads, config.d_head, config.d_model
        self.n_heads, self.kv_heads, self.d_head = n_heads, config.kv_heads, d_head
        self.scale = 1.0 / config.score_scale
        self.is_causal = config.attention_dir == "causal"
        self.has_biases = config.attention_biases
        self.has_output_projection = config.output_projection
        self.W_Q = nn.Parameter(_projection(n_heads, d_model, d_head))
        self.W_K = nn.Parameter(_projection(self.kv_heads, d_model, d_head))
        self.W_V = nn.Parameter(_projection(self.kv_heads, d_model, d_head))
        if self.has_output_projection:
            self.W_O = nn.Parameter(torch.empty(n_heads, d_head, d_model))
        else:
            identity = torch.eye(d_model).view(n_heads, d_head, d_model)
            self.register_buffer("W_O", identity, persistent=False)
        add_bias(self, "b_Q", n_heads, d_head, is_learned=self.has_biases)
        add_bias(self, "b_K", self.kv_heads, d_head, is_learned=self.has_biases)
        add_bias(self, "b_V", self.kv_heads, d_head, is_learned=self.has_biases)
        has_output_bias = self.has_biases and self.has_output_projection
        add_bias(self, "b_O", d_model, is_learned=has_output_bias)
        self.hook_q = Point(*_HEAD)
        self.hook_k = Point(*_KEY_VALUE_HEAD)
        self.hook_v = Point(*_KEY_VALUE_HEAD)
        self.has_rotary = config.positional_embedding_type == "rotary"
        if self.has_rotary:
            self.rotary = Rotary(config)
            self.hook_rot_q = Point(*_HEAD)
            self.hook_rot_k = Point(*_KEY_VALUE_HEAD)
        self.hook_attn_scores = Point(*_SQUARE)
        self.hook_pattern = Point(*_SQUARE)
        self.hook_z = Point(*_HEAD)
        self.hook_result = Point("batch", "pos", "head_index", "d_model")

    def forward(
        self,
        x: Float[Tensor, "batch pos d_model"],
        attention_mask: Bool[Tensor, "batch key_pos"] | None = None,
        positions: Int[Tensor, "batch pos"] | None = None,
    ) -> Float[Tensor, "batch pos d_model"]:
        if self.must_leave_graph:
            left: Tensor = self.outside_graph(x, attention_mask, positions)
            return left
        q = self.hook_q(self._project(x, self.W_Q, self.b_Q))
        k = self.hook_k(self._project(x, self.W_K, self.b_K))
        v = self.hook_v(self._project(x, self.W_V, self.b_V))
        if self.has_rotary:
            q = self.hook_rot_q(self.rotary(q, positions))
            k = self.hook_rot_k(self.rotary(k, positions))
        if self.hook_pattern.is_wanted or self.hook_attn_scores.is_wanted:
            z = self._materialised(q, k, v, attention_mask)
        else:
            self.hook_attn_scores.decline()
            self.hook_pattern.decline()
            z = _fused(q, k, v, scale=self.scale, is_causal=self.is_causal, key_mask=attention_mask)
        return self._write(self.hook_z(z))

    def _write(
        self, z: Float[Tensor, "batch pos head_index d_head"]
    ) -> Float[Tensor, "batch pos d_model"]:
        if self.hook_result.is_wanted:
            result = self.hook_result(torch.einsum("bphd,hdm->bphm", z, self.W_O))
            return result.sum(-2) + self.b_O
        self.hook_result.decline()
        heads = z.flatten(-2)
        if not self.has_output_projection:
            return heads
        return F.linear(heads, self.W_O.flatten(0, 1).t(), self.b_O if self.has_biases else None)

    def _project(
        self,
        x: Float[Tensor, "batch pos d_model"],
        weight: Float[Tensor, "head d_model d_head"],
        bias: Float[Tensor, "head d_head"],
    ) -> Float[Tensor, "batch pos head d_head"]:
        flat = weight.transpose(0, 1).flatten(1)  # a view: see _projection
        projected = F.linear(x, flat.t(), bias.flatten() if self.has_biases else None)
        return projected.unflatten(-1, (weight.shape[0], self.d_head))

    def _materialised(
        self,
        q: Float[Tensor, "batch pos head_index d_head"],
        k: Float[Tensor, "batch pos key_value_head d_head"],
        v: Float[Tensor, "batch pos key_value_head d_head"],
        attention_mask: Bool[Tensor, "batch key_pos"] | None,
    ) -> Float[Tensor, "batch pos head_index d_head"]:
        q, k, v = q.transpose(1, 2), _repeat_heads(k, self.n_heads), _repeat_heads(v, self.n_heads)
        scores = (q * self.scale) @ k.transpose(-1, -2)
        allowed = allowed_pairs(
            scores.shape[-2],
            scores.shape[-1],
            is_causal=self.is_causal,
            key_mask=attention_mask,
            device=scores.device,
        )
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -torch.inf)
        scores = self.hook_attn_scores(scores)
        if attention_mask is None and not self.hook_attn_scores.is_wanted:
            pattern = scores.softmax(-1)
        else:
            # a row without an allowed key attends to nothing, and passes on no NaN
            is_dead = (scores == -torch.inf).all(-1, keepdim=True)
            pattern = scores.masked_fill(is_dead, 0.0).softmax(-1).masked_fill(is_dead, 0.0)
        return (self.hook_pattern(pattern) @ v).transpose(1, 2)


def _fused(
    q: Float[Tensor, "batch query_pos head_index d_head"],
    k: Float[Tensor, "batch key_pos key_value_head d_head"],
    v: Float[Tensor, "batch key_pos key_value_head d_head"],
    *,
    scale: float,
    is_causal: bool,
    key_mask: Bool[Tensor, "batch key_pos"] | None,
) -> Float[Tensor, "batch query_pos head_index d_head"]:
    """Attention output without any [query_pos, key_pos] tensor that outlives the call."""
    n_heads = q.shape[2]
    q, k, v = q.transpose(1, 2), _repeat_heads(k, n_heads), _repeat_heads(v, n_heads)
    if key_mask is None:
        z = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale)
        return z.transpose(1, 2)
    allowed = allowed_pairs(
        q.shape[-2], k.shape[-2], is_causal=is_causal, key_mask=key_mask, device=q.device
    )
    assert allowed is not None
    is_dead = ~allowed.any(-1, keepdim=True)
    z = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed | is_dead, scale=scale)
    return z.masked_fill(is_dead, 0.0).transpose(1, 2)


def allowed_pairs(
    n_queries: int,
    n_keys: int,
    *,
    is_causal: bool,
    key_mask: Bool[Tensor, "batch key_pos"] | None,
    device: torch.device,
) -> Bool[Tensor, "*broadcast query_pos key_pos"] | None:
    """Which query may see which key, broadcastable over [batch, head_index]; None when all may.

    Causal masks are aligned at the end: the last query sees the last key.
    """
    allowed = None
    if is_causal:
        ones = torch.ones(n_queries, n_keys, dtype=torch.bool, device=device)
        allowed = ones.tril(n_keys - n_queries)
    if key_mask is not None:
        keys = key_mask[:, None, None, :]
        allowed = keys.expand(-1, -1, n_queries, -1) if allowed is None else allowed & keys
    return allowed


def _repeat_heads(
    x: Float[Tensor, "batch pos key_value_head d_head"], n_heads: int
) -> Float[Tensor, "batch head_index pos d_head"]:
    x = x.transpose(1, 2)
    return x if x.shape[1] == n_heads else x.repeat_interleave(n_heads // x.shape[1], dim=1)


def _projection(n_heads: int, d_model: int, d_head: int) -> Float[Tensor, "head d_model d_head"]:
    """Storage for a projection: read by head, but lying in memory as [d_model, head * d_head].

    So all heads are projected by one matrix product without copying the weights.
    """
    return torch.empty(d_model, n_heads, d_head).transpose(0, 1)
