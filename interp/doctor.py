"""What this machine can do for the toolkit, and what would be slow on it, and why."""

import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING, Literal

from interp.caches import caches, size
from interp.terminal import size_text

if TYPE_CHECKING:
    import torch

# absent: not here, and not needed; slow: works, the text says at what cost; broken: will not work
State = Literal["ok", "absent", "slow", "broken"]

DEVICES = ("cpu", "cuda", "mps")
DTYPES = ("float32", "float64", "bfloat16", "float16")
# distribution -> the version the project is tested with
TESTED = {
    "torch": "2.13",
    "transformers": "5.24",
    "transformer-lens": "4.3",
    "nnsight": "0.8",
    "triton": "3.9",
    "numpy": "2.4",
    "scipy": "1.17",
    "scikit-learn": "1.9",
}
_LITTLE_ROOM = 2 * 10**9


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at, and what was found."""

    area: str
    what: str
    state: State
    said: str


def examine(*, device: str | None = None, dtype: str | None = None) -> list[Finding]:
    """Look at versions, devices, threads, backends, compiler, disk and caches.

    ``device`` and ``dtype`` narrow the look at devices to what is going to be used; the device that
    is asked for and not there is ``broken``, otherwise it is only told.
    """
    return [
        *_versions(),
        *_devices(device, dtype or "float32"),
        *_threads(),
        *_backends(device or "cpu", dtype or "float32"),
        *_disk(),
    ]


def _versions() -> Iterator[Finding]:
    yield Finding("versions", "python", "ok", platform.python_version())
    for name, tested in TESTED.items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            # Triton exists for Linux alone, and only a GPU needs it
            state: State = "absent" if name == "triton" else "broken"
            yield Finding("versions", name, state, "not installed")
            continue
        is_tested = version.split(".")[:2] == tested.split(".")
        said = version if is_tested else f"{version} (tested with {tested})"
        yield Finding("versions", name, "ok", said)


def _devices(asked: str | None, dtype: str) -> Iterator[Finding]:
    import torch

    for name in (asked,) if asked else DEVICES:
        state, said = _try_device(torch.device(name), getattr(torch, dtype))
        if state == "broken" and not asked and name != "cpu":
            state = "absent"
        yield Finding("devices", name, state, said)


def _try_device(device: "torch.device", dtype: "torch.dtype") -> tuple[State, str]:
    """Multiply two small matrices there and say how it went."""
    import torch

    try:
        x = torch.ones(64, 64, device=device, dtype=dtype)
        (x @ x).sum().item()
    except (RuntimeError, AssertionError, TypeError) as error:
        return "broken", f"not usable: {_first_words(error)}"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        room = size_text(properties.total_memory)
        return "ok", f"{properties.name}, {room}, capability {properties.major}.{properties.minor}"
    return "ok", platform.processor() or platform.machine()


def _threads() -> Iterator[Finding]:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("threads", "cores", "ok", f"{cores} to be used by this process")
    n_threads = torch.get_num_threads()
    if n_threads > 1:
        said = (
            f"{n_threads}; small models are faster with OMP_NUM_THREADS=1, and much faster where "
            "other processes are busy (case studies set it for their workers)"
        )
        yield Finding("threads", "torch threads", "slow", said)
    else:
        yield Finding("threads", "torch threads", "ok", "1")
    load = os.getloadavg()[0]
    is_busy = cores is not None and load > cores
    said = f"{load:.1f} over the last minute" + (": others compute here too" if is_busy else "")
    yield Finding("threads", "load", "slow" if is_busy else "ok", said)
    if "OPENBLAS_CORETYPE" in os.environ:
        chosen = os.environ["OPENBLAS_CORETYPE"]
        said = f"OPENBLAS_CORETYPE={chosen} holds numpy to the instructions of that processor"
        yield Finding("threads", "numpy kernels", "slow", said)
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        said = "TRITON_INTERPRET is set: Triton kernels are interpreted, thousands of times slower"
        yield Finding("threads", "triton", "slow", said)


def _backends(device: str, dtype: str) -> Iterator[Finding]:
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        said = "none: the fused CPU kernel cannot be compiled; install gcc or clang, or set CC"
        yield Finding("compiler", "C", "slow", said)
    else:
        told = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
        yield Finding("compiler", "C", "ok", (told.stdout.splitlines() or [compiler])[0])
    yield from _attention_backends(device, dtype)


def _attention_backends(device: str, dtype: str) -> Iterator[Finding]:
    """Let every attention backend serve one small call, or say why it does not."""
    import torch

    from interp.kernels import attention, backends

    generator = torch.Generator().manual_seed(0)
    try:
        draws = torch.randn(3, 1, 2, 7, 16, generator=generator)
        q, k, v = draws.to(device=device, dtype=getattr(torch, dtype))
    except (RuntimeError, AssertionError, TypeError) as error:
        said = f"{device} in {dtype} is not usable: {_first_words(error)}"
        yield Finding("attention", "all backends", "broken", said)
        return
    for name in ("auto", *backends.MODULES):
        started = time.perf_counter()
        try:
            output = attention.attention(q, k, v, backend=name)
        except Exception as error:
            # whatever a backend trips over here, it would trip over in use
            state: State = "broken" if name == "auto" else "absent"
            yield Finding(
                "attention", name, state, f"does not serve {device}: {_first_words(error)}"
            )
            continue
        seconds = time.perf_counter() - started
        served = f", by {output.backend}: {output.reason}" if name == "auto" else ""
        yield Finding("attention", name, "ok", f"works (first call {seconds:.2f} s{served})")


def _disk() -> Iterator[Finding]:
    for cache in caches():
        said = f"{size_text(size(cache.folder))} in {cache.folder}"
        yield Finding("caches", cache.name, "ok", said)
    free = shutil.disk_usage(os.getcwd()).free
    is_full = free < _LITTLE_ROOM
    said = f"{size_text(free)} free" + (": runs may not fit" if is_full else "")
    yield Finding("disk", os.getcwd(), "slow" if is_full else "ok", said)


def _first_words(error: Exception) -> str:
    """The first sentence of an error; torch's go on for pages."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    sentence = line.partition(". ")[0]
    return sentence if len(sentence) <= 120 else sentence[:117] + "..."
