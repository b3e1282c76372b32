"""The arguments of attention.c: its structures in ctypes, filled from tensors and options.

A `Prepared` call keeps every tensor alive that its pointers point to.
"""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from interp.kernels.options import AttentionOptions

_size, _pointer, _float = ctypes.c_int64, ctypes.c_void_p, ctypes.c_float


class Rows(ctypes.Structure):
    """rows_t: [b, head, position, ...] with a last stride of 1."""

    _fields_ = [("data", _pointer), ("batch", _size), ("head", _size), ("position", _size)]


class Scores(ctypes.Structure):
    """scores_t: [b, h, i, j] with any strides."""

    _fields_ = [
        ("data", _pointer),
        ("batch", _size),
        ("head", _size),
        ("query", _size),
        ("key", _size),
    ]


class Call(ctypes.Structure):
    """call_t, field by field."""

    _fields_ = [
        *((name, _size) for name in ("batch", "n_heads", "n_key_value_heads")),
        *((name, _size) for name in ("n_queries", "n_keys", "d", "e", "n_sets")),
        *((name, _size) for name in ("nearest", "farthest", "n_threads", "is_cut_after")),
        ("scale", _float),
        ("softcap", _float),
        *((name, Rows) for name in ("q", "k", "v")),
        *((name, Scores) for name in ("mask_allowed", "mask_added", "bias", "slot", "key_sets")),
        *((name, _pointer) for name in ("prefix", "key_mask")),
        *((name, _pointer) for name in ("query_documents", "key_documents")),
        *((name, _pointer) for name in ("alibi", "temperature", "head_window")),
        *((name, _pointer) for name in ("query_groups", "key_groups", "head_groups")),
        *((name, _pointer) for name in ("random_heads", "random_rows")),
        *((name, _pointer) for name in ("out", "lse", "entropy", "max", "mass", "sink_mass")),
        *((name, _pointer) for name in ("received", "largest_key")),
        ("d_out", Rows),
        *((name, _pointer) for name in ("d_lse", "d_entropy", "d_max", "d_mass")),
        *((name, _pointer) for name in ("d_sink_mass", "d_received")),
        *((name, _pointer) for name in ("d_q", "d_k", "d_v", "d_slot")),
        ("d_bias", Scores),
    ]


@dataclass(frozen=True)
class Prepared:
    """A call and the tensors that it points into."""

    struct: Call = field(default_factory=Call)
    alive: list[Tensor] = field(default_factory=list)

    def keep(self, x: Tensor) -> Tensor:
        self.alive.append(x)
        return x

    def point(self, name: str, x: Tensor | None, dtype: torch.dtype) -> None:
        """A pointer to a contiguous tensor of this type."""
        if x is not None:
            setattr(self.struct, name, self.keep(x.to(dtype).contiguous()).data_ptr())

    def point_rows(self, name: str, x: Tensor) -> None:
        """A rows_t of a tensor [b, head, position, d]."""
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            x = x.contiguous()
        x = self.keep(x)
        strides = [0 if n == 1 else stride for n, stride in zip(x.shape, x.stride(), strict=True)]
        setattr(self.struct, name, Rows(x.data_ptr(), *strides[:3]))

    def point_scores(self, name: str, x: Tensor | None, dtype: torch.dtype) -> None:
        """A scores_t of a tensor of up to four axes, some of size 1."""
        if x is None:
            return
        x = self.keep(x.view(torch.uint8) if x.dtype == torch.bool else x.to(dtype))
        strides = [0 if n == 1 else stride for n, stride in zip(x.shape, x.stride(), strict=True)]
        setattr(self.struct, name, Scores(x.data_ptr(), *strides, *[0] * (4 - x.ndim)))


def call_of(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, *, n_threads: int
) -> Prepared:
    """A call without results: sizes, operands, options."""
    o, call = options, Prepared()
    s = call.struct
    s.batch, s.n_heads, s.n_key_value_heads = o.batch, o.n_heads, o.n_key_value_heads
    s.n_queries, s.n_keys, s.d, s.e = o.query_pos, o.key_pos, o.d_head, o.d_value
    s.nearest, s.farthest = o.nearest, o.farthest
    s.n_threads, s.is_cut_after = n_threads, int(o.is_cut_after)
    s.scale, s.softcap = o.scale, o.softcap or 0.0
    for name, operand in (("q", q), ("k", k), ("v", v)):
        call.point_rows(name, operand)
    call.point_scores("mask_allowed", o.mask_allowed, torch.uint8)
    call.point_scores("mask_added", o.mask_added, torch.float32)
    call.point_scores("bias", o.bias, torch.float32)
    call.point_scores("slot", o.slot, torch.float32)
    for name in ("alibi", "temperature"):
        call.point(name, getattr(o, name), torch.float32)
    for name in ("key_mask", "random_heads"):
        call.point(name, getattr(o, name), torch.uint8)
    for name in ("prefix", "query_documents", "key_documents", "head_window"):
        call.point(name, getattr(o, name), torch.int32)
    for name in ("query_groups", "key_groups", "head_groups", "random_rows"):
        call.point(name, getattr(o, name), torch.int32)
    return call


def point_sets(call: Prepared, options: AttentionOptions) -> None:
    """The key sets, where their masses or the gradients of these are asked for."""
    assert options.key_sets is not None
    call.struct.n_sets = options.key_sets.shape[1]
    sets = options.key_sets.float()
    call.point_scores("key_sets", sets if sets.stride(-1) == 1 else sets.contiguous(), sets.dtype)


def fill_results(
    call: Prepared,
    options: AttentionOptions,
    names: tuple[str, ...],
    *,
    needs_largest_key: bool,
) -> dict[str, Tensor]:
    """Room for the results in ``names``; with "max" also for the key that has it."""
    o = options
    rows = (o.batch, o.n_heads, o.query_pos)
    results = {}
    for name in names:
        if name == "out":
            results[name] = torch.empty(*rows, o.d_value)
        elif name == "mass":
            point_sets(call, o)
            results[name] = torch.empty(*rows, call.struct.n_sets)
        elif name == "received":
            results[name] = torch.zeros(o.batch, o.n_heads, o.key_pos)
        else:
            results[name] = torch.empty(rows)
    if "max" in results and needs_largest_key:
        results["largest_key"] = torch.empty(rows, dtype=torch.int32)
    for name, tensor in results.items():
        call.point(name, tensor, tensor.dtype)
    return results


def fill_gradients(
    call: Prepared,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions,
    saved: Mapping[str, Tensor],
    given: Mapping[str, Tensor],
    *,
    needs_bias: bool,
    needs_slot: bool,
) -> dict[str, Tensor | None]:
    """Point at saved results and incoming gradients; room for the outgoing ones."""
    o = options
    for name, tensor in saved.items():
        call.point(name, tensor, tensor.dtype)
    d_out = given.get("out")
    call.point_rows("d_out", torch.zeros(o.d_value).expand(q.shape[0], q.shape[1], q.shape[2], -1))
    if d_out is not None:
        call.point_rows("d_out", d_out)
    if "mass" in given:
        point_sets(call, o)
    for name in ("lse", "entropy", "max", "mass", "sink_mass", "received"):
        call.point(f"d_{name}", given.get(name), torch.float32)
    found: dict[str, Tensor | None] = {
        "q": torch.empty(q.shape),
        "k": torch.empty(k.shape),
        "v": torch.empty(v.shape),
        "bias": None,
        "slot": None,
    }
    if needs_bias:
        assert o.bias is not None
        found["bias"] = torch.zeros(o.bias.shape)
        call.point_scores("d_bias", found["bias"], torch.float32)
    if needs_slot:
        found["slot"] = torch.empty(o.batch, o.n_heads, o.query_pos)
    for name in ("q", "k", "v", "slot"):
        call.point(f"d_{name}", found[name], torch.float32)
    return found
