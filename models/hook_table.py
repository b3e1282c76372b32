"""The published points of a model as a table: what can be read where, and what cannot matter."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from interp.models.attention import Attention
from interp.models.hook_point import ReadOut

if TYPE_CHECKING:
    from interp.models.transformer import Transformer

Backend = Literal["fused", "eager"]
Role = Literal["causal", "read-out"]

_SQUARE_POINTS = ("hook_attn_scores", "hook_pattern")


@dataclass(frozen=True)
class PointRow:
    """One published point.

    name: full name, as hooks and caches use it. shape: its axis words, separated by spaces.
    backends: the attention paths that have the tensor; a listener on a point that the fused path
    lacks switches that layer to the eager one. role: "causal" where an edit flows on, "read-out"
    where it is refused. dead: why no edit can change a logit in this model, or None.
    """

    name: str
    shape: str
    backends: tuple[Backend, ...]
    role: Role
    dead: str | None


def build_point_table(model: "Transformer") -> list[PointRow]:
    """One row for each point of ``model``, in the order of the forward pass."""
    return [
        PointRow(
            name=name,
            shape=" ".join(point.axes),
            backends=("eager",) if name.endswith(_SQUARE_POINTS) else ("fused", "eager"),
            role="read-out" if isinstance(point, ReadOut) else "causal",
            dead=_why_dead(model, name),
        )
        for name, point in model.hook_dict.items()
    ]


def _why_dead(model: "Transformer", name: str) -> str | None:
    if not name.startswith("blocks."):
        return None
    _, layer, part = name.split(".", 2)
    block = model.blocks[int(layer)]
    last = part.rsplit(".", 1)[-1]
    if last in ("hook_q", "hook_rot_q") and _is_zero(block.attn, "K"):
        return "every key is zero (W_K = 0, b_K = 0): no query changes a score"
    if last in ("hook_k", "hook_rot_k") and _is_zero(block.attn, "Q"):
        return "every query is zero (W_Q = 0, b_Q = 0): no key changes a score"
    if part == "ln2.hook_scale" and _is_rescaling_invisible(model, int(layer)):
        return "the MLP passes a scale on as it is, and the next norm divides it out again"
    return None


def _is_zero(attn: Attention, letter: str) -> bool:
    weight, bias = getattr(attn, f"W_{letter}"), getattr(attn, f"b_{letter}")
    return not bool(weight.any()) and not bool(bias.any())


def _is_rescaling_invisible(model: "Transformer", layer: int) -> bool:
    """True if an MLP that is homogeneous writes, alone, to a stream that is read through norms."""
    config, is_last = model.cfg, layer == model.cfg.n_layers - 1
    mlp = model.blocks[layer].mlp
    biases = [model.blocks[layer].ln2.b, mlp.b_in, mlp.b_out]
    biases += [mlp.b_gate] if config.gated_mlp else []
    has_bias = any(bool(bias.any()) for bias in biases)
    if config.act_fn != "relu" or has_bias or config.mlp_residual:
        return False
    if is_last:
        return config.final_norm is not None
    return config.attention_norm is not None and not config.attention_residual
