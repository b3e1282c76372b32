"""Models on disk: a folder with the weights as safetensors and the config as JSON.

A file is written under a temporary name, synced and renamed: a name never holds half a file. The
weights carry the config they belong to, so that files of two models in one folder are told apart.
Nothing is unpickled.
"""

import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from interp.models.config import TransformerConfig
from interp.models.transformer import Transformer

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "weights.safetensors"
_CONFIG_KEY = "config"


def save_checkpoint(model: Transformer, folder: str | Path) -> Path:
    """Write ``model`` to ``folder``, which is made if it is missing, and return the folder.

    A checkpoint that is there is replaced. Whenever writing stops, the folder holds the old one,
    the new one, or something that `load_checkpoint` refuses.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = model.cfg.to_json()
    config_file = folder / CONFIG_FILE
    if config_file.exists() and config_file.read_text() != config:
        config_file.unlink()
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    metadata = {_CONFIG_KEY: config}
    _write(folder / WEIGHTS_FILE, lambda path: save_file(weights, path, metadata=metadata))
    _write(config_file, lambda path: path.write_text(config))
    return folder


def load_checkpoint(
    folder: str | Path,
    *,
    config: TransformerConfig | None = None,
    device: torch.device | str = "cpu",
) -> Transformer:
    """The model that `save_checkpoint` wrote to ``folder``, on ``device``.

    config: what the caller expects; None takes whatever was saved.

    Raises ValueError for a missing or truncated file, for weights that belong to another config,
    for unknown config keys, and for a checkpoint of another config than the expected one; the
    message names the file, what came and what was expected. The device is no difference.
    """
    folder = Path(folder)
    saved = _read_config(folder)
    if config is not None:
        _compare(folder, saved, config)
    weights = _read_weights(folder / WEIGHTS_FILE, saved)
    model = Transformer(replace(saved, device=str(device)))
    _check_tensors(folder / WEIGHTS_FILE, weights, model.state_dict())
    model.load_state_dict(weights)
    return model


def _read_config(folder: Path) -> TransformerConfig:
    path = folder / CONFIG_FILE
    if not path.is_file():
        found = ", ".join(sorted(p.name for p in folder.iterdir())) if folder.is_dir() else None
        holds = f"it holds {found or 'nothing'}" if folder.is_dir() else "there is no such folder"
        raise ValueError(
            f"{folder} is no checkpoint: expected {CONFIG_FILE} and {WEIGHTS_FILE}, but {holds}"
        )
    try:
        return TransformerConfig.from_json(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _compare(folder: Path, saved: TransformerConfig, expected: TransformerConfig) -> None:
    names = [field.name for field in fields(expected) if field.name != "device"]
    differences = [
        f"{name}={getattr(saved, name)!r}, expected {getattr(expected, name)!r}"
        for name in names
        if getattr(saved, name) != getattr(expected, name)
    ]
    if differences:
        raise ValueError(f"{folder} holds a model of another config: {'; '.join(differences)}")


def _read_weights(path: Path, config: TransformerConfig) -> dict[str, Tensor]:
    if not path.is_file():
        raise ValueError(f"{path} is missing: the checkpoint is incomplete; save it again")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"{path} ({path.stat().st_size} bytes) is truncated or no safetensors file ({error}); "
            "copy or save it again"
        ) from error
    if _CONFIG_KEY not in metadata:
        raise ValueError(f"{path} was not written by save_checkpoint: it carries no config")
    if metadata[_CONFIG_KEY] != config.to_json():
        raise ValueError(
            f"{path} belongs to another config than the {CONFIG_FILE} beside it; "
            "the folder mixes two checkpoints: save the model again"
        )
    return weights


def _check_tensors(path: Path, came: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    missing, unknown = sorted(expected.keys() - came.keys()), sorted(came.keys() - expected.keys())
    if missing or unknown:
        raise ValueError(
            f"{path} does not fit its config: missing {missing or 'nothing'}, "
            f"unknown {unknown or 'nothing'}"
        )
    for name, tensor in came.items():
        wanted = expected[name]
        if tensor.shape != wanted.shape or tensor.dtype != wanted.dtype:
            raise ValueError(
                f"{path}: {name} is {tensor.dtype} {tuple(tensor.shape)}, expected {wanted.dtype} "
                f"{tuple(wanted.shape)}"
            )


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """Fill a temporary file beside ``path``, sync it to disk, and rename it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
