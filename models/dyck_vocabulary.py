"""Tokens of bracket languages, and how people write them.

Ids: PAD 0, MASK 1, START 2, END 3, then the k open brackets, then the k closes. As text, types 0..3
have a glyph pair of their own, and any type can be written as its number before a parenthesis:
``"4(4)"`` is a pair of type 4, and ``"0("`` is the same token as ``"["``.
"""

import re
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

PAD, MASK, START, END = range(4)
N_SPECIAL_TOKENS = 4

GLYPH_PAIRS = ("[]", "()", "{}", "<>")
# in the order of their ids: PAD 0, MASK 1, START 2, END 3
SPECIAL_GLYPHS = "_?^$"

_TOKEN = re.compile(r"(?P<number>\d+)(?P<side>[()])|(?P<glyph>[\[\](){}<>_?^$])|(?P<blank>\s+)")


@dataclass(frozen=True)
class DyckVocabulary:
    """The tokens of a bracket language over ``n_types`` >= 1 types.

    Raises TypeError or ValueError when ``n_types`` is no such number.
    """

    n_types: int

    def __post_init__(self) -> None:
        check_integer("n_types", self.n_types, minimum=1)

    @property
    def d_vocab(self) -> int:
        """Number of tokens: 4 special ones, k opens, k closes."""
        return N_SPECIAL_TOKENS + 2 * self.n_types

    @property
    def open_tokens(self) -> range:
        """Token ids of the open brackets, by type."""
        return range(N_SPECIAL_TOKENS, N_SPECIAL_TOKENS + self.n_types)

    @property
    def close_tokens(self) -> range:
        """Token ids of the close brackets, by type."""
        return range(N_SPECIAL_TOKENS + self.n_types, self.d_vocab)

    def is_open(self, tokens: Int[Tensor, "*batch pos"]) -> Bool[Tensor, "*batch pos"]:
        """Which tokens are open brackets."""
        return (tokens >= self.open_tokens.start) & (tokens < self.open_tokens.stop)

    def is_close(self, tokens: Int[Tensor, "*batch pos"]) -> Bool[Tensor, "*batch pos"]:
        """Which tokens are close brackets."""
        return (tokens >= self.close_tokens.start) & (tokens < self.close_tokens.stop)

    def bracket_type(self, tokens: Int[Tensor, "*batch pos"]) -> Int[Tensor, "*batch pos"]:
        """Type 0..k-1 of each bracket, -1 for special tokens."""
        kind = (tokens - N_SPECIAL_TOKENS) % self.n_types
        return torch.where(tokens < N_SPECIAL_TOKENS, -1, kind)

    def encode(self, text: str) -> Int[Tensor, " pos"]:
        """Tokens of a text such as ``"^[[()]]$"``.

        Types 0..3 are written ``[] () {} <>``; any type t may be written ``t( t)``. START is ``^``,
        END ``$``, MASK ``?``, PAD ``_``; blanks are skipped and nothing is added. The text need
        not be well nested: ask `is_well_nested`. Raises ValueError at anything else.
        """
        return torch.tensor(_encode(text, self.n_types), dtype=torch.long)

    def decode(self, tokens: Int[Tensor, " pos"]) -> str:
        """The text of one sequence of tokens ``[pos]``, as `encode` reads it."""
        self.check_tokens(tokens)
        return _decode(tokens.tolist(), self.n_types)

    def check_tokens(self, tokens: Tensor) -> None:
        """Raise TypeError or ValueError unless every entry is a token of this vocabulary."""
        if tokens.is_floating_point() or tokens.dtype == torch.bool:
            raise TypeError(f"tokens must be integers, got {tokens.dtype}")
        if tokens.numel() and not (int(tokens.min()) >= 0 and int(tokens.max()) < self.d_vocab):
            raise ValueError(
                f"tokens must lie in 0..{self.d_vocab - 1}, the vocabulary of {self}, got values "
                f"from {int(tokens.min())} to {int(tokens.max())}"
            )


def _encode(text: str, n_types: int) -> list[int]:
    if not isinstance(text, str):
        raise TypeError(f"text must be a string of brackets, got {text!r}")
    tokens: list[int] = []
    end = 0
    while end < len(text):
        match = _TOKEN.match(text, end)
        if match is None:
            raise ValueError(
                f"text has {text[end]!r} at index {end}, which is no bracket: expected the glyphs "
                f"{' '.join(GLYPH_PAIRS)}, a type's number before a parenthesis such as '4(' and "
                f"'4)', or one of the special tokens {' '.join(SPECIAL_GLYPHS)}"
            )
        if not match["blank"]:
            tokens.append(_token_of(match, n_types))
        end = match.end()
    return tokens


def _decode(tokens: list[int], n_types: int) -> str:
    return "".join(_text_of(token, n_types) for token in tokens)


def _token_of(match: re.Match[str], n_types: int) -> int:
    n_special = len(SPECIAL_GLYPHS)
    if match["glyph"] and match["glyph"] in SPECIAL_GLYPHS:
        return SPECIAL_GLYPHS.index(match["glyph"])
    if match["glyph"]:
        index = "".join(GLYPH_PAIRS).index(match["glyph"])
        bracket_type, is_close = index // 2, index % 2 == 1
    else:
        bracket_type, is_close = int(match["number"]), match["side"] == ")"
    if bracket_type >= n_types:
        raise ValueError(
            f"text has {match[0]!r}, a bracket of type {bracket_type}, but the language has "
            f"n_types={n_types}: types 0..{n_types - 1}"
        )
    return n_special + is_close * n_types + bracket_type


def _text_of(token: int, n_types: int) -> str:
    if token < len(SPECIAL_GLYPHS):
        return SPECIAL_GLYPHS[token]
    side, bracket_type = divmod(token - len(SPECIAL_GLYPHS), n_types)
    if bracket_type < len(GLYPH_PAIRS):
        return GLYPH_PAIRS[bracket_type][side]
    return f"{bracket_type}{'()'[side]}"


def check_integer(name: str, value: int, *, minimum: int) -> None:
    """Raise TypeError unless the argument called ``name`` is an int, ValueError if too small."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {value}")
