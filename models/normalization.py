"""LayerNorm and RMSNorm with their hook points."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from interp.models.config import Normalization
from interp.models.hook_point import ObservedModule, Point


class Norm(ObservedModule):
    """``w (x - mean) / scale + b`` ("LN"), or ``w x / scale`` ("RMS").

    ``hook_scale`` [batch, pos, 1] is the divisor, sqrt(variance + eps) or sqrt(mean square + eps);
    ``hook_normalized`` [batch, pos, d_model] is the result, the very tensor that flows on.
    """

    b: Tensor

    def __init__(self, kind: Normalization, d_model: int, *, eps: float) -> None:
        super().__init__()
        self.kind = kind
        self.eps = eps
        self.w = nn.Parameter(torch.ones(d_model))
        if kind == "LN":
            self.b = nn.Parameter(torch.zeros(d_model))
        else:
            self.register_buffer("b", torch.zeros(d_model), persistent=False)
        self.hook_scale = Point("batch", "pos", "1")
        self.hook_normalized = Point("batch", "pos", "d_model")

    def forward(self, x: Float[Tensor, "batch pos d_model"]) -> Float[Tensor, "batch pos d_model"]:
        if self.must_leave_graph:
            left: Tensor = self.outside_graph(x)
            return left
        if self.hook_scale.is_wanted:
            centred = x - x.mean(-1, keepdim=True) if self.kind == "LN" else x
            scale = self.hook_scale((centred.square().mean(-1, keepdim=True) + self.eps).sqrt())
            normalized = centred / scale * self.w
            normalized = normalized + self.b if self.kind == "LN" else normalized
        elif self.kind == "LN":
            self.hook_scale.decline()
            normalized = F.layer_norm(x, self.w.shape, self.w, self.b, self.eps)
        else:
            self.hook_scale.decline()
            normalized = F.rms_norm(x, self.w.shape, self.w, self.eps)
        return self.hook_normalized(normalized)
