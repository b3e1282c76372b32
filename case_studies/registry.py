"""Which studies there are, and how their modules are loaded.

A study is a folder with ``config.py``, ``claims.py``, ``study.py`` and ``figures.py``. The ones
beside this file are known by the folder's name; any other is known by its path. Listing imports
``config.py`` and ``claims.py`` only, and those import no torch.
"""

import importlib
import importlib.machinery
import importlib.util
import os
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from interp.case_studies.claims import Claim, check_claims
from interp.case_studies.study import Figure, StudyInfo, Unit, UnitResult
from interp.errors import UsageError, unknown

PARTS = ("config", "claims", "study", "figures")
Compute: TypeAlias = Callable[[Unit, Mapping[str, UnitResult]], UnitResult]

_HERE = Path(__file__).resolve().parent
_loading = threading.RLock()
_loaded: dict[str, dict[Path, tuple[int, int]]] = {}


@dataclass(frozen=True)
class Study:
    """A study found: its name, its folder, and its parts, each imported when first asked for."""

    name: str
    folder: Path
    package: str

    @cached_property
    def info(self) -> StudyInfo:
        """Title, paper, minutes: ``STUDY`` of config.py."""
        found = self._take("config", "STUDY", StudyInfo)
        if found.name != self.name:
            raise UsageError(
                f"{self.folder / 'config.py'}: STUDY.name is {found.name!r}, expected the folder's "
                f"name {self.name!r}"
            )
        return found

    @cached_property
    def scales(self) -> Mapping[str, Any]:
        """Config by scale: ``SCALES`` of config.py."""
        return self._take("config", "SCALES", Mapping)

    @cached_property
    def claims(self) -> Sequence[Claim]:
        """``CLAIMS`` of claims.py, checked."""
        found = self._take("claims", "CLAIMS", Sequence)
        check_claims(self.name, found, list(self.scales))
        return found

    @cached_property
    def figures(self) -> Sequence[Figure]:
        """``FIGURES`` of figures.py, or none where the study has no such file."""
        if not (self.folder / "figures.py").exists():
            return []
        return self._take("figures", "FIGURES", Sequence)

    @cached_property
    def units(self) -> Callable[[Any], list[Unit]]:
        """``units(config)`` of study.py."""
        return self._take("study", "units", Callable)

    @cached_property
    def compute(self) -> Compute:
        """``compute(unit, needs)`` of study.py."""
        return self._take("study", "compute", Callable)

    def _take(self, part: str, name: str, kind: Any) -> Any:
        module = self.load(part)
        value = getattr(module, name, None)
        if not isinstance(value, kind):
            raise UsageError(
                f"{self.folder / part}.py: {name} is {type(value).__name__}, expected "
                f"{kind.__name__}; see the folder's README for what a study consists of"
            )
        return value

    def load(self, part: str) -> types.ModuleType:
        """Import one part, e.g. ``"claims"``; a syntax error is told with its file and line."""
        with _loading:
            _forget_if_changed(self)
            if self.folder.parent != _HERE:
                _register_package(self)
            try:
                return importlib.import_module(f"{self.package}.{part}")
            except SyntaxError as error:
                raise UsageError(
                    f"{error.filename}, line {error.lineno}: {error.msg}; the study cannot be read"
                ) from error


def list_studies() -> list[Study]:
    """The studies that come with the toolkit, by name."""
    return [
        Study(folder.name, folder, f"interp.case_studies.{folder.name}")
        for folder in sorted(_HERE.iterdir())
        if (folder / "config.py").is_file() and (folder / "claims.py").is_file()
    ]


def find_study(reference: str | os.PathLike[str]) -> Study:
    """The study of that name, or in the folder of that path (``./my_study``).

    Raises ``UsageError`` with the nearest known name, or with what the folder lacks.
    """
    text = os.fspath(reference)
    known = {study.name: study for study in list_studies()}
    if text in known:
        return known[text]
    is_path = os.sep in text or text.startswith(".") or isinstance(reference, Path)
    if not is_path and not (Path(text) / "config.py").is_file():
        hint = "; a study of your own is given as a path, such as ./my_study"
        raise UsageError(unknown("study", text, known) + hint)
    folder = Path(text).expanduser().resolve()
    if folder.parent == _HERE and folder.name in known:
        return known[folder.name]
    missing = [f"{part}.py" for part in PARTS[:3] if not (folder / f"{part}.py").is_file()]
    if missing:
        state = f"has no {', '.join(missing)}" if folder.is_dir() else "is no folder"
        raise UsageError(
            f"study {text!r}: {folder} {state}; a study is a folder with config.py, claims.py and "
            "study.py"
        )
    if not folder.name.isidentifier():
        raise UsageError(
            f"study {text!r}: the folder is imported by its name, and {folder.name!r} is no Python "
            "name; rename it with letters, digits and '_'"
        )
    return Study(folder.name, folder, folder.name)


def _register_package(study: Study) -> None:
    """Make a folder anywhere importable under its own name, without touching ``sys.path``."""
    existing = sys.modules.get(study.package)
    if existing is not None:
        if study.folder in map(Path, getattr(existing, "__path__", [])):
            return
        raise _name_taken(study, str(getattr(existing, "__file__", None) or "Python itself"))
    found = importlib.util.find_spec(study.package)
    if found is not None and study.folder not in _places(found):
        raise _name_taken(study, str(found.origin))
    spec = importlib.machinery.ModuleSpec(study.package, None, is_package=True)
    spec.submodule_search_locations = [str(study.folder)]
    sys.modules[study.package] = importlib.util.module_from_spec(spec)


def _places(spec: Any) -> list[Path]:
    return [Path(place).resolve() for place in spec.submodule_search_locations or []]


def _name_taken(study: Study, by: str) -> UsageError:
    return UsageError(
        f"study {str(study.folder)!r}: the name {study.package!r} is taken by {by}; rename the "
        "folder"
    )


def _forget_if_changed(study: Study) -> None:
    """Import a study's files anew when one of them changed, as in a notebook beside an editor."""
    state = {
        path: (path.stat().st_mtime_ns, path.stat().st_size) for path in study.folder.rglob("*.py")
    }
    if _loaded.get(study.package, state) != state:
        _forget(study.package)
    _loaded[study.package] = state
    importlib.invalidate_caches()


def _forget(package: str) -> None:
    inside = package + "."
    for name in [name for name in sys.modules if name == package or name.startswith(inside)]:
        del sys.modules[name]
