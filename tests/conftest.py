"""Shape annotations are claims: under pytest, jaxtyping and beartype check them at every call.

Left out are modules that define a ``forward`` (nnsight reads its source and cannot see through a
decorator) or a Triton kernel (the same, for Triton).
"""

import sys
import types
from pathlib import Path

import beartype  # before nnsight, which mounts `.save` on `object` and breaks beartype's import
import jaxtyping

ROOT = Path(__file__).resolve().parent.parent


def checked_modules() -> list[str]:
    """Names of the project's modules whose annotations can be checked at run time."""
    names = []
    for folder in ("interp", "kernels", "models", "probes", "case_studies"):
        package = [] if folder == "interp" else ["interp"]
        for path in sorted((ROOT / folder).rglob("*.py")):
            relative = path.relative_to(ROOT)
            if folder == "interp" and len(relative.parts) > 2 and relative.parts[1] in _LINKS:
                continue  # seen under its own folder
            text = path.read_text()
            if path.name == "__init__.py" or "def forward(" in text or "triton.jit" in text:
                continue
            names.append(".".join([*package, *relative.with_suffix("").parts]))
    return names


_LINKS = {"kernels", "models", "probes", "case_studies"}

_checker = types.ModuleType("interp_annotation_checker")
_checker.check = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))  # type: ignore[attr-defined]
sys.modules[_checker.__name__] = _checker
jaxtyping.install_import_hook(checked_modules(), f"{_checker.__name__}.check")
