"""Interventions inside attention, described head by head.

An `Edit` says what is done to which head; heads that it does not name are left alone. Two ways of
intervening need no field of their own: a *blend* of two patterns is the same blend of the two
outputs, because the output is linear in the pattern; and a *frozen* pattern, through which no
gradient flows, is attention called with ``q.detach()`` and ``k.detach()``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF
# Odd constants that spread consecutive positions over 32 bits (2^32 divided by the golden ratio).
KEY_STRIDE = 0x9E3779B1
_MIX_1 = 0x85EBCA6B
_MIX_2 = 0xC2B2AE35


@dataclass(frozen=True, eq=False)
class KnockOut:
    """Edges that are cut, in O(T) memory: query and key positions belong to groups.

    Groups are bits 0 to 30. The edge from query i to key j is cut in head h where some group has
    all three bits set: ``query_groups[i] & key_groups[j] & head_groups[h] != 0``.

    ``query_groups`` [batch or 1, query_pos], ``key_groups`` [batch or 1, key_pos] and
    ``head_groups`` [n_heads] are integer tensors; without ``head_groups`` all heads are cut.
    ``cut`` is ``"before"`` softmax (the rest of the row is renormalised) or ``"after"`` it (the
    weight is lost; lse, entropy, max and sink_mass then describe the row before the cut).
    """

    query_groups: Tensor
    key_groups: Tensor
    head_groups: Tensor | None = None
    cut: Literal["before", "after"] = "before"


@dataclass(frozen=True, eq=False)
class Edit:
    """What to change in which heads; each mapping goes from a head's index to its value.

    temperature
        A factor on the score (after softcap, ALiBi and bias): 1 changes nothing, 0 makes the
        pattern uniform over the allowed keys.
    window
        ``(nearest, farthest)``: only keys at these distances before the query stay allowed;
        ``(1, 1)`` is the previous token, ``(0, 0)`` the token itself.
    knock_out
        A `KnockOut`: single edges, for some heads or all.
    random
        A seed: the head's pattern is drawn uniformly from all distributions over the allowed keys
        (flat Dirichlet), by a hash of seed, sample, head and the two positions, so that every
        backend and every split of a text draws the same.
    pattern
        The head's pattern itself, [query_pos, key_pos] or [batch, query_pos, key_pos], used as it
        is: no mask, sink or normalisation touches it. Its statistics are computed from it, with
        lse the log of its row sums.
    queries, keys
        The head's queries [batch, query_pos, d_head] or keys [batch, key_pos, d_head] from another
        run. Both together patch that run's pattern.
    output
        The head's output, broadcastable to [batch, query_pos, d_value], put in after the gate:
        a mean, or zeros.
    """

    temperature: Mapping[int, float] | None = None
    window: Mapping[int, tuple[int, int]] | None = None
    knock_out: KnockOut | None = None
    random: Mapping[int, int] | None = None
    pattern: Mapping[int, Tensor] | None = None
    queries: Mapping[int, Tensor] | None = None
    keys: Mapping[int, Tensor] | None = None
    output: Mapping[int, Tensor] | None = None


def mix32(x: Tensor) -> Tensor:
    """A bijection of 32-bit numbers (held in int64) that flips every bit with odds of a half.

    The finaliser of MurmurHash3 (Appleby, public domain).
    """
    x = x ^ (x >> 16)
    x = (x * _MIX_1) & _MASK32
    x = x ^ (x >> 13)
    x = (x * _MIX_2) & _MASK32
    return x ^ (x >> 16)


def random_row_keys(seeds: Tensor, batch: int, positions: Tensor) -> Tensor:
    """One 32-bit number for every row of every head: int32 bit patterns [batch, head, query_pos].

    ``seeds`` int64 [n_heads] and ``positions`` int64 [query_pos], the queries' places among the
    keys.
    """
    n_heads = seeds.numel()
    sample = torch.arange(batch, device=seeds.device)[:, None, None]
    head = torch.arange(n_heads, device=seeds.device)[None, :, None]
    key = mix32((seeds & _MASK32)[None, :, None] ^ 0x5BD1E995)
    key = mix32((key + sample * KEY_STRIDE) & _MASK32)
    key = mix32((key + head * KEY_STRIDE) & _MASK32)
    key = mix32((key + (positions & _MASK32)[None, None, :] * KEY_STRIDE) & _MASK32)
    return torch.where(key > 0x7FFFFFFF, key - (1 << 32), key).to(torch.int32)


def random_scores(row_keys: Tensor, first_key: int, last_key: int, dtype: torch.dtype) -> Tensor:
    """Scores whose softmax is a draw from the flat Dirichlet: log of exponential variates.

    ``row_keys`` int32 [...]; the result is [..., last_key - first_key]. With
    ``x = mix32(row_key ^ (key_pos * KEY_STRIDE mod 2^32))`` and ``u = ((x >> 9) + 0.5) / 2^23``
    the score is ``log(-log(u))``; u is exact in float32 and never 0 or 1.
    """
    columns = torch.arange(first_key, last_key, device=row_keys.device)
    columns = (columns * KEY_STRIDE) & _MASK32
    x = mix32((row_keys.to(torch.int64) & _MASK32)[..., None] ^ columns)
    u = ((x >> 9).to(dtype) + 0.5) * 2.0**-23
    return torch.log(-torch.log(u))
