"""The Triton backend: CUDA, or Triton's interpreter on a CPU, which is for tests.

Triton is imported when a call is served, not before.
"""

import importlib.util
import os

import torch
from torch import Tensor

from interp.kernels.options import AttentionOptions, statistics_dtype
from interp.kernels.triton_blocks import WIDEST, padded

MOST_SETS = 16


def misplaced(q: Tensor) -> str | None:
    """Why tensors of this device and type cannot be served, or None where they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; install it (Linux only) or use backend='strips'"
    if q.device.type == "cpu" and not is_interpreted():
        return (
            "q is on the cpu, and Triton compiles for CUDA; move it there or use backend='strips' "
            "(for tests there is Triton's interpreter: set TRITON_INTERPRET=1 before Python starts)"
        )
    if q.dtype == torch.float64 and not is_interpreted():
        return "q is torch.float64; use backend='strips' or 'reference' for it"
    return None


def refusal(options: AttentionOptions) -> str | None:
    """Why the kernels cannot serve a call, naming the option; None where they can."""
    o = options
    if not o.is_softmax:
        return f"variant={o.variant.name!r} has no kernel; use backend='strips' or 'reference'"
    if padded(max(o.d_head, o.d_value)) > WIDEST:
        return f"head sizes {o.d_head} (q, k) and {o.d_value} (v): the widest is {WIDEST}"
    if o.key_sets is not None and "mass" in o.statistics and o.key_sets.shape[1] > MOST_SETS:
        return f"key_sets: got {o.key_sets.shape[1]}, at most {MOST_SETS} fit in one call"
    for name, tensor in (("alibi", o.alibi), ("mask", o.mask_added)):
        if tensor is not None and tensor.requires_grad:
            return f"{name} requires a gradient, which the kernels do not give"
    return None


def is_interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter in this process."""
    if not os.environ.get("TRITON_INTERPRET"):
        return False
    from interp.kernels.triton_launch import IS_INTERPRETED

    return IS_INTERPRETED


def attend(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> dict[str, Tensor]:
    """Output and each of ``options.statistics``, differentiable."""
    from interp.kernels.triton_function import fused_attention

    fused = fused_attention(_readable(q), _readable(k), _readable(v), options)
    results = {"out": fused.out.to(q.dtype)}
    for name in options.statistics:
        results[name] = getattr(fused, name)
    return results


def pattern(q: Tensor, k: Tensor, options: AttentionOptions, heads: Tensor, rows: Tensor) -> Tensor:
    """Weights [batch, len(heads), len(rows), key_pos] of chosen heads and rows; no gradient.

    ``heads`` and ``rows`` are int64 indices within range.
    """
    from interp.kernels.triton_calls import rows_call
    from interp.kernels.triton_launch import launch, problem

    q, k = _readable(q.detach()), _readable(k.detach())
    p = problem(options, q.dtype)
    exact = statistics_dtype(q.dtype)
    shape = (options.batch, len(heads), len(rows), options.key_pos)
    weights = torch.empty(shape, dtype=exact, device=q.device)
    slot = None if options.slot is None else options.slot.detach().to(exact).contiguous()
    launch(rows_call(p, q, k, slot, heads, rows, weights))
    return weights


def _readable(x: Tensor) -> Tensor:
    """In the interpreter bfloat16 arithmetic is arithmetic on the bits: give it float32."""
    return x.float() if x.dtype == torch.bfloat16 and is_interpreted() else x
