"""The words in which a case study is written: units of work, their results, figures.

A study's ``units(config)`` says what there is to compute, and ``compute(unit, needs)`` computes one
unit. A unit is a pure function of its parameters and of the units it needs; that is what makes it
possible to compute units in any order, in any process, once.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from interp.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

# None, bool, int, float, str, and lists and string-keyed dicts of them
JSON: TypeAlias = Any

# what a safetensors file can hold of numpy's types
ARRAY_KINDS = {"bool", "float16", "float32", "float64"}
ARRAY_KINDS |= {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}


class StudyError(UserError):
    """A study, a run or a run folder is not as it has to be; the message says what to do."""


@dataclass(frozen=True)
class StudyInfo:
    """What ``interp list`` knows of a study without importing what it computes with.

    ``minutes`` maps a scale to how long it takes on two cores. ``devices`` and ``dtypes`` are what
    ``--device`` and ``--dtype`` may ask for; a study that offers a choice has a field of that name
    in its ``Config``. No ``dtypes`` means that the study fixes its own.
    """

    name: str
    title: str
    paper: str
    summary: str
    minutes: Mapping[str, float]
    devices: tuple[str, ...] = ("cpu",)
    dtypes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Unit:
    """One piece of work that is computed, stored and hashed as a whole.

    ``params`` say everything that the computation depends on besides the source code, so that runs
    of other scales or seeds share the unit; the name (``"e1/seed=3"``) is for people and for
    ``Results.select``. ``needs`` names the units whose results ``compute`` is given. ``data`` names
    files it reads: their contents enter the unit's key, their places do not. ``cost`` is a guess of
    how long it takes relative to the others, for the time left and for the order of work.
    """

    name: str
    params: Mapping[str, JSON]
    needs: tuple[str, ...] = ()
    cost: float = 1.0
    data: Mapping[str, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip() or not self.name.isprintable():
            raise ValueError(
                f"Unit name: got {self.name!r}, expected one line of text such as 'e1/seed=3'"
            )
        if not self.cost > 0:
            raise ValueError(f"Unit {self.name!r}, cost: got {self.cost!r}, expected more than 0")
        where = f"Unit {self.name!r}, params"
        object.__setattr__(self, "params", _plain_dict(self.params, where, nan=False))
        object.__setattr__(self, "needs", tuple(self.needs))
        object.__setattr__(self, "data", {k: Path(v) for k, v in self.data.items()})


@dataclass(frozen=True)
class UnitResult:
    """What a unit computed: ``numbers`` (JSON, NaN and infinities allowed) and named ``arrays``.

    numpy scalars become Python's own; arrays keep their type and shape, in C order.
    Raises ``TypeError`` for anything that a unit file cannot hold.
    """

    numbers: Mapping[str, JSON] = field(default_factory=dict)
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "numbers", _plain_dict(self.numbers, "numbers", nan=True))
        arrays = {name: _plain_array(name, value) for name, value in self.arrays.items()}
        object.__setattr__(self, "arrays", arrays)


@dataclass(frozen=True)
class Figure:
    """A picture of a finished run. ``draw(results)`` returns a matplotlib figure (no pyplot).

    ``caption`` says what to see; ``alt`` says what is on the picture to someone who cannot see it.
    """

    name: str
    title: str
    caption: str
    alt: str
    draw: "Callable[[Results], Drawing]"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_\-]+", self.name):
            raise ValueError(
                f"Figure name: got {self.name!r}, expected letters, digits, '_' and '-': "
                "it becomes a file name"
            )


class Results(Mapping[str, UnitResult]):
    """The finished units of a run by name, and the run's ``config``."""

    def __init__(self, units: Mapping[str, UnitResult], *, config: Any = None):
        self._units = units
        self.config = config

    def __getitem__(self, name: str) -> UnitResult:
        try:
            return self._units[name]
        except KeyError:
            raise KeyError(f"{name!r}: no such unit in this run ({_some(self.names())})") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._units)

    def __len__(self) -> int:
        return len(self._units)

    def names(self, prefix: str = "") -> list[str]:
        """Names that begin with ``prefix``, numbers inside them in numeric order."""
        return sorted((name for name in self._units if name.startswith(prefix)), key=_natural)

    def select(self, prefix: str) -> list[UnitResult]:
        """Results of the units whose names begin with ``prefix``, in the order of ``names``."""
        return [self._units[name] for name in self.names(prefix)]

    def column(self, prefix: str, number: str) -> np.ndarray:
        """One number of every unit whose name begins with ``prefix``: float64, one a unit.

        Raises ``KeyError`` if no unit has the prefix or one of them lacks the number.
        """
        names = self.names(prefix)
        if not names:
            raise KeyError(f"{prefix!r}: no unit begins so ({_some(self.names())})")
        return np.array([float(self._units[name].numbers[number]) for name in names])


def as_plain(value: Any, where: str, *, nan: bool) -> JSON:
    """``value`` as plain JSON types; raises ``TypeError`` or ``ValueError`` naming the place."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (np.bool_, np.integer, np.floating)):
        value = value.item()
    if isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        if not nan and not math.isfinite(value):
            raise ValueError(f"{where}: got {value!r}, expected a finite number")
        return value
    if isinstance(value, (list, tuple)):
        return [as_plain(item, f"{where}[{i}]", nan=nan) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        return _plain_dict(value, where, nan=nan)
    raise TypeError(
        f"{where}: got {type(value).__name__}, expected JSON (None, bool, int, float, str, list, "
        "dict); put arrays into UnitResult.arrays and call .item() on tensors of one element"
    )


def _plain_dict(value: Mapping[Any, Any], where: str, *, nan: bool) -> dict[str, JSON]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{where}: got {type(value).__name__}, expected a dict")
    for name in value:
        if not isinstance(name, str):
            raise TypeError(f"{where}: key {name!r} is {type(name).__name__}, expected str")
    return {name: as_plain(item, f"{where}[{name!r}]", nan=nan) for name, item in value.items()}


def _plain_array(name: Any, value: Any) -> np.ndarray:
    if not isinstance(name, str) or name == "__metadata__":
        raise TypeError(f"arrays: got the name {name!r}, expected a str other than '__metadata__'")
    if not isinstance(value, np.ndarray):
        raise TypeError(
            f"arrays[{name!r}]: got {type(value).__name__}, expected numpy.ndarray "
            "(for a tensor: .detach().cpu().numpy())"
        )
    if value.dtype.name not in ARRAY_KINDS:
        raise TypeError(
            f"arrays[{name!r}]: got dtype {value.dtype}, expected one of "
            f"{', '.join(sorted(ARRAY_KINDS))}"
        )
    return np.asarray(value, dtype=value.dtype.newbyteorder("<"), order="C")


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Sort key under which ``seed=9`` comes before ``seed=10``."""
    parts = re.split(r"(\d+)", name)
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return f"has {shown}{', ...' if len(names) > 5 else ''}" if names else "has none"
