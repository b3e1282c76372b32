"""Stack-top share: how often a head looks at the bracket that must close next.

That a Dyck model would point at the innermost open bracket is the natural guess about what its
attention means (Ebrahimi et al. 2020, arXiv 2010.04303, find such heads); models without such a
head do as well (Wen et al. 2023, arXiv 2312.01429).
"""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.models.dyck_language import DyckLanguage
from interp.models.transformer import Transformer

TIE = 1e-6  # keys within this of a row's largest weight share the first place


def stack_top_share(
    pattern: Float[Tensor, "batch head_index query_pos key_pos"],
    tokens: Int[Tensor, "batch pos"],
    language: DyckLanguage,
) -> Float[np.ndarray, " head_index"]:
    """Share of queries with an open bracket whose largest attention weight lies on the innermost.

    Where n keys tie for the first place (equal tokens do, in a layer without positions), the
    query counts 1/n if the innermost open bracket is among them.

    Args:
        pattern: ``[batch, head_index, query_pos, key_pos]``.
        tokens: ``[batch, pos]``, prefixes of well-nested strings, START included.
        language: says which bracket is innermost.

    Returns:
        ``[head_index]``, shares in [0, 1].

    Raises:
        ValueError: tokens that are not well nested or leave no query with an open bracket.
    """
    top = language.stack_top(tokens)
    is_counted = top >= 0
    if not is_counted.any():
        raise ValueError("tokens: no position has an open bracket, so there is no stack top")
    is_first = pattern >= pattern.amax(-1, keepdim=True) - TIE
    index = top.clamp(min=0)[:, None, :, None].expand(-1, pattern.shape[1], -1, 1)
    on_top = is_first.gather(-1, index)[..., 0] / is_first.sum(-1)
    counted = on_top.transpose(0, 1)[:, is_counted]  # [head_index, query]
    return np.asarray(counted.double().mean(-1).cpu().numpy())


def model_stack_top_shares(
    model: Transformer, tokens: Int[Tensor, "batch pos"], language: DyckLanguage
) -> Float[np.ndarray, "layer head_index"]:
    """Stack-top share of every head of a model.

    Args:
        model: a hookable transformer.
        tokens: ``[batch, pos]``, what it reads.
        language: the bracket language.

    Returns:
        ``[layer, head_index]``, shares in [0, 1].

    Raises:
        ValueError: as ``stack_top_share``.
    """
    names = [f"blocks.{layer}.attn.hook_pattern" for layer in range(model.cfg.n_layers)]
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens, names_filter=names)
    return np.stack([stack_top_share(cache[name], tokens, language) for name in names])
