"""Models whose attention never learns: scores are fixed at random, everything else is trained.

Uniform scores suffice for a bounded Dyck language at every length, and so do random ones as long as
each pair is tied: s(close|q) - s(open|q) the same for every query (here 0), so that a value can
undo it. Untied scores break that, and no value vectors can repair it (Wen et al. 2023, arXiv
2312.01429, the converse of perfect balance).
"""

from typing import Literal, get_args

import torch

from interp.models.dyck_language import DyckLanguage
from interp.models.transformer import Transformer

FrozenScores = Literal["uniform", "pair_tied", "untied"]


def freeze_attention(
    model: Transformer,
    language: DyckLanguage,
    *,
    scores: FrozenScores,
    sd: float = 1.0,
    seed: int = 0,
) -> Transformer:
    """A copy of a one-layer model with fixed scores; its ``W_Q`` and ``W_K`` take no gradient.

    Args:
        model: one layer that reads the joint one-hot embedding of bracket and depth, one head.
        language: the bracket language.
        scores: ``"uniform"``: all 0; ``"pair_tied"``: random, equal for the two brackets of a pair;
            ``"untied"``: random for every bracket.
        sd: standard deviation of a random score, more than 0.
        seed: seeds a generator of its own.

    Returns:
        The copy, ready to be trained; ``model`` itself is unchanged.

    Raises:
        ValueError: another embedding or norm before attention, more layers or heads, unknown
            scores, or a spread that is not positive.
    """
    cfg = model.cfg
    if scores not in get_args(FrozenScores):
        raise ValueError(f"scores: got {scores!r}, expected one of {get_args(FrozenScores)}")
    if not sd > 0:
        raise ValueError(f"sd: got {sd}, expected more than 0; use scores='uniform' for none")
    if (cfg.n_layers, cfg.n_heads) != (1, 1) or cfg.embedding != "dyck_joint" or cfg.attention_norm:
        raise ValueError(
            f"model: got n_layers={cfg.n_layers}, n_heads={cfg.n_heads}, "
            f"embedding={cfg.embedding!r}, attention_norm={cfg.attention_norm!r}; expected one "
            "layer and head on 'dyck_joint' without norm, where each bracket has its own score"
        )
    frozen = Transformer(cfg)
    frozen.load_state_dict(model.state_dict())
    attention = frozen.blocks[0].attn
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name in ("W_Q", "W_K", "b_Q", "b_K"):
            weights = getattr(attention, name)
            weights.requires_grad_(False)
            weights.zero_()
        if scores == "uniform":
            return frozen
        # q . k over d_head unit normals has standard deviation sqrt(d_head)
        size = (sd * cfg.score_scale / cfg.d_head**0.5) ** 0.5
        for weights in (attention.W_Q, attention.W_K):
            weights.copy_(size * torch.randn(weights.shape, generator=generator))
        if scores == "pair_tied":
            for open_token, close_token in zip(
                language.open_tokens, language.close_tokens, strict=True
            ):
                for depth in range(1, language.max_depth + 1):
                    opens = frozen.embed.table[frozen.embed.row(open_token, depth)].argmax()
                    closes = frozen.embed.table[frozen.embed.row(close_token, depth)].argmax()
                    attention.W_K[0, closes] = attention.W_K[0, opens]
    return frozen
