"""What identifies a unit, and what identifies a result.

A unit's **key** hashes everything it depends on: study, parameters, the keys of the units it needs,
source code, package versions, contents of data files. A **result hash** hashes what was computed.
"""

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path

import numpy as np

from interp.case_studies.study import JSON, StudyError, Unit, UnitResult

# the distributions whose version can change a number
PACKAGES = (
    "torch",
    "numpy",
    "scipy",
    "scikit-learn",
    "pandas",
    "networkx",
    "transformers",
    "transformer-lens",
)

# what of interp/ computes nothing that a unit stores
_FRONT = {
    "__init__.py",
    "benchmarks",
    "caches.py",
    "cli.py",
    "cli_models.py",
    "cli_options.py",
    "cli_tools.py",
    "doctor.py",
    "errors.py",
    "figures.py",
    "files.py",
    "observation_page.py",
    "terminal.py",
    "workflows.py",
}
# what of a study's folder only says how much to compute, or judges and draws what was
_AROUND_STUDY = {"config.py", "claims.py", "measures.py", "figures.py"}
_SOURCE_SUFFIXES = {".py", ".c", ".h", ".cpp", ".cu"}


def canonical_json(value: JSON) -> str:
    """One text for one value: keys sorted, no spaces, shortest floats; NaN as Python writes it."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def text_hash(text: str) -> str:
    """sha256 of a text, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def result_hash(result: UnitResult) -> str:
    """sha256 over the canonical numbers and over each array's name, type, shape and bytes."""
    digest = hashlib.sha256()
    digest.update(canonical_json(result.numbers).encode())
    for name in sorted(result.arrays):
        array = result.arrays[name]
        header = canonical_json([name, array.dtype.name, list(array.shape)])
        digest.update(f"\n{header}\n".encode())
        digest.update(np.ascontiguousarray(array).data if array.size else b"")
    return digest.hexdigest()


def run_hash(result_hashes: Mapping[str, str]) -> str:
    """One hash of a whole run, from the result hashes of its units by name."""
    return text_hash(canonical_json(result_hashes))


def versions() -> dict[str, str]:
    """Python's version (major.minor) and those of the installed packages that compute."""
    found = {"python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def toolkit_hash() -> str:
    """sha256 over the toolkit's source: kernels/, models/, probes/, and interp/ but for the command
    line, the joins and drawing."""
    engine = Path(__file__).resolve().parent
    # a wheel has the folders inside interp/; a checkout has them beside it, linked
    house = engine.parent if engine.parent.name == "interp" else engine.parent / "interp"
    rooms = ("kernels", "models", "probes")
    digest = hashlib.sha256()
    for room in rooms:
        _add_tree(digest, room, (house / room).resolve())
    _add_tree(digest, "interp", house, leave_out={*_FRONT, *rooms, "case_studies"})
    return digest.hexdigest()


def source_hash(study_folder: Path) -> str:
    """sha256 over the source that a unit runs through: the toolkit's, and the study's own, which is
    every source file of its folder but config.py, claims.py, measures.py and figures.py."""
    digest = hashlib.sha256(toolkit_hash().encode())
    _add_tree(digest, "study", study_folder.resolve(), leave_out=_AROUND_STUDY)
    return digest.hexdigest()


def _add_tree(
    digest: "hashlib._Hash", label: str, root: Path, leave_out: Iterable[str] = ()
) -> None:
    """Feed path and content of every source file below ``root`` but the named top entries."""
    left_out = set(leave_out)
    for path in sorted(root.rglob("*")):
        parts = path.relative_to(root).parts
        if path.suffix not in _SOURCE_SUFFIXES or parts[0] in left_out or "__pycache__" in parts:
            continue
        content = path.read_bytes()
        digest.update(f"{label}/{'/'.join(parts)} {len(content)}\n".encode())
        digest.update(content)


def unit_keys(
    study: str, units: Sequence[Unit], *, source: str, packages: Mapping[str, str]
) -> dict[str, str]:
    """Key of every unit by name, in an order in which each comes after the units it needs.

    Raises ``StudyError`` for names used twice, needs that do not exist or go round in a circle, and
    two units that nothing but the name tells apart.
    """
    by_name = {unit.name: unit for unit in units}
    if len(by_name) < len(units):
        twice = next(u.name for u in units if sum(v.name == u.name for v in units) > 1)
        raise StudyError(f"study {study}: two units are named {twice!r}; give each its own name")
    keys: dict[str, str] = {}
    owner: dict[str, str] = {}
    for stage in stages(study, units):
        for unit in stage:
            said = {
                "study": study,
                "params": unit.params,
                "needs": [keys[need] for need in unit.needs],
                "source": source,
                "packages": dict(packages),
                "data": data_hashes(unit),
            }
            key = text_hash(canonical_json(said))
            if key in owner:
                raise StudyError(
                    f"study {study}: units {owner[key]!r} and {unit.name!r} have the same params "
                    "and needs, so they would be one unit; params must say all that differs"
                )
            owner[key] = unit.name
            keys[unit.name] = key
    return keys


def stages(study: str, units: Sequence[Unit]) -> list[list[Unit]]:
    """Units in layers: each needs only units of earlier layers; the costly first within one."""
    names = {unit.name for unit in units}
    for unit in units:
        for need in unit.needs:
            if need not in names:
                raise StudyError(
                    f"study {study}: unit {unit.name!r} needs {need!r}, which is no unit of it"
                )
    layers: list[list[Unit]] = []
    done: set[str] = set()
    left = list(units)
    while left:
        ready = [unit for unit in left if done.issuperset(unit.needs)]
        if not ready:
            circle = ", ".join(repr(unit.name) for unit in left[:4])
            raise StudyError(f"study {study}: units need each other in a circle: {circle}")
        done.update(unit.name for unit in ready)
        left = [unit for unit in left if unit.name not in done]
        layers.append(sorted(ready, key=lambda unit: -unit.cost))
    return layers


def data_hashes(unit: Unit) -> dict[str, str]:
    """sha256 of the contents of every data file of a unit, by the name the unit gives it."""
    found = {}
    for name, path in unit.data.items():
        try:
            state = path.stat()
            found[name] = _file_hash(path, state.st_size, state.st_mtime_ns)
        except OSError as error:
            raise StudyError(
                f"unit {unit.name!r}, data {name!r}: cannot read {path} ({error.strerror})"
            ) from error
    return found


@cache
def _file_hash(path: Path, size: int, changed: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
