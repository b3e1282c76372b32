"""Build attention.c with the user's compiler, once, into the user's cache.

The library's name is a hash of everything it depends on: the source, the flags, the compiler and
its version, the processor. It is compiled under a name of its own and renamed when it is whole, so
that any number of processes may build at once and none ever loads a half-built one. The folder
belongs to the user alone; one that others may write to is refused, for what lies there is executed.
"""

import contextlib
import functools
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("attention.c")
FLAGS = (
    "-std=gnu11",
    "-O3",
    "-march=native",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
    "-pthread",
)
COMPILERS = ("gcc", "cc", "clang")
WHAT_TO_DO = (
    "install gcc or clang, or name a compiler in the environment variable CC; "
    "until then backend='strips' serves the same calls in plain torch"
)
# A build takes seconds; what is left of one after this long was killed.
STALE_SECONDS = 3600


@dataclass(frozen=True)
class Build:
    """The library, or why there is none; ``compiler`` is its path and the first line it says."""

    path: Path | None
    compiler: str | None
    problem: str | None


def cache_folder() -> Path:
    """Where libraries are kept: ``INTERP_CACHE`` or the user's cache folder, below ``kernels``."""
    chosen = os.environ.get("INTERP_CACHE")
    if chosen:
        return Path(chosen).expanduser() / "kernels"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "interp" / "kernels"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "interp" / "kernels"


@functools.cache
def build(*, defines: tuple[str, ...] = ()) -> Build:
    """The library of this process, built if need be; asked for once per process.

    ``defines`` are preprocessor names, for tests. Never raises for a machine that cannot build:
    the reason is in ``problem``.
    """
    if sys.platform == "win32":
        return Build(None, None, "the C kernel is not built on Windows; use backend='strips'")
    compiler = find_compiler()
    if compiler is None:
        looked = os.environ.get("CC") or ", ".join(COMPILERS)
        return Build(None, None, f"no C compiler found (looked for {looked}); {WHAT_TO_DO}")
    told = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    version = told.stdout + told.stderr
    described = f"{compiler}: {(version.splitlines() or ['says nothing'])[0]}"
    if told.returncode:
        return Build(None, described, f"{compiler} --version fails; {WHAT_TO_DO}")
    flags = (*FLAGS, *(f"-D{name}" for name in defines))
    try:
        folder = private_folder(cache_folder())
    except OSError as error:
        return Build(None, described, f"cannot use {cache_folder()}: {error.strerror or error}")
    target = folder / f"attention-{_key(version, flags)}.so"
    if not target.exists():
        problem = _compile(compiler, flags, target)
        if problem is not None:
            return Build(None, described, problem)
    return Build(target, described, None)


def find_compiler() -> str | None:
    """The path of the compiler to use: ``CC`` if it is set, and nothing else then."""
    chosen = os.environ.get("CC")
    candidates = (chosen,) if chosen else COMPILERS
    return next((path for name in candidates if (path := shutil.which(name))), None)


def private_folder(folder: Path) -> Path:
    """Make a folder that is the user's alone. Raises PermissionError for one that is not."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.getuid():
        raise PermissionError(0, "it belongs to somebody else, and libraries in it are executed")
    if stat.S_IMODE(found.st_mode) & 0o077:
        folder.chmod(0o700)
    return folder


def _key(version: str, flags: tuple[str, ...]) -> str:
    parts = (SOURCE.read_text(), "\n".join(flags), version, _processor(), platform.platform())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def _processor() -> str:
    """What -march=native looks at: a library built for one processor may not run on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    told = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features")
    kept = {line for line in lines if line.partition(":")[0].strip() in told}
    return "\n".join(sorted(kept))


def _compile(compiler: str, flags: tuple[str, ...], target: Path) -> str | None:
    """Compile beside the target and rename; the problem in words, or None."""
    _remove_stale(target.parent)
    descriptor, name = tempfile.mkstemp(suffix=".partial", prefix=target.stem, dir=target.parent)
    os.close(descriptor)
    partial = Path(name)
    try:
        command = [compiler, *flags, str(SOURCE), "-o", str(partial), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            last = "\n".join((done.stderr or done.stdout).splitlines()[-8:])
            return f"{compiler} failed with status {done.returncode}:\n{last}\n{WHAT_TO_DO}"
        if not partial.stat().st_size:
            return f"{compiler} succeeded and wrote nothing; {WHAT_TO_DO}"
        partial.chmod(0o700)
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        partial.replace(target)
    except OSError as error:
        return f"cannot build in {target.parent}: {error.strerror or error}"
    finally:
        with contextlib.suppress(FileNotFoundError):
            partial.unlink()
    return None


def _remove_stale(folder: Path) -> None:
    """Delete what builds that were killed have left."""
    for path in folder.glob("*.partial"):
        # another process may delete it first
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > STALE_SECONDS:
                path.unlink()
