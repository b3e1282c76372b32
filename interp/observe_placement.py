"""Where tokens stand: from a cache's absolute positions to positions within a text."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from interp.observe_masks import MaskRequest


@dataclass(frozen=True, eq=False)
class Placement:
    """Where the queries and keys of one call stand in their texts.

    queries, keys: positions counted from the text's first real token, -1 for padding and for keys
        that are no token's own.
    new_keys: keys that no earlier call of the same texts has seen.
    first_sample: the number of the batch's first text among all texts of the stack.
    is_continued: the call goes on with the texts of the previous one, through a cache.
    """

    queries: Int[Tensor, "batch query_pos"]
    keys: Int[Tensor, "batch key_pos"]
    new_keys: Bool[Tensor, "batch key_pos"]
    first_sample: int
    is_continued: bool


@dataclass(frozen=True, eq=False)
class Frame:
    """Absolute positions: query i at ``q_offset + i``, key j at ``kv_offset + j``.

    text_mask: bool [batch, absolute position], True at real tokens; None if all are.
    n_token_keys: keys that are tokens; some architectures put compressed ones behind them.
    """

    text_mask: Tensor | None
    q_offset: int
    kv_offset: int
    n_token_keys: int

    @classmethod
    def of_request(cls, request: MaskRequest) -> "Frame":
        return cls(request.text_mask, request.q_offset, request.kv_offset, request.key_pos)


def place_call(
    frame: Frame,
    *,
    batch: int,
    query_pos: int,
    n_keys: int,
    device: torch.device,
    first_sample: int,
    is_continued: bool = False,
    is_cross: bool = False,
    before: Sequence[Placement] = (),
) -> Placement:
    """Place the queries and keys of one call.

    Cross-attention's keys are another text's; its queries stand where those of the self-attention
    ``before`` it did.
    """
    n_token_keys = min(n_keys, frame.n_token_keys)
    keys = positions_in_text(frame.text_mask, frame.kv_offset, n_token_keys, batch, device)
    keys = torch.nn.functional.pad(keys, (0, n_keys - n_token_keys), value=-1)
    if is_cross:
        queries = torch.arange(query_pos, device=device).expand(batch, query_pos)
        for placement in reversed(before):
            if placement.queries.shape == queries.shape:
                queries = placement.queries
                break
        new_keys = torch.full_like(keys, not is_continued, dtype=torch.bool)
    else:
        queries = positions_in_text(frame.text_mask, frame.q_offset, query_pos, batch, device)
        absolute = torch.arange(n_keys, device=device) + frame.kv_offset
        begins = frame.q_offset if is_continued else 0
        new_keys = (absolute >= begins).expand_as(keys)
    return Placement(queries, keys, new_keys, first_sample, is_continued)


def positions_in_text(
    text_mask: Tensor | None, offset: int, n: int, batch: int, device: torch.device
) -> Int[Tensor, "batch n"]:
    """Real tokens before each absolute position in ``[offset, offset + n)``; -1 for padding."""
    absolute = torch.arange(n, device=device) + offset
    if text_mask is None:
        return absolute.expand(batch, n)
    missing = offset + n - text_mask.shape[-1]
    real = torch.nn.functional.pad(text_mask, (0, missing)) if missing > 0 else text_mask
    # tokens are counted, not places: padding between a soft prompt and its text changes nothing
    count = torch.where(real, real.cumsum(-1) - 1, -1)
    return count[:, offset : offset + n].expand(batch, n)


def position_limit(model: PreTrainedModel) -> tuple[int | None, bool]:
    """How many positions a model has (None: no limit), and whether a learned table ends there."""
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or hasattr(config, "relative_attention_num_buckets"):
        return None, False
    for name, module in model.named_modules():
        is_table = isinstance(module, nn.Embedding) and limit <= module.num_embeddings <= limit + 4
        leaf = name.rpartition(".")[2].lower()
        if is_table and (leaf == "wpe" or "pos" in leaf):
            # RoBERTa and kin number positions from padding_idx + 1
            padding = module.padding_idx if module.num_embeddings == limit else None
            return limit - (0 if padding is None else padding + 1), True
    return limit, False
