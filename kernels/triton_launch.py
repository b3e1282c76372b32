"""A kernel launch as data, and what all launches of one attention share.

A `Call` is made from tensors on any device, so that the very calls that a GPU runs can be compiled
without one (tensors on ``meta``) and interpreted on a CPU.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from triton.runtime import JITFunction

from interp.kernels import triton_arguments as arguments
from interp.kernels.options import AttentionOptions, statistics_dtype
from interp.kernels.triton_blocks import Block, KernelName, block_for, load_of, padded
from interp.kernels.triton_columns import columns_kernel
from interp.kernels.triton_constant import constant_kernel
from interp.kernels.triton_dbias import dbias_kernel
from interp.kernels.triton_dkv import dkv_kernel
from interp.kernels.triton_dq import dq_kernel
from interp.kernels.triton_forward import forward_kernel
from interp.kernels.triton_rows import rows_kernel

KERNELS: dict[KernelName, Any] = {
    "forward": forward_kernel,
    "columns": columns_kernel,
    "constant": constant_kernel,
    "dkv": dkv_kernel,
    "dq": dq_kernel,
    "dbias": dbias_kernel,
    "rows": rows_kernel,
}

# Contracting a product and a sum into one instruction is the default of every GPU compiler; saying
# so keeps Triton from asking the environment.
COMPILER_OPTIONS = {"enable_fp_fusion": True}


# Decided by the environment when triton was imported.
IS_INTERPRETED = not isinstance(forward_kernel, JITFunction)


@dataclass(frozen=True, eq=False)
class Call:
    """One launch."""

    name: KernelName
    n_programs: int
    arguments: dict[str, Any]
    block: Block

    @property
    def kernel(self) -> Any:
        return KERNELS[self.name]


def launch(call: Call) -> None:
    """Run a call on the device of its queries."""
    if call.n_programs == 0:
        return
    device = call.arguments["q"].pointer.device
    on_device: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if device.type == "cuda":
        on_device = torch.cuda.device(device)
    with on_device:
        call.kernel[(call.n_programs,)](
            **call.arguments,
            num_warps=call.block.warps,
            num_stages=call.block.stages,
            **COMPILER_OPTIONS,
        )


@dataclass(frozen=True, eq=False)
class Problem:
    """What all calls of one attention share; ``interpreted`` chooses blocks and precision."""

    options: AttentionOptions
    dtype: torch.dtype
    interpreted: bool
    sizes: arguments.Sizes
    scores: arguments.Scores
    masks: arguments.Masks
    key_sets: arguments.KeySets

    @property
    def exact(self) -> torch.dtype:
        """The type of scores and statistics."""
        return statistics_dtype(self.dtype)

    @property
    def n_sets(self) -> int:
        return 0 if self.key_sets.pointer is None else self.key_sets.pointer.shape[1]

    def call(
        self,
        name: KernelName,
        count: Callable[[Block], int],
        tensors: dict[str, Any],
        *,
        has_values: bool = True,
        has_statistics: bool = False,
    ) -> Call:
        """A call of this problem: its own arguments beside the tensors that the kernel names."""
        options = self.options
        d_pad, e_pad = padded(options.d_head), padded(options.d_value)
        width = max(d_pad, e_pad) if has_values else d_pad
        load = load_of(options, has_statistics=has_statistics)
        block = block_for(name, width, self.dtype.itemsize, load, is_interpreted=self.interpreted)
        is_tensor_core_single = self.dtype == torch.float32 and not self.interpreted
        constants: dict[str, Any] = {
            "sizes": self.sizes,
            "scores": self.scores,
            "masks": self.masks,
            "BLOCK_M": block.rows,
            "BLOCK_N": block.keys,
            "D": options.d_head,
            "D_PAD": d_pad,
            "CUT_AFTER": options.is_cut_after,
            "PRECISION": "tf32x3" if is_tensor_core_single else "ieee",
        }
        if has_values:
            constants |= {"E": options.d_value, "E_PAD": e_pad}
        return Call(name, count(block), {**tensors, **constants}, block)


def problem(
    options: AttentionOptions, dtype: torch.dtype, *, interpreted: bool | None = None
) -> Problem:
    """Gather what the kernels need of a call's options."""
    return Problem(
        options=options,
        dtype=dtype,
        interpreted=IS_INTERPRETED if interpreted is None else interpreted,
        sizes=arguments.sizes(options),
        scores=arguments.scores(options, dtype),
        masks=arguments.masks(options),
        key_sets=arguments.key_sets(options, dtype),
    )
