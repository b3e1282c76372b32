"""The C backend: attention.c called through ctypes, with autograd around it.

Float32 on a CPU; half precision is converted on the way in and out. Softmax with any mask, edit,
sink or key-value bias; the other variants are refused. Nothing of size query x key is kept.
"""

import ctypes
import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from interp.kernels import c_build
from interp.kernels.c_call import Call, call_of, fill_gradients, fill_results
from interp.kernels.options import AttentionOptions

# Below this many multiplications a second thread costs more than it brings.
LEAST_PER_THREAD = 1 << 22


@dataclass(frozen=True)
class CBackendStatus:
    """Whether the C kernel can be used here, and why not."""

    is_available: bool
    compiler: str | None
    library: str | None
    problem: str | None


def c_backend_status() -> CBackendStatus:
    """Build the kernel if it is not there yet, and say whether it can be used.

    Asked for once per process: a compiler that was installed meanwhile is found by the next one.
    """
    built = c_build.build()
    if built.path is None:
        return CBackendStatus(False, built.compiler, None, built.problem)
    loaded = _load(str(built.path))
    if isinstance(loaded, str):
        return CBackendStatus(False, built.compiler, str(built.path), loaded)
    return CBackendStatus(True, built.compiler, str(built.path), None)


@functools.cache
def _load(path: str) -> ctypes.CDLL | str:
    """The library, or why it cannot be loaded."""
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        return f"{path} cannot be loaded ({error}); delete it and it is built again"
    for name in ("attention_forward", "attention_backward"):
        function = getattr(library, name)
        function.argtypes, function.restype = [ctypes.POINTER(Call)], ctypes.c_int
    return library


def refusal(options: AttentionOptions) -> str | None:
    """Why the kernel cannot serve a call, naming the option; None where it can."""
    if not options.is_softmax:
        return f"variant={options.variant.name!r} is not fused in C; use 'strips' or 'reference'"
    if options.alibi is not None and options.alibi.requires_grad:
        return "alibi requires a gradient, which 'strips' and 'reference' give"
    status = c_backend_status()
    return None if status.is_available else status.problem


def attend(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> dict[str, Tensor]:
    """``"out"`` [B, H, Q, E] in the type of q and each of ``options.statistics``."""
    o = options
    is_bare = o.bias is None and o.slot is None
    detached = o if is_bare else replace(o, bias=None, slot=None)
    tensors = _CAttention.apply(q.float(), k.float(), v.float(), o.bias, o.slot, detached)
    results = dict(zip(_returned(o), tensors, strict=True))
    results["out"] = results["out"].to(q.dtype)
    return results


def _with(options: AttentionOptions, bias: Tensor | None, slot: Tensor | None) -> AttentionOptions:
    """Options with the tensors that autograd handed over."""
    return options if bias is None and slot is None else replace(options, bias=bias, slot=slot)


def _returned(options: AttentionOptions) -> tuple[str, ...]:
    """What the forward pass returns, in order; lse always, for the backward pass needs it."""
    return tuple(dict.fromkeys(("out", *options.statistics, "lse")))


def n_threads_for(options: AttentionOptions) -> int:
    """How many threads a call is worth."""
    o = options
    work = o.batch * o.n_heads * o.query_pos * o.key_pos * (o.d_head + o.d_value)
    return max(1, min(torch.get_num_threads(), work // LEAST_PER_THREAD))


def _run(name: str, call: Call) -> None:
    """Call a function of the library."""
    built = c_build.build()
    library = _load(str(built.path))
    assert not isinstance(library, str)
    if getattr(library, name)(ctypes.byref(call)):
        raise MemoryError(f"{name}: no memory for the C kernel's blocks; use backend='strips'")


class _CAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        slot: Tensor | None,
        options: AttentionOptions,
    ) -> tuple[Tensor, ...]:
        whole = _with(options, bias, slot)
        call = call_of(q, k, v, whole, n_threads=n_threads_for(whole))
        results = fill_results(
            call, whole, _returned(whole), needs_largest_key=any(ctx.needs_input_grad)
        )
        _run("attention_forward", call.struct)
        ctx.options = options
        ctx.set_materialize_grads(False)
        kept = [results.get(name) for name in ("out", "lse", "entropy", "max", "largest_key")]
        kept += [results.get(name) for name in ("mass", "sink_mass")]
        ctx.save_for_backward(q, k, v, bias, slot, *kept)
        return tuple(results[name] for name in _returned(whole))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, bias, slot, *kept = ctx.saved_tensors
        names = ("out", "lse", "entropy", "max", "largest_key", "mass", "sink_mass")
        saved = {name: x for name, x in zip(names, kept, strict=True) if x is not None}
        whole = _with(ctx.options, bias, slot)
        upstream = dict(zip(_returned(whole), grads, strict=True))
        given = {name: grad for name, grad in upstream.items() if grad is not None}
        _, _, _, needs_bias, needs_slot, _ = ctx.needs_input_grad
        n_threads = n_threads_for(whole)
        if needs_bias and bias.shape != (whole.batch, whole.n_heads, *q.shape[2:3], k.shape[2]):
            n_threads = 1  # several heads add to one number
        call = call_of(q, k, v, whole, n_threads=n_threads)
        found = fill_gradients(
            call, q, k, v, whole, saved, given, needs_bias=needs_bias, needs_slot=needs_slot
        )
        _run("attention_backward", call.struct)
        d_bias, d_slot = found["bias"], found["slot"]
        return (
            found["q"],
            found["k"],
            found["v"],
            None if d_bias is None else d_bias.to(bias.dtype),
            None if d_slot is None else d_slot.to(slot.dtype),
            None,
        )
