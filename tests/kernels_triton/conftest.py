"""Triton's interpreter: these tests run in a process of their own, with TRITON_INTERPRET=1.

The variable is read when a kernel is defined, so it has to be set before Python starts. Nothing
here needs a GPU.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from interp.kernels import triton_blocks
from interp.kernels.triton_parity import STATISTICS, Run, Setting, errors, run

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return
    reason = "needs Triton's interpreter: TRITON_INTERPRET=1 python -m pytest tests/kernels_triton"
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def setting() -> Setting:
    """Primes, so that no two axes can be confused; fewer queries than keys; one shared key head."""
    return Setting(n_queries=19, n_keys=37)


@pytest.fixture
def agree() -> Callable[..., Run]:
    """Run the kernels and the float64 reference on the same numbers; fail where they differ.

    ``tolerance`` is relative to the largest magnitude of each result, or to 1.
    """

    def check(
        setting: Setting,
        options: Mapping[str, Any],
        *,
        tolerance: float,
        statistics: tuple[str, ...] = STATISTICS,
    ) -> Run:
        operands = setting.operands()
        found, expected = (
            run(setting, operands, options, backend=backend, dtype=dtype, statistics=statistics)
            for backend, dtype in (("triton", setting.dtype), ("reference", torch.float64))
        )
        assert found.output.backend == "triton"
        assert found.values["out"].dtype == setting.dtype
        wrong = {n: error for n, error in errors(found, expected).items() if error > tolerance}
        assert not wrong, f"above {tolerance:.0e}: {wrong}"
        return found

    return check


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that a short text has free and checked blocks, gaps and ragged ends."""
    monkeypatch.setattr(triton_blocks, "INTERPRETED", triton_blocks.Block(16, 32, 1, 1))
