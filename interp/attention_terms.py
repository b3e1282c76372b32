"""What one attention head adds up: a score for every query and key, a vector for every key."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.models.transformer import Transformer


@dataclass(frozen=True)
class AttentionTerms:
    """Scores and values of one head; its output is softmax(masked scores) @ values."""

    scores: Float[Tensor, "query_pos key_pos"]
    """s(key | query) = q . k / scale before any mask, float64."""
    values: Float[Tensor, "key_pos d_model"]
    """What attending to a key alone would write to the residual stream, float64."""


def attention_terms(
    model: Transformer, tokens: Int[Tensor, " pos"], *, layer: int, head: int = 0
) -> AttentionTerms:
    """Scores between all queries and keys and the vectors of the keys, from one run of the model.

    The run is the model's own; only the mask of this one head is left out of the scores, so a
    causal model's score for a later key is what that key's vector would have been worth. ``b_O``
    belongs to every value, as weights that sum to 1 make of it what the model adds; with several
    heads it is shared out equally.

    Args:
        model: a hookable transformer.
        tokens: ``[pos]``, with START where it is wanted.
        layer, head: which attention head.

    Returns:
        Scores ``[query_pos, key_pos]`` and values ``[key_pos, d_model]``.

    Raises:
        ValueError: a layer or head that the model lacks.
    """
    for name, given, count in (
        ("layer", layer, model.cfg.n_layers),
        ("head", head, model.cfg.n_heads),
    ):
        if not 0 <= given < count:
            raise ValueError(
                f"{name}: got {given}, expected 0 to {count - 1}: the model has {count}"
            )
    prefix = f"blocks.{layer}.attn.hook_"
    turned = "rot_" if model.cfg.positional_embedding_type == "rotary" else ""
    names = [f"{prefix}{turned}q", f"{prefix}{turned}k", f"{prefix}v"]
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens[None], names_filter=names)
        queries, keys, values = (cache[name][0].double() for name in names)
        shared_by = model.cfg.n_heads // keys.shape[1]
        keys, values = keys[:, head // shared_by], values[:, head // shared_by]
        attention = model.blocks[layer].attn
        written = values @ attention.W_O[head].double() + attention.b_O.double() / model.cfg.n_heads
        return AttentionTerms(queries[:, head] @ keys.T / model.cfg.score_scale, written)
