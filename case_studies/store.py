"""Where finished units live: ``RUN/units/<key>.safetensors``, one file a unit.

The process that computed a unit writes its file. Reading checks the hash of what was stored, and
never unpickles: a file that is damaged is named, not used and not silently computed again.
"""

import json
import struct
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from interp.case_studies.keys import canonical_json, result_hash
from interp.case_studies.study import StudyError, UnitResult
from interp.files import PartialFile, remove_leftovers, unique_partial

FORMAT = "interp-unit-1"
# as much of a run's results as StoredResults keeps in memory
CACHE_BYTES = 1 << 28

_DTYPES: dict[str, Any] = {
    "BOOL": "|b1",
    **{f"{kind}{bits}": f"<{kind.lower()}{bits // 8}" for kind in "IU" for bits in (8, 16, 32, 64)},
    **{f"F{bits}": f"<f{bits // 8}" for bits in (16, 32, 64)},
}


class CorruptUnit(StudyError):
    """A unit file that is not what was written: the message names it and says what to do."""


@dataclass(frozen=True)
class StoredUnit:
    """A unit file that was read and checked; ``finished`` is a UTC time."""

    unit: str
    result: UnitResult
    result_hash: str
    seconds: float
    finished: str


class Store:
    """The unit files of one run folder."""

    def __init__(self, run_folder: Path):
        self.folder = Path(run_folder) / "units"

    def path(self, key: str) -> Path:
        """Where the unit of that key is, or would be."""
        return self.folder / f"{key}.safetensors"

    def has(self, key: str) -> bool:
        """True where the unit is finished."""
        return self.path(key).exists()

    def read(self, key: str) -> StoredUnit:
        """Read and check a finished unit. Raises ``CorruptUnit`` if the file is not as written."""
        return read_unit(self.path(key))

    def begin(self, key: str, *, shared: bool = False) -> PartialFile:
        """Open the file that the unit will be written to.

        Raises ``BlockingIOError`` where a living process has begun the same unit. With ``shared``
        nobody minds: several may compute it, and the first to finish is kept.
        """
        path = self.folder / f"{key}.partial"
        return PartialFile(unique_partial(path) if shared else path)

    def finish(
        self, key: str, file: PartialFile, result: UnitResult, *, unit: str, seconds: float
    ) -> str:
        """Write the result under its final name and return its hash.

        A finished file that appeared meanwhile stays, and its hash is returned.
        """
        if self.has(key):
            return self.read(key).result_hash
        found = result_hash(result)
        said = {
            "format": FORMAT,
            "key": key,
            "unit": unit,
            "numbers": canonical_json(result.numbers),
            "result_hash": found,
            "seconds": f"{seconds:.6f}",
            "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        file.commit(save(dict(result.arrays), said), self.path(key))
        return found

    def remove_leftovers(self) -> int:
        """Delete partial files whose writer is dead; returns how many."""
        return remove_leftovers(self.folder)


class StoredResults(Mapping[str, UnitResult]):
    """Results by unit name, read from a store when asked for; the latest are kept in memory."""

    def __init__(self, store: Store, keys: Mapping[str, str]):
        self._store, self._keys = store, dict(keys)
        self._kept: OrderedDict[str, UnitResult] = OrderedDict()
        self._bytes = 0

    def __getitem__(self, name: str) -> UnitResult:
        if name in self._kept:
            self._kept.move_to_end(name)
            return self._kept[name]
        result = self._store.read(self._keys[name]).result
        self._kept[name] = result
        self._bytes += _n_bytes(result)
        while self._bytes > CACHE_BYTES and len(self._kept) > 1:
            self._bytes -= _n_bytes(self._kept.popitem(last=False)[1])
        return result

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


def read_unit(path: Path) -> StoredUnit:
    """Read one unit file and check it against its own hash. Raises ``CorruptUnit``."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CorruptUnit(f"cannot read unit file {path}: {error.strerror}") from error
    said = _metadata(path, content)
    try:
        arrays = {
            name: np.ndarray(part["shape"], dtype=_DTYPES[part["dtype"]], buffer=part["data"])
            for name, part in deserialize(content)
        }
        result = UnitResult(json.loads(said["numbers"]), arrays)
        stored = StoredUnit(
            said["unit"], result, said["result_hash"], float(said["seconds"]), said["finished"]
        )
        key = said["key"]
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    if result_hash(result) != stored.result_hash:
        raise _damaged(path, "its contents do not have the hash that they were stored with")
    if key != path.stem:
        raise _damaged(path, f"it holds the unit of key {key[:12]}..., so it was renamed or copied")
    return stored


def _metadata(path: Path, content: bytes) -> dict[str, str]:
    """The text part of a safetensors file: 8 bytes of length, then a JSON header."""
    if len(content) < 8:
        raise _damaged(path, f"it has {len(content)} bytes")
    (length,) = struct.unpack("<Q", content[:8])
    if length > len(content) - 8:
        raise _damaged(path, "it ends before its header does, or is no safetensors file")
    try:
        said = json.loads(content[8 : 8 + length])["__metadata__"]
        written_by = said["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise _damaged(path, "its header was not written by interp") from error
    if written_by != FORMAT:
        raise _damaged(path, f"it says format {written_by!r}, expected {FORMAT!r}")
    return {name: str(value) for name, value in said.items()}


def _damaged(path: Path, why: str) -> CorruptUnit:
    return CorruptUnit(
        f"unit file {path} is damaged: {why}. Delete it and run the same command again: only this "
        "unit is computed anew"
    )


def _n_bytes(result: UnitResult) -> int:
    return 4096 + sum(array.nbytes for array in result.arrays.values())
