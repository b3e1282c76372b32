"""Texts from files, and windows of tokens of one length, so that nothing needs padding.

Whether a beginning-of-sequence token stands in front changes what a sink is: it is never added
silently. Windows hold the text's tokens only, unless ``prefix`` names a token.
"""

import csv
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor


def read_texts(
    path: str | Path, *, columns: Sequence[int] | None = None, field: str = "text"
) -> list[str]:
    """The texts of a file, by its suffix; empty ones are left out.

    ``.csv``: one per row, the given ``columns`` (from 0) joined by a blank. ``.jsonl``: one per
    line, its ``field``. Anything else: one per line. A book is one text only if it is one line.

    Raises ValueError for a file without a text, or a row without such a column or field.
    """
    path = Path(path)
    with open(path, encoding="utf-8", newline="") as stream:
        if path.suffix == ".csv":
            if columns is None:
                raise ValueError(f"columns: say which columns of {path.name} hold the text")
            texts = [
                _join(row, columns, f"row {i} of {path}")
                for i, row in enumerate(csv.reader(stream))
            ]
        elif path.suffix == ".jsonl":
            texts = [
                _field(line, field, f"line {i} of {path}")
                for i, line in enumerate(stream)
                if line.strip()
            ]
        else:
            texts = list(stream)
    texts = [text.strip() for text in texts]
    texts = [text for text in texts if text]
    if not texts:
        raise ValueError(f"{path} holds no text")
    return texts


def text_windows(
    texts: Iterable[str],
    tokenizer: Any,
    *,
    n_tokens: int,
    n_windows: int | None = None,
    prefix: int | None = None,
) -> Int[Tensor, "batch pos"]:
    """The first ``n_tokens`` of each text that is long enough, in order, at most ``n_windows``.

    prefix: a token to put in front of each, counted among the ``n_tokens``.

    Raises ValueError when there are fewer windows than asked for, or none.
    """
    n_own = _n_own(n_tokens, prefix)
    windows: list[list[int]] = []
    for text in texts:
        if len(windows) == n_windows:
            break
        ids = _encode(tokenizer, text)
        if len(ids) >= n_own:
            windows.append(ids[:n_own])
    return _stack(windows, n_windows, prefix, f"texts of at least {n_own} tokens")


def packed_windows(
    texts: Iterable[str],
    tokenizer: Any,
    *,
    n_tokens: int,
    n_windows: int | None = None,
    prefix: int | None = None,
    separator: str = "\n\n",
) -> Int[Tensor, "batch pos"]:
    """All texts one after another, cut into windows of ``n_tokens``; the rest is dropped.

    Raises ValueError when there are fewer windows than asked for, or none.
    """
    n_own = _n_own(n_tokens, prefix)
    windows: list[list[int]] = []
    running: list[int] = []
    for text in texts:
        running += _encode(tokenizer, text + separator)
        while len(running) >= n_own and len(windows) != n_windows:
            windows.append(running[:n_own])
            running = running[n_own:]
        if len(windows) == n_windows:
            break
    return _stack(windows, n_windows, prefix, f"windows of {n_own} tokens")


def padded_batches(
    texts: Sequence[str], tokenizer: Any, *, max_tokens: int, batch_size: int = 8
) -> Iterator[tuple[Int[Tensor, "batch pos"], Int[Tensor, "batch pos"]]]:
    """Token ids and their attention mask, batch by batch: each text cut and padded on the right.

    No token is put in front. Raises ValueError for a text without a token.
    """
    encoded = [_encode(tokenizer, text)[:max_tokens] for text in texts]
    for number, ids in enumerate(encoded):
        if not ids:
            raise ValueError(f"text {number} has no token (max_tokens={max_tokens})")
    for start in range(0, len(encoded), batch_size):
        batch = encoded[start : start + batch_size]
        longest = max(map(len, batch))
        # what stands under a mask of 0 is never read; 0 is an id that every model has
        yield (
            torch.tensor([ids + [0] * (longest - len(ids)) for ids in batch]),
            torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in batch]),
        )


def check_tokens(model: Any, tokens: Int[Tensor, "batch pos"], *, at_least: int = 1) -> None:
    """Refuse what would fail deep inside the model, or be silently wrong."""
    if tokens.ndim != 2 or 0 in tokens.shape or tokens.shape[1] < at_least:
        raise ValueError(
            f"tokens must be [batch, pos] with at least {at_least} positions, "
            f"got the shape {tuple(tokens.shape)}"
        )
    config = getattr(model, "config", None) or model.cfg  # transformers' or our zoo's
    size = getattr(config, "vocab_size", None) or getattr(config, "d_vocab", None)
    largest = int(tokens.max())
    if int(tokens.min()) < 0 or (size is not None and largest >= size):
        raise ValueError(f"tokens has an id outside the model's vocabulary of {size}: {largest}")


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def _n_own(n_tokens: int, prefix: int | None) -> int:
    n_own = n_tokens - (prefix is not None)
    if n_own < 1:
        raise ValueError(f"n_tokens must leave room for a token of the text, got {n_tokens}")
    return n_own


def _stack(
    windows: list[list[int]], n_windows: int | None, prefix: int | None, what: str
) -> Tensor:
    if not windows or (n_windows is not None and len(windows) < n_windows):
        wanted = "at least one" if n_windows is None else n_windows
        raise ValueError(f"there are {len(windows)} {what}, asked for {wanted}")
    front = [] if prefix is None else [prefix]
    return torch.tensor([front + window for window in windows])


def _join(row: list[str], columns: Sequence[int], where: str) -> str:
    if max(columns) >= len(row) or min(columns) < 0:
        raise ValueError(f"columns {list(columns)}: {where} has {len(row)}")
    return " ".join(row[column] for column in columns)


def _field(line: str, field: str, where: str) -> str:
    record = json.loads(line)
    if not isinstance(record, dict) or not isinstance(record.get(field), str):
        raise ValueError(f"field {field!r}: {where} has no such string")
    return record[field]
