"""An `Edit` comes apart: what happens before the kernel, inside it, and to its results."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from interp.kernels.checks import (
    check_device,
    check_floats,
    check_heads,
    check_int,
    check_integers,
    check_number,
    check_tensor,
    describe,
    expand,
)
from interp.kernels.edits import Edit, KnockOut, random_row_keys
from interp.kernels.options import OPEN, AttentionOptions, statistics_dtype


@dataclass(frozen=True, eq=False)
class Overrides:
    """What replaces a head's results after the kernel: patterns [B, Q, K], outputs [B, Q, E]."""

    patterns: Mapping[int, Tensor] = field(default_factory=dict)
    outputs: Mapping[int, Tensor] = field(default_factory=dict)


def check_edit(edit: Any) -> Edit:
    if not isinstance(edit, Edit):
        raise TypeError(f"edit: got {describe(edit)}, expected an interp.kernels.edits.Edit")
    return edit


def patch_operands(
    edit: Edit, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor, Tensor, AttentionOptions]:
    """Put the queries and keys of another run into the heads that get them.

    Keys that are shared by a group are given to each of its heads first, for one head may be
    patched and its neighbour not.
    """
    if edit.queries is not None:
        shape = (options.batch, options.query_pos, options.d_head)
        q = _patch("edit.queries", edit.queries, q, options, shape)
    if edit.keys is not None:
        if options.n_groups > 1:
            k = k.repeat_interleave(options.n_groups, 1)
            v = v.repeat_interleave(options.n_groups, 1)
            options = replace(options, n_key_value_heads=options.n_heads)
        shape = (options.batch, options.key_pos, options.d_head)
        k = _patch("edit.keys", edit.keys, k, options, shape)
    return q, k, v, options


def _patch(
    name: str, values: Any, x: Tensor, options: AttentionOptions, shape: tuple[int, ...]
) -> Tensor:
    heads = list(x.unbind(1))
    for head, value in check_heads(name, values, options.n_heads).items():
        heads[head] = check_floats(f"{name}[{head}]", value, x, shape).to(x.dtype)
    return torch.stack(heads, 1)


def resolve_edit(
    edit: Edit, q: Tensor, options: AttentionOptions
) -> tuple[AttentionOptions, Overrides]:
    """Put the edits that kernels make into the options; return those that replace results."""
    n_heads, device = options.n_heads, q.device
    changes: dict[str, Any] = {}
    if edit.temperature is not None:
        factors = torch.ones(n_heads)
        for head, factor in check_heads("edit.temperature", edit.temperature, n_heads).items():
            factors[head] = check_number(f"edit.temperature[{head}]", factor)
        changes["temperature"] = factors.to(device)
    if edit.window is not None:
        windows = torch.tensor([[-OPEN, OPEN]] * n_heads, dtype=torch.int32)
        for head, window in check_heads("edit.window", edit.window, n_heads).items():
            if not isinstance(window, tuple) or len(window) != 2:
                raise TypeError(
                    f"edit.window[{head}]: got {describe(window)}, expected (nearest, farthest)"
                )
            near, far = (check_int(f"edit.window[{head}]", distance) for distance in window)
            if near > far:
                raise ValueError(f"edit.window[{head}]: got {window}, expected nearest <= farthest")
            windows[head] = torch.tensor([near, far])
        changes["head_window"] = windows.to(device)
    if edit.random is not None:
        is_random = torch.zeros(n_heads, dtype=torch.bool)
        seeds = torch.zeros(n_heads, dtype=torch.int64)
        for head, seed in check_heads("edit.random", edit.random, n_heads).items():
            is_random[head] = True
            seeds[head] = check_int(f"edit.random[{head}]", seed)
        positions = torch.arange(options.query_pos, device=device) + options.offset
        changes["random_heads"] = is_random.to(device)
        changes["random_rows"] = random_row_keys(seeds.to(device), options.batch, positions)
    if edit.knock_out is not None:
        changes |= _knock_out(edit.knock_out, q, options)
    patterns = {} if edit.pattern is None else _patterns(edit.pattern, q, options)
    outputs = {} if edit.output is None else _outputs(edit.output, q, options)
    return replace(options, **changes), Overrides(patterns, outputs)


def _knock_out(knock_out: Any, q: Tensor, options: AttentionOptions) -> dict[str, Any]:
    if not isinstance(knock_out, KnockOut):
        raise TypeError(f"edit.knock_out: got {describe(knock_out)}, expected a KnockOut")
    if knock_out.cut not in ("before", "after"):
        raise ValueError(f"edit.knock_out.cut: got {knock_out.cut!r}, expected 'before' or 'after'")
    n_heads, name = options.n_heads, "edit.knock_out"
    heads = knock_out.head_groups
    if heads is None:
        heads = torch.full((n_heads,), (1 << 31) - 1, dtype=torch.int32, device=q.device)
    rows, columns = (options.batch, options.query_pos), (options.batch, options.key_pos)
    return {
        "query_groups": check_integers(f"{name}.query_groups", knock_out.query_groups, q, rows),
        "key_groups": check_integers(f"{name}.key_groups", knock_out.key_groups, q, columns),
        "head_groups": check_integers(f"{name}.head_groups", heads, q, (n_heads,)),
        "is_cut_after": knock_out.cut == "after",
    }


def _patterns(patterns: Any, q: Tensor, options: AttentionOptions) -> dict[int, Tensor]:
    shape = (options.batch, options.query_pos, options.key_pos)
    checked = {}
    for head, pattern in check_heads("edit.pattern", patterns, options.n_heads).items():
        name = f"edit.pattern[{head}]"
        tensor = check_tensor(name, pattern)
        tensor = tensor[None] if tensor.ndim == 2 else tensor
        checked[head] = check_floats(name, tensor, q, shape).to(statistics_dtype(q.dtype))
    return checked


def _outputs(outputs: Any, q: Tensor, options: AttentionOptions) -> dict[int, Tensor]:
    shape = (options.batch, options.query_pos, options.d_value)
    checked = {}
    for head, output in check_heads("edit.output", outputs, options.n_heads).items():
        name = f"edit.output[{head}]"
        tensor = check_device(name, check_tensor(name, output), q)
        if tensor.ndim > 3:
            raise ValueError(f"{name}: got {describe(tensor)}, expected at most 3 axes, {shape}")
        tensor = expand(name, tensor[(None,) * (3 - tensor.ndim)], shape)
        checked[head] = check_floats(name, tensor, q, shape).to(q.dtype)
    return checked


def override_patterns(
    results: dict[str, Tensor],
    patterns: Mapping[int, Tensor],
    v: Tensor,
    options: AttentionOptions,
) -> dict[str, Tensor]:
    """Results in which the heads with a pattern of their own follow that pattern."""
    if not patterns:
        return results
    split = {name: list(tensor.unbind(1)) for name, tensor in results.items()}
    for head, weights in patterns.items():
        values = v[:, head // options.n_groups].to(weights.dtype)
        total = weights.sum(-1)
        positive = weights > 0
        logs = torch.log(torch.where(positive, weights, 1.0))
        own = {
            "out": weights @ values,
            "lse": torch.log(total),
            "entropy": -(weights * logs).sum(-1),
            "max": weights.max(-1).values,
            "sink_mass": torch.zeros_like(total),
            "received": weights.sum(-2),
        }
        if options.key_sets is not None:
            own["mass"] = weights @ options.key_sets.to(weights.dtype).transpose(-1, -2)
        for name, heads in split.items():
            heads[head] = own[name].to(heads[head].dtype)
    return {name: torch.stack(heads, 1) for name, heads in split.items()}


def override_outputs(out: Tensor, outputs: Mapping[int, Tensor]) -> Tensor:
    """The output in which the named heads are what the edit says."""
    if not outputs:
        return out
    heads = list(out.unbind(1))
    for head, value in outputs.items():
        heads[head] = value
    return torch.stack(heads, 1)
