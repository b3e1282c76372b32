"""Compile kernel launches for a GPU that is not there, and count what they use.

The signature of a `Call` is worked out as Triton's launcher does it, so that what is compiled here
is what a launch would run. ptxas, which the triton wheel brings along, reports registers and
spills; nothing is loaded and no driver is asked.
"""

import contextlib
import io
import re
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from interp.kernels.triton_launch import COMPILER_OPTIONS, Call

# Largest shared memory of one block in bytes (CUDA C++ programming guide, technical specifications
# per compute capability).
SHARED_LIMITS = {80: 163 * 1024, 90: 227 * 1024}

TYPE_NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}


@dataclass(frozen=True)
class Usage:
    """What one compiled kernel takes of a multiprocessor, per thread or per block."""

    registers: int
    stack_bytes: int
    spilled_bytes: int
    shared_bytes: int
    has_wgmma: bool

    def excesses(self, capability: int) -> list[str]:
        """What does not keep within a multiprocessor of this generation; empty if all does."""
        found = []
        if self.spilled_bytes or self.stack_bytes:
            found.append(f"{self.spilled_bytes} bytes spilled, stack of {self.stack_bytes}")
        if self.shared_bytes > SHARED_LIMITS[capability]:
            found.append(f"{self.shared_bytes} bytes of shared memory")
        if capability == 90 and not self.has_wgmma:
            found.append("no wgmma instruction")
        return found


def compile_call(call: Call, capability: int) -> Usage:
    """Compile a launch for compute capability 80 or 90 (8.0, 9.0)."""
    kernel = call.kernel
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    for index, parameter in enumerate(kernel.params):
        value = call.arguments[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name] = "constexpr"
            constants[(index,)] = value
        else:
            signature[parameter.name] = _specialize(value, (index,), constants, attributes)
    source = ASTSource(kernel, signature, constants, attributes)
    options = {
        "num_warps": call.block.warps,
        "num_stages": call.block.stages,
        **COMPILER_OPTIONS,
    }
    log = io.StringIO()
    with (
        triton.knobs.compilation.scope(),
        triton.knobs.nvidia.scope(),
        contextlib.redirect_stdout(log),
    ):
        # a cached binary would come without the report
        triton.knobs.compilation.always_compile = True
        triton.knobs.nvidia.dump_ptxas_log = True
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    report = log.getvalue()
    return Usage(
        registers=_number(r"Used (\d+) registers", report),
        stack_bytes=_number(r"(\d+) bytes stack frame", report),
        spilled_bytes=_number(r"(\d+) bytes spill stores", report)
        + _number(r"(\d+) bytes spill loads", report),
        shared_bytes=compiled.metadata.shared,
        has_wgmma="wgmma.mma_async" in compiled.asm["ptx"],
    )


def _specialize(
    value: Any,
    path: tuple[int, ...],
    constants: dict[tuple[int, ...], Any],
    attributes: dict[tuple[int, ...], list[list[object]]],
) -> Any:
    """The type of an argument; None and 1 become constants, multiples of 16 are marked."""
    if isinstance(value, tuple):
        parts = [
            _specialize(part, (*path, index), constants, attributes)
            for index, part in enumerate(value)
        ]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if value is None or (isinstance(value, int) and value == 1):
        constants[path] = value
        return "constexpr"
    if isinstance(value, Tensor):
        # torch aligns what it allocates; a view that starts elsewhere compiles once more
        attributes[path] = [["tt.divisibility", 16]]
        return "*" + TYPE_NAMES[value.dtype]
    if isinstance(value, int):
        if value % 16 == 0:
            attributes[path] = [["tt.divisibility", 16]]
        return "i32" if abs(value) < 2**31 else "i64"
    assert isinstance(value, float)
    return "fp32"


def _number(pattern: str, report: str) -> int:
    match = re.search(pattern, report)
    if match is None:
        raise RuntimeError(f"ptxas reported no {pattern!r}; it said:\n{report}")
    return int(match.group(1))
