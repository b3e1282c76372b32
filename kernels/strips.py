"""Attention in plain torch that never holds more than some rows of the pattern.

This file is the autograd around `interp.kernels.strips_forward` and `strips_backward`. Works on any
device and serves every option. Only lse, and entropy and max where asked for, are kept between the
two passes.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from interp.kernels.options import AttentionOptions
from interp.kernels.strips_backward import Saved, compute_gradients
from interp.kernels.strips_forward import compute_results


def refusal(options: AttentionOptions) -> str | None:
    """Why this backend cannot serve a call; it serves every option."""
    return None


def attend(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> dict[str, Tensor]:
    """``"out"`` [B, H, Q, E] in the type of q and each of ``options.statistics``."""
    o = options
    detached = replace(o, bias=None, alibi=None, slot=None)
    tensors = _Strips.apply(q, k, v, o.bias, o.alibi, o.slot, detached)
    return dict(zip(_computed(o), tensors, strict=True))


def _computed(options: AttentionOptions) -> tuple[str, ...]:
    """What the forward pass returns, in order; lse always, for the backward pass needs it."""
    return tuple(dict.fromkeys(("out", *options.statistics, "lse")))


class _Strips(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        alibi: Tensor | None,
        slot: Tensor | None,
        options: AttentionOptions,
    ) -> tuple[Tensor, ...]:
        whole = replace(options, bias=bias, alibi=alibi, slot=slot)
        results = compute_results(q, k, v, whole, names=_computed(options))
        ctx.options = options
        ctx.set_materialize_grads(False)
        kept = (results["lse"], results.get("entropy"), results.get("max"))
        ctx.save_for_backward(q, k, v, bias, alibi, slot, *kept)
        return tuple(results.values())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, bias, alibi, slot, lse, entropy, largest = ctx.saved_tensors
        whole = replace(ctx.options, bias=bias, alibi=alibi, slot=slot)
        upstream = dict(zip(_computed(whole), grads, strict=True))
        with torch.autocast(q.device.type, enabled=False):
            gradients = compute_gradients(
                q, k, v, whole, Saved(lse, entropy, largest), upstream, ctx.needs_input_grad
            )
        return (*gradients, None)
