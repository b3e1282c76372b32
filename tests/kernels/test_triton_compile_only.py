"""Without a GPU, the kernels compile for two generations of them and keep within their limits.

The rows here are a selection; `interp.kernels.triton_budget.all_rows` is the whole table, which
``python -m interp.kernels.triton_budget`` goes through.
"""

import os

import pytest
import torch

from interp.kernels.triton_budget import Row, survey

pytestmark = pytest.mark.skipif(
    bool(os.environ.get("TRITON_INTERPRET")), reason="under the interpreter nothing is compiled"
)

BF16, FP32 = torch.bfloat16, torch.float32

ROWS = [
    Row("forward", 64, 64, BF16, "observed"),
]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_a_kernel_keeps_within_a_multiprocessor(row, capability):
    ((_, _, usage),) = survey([row], capabilities=[capability])
    assert usage.excesses(capability) == []
