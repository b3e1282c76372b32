"""Multi-head attention that computes what is observed and no more.

While nobody looks at a [query_pos, key_pos] tensor the layer takes the fused path, which has the
output and any statistic of the pattern; a listener on ``hook_attn_scores`` or ``hook_pattern``
switches this layer, and no other, to the eager path.
"""

from collections.abc import Collection

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from interp.kernels.attention import attention
from interp.models.config import TransformerConfig
from interp.models.eager_attention import (
    first_keys,
    masked_scores,
    pattern_statistics,
    softmax_rows,
)
from interp.models.hook_point import ObservedModule, Point, ReadOut
from interp.models.parameters import add_bias, empty_output, empty_projection
from interp.models.positions import Rotary

# What a layer can be asked about its pattern without building it, and under which name the kernel
# has it: "first_mass" is the attention on the first real key.
STATISTICS = {
    "lse": "lse",
    "entropy": "entropy",
    "first_mass": "mass",
    "received": "received",
}
# From about so many positions the kernel overtakes torch's own attention, in float32 on a CPU:
# 1.3 times as fast there, forward and backward, 1.9 times at 512 positions.
KERNEL_FROM = 128

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

    Read-outs, in at least float32: ``hook_lse`` [batch, head_index, query_pos], the log-sum-exp of
    the scores (-inf where no key may be seen); ``hook_entropy``, that of each row of the pattern in
    nats; ``hook_first_mass``, the attention on the first key that is not padding;
    ``hook_received`` [batch, head_index, key_pos], the attention that each key gets from all
    queries. An edited pattern is told as edited.
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
        self.W_Q = nn.Parameter(empty_projection(n_heads, d_model, d_head))
        self.W_K = nn.Parameter(empty_projection(self.kv_heads, d_model, d_head))
        self.W_V = nn.Parameter(empty_projection(self.kv_heads, d_model, d_head))
        if self.has_output_projection:
            self.W_O = nn.Parameter(empty_output(n_heads, d_head, d_model))
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
        self.hook_lse = ReadOut(*_SQUARE[:3])
        self.hook_entropy = ReadOut(*_SQUARE[:3])
        self.hook_first_mass = ReadOut(*_SQUARE[:3])
        self.hook_received = ReadOut("batch", "head_index", "key_pos")
        self.hook_z = Point(*_HEAD)
        self.hook_result = Point("batch", "pos", "head_index", "d_model")
        self.read_outs = tuple((name, getattr(self, f"hook_{name}")) for name in STATISTICS)

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
        return self._write(self.hook_z(self._attend(q, k, v, attention_mask)))

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
        rows = weight.transpose(1, 2).flatten(0, 1)  # a view, as it lies in memory
        projected = F.linear(x, rows, bias.flatten() if self.has_biases else None)
        return projected.view(*x.shape[:2], *bias.shape)

    def _attend(
        self,
        q: Float[Tensor, "batch pos head_index d_head"],
        k: Float[Tensor, "batch pos key_value_head d_head"],
        v: Float[Tensor, "batch pos key_value_head d_head"],
        key_mask: Bool[Tensor, "batch key_pos"] | None,
    ) -> Float[Tensor, "batch pos head_index d_head"]:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if not self.is_watched:
            z, _ = _fused(q, k, v, key_mask, (), scale=self.scale, is_causal=self.is_causal)
            return z.transpose(1, 2)
        wanted = [name for name, point in self.read_outs if point.is_wanted]
        if self.hook_pattern.is_wanted or self.hook_attn_scores.is_wanted:
            z, found = self._eager(q, k, v, key_mask, wanted)
        else:
            self.hook_attn_scores.decline()
            self.hook_pattern.decline()
            z, found = _fused(q, k, v, key_mask, wanted, scale=self.scale, is_causal=self.is_causal)
        for name, point in self.read_outs:
            if name in found:
                point(found[name])
            else:
                point.decline()
        return z.transpose(1, 2)

    def _eager(
        self,
        q: Float[Tensor, "batch head_index query_pos d_head"],
        k: Float[Tensor, "batch key_value_head key_pos d_head"],
        v: Float[Tensor, "batch key_value_head key_pos d_head"],
        key_mask: Bool[Tensor, "batch key_pos"] | None,
        statistics: Collection[str],
    ) -> tuple[Float[Tensor, "batch head_index query_pos d_head"], dict[str, Tensor]]:
        may_be_dead = key_mask is not None or self.hook_attn_scores.is_wanted
        allowed = _allowed_pairs(q, k, is_causal=self.is_causal, key_mask=key_mask)
        keys = _repeat_heads(k, self.n_heads)
        scores = self.hook_attn_scores(masked_scores(q, keys, scale=self.scale, allowed=allowed))
        pattern = self.hook_pattern(softmax_rows(scores, may_be_dead=may_be_dead))
        found = pattern_statistics(scores, pattern, statistics, first_keys(key_mask, k))
        return pattern @ _repeat_heads(v, self.n_heads), found


def _fused(
    q: Float[Tensor, "batch head_index query_pos d_head"],
    k: Float[Tensor, "batch key_value_head key_pos d_head"],
    v: Float[Tensor, "batch key_value_head key_pos d_head"],
    key_mask: Bool[Tensor, "batch key_pos"] | None,
    statistics: Collection[str],
    *,
    scale: float,
    is_causal: bool,
) -> tuple[Float[Tensor, "batch head_index query_pos d_head"], dict[str, Tensor]]:
    """Heads' outputs and the statistics asked for, without a pattern.

    Statistics: ``lse``, ``entropy``, ``first_mass`` [batch, head_index, query_pos]; ``received``
    [batch, head_index, key_pos].
    """
    if not statistics and key_mask is None and not _gains_from_kernel(q):
        k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale), {}
    output = attention(
        q,
        k,
        v,
        causal=is_causal,
        key_mask=key_mask,
        scale=scale,
        statistics=tuple(STATISTICS[name] for name in statistics),
        key_sets={"first": first_keys(key_mask, k)} if "first_mass" in statistics else None,
    )
    found = {name: output.statistics[STATISTICS[name]] for name in statistics}
    if "first_mass" in found:
        found["first_mass"] = found["first_mass"].squeeze(-1)
    return output.out, found


def _gains_from_kernel(q: Float[Tensor, "batch head_index query_pos d_head"]) -> bool:
    """True where the kernel is faster than torch's own attention although nothing is asked.

    Not inside a graph that is being compiled: the kernel would cut it in two.
    """
    is_served = q.dtype == torch.float32 and q.device.type == "cpu"
    return is_served and q.shape[2] >= KERNEL_FROM and not torch.compiler.is_compiling()


def _allowed_pairs(
    q: Float[Tensor, "batch head_index query_pos d_head"],
    k: Float[Tensor, "batch head key_pos d_head"],
    *,
    is_causal: bool,
    key_mask: Bool[Tensor, "batch key_pos"] | None,
) -> Bool[Tensor, "*broadcast query_pos key_pos"] | None:
    """Which query may see which key, broadcastable over [batch, head_index]; None when all may.

    Causal masks are aligned at the end: the last query sees the last key.
    """
    n_queries, n_keys = q.shape[-2], k.shape[-2]
    allowed = None
    if is_causal:
        ones = torch.ones(n_queries, n_keys, dtype=torch.bool, device=q.device)
        allowed = ones.tril(n_keys - n_queries)
    if key_mask is not None:
        keys = key_mask[:, None, None, :]
        allowed = keys.expand(-1, -1, n_queries, -1) if allowed is None else allowed & keys
    return allowed


def _repeat_heads(
    x: Float[Tensor, "batch key_value_head pos d_head"], n_heads: int
) -> Float[Tensor, "batch head_index pos d_head"]:
    """Each key or value head once for every query head of its group."""
    return x if x.shape[1] == n_heads else x.repeat_interleave(n_heads // x.shape[1], dim=1)
