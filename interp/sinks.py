"""Attention sinks as numbers: what each paper measures, on arrays, exactly as it is defined.

Arrays are torch tensors or numpy arrays of floats; results are torch tensors. A pattern is
``[..., query_pos, key_pos]``, causal and of one text without padding unless a function says
otherwise, so that row i sees keys 0..i. `interp.sink_profile` measures the same on a model.
"""

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

Array = Tensor | np.ndarray


def row_normalized(pattern: Float[Array, "*heads query_pos key_pos"]) -> Float[Tensor, "..."]:
    """A pattern whose rows sum to 1; rows of zeros stay so.

    For attention that is not normalised (sigmoid, ReLU, softpick), before any measure below.
    Source: Gu et al., ICLR 2025 (arXiv 2410.10781), on attention without normalisation.
    """
    pattern = torch.as_tensor(pattern)
    total = pattern.sum(-1, keepdim=True)
    return torch.where(total == 0, 0.0, pattern / total.where(total != 0, 1.0))


def attention_entropy(
    pattern: Float[Array, "*heads query_pos key_pos"],
) -> Float[Tensor, "*heads query_pos"]:
    """Entropy of each query's attention, in nats: from 0 to log of the number of its keys."""
    pattern = torch.as_tensor(pattern)
    return torch.special.entr(pattern).sum(-1)


def received_mass(
    pattern: Float[Array, "*heads query_pos key_pos"],
) -> Float[Tensor, "*heads key_pos"]:
    """Attention that each key receives, summed over the queries."""
    return torch.as_tensor(pattern).sum(-2)


def effective_distance(
    pattern: Float[Array, "*heads query_pos key_pos"],
) -> Float[Tensor, "*heads"]:
    """How far back attention looks, in tokens: sum_j A_ij (i - j), averaged over the queries."""
    pattern = torch.as_tensor(pattern)
    n_queries, n_keys = pattern.shape[-2:]
    if n_queries != n_keys:
        raise ValueError(f"pattern must be square, got {n_queries} queries and {n_keys} keys")
    position = torch.arange(n_keys, device=pattern.device)
    distance = (position[:, None] - position).to(pattern.dtype)
    return (pattern * distance).sum(-1).mean(-1)


def first_token_attention(
    first_mass: Float[Array, "*heads query_pos"], *, include_first_query: bool = False
) -> Float[Tensor, "*heads"]:
    """F-Attn: the mean attention that queries pay to the first token, in [0, 1].

    first_mass: each query's weight on key 0, which is ``pattern[..., 0]``.
    include_first_query: query 0 sees nothing else, so its weight is always 1. Papers differ on
        whether it counts; give both.

    Source: Qiu et al., NeurIPS 2025 (arXiv 2505.06708).
    """
    first_mass = torch.as_tensor(first_mass)
    skipped = 0 if include_first_query else 1
    if first_mass.shape[-1] <= skipped:
        raise ValueError(
            f"first_mass has {first_mass.shape[-1]} queries; without query 0 none is left"
        )
    return first_mass[..., skipped:].mean(-1)


def position_importance(
    pattern: Float[Array, "*heads query_pos key_pos"],
) -> Float[Tensor, "*heads key_pos"]:
    """alpha_k: the mean attention to key k over the queries i >= k that can see it, in [0, 1].

    Keys are counted from 0: Gu's alpha_1 is the first. Query 0 counts, so uniform causal attention
    over T tokens gives the first key H_T / T (.0741 for 64).
    Source: Gu et al., ICLR 2025 (arXiv 2410.10781).
    """
    pattern = torch.as_tensor(pattern)
    n_queries, n_keys = pattern.shape[-2:]
    if n_queries != n_keys:
        raise ValueError(f"pattern must be square, got {n_queries} queries and {n_keys} keys")
    n_seeing = torch.arange(n_keys, 0, -1, device=pattern.device, dtype=pattern.dtype)
    return pattern.tril().sum(-2) / n_seeing


def sink_rate(
    importance: Float[Array, "batch *layers head_index"], *, epsilon: float = 0.3
) -> Float[Tensor, "*layers"]:
    """Sink_k^epsilon: the share of heads whose alpha_k exceeds epsilon, in [0, 1].

    importance: alpha of *one* key (`position_importance`) for each text and head. The threshold
        falls per text and the indicators are averaged; averaging first and thresholding then is
        another number. With a layer axis there is a rate per layer; their mean is the model's.
    epsilon: Gu et al. use .3 on 64 tokens, Barbero et al. .8; it depends on the length, so say it.

    Source: Gu et al., ICLR 2025 (arXiv 2410.10781); Barbero et al., COLM 2025 (arXiv 2504.02732).
    """
    importance = torch.as_tensor(importance)
    if not 0 <= epsilon <= 1:
        raise ValueError(f"epsilon is a share of attention in [0, 1], got {epsilon}")
    if importance.numel() == 0:
        raise ValueError(f"importance is empty: its shape is {tuple(importance.shape)}")
    return (importance > epsilon).double().mean((0, -1))


def value_drain(
    values: Float[Array, "*heads key_pos d_head"], *, position: int = 0
) -> Float[Tensor, "*heads"]:
    """|v_sink| over the mean |v| of the other positions.

    Below .2 the sink is a no-op: attending to it adds next to nothing; about 1, a value like any.
    Source: Guo et al., arXiv 2410.13835 (value-state drains).
    """
    norms = torch.linalg.vector_norm(torch.as_tensor(values), dim=-1)
    if norms.shape[-1] < 2:
        raise ValueError("values has one position only: there is no other to compare the sink with")
    others = norms.sum(-1) - norms[..., position]
    return norms[..., position] / (others / (norms.shape[-1] - 1))


class GateScores(NamedTuple):
    """Gate scores of a layer. The last two are None where no triggers were named."""

    mean: Float[Tensor, ""]
    share_below: Float[Tensor, ""]
    at_triggers: Float[Tensor, ""] | None
    elsewhere: Float[Tensor, ""] | None


def gate_scores(
    gate: Float[Array, "batch pos *rest"],
    *,
    below: float = 0.1,
    triggers: Bool[Array, "batch pos"] | None = None,
) -> GateScores:
    """How open a layer's gate is: mean of sigma, and the share of scores below ``below``.

    gate: scores after the sigmoid (`hook_gate`), elementwise or one per head.
    triggers: positions whose scores are averaged apart from all others.

    Source: Qiu et al., NeurIPS 2025 (arXiv 2505.06708).
    """
    gate = torch.as_tensor(gate).double()
    split: tuple[Tensor, Tensor] | tuple[None, None] = (None, None)
    if triggers is not None:
        chosen = torch.as_tensor(triggers)
        split = (gate[chosen].mean(), gate[~chosen].mean())
    return GateScores(gate.mean(), (gate < below).double().mean(), *split)


def gated_sink_contribution(
    first_mass: Float[Array, "batch head_index query_pos"],
    first_value: Float[Array, "batch head_index d_head"],
    gate: Float[Array, "batch query_pos head_index gate_dim"] | None = None,
) -> Float[Tensor, "batch head_index"]:
    """What the sink writes after the gate: the mean over queries of g_i A_i0 |v_0|.

    gate: scores per head (gate_dim 1) or per element (gate_dim d_head), where it is
        A_i0 |g_i * v_0|; None for a head without a gate, g = 1.

    Raw attention on the first token says little once a gate has closed: nothing trains any more
    where it points. This says what arrives.
    """
    first_mass, value = torch.as_tensor(first_mass), torch.as_tensor(first_value)
    if gate is None:
        return first_mass.mean(-1) * torch.linalg.vector_norm(value, dim=-1)
    gate = torch.as_tensor(gate).transpose(1, 2)  # [batch, head_index, query_pos, gate_dim]
    written = torch.linalg.vector_norm(gate * value[:, :, None], dim=-1)
    return (first_mass * written).mean(-1)


def over_mixing(values: Float[Array, "*batch pos d_model"]) -> Float[Tensor, "*batch"]:
    """How unlike the tokens still are: the Frobenius norm of V - (1/n) 1 1^T V; 0 when all agree.

    Source: Barbero et al., COLM 2025 (arXiv 2504.02732).
    """
    values = torch.as_tensor(values)
    centred = values - values.mean(-2, keepdim=True)
    return torch.linalg.matrix_norm(centred)


def query_self_similarity(queries: Float[Array, "*heads pos d_head"]) -> Float[Tensor, "*heads"]:
    """Mean cosine between a head's queries at different positions, in [-1, 1].

    Queries without a gate: split a fused query-and-gate projection first.
    Source: TAPPA, arXiv 2601.21709.
    """
    queries = torch.as_tensor(queries)
    n = queries.shape[-2]
    if n < 2:
        raise ValueError("queries has one position only: there is no pair")
    unit = torch.nn.functional.normalize(queries, dim=-1)
    # sum over all ordered pairs of u_i . u_j is |sum u|^2; n of them are i = j
    total = unit.sum(-2).square().sum(-1)
    diagonal = unit.square().sum((-1, -2))
    return (total - diagonal) / (n * (n - 1))
