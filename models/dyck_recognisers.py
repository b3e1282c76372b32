"""Hand-built transformers that know which bracket must close, at any length.

Both have the architecture of the E1 preset, with weights written down instead of learned. The
value of an open bracket of type t at depth d is ``beta^d`` along an axis of its own type, the value
of the close that belongs to it undoes it exactly, and everything else has value 0. What attention
sums up is then a polynomial in beta over the brackets still open, and the innermost one wins.

- *Uniform attention*: W_Q = W_K = 0, v_close = -v_open, beta >= 2. Attention that looks at nothing
  in particular is all that the language needs.
- *Random pair-tied attention*: the score of every open bracket under every query is random, and
  ``s(close | q) = s(open | q) - c`` with a random c for each (type, depth); v_close = -e^c v_open.
  Patterns of different draws have nothing in common, and all of them are right.

Source: Wen, Li, Liu and Risteski, NeurIPS 2023 (arXiv 2312.01429): the balance condition and the
"nearly random" attention of its abstract. The values themselves and the bound below are ours.

**What floats can carry.** Sums over n keys are rounded, while the weakest fact to be read off them
is one bracket at depth 1 beside pairs as strong as ``beta^max_depth`` that ought to cancel. With u
the rounding unit, each weighted value has a relative error of at most a few dozen u (from its
score, its exponential, its rescaling), and every partial sum over a run of neighbouring keys stays
below a small multiple of the strongest value, because all but the brackets open at its ends cancel.
So each sum is wrong by at most ``64 n u`` times the strongest weighted value, and what this could
overturn is not built.
"""

import math
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from interp.models.dyck_language import DyckLanguage
from interp.models.dyck_presets import dyck_preset
from interp.models.dyck_vocabulary import START
from interp.models.embeddings import DyckEmbed
from interp.models.transformer import Transformer

ERROR_PER_KEY = 64
MAX_DRAWS = 10
# With it, a win by half of the winner's strength is a difference of more than 16 between logits.
LOGIT_GAIN = 16.0


def uniform_recogniser(
    language: DyckLanguage,
    *,
    length: int,
    beta: float = 4.0,
    dtype: torch.dtype = torch.float64,
) -> Transformer:
    """An exact recogniser whose attention is uniform: W_Q = W_K = 0.

    After START and up to ``length`` brackets, the right close bracket has the largest logit of all
    closes wherever one is open, and for beta >= 3 also nearly all of their probability.

    Raises ValueError for beta below 2, or when ``dtype`` cannot carry the language's depth at this
    length.
    """
    if not 2 <= beta < math.inf:
        raise ValueError(f"beta={beta}: expected at least 2, so that the innermost bracket wins")
    model = _blank_model(language, length, dtype)
    scores = torch.zeros(1, *_open_shape(language), dtype=torch.float64)
    if not _wins(language, scores, beta, by=0.0, length=length, dtype=dtype).all():
        raise ValueError(_too_deep(language, beta, length=length, dtype=dtype))
    _write_values(model, language, beta, close_offset=torch.zeros(_open_shape(language)))
    return model


def random_pair_tied_recogniser(
    language: DyckLanguage,
    *,
    length: int,
    seed: int,
    beta: float = 100.0,
    score_sd: float = 1.0,
    dtype: torch.dtype = torch.float64,
) -> Transformer:
    """An exact recogniser whose attention is random but for the tie within each pair.

    All scores of open brackets and of START, and all offsets c, are drawn from N(0, score_sd^2).
    The scores under one query are drawn again, all of them together, where the innermost bracket
    could win by less than half of its own strength or by less than rounding takes away: what is
    left is exact up to ``length`` brackets, in both senses of `uniform_recogniser`.

    Raises ValueError for beta not above 2, a negative score_sd or seed, or when no draw could be
    carried by ``dtype`` at this depth and length.
    """
    if not 2 < beta < math.inf:
        raise ValueError(f"beta={beta}: expected more than 2, so that the innermost bracket wins")
    if not 0 <= score_sd < math.inf:
        raise ValueError(f"score_sd={score_sd}: expected a standard deviation of at least 0")
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ValueError(f"seed={seed!r}: expected an integer that is at least 0")
    model = _blank_model(language, length, dtype)
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Float[Tensor, "..."]:
        return score_sd * torch.randn(*shape, generator=generator, dtype=torch.float64)

    shape = _open_shape(language)
    scores = draw(_n_queries(language), *shape)
    for _ in range(MAX_DRAWS):
        is_right = _wins(language, scores, beta, by=0.5, length=length, dtype=dtype)
        if is_right.all():
            break
        scores[~is_right] = draw(int((~is_right).sum()), *shape)
    else:
        raise ValueError(_too_deep(language, beta, length=length, dtype=dtype))

    close_offset = draw(*shape)
    start_scores = draw(_n_queries(language))
    _write_scores(model, language, scores, start_scores, close_offset)
    _write_values(model, language, beta, close_offset=close_offset)
    return model


# Queries are counted opens first, then closes, each by type, then depth 1..max_depth.


def _open_shape(language: DyckLanguage) -> tuple[int, int]:
    return language.n_types, language.max_depth


def _n_queries(language: DyckLanguage) -> int:
    return 2 * language.n_types * language.max_depth


def _wins(
    language: DyckLanguage,
    scores: Float[Tensor, "query type depth"],
    beta: float,
    *,
    by: float,
    length: int,
    dtype: torch.dtype,
) -> Tensor:
    """Under which queries the innermost bracket wins whatever else is open: ``[query]``.

    It must win by more than ``by`` times its own strength, and by more than rounding.
    """
    n_types, max_depth = _open_shape(language)
    strength = scores.exp() * beta ** torch.arange(1, max_depth + 1, dtype=torch.float64)
    # the strongest rival of another type: every bracket below the innermost one is of that type
    below = strength.cumsum(-1) - strength
    is_other = ~torch.eye(n_types, dtype=torch.bool)
    rival = torch.where(is_other[:, :, None], below[:, None, :, :], 0.0).amax(2)
    lead = strength - rival

    strongest = strength.amax((1, 2), keepdim=True)
    unit = torch.finfo(dtype).eps / 2
    rounding = 2 * ERROR_PER_KEY * (length + 1) * unit * strongest
    is_won = (lead > by * strength) & (lead > rounding)
    return (is_won | ~_may_be_innermost(language, n_queries=len(scores))).all((1, 2))


def _may_be_innermost(language: DyckLanguage, *, n_queries: int) -> Tensor:
    """Which bracket may be innermost after each query's token: ``[query, type, depth]``.

    An open bracket is itself innermost; after a close at depth d it is any type at depth d - 1.
    A single query stands for all of them.
    """
    n_types, max_depth = _open_shape(language)
    if n_queries == 1:
        return torch.ones(1, n_types, max_depth, dtype=torch.bool)
    n_open = n_types * max_depth
    after_open = torch.eye(n_open, dtype=torch.bool).view(n_open, n_types, max_depth)
    one_lower = torch.diag(torch.ones(max_depth - 1, dtype=torch.bool), -1)
    after_close = one_lower[None, :, None, :].expand(n_types, max_depth, n_types, max_depth)
    return torch.cat([after_open, after_close.flatten(0, 1)])


def _too_deep(language: DyckLanguage, beta: float, *, length: int, dtype: torch.dtype) -> str:
    return (
        f"max_depth={language.max_depth} at length={length} is more than {dtype} can carry with "
        f"beta={beta}: pairs as strong as beta^{language.max_depth} leave rounding errors that "
        "could hide the bracket to be closed; use fewer levels, shorter strings, a smaller beta "
        "or float64"
    )


def _blank_model(language: DyckLanguage, length: int, dtype: torch.dtype) -> Transformer:
    """The E1 architecture for this language, every weight 0, norms as they are born."""
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise ValueError(f"length={length!r}: expected a number of brackets of at least 1")
    config, _ = dyck_preset("E1", language=language, n_ctx=length + 1)
    model = Transformer(replace(config, dtype=dtype))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.rsplit(".", 1)[-1].startswith("W_"):
                parameter.zero_()
    return model


def _write_scores(
    model: Transformer,
    language: DyckLanguage,
    scores: Float[Tensor, "query type depth"],
    start_scores: Float[Tensor, " query"],
    close_offset: Float[Tensor, "type depth"],
) -> None:
    """W_K reads the key's one-hot as it is, and row q of W_Q holds the scores under query q."""
    opens, closes, start = _cells(model, language)
    weight = torch.zeros(model.cfg.d_model, model.cfg.d_head, dtype=torch.float64)
    queries = torch.cat([opens, closes])
    weight[queries[:, None], opens] = scores.flatten(1)
    weight[queries[:, None], closes] = (scores - close_offset).flatten(1)
    weight[queries, start] = start_scores
    with torch.no_grad():
        model.blocks[0].attn.W_Q[0] = weight * model.cfg.score_scale
        model.blocks[0].attn.W_K[0] = torch.eye(model.cfg.d_model)


def _write_values(
    model: Transformer,
    language: DyckLanguage,
    beta: float,
    *,
    close_offset: Float[Tensor, "type depth"],
) -> None:
    """beta^d along axis t for opens, -e^c beta^d for closes; the head reads axis t for close t."""
    opens, closes, _ = _cells(model, language)
    n_types, max_depth = _open_shape(language)
    # Averages over n keys shrink like 1/n: without this the norm's eps would shrink logits as well.
    scale = 2.0 ** math.ceil(math.log2(model.cfg.n_ctx))
    value = scale * beta ** torch.arange(1, max_depth + 1, dtype=torch.float64).expand(n_types, -1)
    axis = torch.arange(n_types).repeat_interleave(max_depth)
    with torch.no_grad():
        W_V, W_U = model.blocks[0].attn.W_V[0], model.unembed.W_U
        W_V[opens, axis] = value.flatten().to(W_V)
        W_V[closes, axis] = (-close_offset.exp() * value).flatten().to(W_V)
        for bracket_type, token in enumerate(language.close_tokens):
            W_U[bracket_type, token] = LOGIT_GAIN


def _cells(model: Transformer, language: DyckLanguage) -> tuple[Tensor, Tensor, int]:
    """The one-hot dimension of every open and every close, by type and depth, and of START."""
    embed = model.embed
    assert isinstance(embed, DyckEmbed)
    dimension = embed.table.argmax(-1).tolist()

    def by_depth(tokens: range) -> Tensor:
        depths = range(1, language.max_depth + 1)
        return torch.tensor([dimension[embed.row(t, d)] for t in tokens for d in depths])

    return (
        by_depth(language.open_tokens),
        by_depth(language.close_tokens),
        dimension[embed.row(START, 0)],
    )
