"""Autograd around the Triton kernels: forward, statistics, and gradients through all of them.

Nothing of size query x key is kept: the backward computes scores again, tile by tile, from q, k and
the log-sum-exp.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from interp.kernels import triton_arguments as arguments
from interp.kernels import triton_calls as calls
from interp.kernels.options import AttentionOptions
from interp.kernels.triton_launch import launch, problem


class Fused(NamedTuple):
    """Output and statistics; None for a statistic that was not asked for."""

    out: Tensor
    lse: Tensor
    entropy: Tensor | None
    max: Tensor | None
    mass: Tensor | None
    received: Tensor | None
    sink_mass: Tensor | None


def fused_attention(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Fused:
    """Attention by the kernels, differentiable in q, k, v, and the options' bias and slot."""
    detached = replace(options, bias=None, slot=None)
    return Fused(*_FusedAttention.apply(q, k, v, options.bias, options.slot, detached))


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        slot: Tensor | None,
        options: AttentionOptions,
    ) -> tuple[Tensor | None, ...]:
        o = options
        p = problem(replace(o, bias=bias), q.dtype)
        rows = (o.batch, o.n_heads, o.query_pos)
        asked = o.statistics

        def statistic(name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor | None:
            if name not in asked:
                return None
            return torch.empty(*shape, dtype=dtype or p.exact, device=q.device)

        out = torch.empty(*rows, o.d_value, dtype=q.dtype, device=q.device)
        lse = torch.empty(rows, dtype=p.exact, device=q.device)
        sink_mass = statistic("sink_mass", *rows)
        if slot is None and sink_mass is not None:
            sink_mass.zero_()
        results = arguments.Results(
            lse=lse,
            entropy=statistic("entropy", *rows),
            peak=statistic("max", *rows),
            peak_key=statistic("max", *rows, dtype=torch.int32),
            mass=statistic("mass", *rows, p.n_sets),
            sink_mass=sink_mass,
        )
        logits = None if slot is None else slot.to(p.exact).contiguous()
        launch(calls.forward_call(p, q, k, v, out, results, logits))
        received = statistic("received", o.batch, o.n_heads, o.key_pos)
        if received is not None:
            launch(calls.columns_call(p, q, k, lse, received))

        ctx.set_materialize_grads(False)
        ctx.options = o
        ctx.save_for_backward(q, k, v, bias, logits, out, *results)
        return (out, lse, results.entropy, results.peak, results.mass, received, sink_mass)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        grad_out: Tensor | None,
        grad_lse: Tensor | None,
        grad_entropy: Tensor | None,
        grad_max: Tensor | None,
        grad_mass: Tensor | None,
        grad_received: Tensor | None,
        grad_sink_mass: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        o: AttentionOptions = ctx.options
        q, k, v, bias, slot, out, *saved = ctx.saved_tensors
        results = arguments.Results(*saved)
        p = problem(replace(o, bias=bias), q.dtype)
        if grad_out is None:
            grad_out = out.new_zeros(o.d_value).expand(out.shape)
        elif grad_out.stride(-1) != 1:
            grad_out = grad_out.contiguous()
        grads = arguments.Grads(
            lse=_contiguous(grad_lse),
            entropy=_contiguous(grad_entropy),
            peak=_contiguous(grad_max),
            mass=_contiguous(grad_mass),
            received=_contiguous(grad_received),
            sink_mass=_contiguous(grad_sink_mass),
        )
        constant = torch.empty_like(results.lse)
        launch(calls.constant_call(p, q, k, out, grad_out, constant, results, grads))
        upstream = arguments.Upstream(
            lse=results.lse,
            constant=constant,
            entropy=grads.entropy,
            peak=grads.peak,
            peak_key=None if grads.peak is None else results.peak_key,
            mass=grads.mass,
            received=grads.received,
        )
        back = calls.Backward(q, k, v, grad_out, upstream)
        grad_q = grad_k = grad_v = grad_bias = grad_slot = None
        needs_q, needs_k, needs_v, needs_bias, needs_slot, _ = ctx.needs_input_grad
        if needs_q:
            grad_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            launch(calls.dq_call(p, back, grad_q))
        if needs_k or needs_v:
            grad_k = torch.empty(k.shape, dtype=k.dtype, device=k.device)
            grad_v = torch.empty(v.shape, dtype=v.dtype, device=v.device)
            launch(calls.dkv_call(p, back, grad_k, grad_v))
        if needs_bias:
            total = torch.empty(bias.shape, dtype=p.exact, device=bias.device)
            launch(calls.dbias_call(p, back, total))
            grad_bias = total.to(bias.dtype)
        if needs_slot:
            grad_slot = _slot_gradient(slot, upstream, grads)
        return grad_q, grad_k, grad_v, grad_bias, grad_slot, None


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def _slot_gradient(slot: Tensor, upstream: arguments.Upstream, grads: arguments.Grads) -> Tensor:
    """The slot is a key without a value: its score's gradient is the row constant and its own."""
    is_dead = upstream.lse == -torch.inf
    log_share = torch.where(is_dead, 0.0, slot - upstream.lse)
    gradient = upstream.constant
    if grads.sink_mass is not None:
        gradient = gradient + grads.sink_mass
    if grads.entropy is not None:
        gradient = gradient - grads.entropy * log_share
    return torch.where(is_dead, 0.0, torch.exp(log_share) * gradient)
