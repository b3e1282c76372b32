"""Which backend serves a call, and why: a decision made before anything is computed.

A backend is a module with ``refusal(options) -> str | None``, a sentence that names the option it
cannot serve, and ``attend(q, k, v, options) -> dict``, which returns ``"out"`` and each of
``options.statistics`` (shapes as in `interp.kernels.attention.AttentionOutput`), differentiable
with respect to q, k, v, ``options.bias`` and ``options.slot``. It must not look at the gate, at
given patterns or outputs, or at the value of a key-value bias: those are added afterwards.
"""

import importlib
from types import ModuleType

import torch
from torch import Tensor

from interp.kernels.options import AttentionOptions

MODULES = {
    "reference": "interp.kernels.reference",
    "strips": "interp.kernels.strips",
    "c": "interp.kernels.c_backend",
    "triton": "interp.kernels.triton_backend",
}
# Where each backend runs and in which types; None means anywhere.
DEVICES = {"reference": None, "strips": None, "c": ("cpu",), "triton": ("cuda", "cpu")}
FASTEST = {"cuda": "triton", "cpu": "c"}
HALF_AND_SINGLE = (torch.float16, torch.bfloat16, torch.float32)


def load(name: str) -> ModuleType:
    """The module of a backend, imported when it is first used."""
    return importlib.import_module(MODULES[name])


def choose(backend: object, q: Tensor, options: AttentionOptions) -> tuple[str, str]:
    """The backend's name and a sentence that says why it was taken."""
    if not isinstance(backend, str) or (backend != "auto" and backend not in MODULES):
        known = ", ".join(("auto", *MODULES))
        raise ValueError(f"backend: got {backend!r}, expected one of {known}")
    if backend != "auto":
        why = why_not(backend, q, options)
        if why is not None:
            raise ValueError(f"backend={backend!r} cannot serve this call: {why}")
        return backend, "asked for"
    fast = FASTEST.get(q.device.type)
    if fast is None:
        obstacle = f"there is no kernel for {q.device.type}"
    else:
        why = why_not(fast, q, options)
        if why is None:
            return fast, f"the fastest backend on {q.device.type}"
        obstacle = f"{fast}: {why}"
    why = why_not("strips", q, options)
    if why is None:
        return "strips", obstacle
    raise ValueError(
        f"no fused backend can serve this call: {obstacle}; strips: {why}; "
        "backend='reference' materialises the pattern and can"
    )


def why_not(name: str, q: Tensor, options: AttentionOptions) -> str | None:
    """A sentence that says why a backend cannot serve a call, or None where it can."""
    devices = DEVICES[name]
    if devices is not None and q.device.type not in devices:
        return f"q is on {q.device.type}, this backend runs on {' or '.join(devices)}"
    if name == "c" and q.dtype not in HALF_AND_SINGLE:
        return f"q is {q.dtype}; use backend='strips' or 'reference' for it"
    if name == "triton":
        misplaced: str | None = load(name).misplaced(q)
        if misplaced is not None:
            return misplaced
    refusal: str | None = load(name).refusal(options)
    return refusal
