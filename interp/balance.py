"""Balance: in a model that generalises, a matched pair adds nothing.

For a query q and the pair (o, c) of one type and depth, *perfect balance* says
e^{s(o|q)} v_o + e^{s(c|q)} v_c = 0, s the attention score and v the centred value. A model whose
normalisation forgets scale can be right at every length only if this holds for every close query
that leaves a bracket open (Wen et al. 2023, arXiv 2312.01429, perfect and approximate balance).

*Balance violation* measures how far a model is from it; *balance surgery* makes it true without
training. Both speak of one attention layer whose keys and values depend on type and depth alone.
"""

from dataclasses import dataclass
from itertools import product

import torch
from jaxtyping import Float
from torch import Tensor

from interp.attention_terms import attention_terms
from interp.models.config import DYCK_EMBEDDINGS
from interp.models.dyck_language import START, DyckLanguage
from interp.models.transformer import Transformer

MAX_PREFIXES = 2**16


@dataclass(frozen=True)
class BalanceViolation:
    """The two sides of approximate balance for every close query that leaves a bracket open.

    Query (t, d) closes a bracket of type t and leaves d open, d = 1 .. max_depth - 1. Weights are
    divided by the largest of their query, which cancels in the ratio.
    """

    pair_norms: Float[Tensor, "query n_types max_depth"]
    """|e^{s(o|q)} v_o + e^{s(c|q)} v_c| of the pair of each type and depth."""
    prefix_norms: Float[Tensor, " query"]
    """Least norm of the summed output over the shortest strings that end in the query."""

    @property
    def by_query(self) -> Float[Tensor, " query"]:
        """Worst pair over least output, for each query; at least 0."""
        return self.pair_norms.flatten(1).amax(1) / self.prefix_norms

    @property
    def mean(self) -> float:
        """Mean over queries: 0 for perfect balance, of order 1 where one pair decides."""
        return float(self.by_query.mean())


def balance_violation(model: Transformer, language: DyckLanguage) -> BalanceViolation:
    """How far one-layer attention is from perfect balance, measured on START + the probe string.

    Scores are taken without mask, so that every query meets every pair. The shortest string that
    ends in query (t, d) is START, d open brackets, then the pair that q closes; its least output is
    sought over all types of the d open brackets.

    Args:
        model: one layer, one head, an embedding of type and depth, no positions.
        language: the bracket language, of depth at least 2.

    Returns:
        Pair and prefix norms by query; ``.mean`` is the balance violation.

    Raises:
        ValueError: a model whose keys and values are not functions of type and depth, a language
            that is too shallow, or more than ``MAX_PREFIXES`` prefixes to search.
    """
    _check_model(model, language)
    k, max_depth = language.n_types, language.max_depth
    if max_depth < 2:
        raise ValueError(
            f"language: got max_depth {max_depth}, expected at least 2: no close bracket leaves "
            "another one open"
        )
    if k ** (max_depth - 1) > MAX_PREFIXES:
        raise ValueError(
            f"language: got {k}^{max_depth - 1} prefixes to search, expected at most "
            f"{MAX_PREFIXES}; measure a language with fewer types or less depth"
        )
    tokens = torch.cat([torch.tensor([START]), language.probe_tokens()])
    terms = attention_terms(model, tokens.to(model.cfg.device), layer=0)
    scores, values = terms.scores.cpu(), terms.values.cpu()
    values = values - values.mean(-1, keepdim=True)
    # the run of type t: its opens, depth 1 to D, then its closes, depth D to 1
    runs = 1 + torch.arange(2 * k * max_depth).view(k, 2, max_depth)
    opens, closes = runs[:, 0], runs[:, 1].flip(-1)  # [type, depth - 1]

    pair_norms, prefix_norms = [], []
    for kind, n_open in product(range(k), range(1, max_depth)):
        query = closes[kind, n_open]  # closes depth n_open + 1
        weights = (scores[query] - scores[query].max()).exp()
        terms_of_key = weights[:, None] * values
        pairs = terms_of_key[opens] + terms_of_key[closes]
        pair_norms.append(pairs.norm(dim=-1))
        types = torch.tensor(list(product(range(k), repeat=n_open)))
        below = terms_of_key[opens[types, torch.arange(n_open)]].sum(1)
        prefixes = terms_of_key[0] + below + pairs[kind, n_open]
        prefix_norms.append(prefixes.norm(dim=-1).min())
    return BalanceViolation(torch.stack(pair_norms), torch.stack(prefix_norms))


def balance_surgery(model: Transformer, language: DyckLanguage) -> Transformer:
    """A copy of a trained model in which every pair cancels: no retraining, the opens untouched.

    Each close bracket gets the key of the open bracket of its type and depth, and minus its value.

    Args:
        model: one layer, one head, joint one-hot embedding, no positions, no output projection.
        language: the bracket language.

    Returns:
        The operated copy; ``model`` itself is unchanged.

    Raises:
        ValueError: a model in which close brackets have no keys and values of their own.
    """
    _check_model(model, language)
    cfg = model.cfg
    if cfg.embedding != "dyck_joint" or cfg.attention_norm is not None or cfg.output_projection:
        raise ValueError(
            f"model: got embedding={cfg.embedding!r}, attention_norm={cfg.attention_norm!r}, "
            f"output_projection={cfg.output_projection}; expected 'dyck_joint', None and False: "
            "only there does each bracket own a row of W_K and of W_V"
        )
    operated = Transformer(cfg)
    operated.load_state_dict(model.state_dict())
    attention, embed = operated.blocks[0].attn, operated.embed
    with torch.no_grad():
        for open_token, close_token in zip(
            language.open_tokens, language.close_tokens, strict=True
        ):
            for depth in range(1, language.max_depth + 1):
                opens = embed.table[embed.row(open_token, depth)].argmax()
                closes = embed.table[embed.row(close_token, depth)].argmax()
                attention.W_K[0, closes] = attention.W_K[0, opens]
                # with the bias, value(close) = W_V[closes] + b_V = -(W_V[opens] + b_V)
                attention.W_V[0, closes] = -attention.W_V[0, opens] - 2 * attention.b_V[0]
    return operated


def _check_model(model: Transformer, language: DyckLanguage) -> None:
    cfg = model.cfg
    wanted = {
        "n_layers": (cfg.n_layers, 1),
        "n_heads": (cfg.n_heads, 1),
        "positional_embedding_type": (cfg.positional_embedding_type, "none"),
        "d_vocab": (cfg.d_vocab, language.d_vocab),
    }
    for name, (given, expected) in wanted.items():
        if given != expected:
            raise ValueError(
                f"model: got {name}={given!r}, expected {expected!r}: balance speaks of keys and "
                "values that depend on the bracket's type and depth alone"
            )
    if cfg.embedding not in DYCK_EMBEDDINGS or (cfg.max_depth or 0) < language.max_depth:
        raise ValueError(
            f"model: got embedding={cfg.embedding!r} up to depth {cfg.max_depth}, expected one of "
            f"{', '.join(DYCK_EMBEDDINGS)} up to depth {language.max_depth} at least"
        )
