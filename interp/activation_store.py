"""Activations on disk: safetensors shards with a JSON index, read through memory maps.

A *row* is one vector of every point: one position of one example, or an example's mean. Rows lie in
the order in which examples were recorded; ``examples`` and ``positions`` say which each one is, so
that labels are looked up as ``labels[store.examples]`` whatever the order. Points whose names
differ in a number only (``model.layers.0``, ``model.layers.1``, ...) are one *kind*, and the number
is its layer.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors import safe_open
from torch import Tensor

from interp.files import write_atomically

INDEX = "index.json"
_FORMAT = "interp activations"
_VERSION = 1
_ROW_NAMES = ("example", "position")


@dataclass(frozen=True)
class Recording:
    """What was recorded, and from what: two recordings are the same if all of this is.

    points: names of the recorded points. positions: "all", "last", "mean", or positions from the
    text's first token (negative: from its end). seed: of the shuffle; None keeps the given order.
    dtype: of the stored numbers. inputs, model: fingerprints of the examples and of the model.
    """

    points: tuple[str, ...]
    positions: str | tuple[int, ...]
    n_examples: int
    seed: int | None
    dtype: str
    batch_size: int
    shard_examples: int
    inputs: str
    model: str
    model_name: str


@dataclass(frozen=True)
class Shard:
    """One file: examples ``[first, last)`` of the recorded order, and how many rows they gave."""

    file: str
    first: int
    last: int
    n_rows: int
    n_bytes: int


@dataclass
class Index:
    """The folder's table of contents; shards appear in it when they are whole on disk."""

    recording: Recording
    shapes: dict[str, list[int]] = field(default_factory=dict)
    shards: list[Shard] = field(default_factory=list)

    @property
    def n_done(self) -> int:
        """Examples on disk."""
        return self.shards[-1].last if self.shards else 0

    def write(self, folder: Path) -> None:
        content = {"format": _FORMAT, "version": _VERSION, **asdict(self)}
        write_atomically(folder / INDEX, json.dumps(content, indent=1) + "\n")


def read_index(folder: Path) -> Index:
    """Raises FileNotFoundError or ValueError for a folder that holds no (readable) recording."""
    path = folder / INDEX
    if not path.is_file():
        raise FileNotFoundError(f"{folder} holds no activations: it has no {INDEX}")
    content = json.loads(path.read_text())
    if content.get("format") != _FORMAT or content.get("version") != _VERSION:
        raise ValueError(
            f"{path}: is {content.get('format')!r} version {content.get('version')!r}, expected "
            f"{_FORMAT!r} version {_VERSION}; record again with this version"
        )
    said = content["recording"]
    positions = said["positions"]
    said["positions"] = positions if isinstance(positions, str) else tuple(positions)
    recording = Recording(**{**said, "points": tuple(said["points"])})
    shards = [Shard(**shard) for shard in content["shards"]]
    return Index(recording, content["shapes"], shards)


def kind_of(point: str) -> tuple[str, int | None]:
    """A point's name with its first number replaced by ``*``, and that number (its layer)."""
    match = re.search(r"(?<=\.)\d+(?=\.|:|$)", point)
    if match is None:
        return point, None
    return f"{point[: match.start()]}*{point[match.end() :]}", int(match.group())


class ActivationStore:
    """A finished recording, opened for reading.

    n_rows: rows of every point. examples, positions: [row], which example (as it was given) and
    which of its positions (-1 for a mean) each row is. recording: how it was made.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._index = read_index(self.folder)
        self.recording = self._index.recording
        if self._index.n_done < self.recording.n_examples:
            raise ValueError(
                f"{self.folder}: holds {self._index.n_done} of {self.recording.n_examples} "
                "examples; the same call of record_activations goes on where it stopped"
            )
        self._files = [self._open(shard) for shard in self._index.shards]
        self._ends = np.cumsum([shard.n_rows for shard in self._index.shards])
        self.n_rows = int(self._ends[-1])
        self.examples: Int[Tensor, " row"] = self._rows_of("example")
        self.positions: Int[Tensor, " row"] = self._rows_of("position")

    def _open(self, shard: Shard) -> Any:
        path = self.folder / shard.file
        if not path.is_file() or path.stat().st_size != shard.n_bytes:
            raise ValueError(
                f"{path}: is missing or not the {shard.n_bytes} bytes that were written; delete "
                f"{INDEX} and record again"
            )
        return safe_open(path, framework="pt")

    def _rows_of(self, name: str) -> Tensor:
        return torch.cat([file.get_tensor(name) for file in self._files])

    @property
    def points(self) -> tuple[str, ...]:
        return self.recording.points

    @property
    def kinds(self) -> dict[str, list[int | None]]:
        """The layers of every kind of point."""
        found: dict[str, list[int | None]] = {}
        for point in self.points:
            kind, layer = kind_of(point)
            found.setdefault(kind, []).append(layer)
        return found

    @property
    def order(self) -> Int[Tensor, " example"]:
        """Examples in the order in which they lie on disk."""
        return torch.unique_consecutive(self.examples)

    def read(
        self, point: str, rows: Sequence[int] | slice | Tensor | None = None
    ) -> Float[Tensor, "row ..."]:
        """Rows of one point, all of them by default, in the order asked for.

        Only the pages of the files that hold these rows are read.
        """
        self._check_point(point)
        wanted = self._row_numbers(rows)
        shape = (len(wanted), *self._index.shapes[point])
        result = torch.empty(shape, dtype=getattr(torch, self.recording.dtype))
        shards = np.searchsorted(self._ends, wanted, side="right")
        for number in np.unique(shards):
            chosen = np.flatnonzero(shards == number)
            begin = int(self._ends[number - 1]) if number else 0
            within = wanted[chosen] - begin
            low, high = int(within.min()), int(within.max()) + 1
            block = self._files[number].get_slice(point)[low:high]
            result[torch.from_numpy(chosen)] = block[torch.from_numpy(within - low)]
        return result

    def stack(
        self, kind: str, rows: Sequence[int] | slice | Tensor | None = None
    ) -> Float[Tensor, "layer row ..."]:
        """Rows of every layer of a kind, ``"model.layers.*"``, in the order of ``kinds[kind]``."""
        if kind not in self.kinds:
            raise ValueError(f"kind: got {kind!r}, expected among {sorted(self.kinds)}")
        points = [point for point in self.points if kind_of(point)[0] == kind]
        return torch.stack([self.read(point, rows) for point in points])

    def batches(self, point: str, *, n_rows: int) -> Iterator[Float[Tensor, "row ..."]]:
        """All rows of one point in blocks of at most ``n_rows``."""
        for begin in range(0, self.n_rows, n_rows):
            yield self.read(point, slice(begin, begin + n_rows))

    def _check_point(self, point: str) -> None:
        if point not in self.points:
            raise ValueError(f"point: {point!r} was not recorded, expected among {self.points}")

    def _row_numbers(self, rows: Sequence[int] | slice | Tensor | None) -> np.ndarray:
        if rows is None or isinstance(rows, slice):
            return np.arange(self.n_rows)[rows if rows is not None else slice(None)]
        wanted = np.asarray(rows, dtype=np.int64)
        if wanted.size and (wanted.min() < 0 or wanted.max() >= self.n_rows):
            raise ValueError(
                f"rows: name {wanted.min()} to {wanted.max()}, expected 0 to {self.n_rows - 1}"
            )
        return wanted
