"""In the interpreter, the Triton kernels agree with the reference for every length and type."""

import dataclasses

import pytest
import torch

from interp.kernels.triton_parity import TOLERANCES, Setting


@pytest.mark.parametrize("length", [1, 17, 64, 100, 130])
def test_any_length_is_served(length, agree, setting):
    setting = dataclasses.replace(setting, n_queries=length, n_keys=length, batch=1)
    agree(setting, {}, tolerance=TOLERANCES[torch.float64])


@pytest.mark.parametrize(("n_queries", "n_keys"), [(1, 130), (17, 64), (67, 5)])
@pytest.mark.parametrize("causal", [True, False])
def test_queries_and_keys_may_differ_in_number(n_queries, n_keys, causal, agree, setting):
    setting = dataclasses.replace(setting, n_queries=n_queries, n_keys=n_keys, batch=1)
    agree(setting, {"causal": causal}, tolerance=TOLERANCES[torch.float64])


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_every_type_is_as_exact_as_it_can_be(dtype, agree, setting):
    setting = dataclasses.replace(setting, n_queries=100, n_keys=130, batch=1, dtype=dtype)
    found = agree(setting, {"softcap": 20.0}, tolerance=TOLERANCES[dtype])
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    assert all(found.values[name].dtype == exact for name in found.output.statistics)
    assert all(gradient.dtype == dtype for gradient in found.gradients.values())


@pytest.mark.parametrize(("n_heads", "n_key_value_heads"), [(1, 1), (4, 1), (6, 3)])
def test_heads_may_share_keys(n_heads, n_key_value_heads, agree, setting):
    setting = dataclasses.replace(
        setting, n_heads=n_heads, n_key_value_heads=n_key_value_heads, batch=1
    )
    agree(setting, {}, tolerance=TOLERANCES[torch.float64])


@pytest.mark.parametrize(("d_head", "d_value"), [(1, 1), (64, 16), (5, 80), (72, 72)])
def test_heads_may_have_any_size(d_head, d_value, agree, setting):
    setting = dataclasses.replace(setting, d_head=d_head, d_value=d_value, batch=1)
    agree(setting, {}, tolerance=TOLERANCES[torch.float64])


def test_transposed_operands_need_no_copy(setting, agree):
    """Heads before or after positions in memory: transformers keep them after."""

    class Transposed(Setting):
        def operands(self):
            return tuple(x.transpose(1, 2).contiguous().transpose(1, 2) for x in super().operands())

    sizes = dataclasses.asdict(setting) | {"n_key_value_heads": 2}
    transposed = Transposed(**sizes)
    assert not any(x.is_contiguous() for x in transposed.operands())
    agree(transposed, {}, tolerance=TOLERANCES[torch.float64])
