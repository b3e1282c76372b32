"""The MLP, plain or gated, with its hook points."""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from interp.models.config import TransformerConfig
from interp.models.hook_point import ObservedModule, Point
from interp.models.parameters import add_bias, empty_weight

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_new": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
}


class MLP(ObservedModule):
    """``act(x W_in + b_in) W_out + b_out``; gated: ``act(x W_gate + b_gate) * (x W_in + b_in)``.

    ``hook_pre`` is what the activation function reads, ``hook_pre_linear`` the other factor of a
    gated MLP, ``hook_post`` what W_out multiplies; each [batch, pos, d_mlp].
    """

    b_in: Tensor
    b_gate: Tensor
    b_out: Tensor

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        assert config.d_mlp is not None
        d_model, d_mlp = config.d_model, config.d_mlp
        self.act_fn = _ACTIVATIONS[config.act_fn]
        self.gated = config.gated_mlp
        self.has_biases = config.mlp_biases
        self.W_in = nn.Parameter(empty_weight(d_model, d_mlp))
        if self.gated:
            self.W_gate = nn.Parameter(empty_weight(d_model, d_mlp))
        self.W_out = nn.Parameter(empty_weight(d_mlp, d_model))
        for name, size in (("b_in", d_mlp), ("b_gate", d_mlp), ("b_out", d_model)):
            if name == "b_gate" and not self.gated:
                continue
            add_bias(self, name, size, is_learned=self.has_biases)
        self.hook_pre = Point("batch", "pos", "d_mlp")
        if self.gated:
            self.hook_pre_linear = Point("batch", "pos", "d_mlp")
        self.hook_post = Point("batch", "pos", "d_mlp")

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        if self.must_leave_graph:
            left: Tensor = self.outside_graph(x)
            return left
        b_in, b_out = (self.b_in, self.b_out) if self.has_biases else (None, None)
        if self.gated:
            b_gate = self.b_gate if self.has_biases else None
            pre = self.hook_pre(F.linear(x, self.W_gate.t(), b_gate))
            linear = self.hook_pre_linear(F.linear(x, self.W_in.t(), b_in))
            post = self.hook_post(self.act_fn(pre) * linear)
        else:
            post = self.hook_post(self.act_fn(self.hook_pre(F.linear(x, self.W_in.t(), b_in))))
        return F.linear(post, self.W_out.t(), b_out)
