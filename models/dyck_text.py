"""Bracket strings as text: how people write tokens in tests, notebooks and figures.

Types 0..3 have a glyph pair of their own; any type can be written as its number before a
parenthesis, so ``"4(4)"`` is a pair of type 4 and ``"0("`` is the same token as ``"["``.
"""

import re

GLYPH_PAIRS = ("[]", "()", "{}", "<>")
# in the order of their ids: PAD 0, MASK 1, START 2, END 3
SPECIAL_GLYPHS = "_?^$"

_TOKEN = re.compile(r"(?P<number>\d+)(?P<side>[()])|(?P<glyph>[\[\](){}<>_?^$])|(?P<blank>\s+)")


def encode_brackets(text: str, n_types: int) -> list[int]:
    """Token ids of a text. Raises ValueError at an unknown glyph or a type beyond ``n_types``."""
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


def decode_brackets(tokens: list[int], n_types: int) -> str:
    """The text of token ids, which must lie in the vocabulary of ``n_types`` bracket types."""
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
