"""The budget table: launches whose registers, spills and shared memory are checked without a GPU.

A row is a kernel, head sizes, a type, and a profile: what a call asks for. The launches are made by
the code that makes the real ones, on tensors without memory.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from interp.kernels import triton_arguments as arguments
from interp.kernels import triton_calls as calls
from interp.kernels.compile_only import Usage, compile_call
from interp.kernels.options import AttentionOptions
from interp.kernels.triton_blocks import KernelName
from interp.kernels.triton_launch import Call, problem

Profile = Literal["plain", "model", "observed", "everything"]

BATCH, N_HEADS, N_KEY_VALUE_HEADS = 2, 16, 4


@dataclass(frozen=True)
class Row:
    """One launch of the table; ``length`` is the number of queries and keys."""

    kernel: KernelName
    d_head: int
    d_value: int
    dtype: torch.dtype
    profile: Profile
    length: int = 1024

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.kernel} d{self.d_head}/{self.d_value} {kind} {self.profile} T{self.length}"


def all_rows() -> list[Row]:
    """The whole table: every kernel, type, width and profile."""
    rows = []
    for kernel, dtype, width, profile in itertools.product(
        get_args(KernelName),
        (torch.float16, torch.bfloat16, torch.float32),
        (32, 64, 128, 256),
        get_args(Profile),
    ):
        if kernel == "dbias" and profile != "everything":
            continue  # there is no bias in the others
        if kernel == "constant" and profile in ("plain", "model"):
            continue  # without a gradient of the received mass it multiplies nothing
        rows.append(Row(kernel, width, width, dtype, profile))
    rows.append(Row("forward", 72, 72, torch.bfloat16, "everything", length=1001))
    rows.append(Row("dkv", 72, 72, torch.bfloat16, "everything", length=1001))
    rows.append(Row("forward", 192, 128, torch.bfloat16, "observed"))
    rows.append(Row("dkv", 192, 128, torch.bfloat16, "observed"))
    return rows


def options_for(row: Row) -> AttentionOptions:
    """The options of a row's profile, with tensors on the meta device."""
    batch, n_heads, length = BATCH, N_HEADS, row.length

    def tensor(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    o = AttentionOptions(
        batch=batch,
        n_heads=n_heads,
        n_key_value_heads=N_KEY_VALUE_HEADS,
        query_pos=length,
        key_pos=length,
        d_head=row.d_head,
        d_value=row.d_value,
        scale=row.d_head**-0.5,
        nearest=0,
    )
    if row.profile != "plain":
        o = replace(
            o,
            farthest=256,
            key_mask=tensor(batch, length, dtype=torch.bool),
            softcap=50.0,
            alibi=tensor(n_heads, dtype=torch.float32),
            slot=tensor(batch, n_heads, length, dtype=torch.float32),
        )
    if row.profile in ("observed", "everything"):
        o = replace(
            o,
            statistics=("lse", "entropy", "max", "mass", "received", "sink_mass"),
            key_sets=tensor(batch, 3, length, dtype=torch.float32),
        )
    if row.profile == "everything":
        o = replace(
            o,
            prefix=tensor(batch),
            longest_prefix=4,
            query_documents=tensor(batch, length),
            key_documents=tensor(batch, length),
            mask_allowed=tensor(batch, 1, length, length, dtype=torch.bool),
            mask_added=tensor(batch, 1, length, length, dtype=row.dtype),
            bias=tensor(1, n_heads, length, length, dtype=row.dtype),
            temperature=tensor(n_heads, dtype=torch.float32),
            head_window=tensor(n_heads, 2),
            query_groups=tensor(batch, length),
            key_groups=tensor(batch, length),
            head_groups=tensor(n_heads),
            is_cut_after=True,
            random_heads=tensor(n_heads, dtype=torch.bool),
            random_rows=tensor(batch, n_heads, length),
        )
    return o


def call_for(row: Row) -> Call:
    """The launch of a row, as a GPU would get it."""
    o = options_for(row)
    p = problem(o, row.dtype, interpreted=False)

    def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    def of_rows(name: str, *rest: int, dtype: torch.dtype = torch.float32) -> Tensor | None:
        is_asked = name in o.statistics
        return tensor(o.batch, o.n_heads, row.length, *rest, dtype=dtype) if is_asked else None

    q = tensor(o.batch, o.n_heads, row.length, o.d_head, dtype=row.dtype)
    k = tensor(o.batch, o.n_key_value_heads, row.length, o.d_head, dtype=row.dtype)
    v = tensor(o.batch, o.n_key_value_heads, row.length, o.d_value, dtype=row.dtype)
    out = tensor(o.batch, o.n_heads, row.length, o.d_value, dtype=row.dtype)
    lse = tensor(o.batch, o.n_heads, row.length)
    received = tensor(o.batch, o.n_heads, row.length)
    results = arguments.Results(
        lse=lse,
        entropy=of_rows("entropy"),
        peak=of_rows("max"),
        peak_key=of_rows("max", dtype=torch.int32),
        mass=of_rows("mass", p.n_sets),
        sink_mass=of_rows("sink_mass"),
    )
    grads = arguments.Grads(
        lse=lse,
        entropy=results.entropy,
        peak=results.peak,
        mass=results.mass,
        received=received if "received" in o.statistics else None,
        sink_mass=results.sink_mass,
    )
    upstream = arguments.Upstream(
        lse=lse,
        constant=lse,
        entropy=grads.entropy,
        peak=grads.peak,
        peak_key=results.peak_key,
        mass=grads.mass,
        received=grads.received,
    )
    back = calls.Backward(q, k, v, out, upstream)
    if row.kernel == "forward":
        return calls.forward_call(p, q, k, v, out, results, o.slot)
    if row.kernel == "columns":
        return calls.columns_call(p, q, k, lse, received)
    if row.kernel == "constant":
        return calls.constant_call(p, q, k, out, out, lse, results, grads)
    if row.kernel == "dkv":
        return calls.dkv_call(p, back, k, v)
    if row.kernel == "dq":
        return calls.dq_call(p, back, q)
    if row.kernel == "dbias":
        return calls.dbias_call(p, back, tensor(1, o.n_heads, row.length, row.length))
    chosen = tensor(64, dtype=torch.int64)
    pattern = tensor(o.batch, 64, 64, row.length)
    return calls.rows_call(p, q, k, o.slot, chosen, chosen, pattern)


def survey(
    rows: Iterable[Row] | None = None, *, capabilities: Iterable[int] = (80, 90)
) -> Iterator[tuple[Row, int, Usage]]:
    """Compile rows (all, unless given) for each capability, one by one as they are asked for.

    The whole table takes about an hour of one core.
    """
    for row in all_rows() if rows is None else rows:
        call = call_for(row)
        for capability in capabilities:
            yield row, capability, compile_call(call, capability)


def main() -> None:
    """Print the whole table; exit with an error if any row exceeds its limits."""
    n_failed = 0
    for row, capability, usage in survey():
        excesses = ", ".join(usage.excesses(capability))
        n_failed += bool(excesses)
        print(
            f"{row!s:44} sm_{capability} {usage.registers:4} registers "
            f"{usage.shared_bytes:7} bytes shared  {excesses or 'ok'}",
            flush=True,
        )
    if n_failed:
        raise SystemExit(f"{n_failed} rows exceed their limits")


if __name__ == "__main__":
    main()
