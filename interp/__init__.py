"""Mechanistic interpretability with known answers.

The names below are the public face. Each loads its module when it is first used, so that
``import interp`` stays instant and brings in neither torch nor transformer_lens nor nnsight.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# public name -> module that defines it
_PUBLIC: dict[str, str] = {
    "fetch": "interp.model_cache",
    "list_studies": "interp.workflows",
    "load": "interp.loading",
    "load_run": "interp.workflows",
    "observe": "interp.observing",
    "run_study": "interp.workflows",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'interp' has no attribute {name!r}")
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
