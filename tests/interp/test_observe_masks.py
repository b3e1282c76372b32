"""A model's mask reaches the kernel as a rule, which must say what transformers' mask says."""

import pytest
import torch
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    packed_sequence_mask_function,
    remap_positions_for_packed_sequence,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from interp.kernels.attention import attention
from interp.observe_masks import LazyMask, MaskRequest, lazy_mask, read_rule

PACKED = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2], [0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1]])
RESTARTING = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3]])
LEFT = torch.tensor([3, 0])

FUNCTIONS = {
    "causal": causal_mask_function,
    "bidirectional": bidirectional_mask_function,
    "window": sliding_window_causal_mask_function(3),
    "wide window": sliding_window_causal_mask_function(50),
    "bidirectional window": sliding_window_bidirectional_mask_function(2),
    "chunks": chunked_causal_mask_function(4, LEFT),
    "packed": and_masks(
        remap_positions_for_packed_sequence(causal_mask_function, RESTARTING),
        packed_sequence_mask_function(PACKED),
    ),
    "packed window": and_masks(
        remap_positions_for_packed_sequence(sliding_window_causal_mask_function(2), RESTARTING),
        packed_sequence_mask_function(PACKED),
    ),
}


def seen_pairs(mask: LazyMask) -> torch.Tensor:
    """Which keys the kernel lets which query see, read off the weights of equal scores."""
    told = mask.kernel()
    request = mask.request
    q = torch.zeros(request.batch, 1, request.query_pos, 2)
    k = torch.zeros(request.batch, 1, told.n_keys, 2)
    weights = attention(
        q,
        k,
        k,
        causal=told.causal,
        window=told.window,
        key_mask=told.key_mask,
        documents=told.documents,
        mask=told.mask,
        backend="reference",
    ).pattern()
    hidden = request.key_pos - told.n_keys
    return torch.nn.functional.pad(weights > 0, (0, hidden))


def padding(*lengths: int, n: int, side: str) -> torch.Tensor:
    mask = torch.zeros(len(lengths), n, dtype=torch.bool)
    for row, length in zip(mask, lengths, strict=True):
        row[: length if side == "right" else n] = True
        if side == "left":
            row[: n - length] = False
    return mask


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_kernel_hides_what_transformers_hides(name, side):
    text_mask = None if side is None else padding(8, 11, n=11, side=side)
    asked = {
        "batch_size": 2,
        "q_length": 11,
        "kv_length": 11,
        "mask_function": FUNCTIONS[name],
        "attention_mask": text_mask,
    }
    mask = lazy_mask(**asked)
    expected = sdpa_mask(**asked, allow_is_causal_skip=False)
    assert mask.request.rule is not None
    assert mask.kernel().mask is None
    assert torch.equal(seen_pairs(mask), expected)


@pytest.mark.parametrize(
    ("q_offset", "kv_offset", "q_length", "kv_length"),
    [(0, 0, 5, 17), (5, 0, 3, 17), (7, 0, 1, 8), (9, 6, 2, 5), (0, 0, 1, 1)],
    ids=["static prefill", "static step", "dynamic step", "sliding cache", "one token"],
)
@pytest.mark.parametrize("name", ["causal", "window"])
def test_a_caches_offsets_and_unused_room_are_understood(
    name, q_offset, kv_offset, q_length, kv_length
):
    asked = {
        "batch_size": 2,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": FUNCTIONS[name],
        "attention_mask": padding(
            q_offset + q_length, q_offset + q_length - 1, n=q_offset + q_length, side="left"
        )
        if q_offset + q_length > 1
        else None,
    }
    mask = lazy_mask(**asked)
    expected = sdpa_mask(**asked, allow_is_causal_skip=False)
    assert mask.kernel().n_keys == q_offset + q_length - kv_offset
    assert mask.kernel().mask is None
    assert torch.equal(seen_pairs(mask), expected)


def test_a_static_caches_offset_may_be_a_tensor():
    mask = lazy_mask(batch_size=1, q_length=1, kv_length=9, q_offset=torch.tensor(4))
    assert mask.kernel().n_keys == 5


def test_a_function_we_do_not_know_is_evaluated_and_not_guessed():
    def every_other(batch, head, query, key):
        return (key <= query) & ((query - key) % 2 == 0)

    for function in (every_other, or_masks(causal_mask_function, every_other)):
        asked = {"batch_size": 2, "q_length": 7, "kv_length": 7, "mask_function": function}
        mask = lazy_mask(**asked)
        assert mask.request.rule is None
        expected = sdpa_mask(**asked, allow_is_causal_skip=False)
        assert torch.equal(seen_pairs(mask), expected)


def test_a_known_name_that_means_something_else_is_caught_and_evaluated():
    def sliding_window_overlay(sliding_window):
        def inner_mask(batch, head, query, key):
            return key >= query - sliding_window  # one key more than the true overlay

        return inner_mask

    impostor = sliding_window_overlay(3)
    impostor.__module__ = "transformers.masking_utils"
    impostor.__qualname__ = "sliding_window_overlay.<locals>.inner_mask"
    assert read_rule(impostor) is not None  # a positive control: it is taken in by the name
    mask = lazy_mask(batch_size=1, q_length=9, kv_length=9, mask_function=impostor)
    assert mask.request.rule is None


def test_the_compact_mask_counts_as_the_tensor_it_stands_for():
    text_mask = padding(4, 6, n=6, side="left")
    mask = lazy_mask(batch_size=2, q_length=6, kv_length=6, attention_mask=text_mask)
    assert isinstance(mask, torch.Tensor)
    assert (mask.shape, mask.dtype, mask.ndim) == ((2, 1, 6, 6), torch.float32, 4)
    added = mask + torch.ones(())
    assert type(added) is torch.Tensor
    allowed = sdpa_mask(2, 6, 6, attention_mask=text_mask, allow_is_causal_skip=False)
    assert torch.equal(added > 0, allowed)
    assert torch.equal(mask[:, 0] == 0, allowed[:, 0])


def test_handing_the_compact_mask_on_builds_nothing(monkeypatch):
    def forbidden(self):
        raise AssertionError("built a mask of [query_pos, key_pos]")

    monkeypatch.setattr(MaskRequest, "additive", forbidden)
    monkeypatch.setattr(MaskRequest, "allowed", forbidden)
    mask = lazy_mask(batch_size=1, q_length=5000, kv_length=5000)
    assert mask.kernel().causal
    with pytest.raises(AssertionError, match="built a mask"):
        _ = mask + 1  # the control: this would have built it


def test_a_text_of_padding_only_is_refused():
    text_mask = padding(0, 4, n=4, side="right")
    with pytest.raises(ValueError, match="attention_mask: hides every token of sample 0"):
        lazy_mask(batch_size=2, q_length=4, kv_length=4, attention_mask=text_mask)
