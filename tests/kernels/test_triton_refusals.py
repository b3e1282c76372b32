"""Without a GPU and outside the interpreter, the Triton backend says why it cannot serve."""

import dataclasses
import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from interp.kernels import backends, triton_backend
from interp.kernels.attention import attention
from interp.kernels.options import AttentionOptions
from interp.kernels.variants import Softpick

OPTIONS = AttentionOptions(1, 2, 2, 3, 3, 8, 8, scale=1.0)


@pytest.mark.skipif(bool(os.environ.get("TRITON_INTERPRET")), reason="the interpreter serves CPUs")
def test_tensors_on_a_cpu_are_refused_with_what_to_do():
    x = torch.zeros(1, 2, 3, 8)
    with pytest.raises(ValueError, match=r"backend='triton'.*q is on the cpu.*strips.*INTERPRET"):
        attention(x, x, x, backend="triton")


def test_a_missing_triton_is_said_and_replaced_by_strips(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "triton" else find_spec(name, *rest),
    )
    with torch.device("meta"):
        on_cuda = torch.zeros(1, 2, 3, 8)
    monkeypatch.setattr(backends, "FASTEST", {"meta": "triton"})
    monkeypatch.setitem(backends.DEVICES, "triton", ("meta",))
    name, reason = backends.choose("auto", on_cuda, OPTIONS)
    assert name == "strips"
    assert "triton is not installed" in reason


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"variant": Softpick()}, "variant='softpick'"),
        ({"d_head": 300}, "head sizes 300"),
        ({"d_value": 257}, "and 257"),
        ({"statistics": ("mass",), "key_sets": torch.zeros(1, 17, 3)}, "key_sets: got 17"),
        ({"alibi": torch.ones(2, requires_grad=True)}, "alibi requires a gradient"),
    ],
)
def test_what_has_no_kernel_is_refused_by_name(changes, expected):
    assert triton_backend.refusal(OPTIONS) is None
    assert expected in triton_backend.refusal(dataclasses.replace(OPTIONS, **changes))


def test_triton_is_imported_by_its_backend_alone():
    program = (
        "import sys, torch; from interp.kernels.attention import attention; "
        "x = torch.zeros(1, 2, 3, 8); attention(x, x, x); import interp.kernels.triton_backend; "
        "print('triton' in sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "False"
