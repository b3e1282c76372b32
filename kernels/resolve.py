"""From the arguments of `attention` to the checked description that backends receive.

`resolve_operands` makes the description from q, k and v; the others return the fields that their
arguments set in it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from interp.kernels.checks import (
    check_bool,
    check_device,
    check_float_type,
    check_floats,
    check_int,
    check_integers,
    check_number,
    check_scores,
    check_tensor,
    describe,
    expand,
)
from interp.kernels.options import OPEN, STATISTICS, AttentionOptions, statistics_dtype
from interp.kernels.variants import KeyValueBias, Softmax1, resolve_variant

FLOATING_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def resolve_operands(q: Any, k: Any, v: Any) -> AttentionOptions:
    """Check q, k and v against one another: options that hold their sizes and defaults."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, tensor)
        if tensor.ndim != 4:
            heads = "head_index" if name == "q" else "key_value_head"
            raise ValueError(
                f"{name}: got shape {tuple(tensor.shape)}, expected 4 axes [batch, {heads}, pos, d]"
            )
        if 0 in tensor.shape:
            raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, expected no empty axis")
        if tensor.dtype not in FLOATING_TYPES:
            raise TypeError(f"{name}: is {tensor.dtype}, expected float16, bfloat16, float32 or 64")
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(
                f"{name}: the last axis has stride {tensor.stride(-1)}, expected 1; "
                f"pass {name}.contiguous()"
            )
        check_device(name, tensor, q)
        if tensor.dtype != q.dtype:
            raise ValueError(f"{name}: is {tensor.dtype} and q {q.dtype}, expected one type")
    batch, n_heads, query_pos, d_head = q.shape
    n_key_value_heads, key_pos = k.shape[1:3]
    if k.shape[0] != batch or k.shape[3] != d_head:
        raise ValueError(
            f"k: got shape {tuple(k.shape)}, expected batch {batch} and d_head {d_head} as in q"
        )
    if v.shape[:3] != k.shape[:3]:
        raise ValueError(
            f"v: got shape {tuple(v.shape)}, expected {tuple(k.shape[:3])} and a head size"
        )
    if n_heads % n_key_value_heads:
        raise ValueError(
            f"k: has {n_key_value_heads} heads, which do not divide the {n_heads} heads of q"
        )
    return AttentionOptions(
        batch=batch,
        n_heads=n_heads,
        n_key_value_heads=n_key_value_heads,
        query_pos=query_pos,
        key_pos=key_pos,
        d_head=d_head,
        d_value=v.shape[3],
        scale=1 / math.sqrt(d_head),
    )


def resolve_masks(
    options: AttentionOptions,
    q: Tensor,
    *,
    causal: Any,
    window: Any,
    prefix: Any,
    key_mask: Any,
    documents: Any,
    mask: Any,
) -> dict[str, Any]:
    """The fields that masks set."""
    nearest, farthest = _resolve_window(window, is_causal=check_bool("causal", causal))
    rows, columns = (options.batch, options.query_pos), (options.batch, options.key_pos)
    changes: dict[str, Any] = {"nearest": nearest, "farthest": farthest}

    if isinstance(prefix, Tensor):
        if prefix.ndim != 1:
            raise ValueError(f"prefix: got {describe(prefix)}, expected an int or [batch] of them")
        changes["prefix"] = check_integers("prefix", prefix, q, (options.batch,))
        on_cpu = prefix.device.type == "cpu"
        changes["longest_prefix"] = int(prefix.max()) if on_cpu else options.key_pos
    elif check_int("prefix", prefix, least=0):
        changes["prefix"] = torch.full((options.batch,), prefix, dtype=torch.int32, device=q.device)
        changes["longest_prefix"] = prefix

    if key_mask is not None:
        tensor = check_device("key_mask", check_tensor("key_mask", key_mask), q)
        if tensor.dtype != torch.bool:
            raise TypeError(
                f"key_mask: got {describe(tensor)}, expected bool, True where a key may be seen; "
                "a mask of 0 and 1 becomes one by key_mask.bool()"
            )
        changes["key_mask"] = expand("key_mask", tensor, columns)

    if documents is not None:
        if isinstance(documents, tuple):
            if len(documents) != 2:
                raise ValueError(
                    f"documents: got {len(documents)} tensors, expected (queries', keys') ids"
                )
            of_queries = check_integers("documents[0]", documents[0], q, rows)
            of_keys = check_integers("documents[1]", documents[1], q, columns)
        else:
            of_keys = check_integers("documents", documents, q, columns)
            if options.offset < 0:
                raise ValueError(
                    f"documents: {options.query_pos} queries are more than {options.key_pos} keys; "
                    "pass a pair (ids of queries, ids of keys)"
                )
            of_queries = of_keys[:, options.offset :]
        changes["query_documents"], changes["key_documents"] = of_queries, of_keys

    if mask is not None:
        shape = (options.batch, options.n_heads, options.query_pos, options.key_pos)
        tensor = check_scores("mask", mask, q, shape)
        if tensor.dtype == torch.bool:
            changes["mask_allowed"] = tensor
        elif tensor.is_floating_point():
            changes["mask_added"] = tensor
            if tensor.requires_grad:
                raise ValueError("mask: requires a gradient; pass it as bias, which is learned")
        else:
            raise TypeError(
                f"mask: got {describe(tensor)}, expected bool (True: may be seen) or floating "
                "point (added to the scores)"
            )
    return changes


def _resolve_window(window: Any, *, is_causal: bool) -> tuple[int, int]:
    nearest, farthest = -OPEN, OPEN
    if isinstance(window, tuple):
        if len(window) != 2:
            raise ValueError(f"window: got {window}, expected (nearest, farthest) distances")
        nearest, farthest = (check_int("window", distance) for distance in window)
        if nearest > farthest:
            raise ValueError(f"window: got {window}, expected nearest <= farthest")
    elif window is not None:
        width = check_int("window", window, least=1)
        nearest, farthest = 1 - width, width - 1
    return (max(nearest, 0) if is_causal else nearest), farthest


def resolve_scores(
    options: AttentionOptions,
    q: Tensor,
    *,
    scale: Any,
    softcap: Any,
    alibi: Any,
    bias: Any,
    sink: Any,
    variant: Any,
) -> dict[str, Any]:
    """The fields that make scores, and the variant."""
    heads = (options.n_heads,)
    changes: dict[str, Any] = {"variant": resolve_variant(variant)}
    if scale is not None:
        changes["scale"] = check_number("scale", scale)
    if softcap is not None:
        changes["softcap"] = check_number("softcap", softcap)
        if changes["softcap"] <= 0:
            raise ValueError(f"softcap: got {softcap}, expected a number above 0, or None")
    if alibi is not None:
        changes["alibi"] = check_floats("alibi", alibi, q, heads)
    if bias is not None:
        shape = (options.batch, options.n_heads, options.query_pos, options.key_pos)
        changes["bias"] = check_float_type("bias", check_scores("bias", bias, q, shape), q)
    name = changes["variant"].name
    rows = (options.batch, options.n_heads, options.query_pos)
    if sink is not None:
        if name != "softmax":
            raise ValueError(f"sink: a learned sink goes with variant='softmax', not with {name!r}")
        changes["slot"] = check_floats("sink", sink, q, heads)[None, :, None].expand(rows)
    if isinstance(changes["variant"], Softmax1):
        dtype = statistics_dtype(q.dtype)
        changes["slot"] = torch.zeros((), dtype=dtype, device=q.device).expand(rows)
    return changes


def bias_slot(options: AttentionOptions, q: Tensor) -> tuple[AttentionOptions, Tensor | None]:
    """The slot of a key-value bias: its logit per query goes into the options; its value returned.

    The value [n_heads, d_value] comes back in the type of the statistics.
    """
    variant = options.variant
    if not isinstance(variant, KeyValueBias):
        return options, None
    dtype = statistics_dtype(q.dtype)
    key = check_floats("variant.key", variant.key, q, (options.n_heads, options.d_head))
    logit = torch.einsum("bhqd,hd->bhq", q.to(dtype), key.to(dtype)) * options.scale
    if options.softcap is not None:
        logit = options.softcap * torch.tanh(logit / options.softcap)
    value = None
    if variant.value is not None:
        shape = (options.n_heads, options.d_value)
        value = check_floats("variant.value", variant.value, q, shape).to(dtype)
    return replace(options, slot=logit), value


def resolve_statistics(
    options: AttentionOptions, q: Tensor, *, statistics: Any, key_sets: Any, has_slot: bool
) -> dict[str, Any]:
    """The fields that say which statistics, and of which key sets."""
    if isinstance(statistics, str) or not isinstance(statistics, Sequence):
        raise TypeError(
            f"statistics: got {describe(statistics)}, expected a tuple of names, as in ('lse',)"
        )
    for name in statistics:
        if name not in STATISTICS:
            raise ValueError(f"statistics: unknown {name!r}; known are {', '.join(STATISTICS)}")
    names = tuple(dict.fromkeys(statistics))
    if "sink_mass" in names and not has_slot:
        raise ValueError(
            "statistics: 'sink_mass' needs a learned sink, or the variant 'softmax1' or "
            "KeyValueBias; the mass on the first key is key_sets={'first': [0]} with 'mass'"
        )
    if "mass" not in names:
        if key_sets is not None:
            raise ValueError("key_sets: given, but 'mass' is not among the statistics")
        return {"statistics": names}
    if not isinstance(key_sets, Mapping) or not key_sets:
        raise ValueError(
            f"key_sets: got {describe(key_sets)}; 'mass' expects a mapping from names to sets of "
            "keys, as in {'first': [0]}"
        )
    sets = [_resolve_key_set(options, q, name, keys) for name, keys in key_sets.items()]
    return {"statistics": names, "key_sets": torch.stack(sets, 1)}


def _resolve_key_set(options: AttentionOptions, q: Tensor, name: Any, keys: Any) -> Tensor:
    """Membership 0 or 1 of every key: [batch, key_pos], of one set."""
    if not isinstance(name, str):
        raise TypeError(f"key_sets: has the name {name!r}, expected a str")
    label, n_keys = f"key_sets[{name!r}]", options.key_pos
    dtype = statistics_dtype(q.dtype)
    if isinstance(keys, Tensor) and keys.dtype == torch.bool:
        check_device(label, keys, q)
        keys = keys[None] if keys.ndim == 1 else keys
        return expand(label, keys, (options.batch, n_keys)).to(dtype)
    if isinstance(keys, Tensor):
        if keys.ndim != 1 or keys.is_floating_point() or keys.is_complex():
            raise TypeError(
                f"{label}: got {describe(keys)}, expected indices [n], or bool [key_pos] or "
                "[batch, key_pos]"
            )
        keys = keys.tolist()
    if isinstance(keys, str) or not isinstance(keys, Sequence):
        raise TypeError(f"{label}: got {describe(keys)}, expected key positions or a bool tensor")
    for key in keys:
        if not 0 <= check_int(label, key) < n_keys:
            raise ValueError(f"{label}: names key {key}, expected 0 to {n_keys - 1}")
    member = torch.zeros(n_keys, dtype=dtype, device=q.device)
    member[list(keys)] = 1.0
    return member.expand(options.batch, n_keys)
