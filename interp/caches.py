"""Where things are kept between runs, how much they take, and what may be thrown away."""

import contextlib
import getpass
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from interp.model_cache import cache_folder


@dataclass(frozen=True)
class Cache:
    """A folder that fills up. What cannot be cleared belongs to other programs too."""

    name: str
    folder: Path
    holds: str
    can_be_cleared: bool


def caches() -> list[Cache]:
    """Every cache that work with the toolkit fills, whether its folder is there or not."""
    home = Path.home()
    hub = os.environ.get("HF_HOME") or home / ".cache" / "huggingface"
    triton = os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache"
    inductor = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    temporary = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
    return [
        Cache("interp", cache_folder(), "compiled kernels and prepared models", True),
        Cache("triton", Path(triton), "compiled Triton kernels", True),
        Cache("inductor", Path(inductor or temporary), "what torch.compile made", True),
        Cache("hugging-face", Path(hub), "downloaded models and data sets", False),
    ]


def size(folder: Path) -> int:
    """Bytes in the files of a folder and below; 0 where there is no folder."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent, name)
            # others write and delete here meanwhile
            with contextlib.suppress(FileNotFoundError):
                total += path.lstat().st_size
    return total


def clear(cache: Cache) -> int:
    """Delete a cache's folder and return the bytes it held.

    Raises ``ValueError`` for a cache that other programs rely on.
    """
    if not cache.can_be_cleared:
        raise ValueError(
            f"cache: {cache.name!r} holds {cache.holds} of other programs too and is not cleared "
            f"from here; delete {cache.folder} yourself if you mean to"
        )
    held = size(cache.folder)
    if cache.folder.exists():
        shutil.rmtree(cache.folder)
    return held
