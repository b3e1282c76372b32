"""Tokens for tools that think in text: our models have ids and no tokenizer."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor


class TokenIds:
    """The three methods that TransformerLens' tools ask a model for to turn text into tokens."""

    W_U: Any

    def to_tokens(self, text: Any) -> Int[Tensor, "batch pos"]:
        """Tokens [batch, pos] from token ids: a tensor, nested lists, or text such as ``"2 4 6"``.

        A model of ours has no tokenizer; TransformerLens' tools ask for this method. Raises
        ValueError for text that is no list of integers, and for anything but one or two axes.
        """
        if isinstance(text, str):
            text = [self._parse(text)]
        elif isinstance(text, list | tuple) and text and isinstance(text[0], str):
            text = [self._parse(line) for line in text]
        tokens = torch.as_tensor(text)
        tokens = tokens[None] if tokens.ndim == 1 else tokens
        if tokens.ndim != 2 or tokens.is_floating_point() or tokens.dtype == torch.bool:
            raise ValueError(
                f"to_tokens: got {tokens.dtype} of shape {tuple(tokens.shape)}, expected integers "
                "[pos] or [batch, pos]"
            )
        return tokens.long()

    def to_single_token(self, text: str) -> int:
        """The one token id that ``text`` spells; raises ValueError for none or several."""
        ids = self._parse(text)
        if len(ids) != 1:
            raise ValueError(f"{text!r} spells {len(ids)} tokens, expected one id such as '4'")
        return ids[0]

    def _parse(self, text: str) -> list[int]:
        try:
            return [int(word) for word in text.split()]
        except ValueError:
            raise ValueError(
                f"{text!r}: this model has no tokenizer; give token ids, as in '2 4 6'"
            ) from None

    def tokens_to_residual_directions(
        self, tokens: int | str | Int[Tensor, "*batch"]
    ) -> Float[Tensor, "*batch d_model"]:
        """Column of W_U for each token: what the normalized stream is multiplied with."""
        if isinstance(tokens, str):
            tokens = self.to_single_token(tokens)
        return self.W_U.t()[tokens]
