"""`interp.load`: one name, and the right kind of model with its tokenizer.

A string is looked up in this order: a model of our zoo, a path on disk, a short name in
``INTERP_MODELS`` or in our cache (``smollm2-135m`` also in its installed package), a hub name. A
`Path` always means the disk. Nothing is downloaded unless ``allow_download=True``, and no pickle is
ever read.
"""

import difflib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from interp.model_cache import PACKAGED_MODELS, find_model
from interp.model_zoo import build_zoo_model, zoo_names
from interp.models.checkpoints import WEIGHTS_FILE, load_checkpoint

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, what turns text into its tokens, and where both came from.

    model: a transformers model, or one of our zoo.
    tokenizer: a transformers tokenizer; for the zoo's Dyck models their language, with ``encode``
        and ``decode``; None when the folder has none.
    name: the name that was asked for.
    source: where it was found, in words: "zoo", a path, or the hub's name.
    """

    model: Any = field(repr=False)
    tokenizer: Any = field(repr=False)
    name: str
    source: str


def load(
    name: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "float32",
    allow_download: bool = False,
    revision: str | None = None,
) -> LoadedModel:
    """Load a zoo model, a folder, a GGUF file or a hub model, each with its tokenizer.

    name: see the top of this module; the zoo's names are in `interp.model_zoo`. A folder is one of
        `interp.models.checkpoints.save_checkpoint` or of transformers' ``save_pretrained``.
    dtype: of the weights, float32 unless asked otherwise, whatever the checkpoint holds.
    allow_download: let the hub's client fetch what is not on this machine.
    revision: branch, tag or commit of a hub model.

    Raises FileNotFoundError when there is no such model here, saying what to do; ValueError for
    pickled or incomplete weights, or a folder that is no model.
    """
    dtype = _as_dtype(dtype)
    path = Path(name).expanduser()
    if isinstance(name, str) and name in zoo_names():
        if revision is not None:
            raise ValueError(f"revision is for hub models; {name!r} is a zoo model")
        zoo_model, language = build_zoo_model(name, dtype=dtype)
        return LoadedModel(zoo_model.to(device).eval(), language, name, "zoo")
    found = path if isinstance(name, Path) or path.exists() else find_model(name)
    if found is not None:
        if revision is not None:
            raise ValueError(f"revision is for hub models; {name} is here: {found}")
        model, tokenizer = _load_path(found, device=device, dtype=dtype)
        return LoadedModel(model, tokenizer, str(name), str(found))
    packaged = PACKAGED_MODELS.get(str(name))
    hub = packaged.hub if packaged else str(name)
    _check_could_be_on_a_hub(hub)

    from interp.hugging_face import load_from_hub

    try:
        model, tokenizer = load_from_hub(
            hub, dtype=dtype, device=device, revision=revision, allow_download=allow_download
        )
    except FileNotFoundError as error:
        if packaged is None:
            raise
        raise FileNotFoundError(
            f"{name!r} is not on this machine. Say `interp fetch {name}` or interp.fetch({name!r})"
            f", and pip brings the package that ships it; or take it from the hub, not quantised: "
            f"interp.load({name!r}, allow_download=True)"
        ) from error
    return LoadedModel(model, tokenizer, str(name), f"hub: {hub}")


def _load_path(path: Path, *, device: str | torch.device, dtype: torch.dtype) -> tuple[Any, Any]:
    from interp.hugging_face import load_folder, load_gguf

    if not path.exists():
        raise FileNotFoundError(f"there is no file or folder {path}")
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ValueError(
                f"{path} is no model: a single file must be a GGUF file (.gguf); for safetensors "
                f"name the folder that also holds config.json. Pickled weights are never read"
            )
        return load_gguf(path, dtype=dtype, device=device)
    packed = sorted(path.glob("*.gguf"))
    if packed and not (path / "config.json").is_file():
        if len(packed) > 1:
            names = ", ".join(file.name for file in packed)
            raise ValueError(f"{path} holds several GGUF files: name one of {names}")
        return load_gguf(packed[0], dtype=dtype, device=device)
    if (path / WEIGHTS_FILE).is_file():
        return load_checkpoint(path).to(device=device, dtype=dtype).eval(), None
    return load_folder(path, dtype=dtype, device=device)


def _as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        if not dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating-point type, got {dtype}")
        return dtype
    if dtype not in _DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
    return _DTYPES[dtype]


def _check_could_be_on_a_hub(name: str) -> None:
    parts = name.split("/")
    if len(parts) <= 2 and all(parts) and not name.startswith((".", "~")):
        # A bare word is rarely a hub name but often a misspelt one of ours.
        ours = [*zoo_names(), *PACKAGED_MODELS]
        close = difflib.get_close_matches(name, ours, n=1, cutoff=0.75)
        if close:
            raise FileNotFoundError(f"there is no model {name!r}: did you mean {close[0]!r}?")
        return
    raise FileNotFoundError(f"there is no file or folder {name}, and no hub model has such a name")
