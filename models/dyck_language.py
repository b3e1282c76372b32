"""The bounded Dyck language: well-nested strings over k bracket types, at most D deep.

One class knows everything that is true of a string whatever model reads it: how to draw it, how
deep each token lies, which bracket closes which, and what may come next with what probability.

Tokens are integer tensors ``[..., pos]``, with the ids of `interp.models.dyck_vocabulary`; every
sampled string carries START in front. Source: Wen, Li, Liu
and Risteski, NeurIPS 2023 (arXiv 2312.01429), section 2, and its released configuration k=2, D=4.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.models.dyck_sampling import sample_complete_steps, sample_prefix_steps
from interp.models.dyck_vocabulary import (
    END,
    MASK,
    N_SPECIAL_TOKENS,
    PAD,
    START,
    DyckVocabulary,
    check_integer,
)

MODES = ("prefix", "complete")

# At height 0 a complete string ends with this probability (the released configuration).
P_END = 0.5


@dataclass(frozen=True)
class DyckLanguage(DyckVocabulary):
    """Dyck-(k, D) with the distribution that its strings are drawn from.

    n_types: number of bracket types k >= 1.
    max_depth: largest number D >= 1 of brackets that may be open at once.
    p_open: probability in (0, 1) of opening one more bracket at depths 1..D-1; the type is uniform.
        At depth 0 a bracket must open (prefix mode), or the string ends with probability 1/2
        (complete mode); at depth D the innermost bracket must close.

    Raises TypeError or ValueError when a field is of another kind or outside its range.
    """

    max_depth: int
    p_open: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("max_depth", self.max_depth, minimum=1)
        if not isinstance(self.p_open, int | float) or isinstance(self.p_open, bool):
            raise TypeError(f"p_open must be a float, got {self.p_open!r}")
        if not 0 < self.p_open < 1:
            raise ValueError(
                f"p_open must lie strictly between 0 and 1, got {self.p_open}: at 0 no bracket "
                "would ever nest, at 1 none would close before the depth limit"
            )

    # ----------------------------------------------------------------- structure

    def depth(self, tokens: Int[Tensor, "*batch pos"]) -> Int[Tensor, "*batch pos"]:
        """Number of brackets still open after each token; special tokens leave it as it is.

        Raises ValueError when a depth would leave 0..D. Types are not compared here.
        """
        self.check_tokens(tokens)
        step = self.is_open(tokens).long() - self.is_close(tokens).long()
        depth = step.cumsum(dim=-1)
        _refuse(depth < 0, tokens, "closes a bracket where none is open")
        _refuse(depth > self.max_depth, tokens, f"opens more than max_depth={self.max_depth}")
        return depth

    def bracket_depth(self, tokens: Int[Tensor, "*batch pos"]) -> Int[Tensor, "*batch pos"]:
        """Depth 1..D of each bracket's pair: the same for an open and its close; 0 for specials."""
        depth = self.depth(tokens) + self.is_close(tokens).long()
        return torch.where(tokens < N_SPECIAL_TOKENS, 0, depth)

    def stack_top(self, tokens: Int[Tensor, "*batch pos"]) -> Int[Tensor, "*batch pos"]:
        """Position of the innermost bracket still open after each token, -1 where none is.

        Raises ValueError when ``tokens`` is not the beginning of a well-nested string.
        """
        top = self._stack_top_by_depth(tokens)
        is_close = self.is_close(tokens)
        opened = self.bracket_type(tokens).gather(-1, _before(top).clamp(min=0))
        _refuse(
            is_close & (opened != self.bracket_type(tokens)),
            tokens,
            "closes a bracket of another type than the innermost open one",
        )
        return top

    def matching_bracket(self, tokens: Int[Tensor, "*batch pos"]) -> Int[Tensor, "*batch pos"]:
        """Position of each bracket's partner; -1 for special tokens and brackets never closed.

        Raises ValueError when ``tokens`` is not the beginning of a well-nested string.
        """
        opened_at = torch.where(self.is_close(tokens), _before(self.stack_top(tokens)), -1)
        position = torch.arange(tokens.shape[-1], device=tokens.device).expand_as(tokens)
        # each close tells its open; everything else writes into a column that is cut off
        n_pos = tokens.shape[-1]
        closed_at = torch.full((*tokens.shape[:-1], n_pos + 1), -1, device=tokens.device)
        target = torch.where(opened_at >= 0, opened_at, n_pos)
        closed_at.scatter_(-1, target, position)
        return torch.where(self.is_open(tokens), closed_at[..., :n_pos], opened_at)

    def closing_bracket(self, tokens: Int[Tensor, "*batch pos"]) -> Int[Tensor, "*batch pos"]:
        """The one close bracket that may follow each token, -1 where no bracket is open."""
        top = self.stack_top(tokens)
        close = tokens.gather(-1, top.clamp(min=0)) + self.n_types
        return torch.where(top >= 0, close, -1)

    def closing_distribution(
        self, tokens: Int[Tensor, "*batch pos"], *, mode: str = "prefix"
    ) -> Float[Tensor, "*batch pos d_vocab"]:
        """The true distribution of the next token at each position, float64, rows sum to 1.

        Prefix mode forces an open bracket at depth 0; complete mode ends there with probability
        1/2 (before any conditioning on length). After END and PAD comes PAD.
        """
        _check_mode(mode)
        depth, close = self.depth(tokens), self.closing_bracket(tokens)
        p_close = torch.full(
            depth.shape, 1 - self.p_open, dtype=torch.float64, device=tokens.device
        )
        p_close[depth == self.max_depth] = 1.0
        p_close[depth == 0] = 0.0
        p_end = torch.where(depth == 0, P_END if mode == "complete" else 0.0, 0.0).double()
        has_ended = (tokens == END) | (tokens == PAD)

        p_next = torch.zeros(*tokens.shape, self.d_vocab, dtype=torch.float64, device=tokens.device)
        p_each_open = (1 - p_close - p_end) / self.n_types
        p_next[..., self.open_tokens.start : self.open_tokens.stop] = p_each_open.unsqueeze(-1)
        p_next.scatter_(-1, close.clamp(min=PAD).unsqueeze(-1), p_close.unsqueeze(-1))
        p_next[..., END] = p_end
        p_next[has_ended] = 0.0
        p_next[has_ended, PAD] = 1.0
        return p_next

    def is_well_nested(self, tokens: Int[Tensor, "*batch pos"]) -> Bool[Tensor, "*batch"]:
        """Whether each sequence is one complete string of the language.

        START may stand in front, END behind, PAD behind END; MASK nowhere. The empty string counts.
        """
        self.check_tokens(tokens)
        step = self.is_open(tokens).long() - self.is_close(tokens).long()
        height = step.cumsum(dim=-1)
        fits = ((height >= 0) & (height <= self.max_depth)).all(-1)
        fits &= (step.sum(-1) == 0) & (tokens != MASK).all(-1) & (tokens[..., 1:] != START).all(-1)
        has_ended = ((tokens == END) | (tokens == PAD)).long()
        fits &= (has_ended.diff(dim=-1) >= 0).all(-1) & ((tokens == END).sum(-1) <= 1)
        fits &= ~((tokens[..., 1:] == END) & (tokens[..., :-1] == PAD)).any(-1)
        # types can only be compared where the heights are those of a bracket string
        candidate = torch.where(fits.unsqueeze(-1), tokens, PAD)
        top = self._stack_top_by_depth(candidate)
        opened = self.bracket_type(candidate).gather(-1, _before(top).clamp(min=0))
        is_wrong = self.is_close(candidate) & (opened != self.bracket_type(candidate))
        return fits & ~is_wrong.any(-1)

    def _stack_top_by_depth(self, tokens: Int[Tensor, "*batch pos"]) -> Int[Tensor, "*batch pos"]:
        """`stack_top` from depths alone: the last open bracket that led to the present depth.

        Sorting by depth, stably, puts every depth's tokens side by side in order of time. The
        first of each group is an open bracket (a depth is first reached by opening), so filling
        forward from the last open bracket never crosses into another group.
        """
        depth = self.depth(tokens)
        order = depth.argsort(dim=-1, stable=True)
        rank = torch.arange(tokens.shape[-1], device=tokens.device).expand_as(tokens)
        is_open = self.is_open(tokens).gather(-1, order)
        last_open = torch.where(is_open, rank, 0).cummax(dim=-1).values
        top = torch.empty_like(order).scatter_(-1, order, order.gather(-1, last_open))
        return torch.where(depth > 0, top, -1)

    # ----------------------------------------------------------------- the probe string

    def probe_tokens(self) -> Int[Tensor, " pos"]:
        """The probe string: for each type, D opens and D closes; ``[[[[]]]](((())))`` for (2, 4).

        No START in front; ``2 * k * D`` tokens.
        """
        runs = [
            [token] * self.max_depth
            for pair in zip(self.open_tokens, self.close_tokens, strict=True)
            for token in pair
        ]
        return torch.tensor(runs, dtype=torch.long).flatten()

    def probe_with_pair(self, bracket_type: int, depth: int) -> Int[Tensor, " pos"]:
        """The probe string with one more pair of ``bracket_type`` where ``depth`` are open.

        The pair goes in at index ``2 * D * bracket_type + depth``, so ``depth`` is in 0..D-1 (the
        contrastive regulariser of section 4 draws both at random).
        """
        if not 0 <= bracket_type < self.n_types:
            raise ValueError(
                f"bracket_type must lie in 0..{self.n_types - 1}, got {bracket_type} for {self}"
            )
        if not 0 <= depth < self.max_depth:
            raise ValueError(
                f"depth must lie in 0..{self.max_depth - 1} so that one more pair fits, got {depth}"
            )
        probe = self.probe_tokens()
        index = 2 * self.max_depth * bracket_type + depth
        pair = torch.tensor([self.open_tokens[bracket_type], self.close_tokens[bracket_type]])
        return torch.cat([probe[:index], pair, probe[index:]])

    # ----------------------------------------------------------------- drawing strings

    def sample(
        self,
        n_sequences: int,
        length: int | tuple[int, int],
        *,
        mode: str = "prefix",
        seed: int,
    ) -> Int[Tensor, "batch pos"]:
        """Draw strings, START in front; the same arguments give the same tokens.

        ``length`` counts brackets: START, END and PAD come on top of it.

        mode "prefix": ``length`` is a number, and every row is START and exactly that many
        brackets, ``[n_sequences, 1 + length]``. A model reads ``tokens[:, :-1]`` and predicts
        ``tokens[:, 1:]``, so training at length 28 shows it 28 input tokens, START and 27
        brackets, and 28 targets (the released code drops the last token from the input).

        mode "complete": ``length`` is a number or a pair ``(min, max)``; every row is START, a
        well-nested string, END and PAD up to ``2 + max`` tokens (max rounded down to even). The
        strings have the language's own distribution given that their length lies in the range,
        which favours short ones; no draw is ever rejected.

        Raises ValueError when the range holds no possible length (in complete mode: no even one).
        """
        return self._draw(np.random.default_rng(_check_seed(seed)), n_sequences, length, mode)

    def stream(
        self,
        n_sequences: int | None,
        length: int | tuple[int, int],
        *,
        mode: str = "prefix",
        seed: int,
        batch_size: int = 4096,
    ) -> Iterator[Int[Tensor, "batch pos"]]:
        """Draw as `sample` does, ``batch_size`` sequences at a time, for data larger than memory.

        ``n_sequences=None`` never ends. Batch number i depends on ``(seed, i, batch_size)`` alone,
        so a stream is repeatable; it is not cut from `sample` with the same seed.
        """
        check_integer("batch_size", batch_size, minimum=1)
        if n_sequences is not None:
            check_integer("n_sequences", n_sequences, minimum=1)
        _check_mode(mode)
        self._length_range(length, mode)
        return self._stream(n_sequences, length, mode, _check_seed(seed), batch_size)

    def _stream(
        self,
        n_sequences: int | None,
        length: int | tuple[int, int],
        mode: str,
        seed: int,
        batch_size: int,
    ) -> Iterator[Tensor]:
        index, n_left = 0, n_sequences
        while n_left is None or n_left > 0:
            n_now = batch_size if n_left is None else min(batch_size, n_left)
            yield self._draw(np.random.default_rng([seed, index]), n_now, length, mode)
            index += 1
            n_left = None if n_left is None else n_left - n_now

    def _draw(
        self, rng: np.random.Generator, n_sequences: int, length: int | tuple[int, int], mode: str
    ) -> Tensor:
        check_integer("n_sequences", n_sequences, minimum=1)
        _check_mode(mode)
        min_length, max_length = self._length_range(length, mode)
        max_depth, p_open = self.max_depth, self.p_open
        if mode == "prefix":
            steps = sample_prefix_steps(
                rng, n_sequences, max_length, max_depth=max_depth, p_open=p_open
            )
        else:
            steps = sample_complete_steps(
                rng,
                n_sequences,
                min_length,
                max_length,
                max_depth=max_depth,
                p_open=p_open,
                p_end=P_END,
            )
        drawn_types = rng.integers(self.n_types, size=steps.shape, dtype=np.int64)
        return self._tokens_from(torch.from_numpy(steps), torch.from_numpy(drawn_types), mode)

    def _tokens_from(self, steps: Tensor, drawn_types: Tensor, mode: str) -> Tensor:
        """Give every open bracket its drawn type and every close the type of its open."""
        shape = torch.where(steps > 0, self.open_tokens.start, self.close_tokens.start)
        shape[steps == 0] = PAD
        opened_at = _before(self._stack_top_by_depth(shape)).clamp(min=0)
        types = torch.where(steps > 0, drawn_types, drawn_types.gather(-1, opened_at))
        brackets = torch.where(steps == 0, shape, shape + types)

        start = torch.full((len(brackets), 1), START)
        if mode == "prefix":
            return torch.cat([start, brackets], dim=1)
        tokens = torch.cat([start, brackets, torch.full_like(start, PAD)], dim=1)
        end_at = 1 + (steps != 0).sum(dim=1, keepdim=True)
        return tokens.scatter_(1, end_at, END)

    def _length_range(self, length: int | tuple[int, int], mode: str) -> tuple[int, int]:
        if mode == "prefix":
            if isinstance(length, tuple):
                raise ValueError(
                    f"length must be one number of brackets in prefix mode, got {length}; "
                    "a range needs mode='complete'"
                )
            check_integer("length", length, minimum=1)
            return length, length
        low, high = length if isinstance(length, tuple) else (length, length)
        check_integer("length", low, minimum=1)
        check_integer("length", high, minimum=1)
        high -= high % 2
        if high < max(low, 2):
            raise ValueError(
                f"length must hold an even number of at least 2, which is what a complete string "
                f"can have, got {length}"
            )
        return low, high


def _before(values: Int[Tensor, "*batch pos"]) -> Int[Tensor, "*batch pos"]:
    """The same row one position later: what held before each token; -1 in front."""
    return torch.nn.functional.pad(values, (1, 0), value=-1)[..., :-1]


def _refuse(is_bad: Bool[Tensor, "*batch pos"], tokens: Tensor, what: str) -> None:
    if is_bad.any():
        where = is_bad.nonzero()[0].tolist()
        raise ValueError(
            f"tokens must begin a well-nested string, but the token {int(tokens[tuple(where)])} at "
            f"index {where} {what}"
        )


def _check_seed(seed: int) -> int:
    check_integer("seed", seed, minimum=0)
    return seed


def _check_mode(mode: str) -> None:
    if mode not in MODES:
        raise ValueError(f"mode must be one of {MODES}, got {mode!r}")
