"""Read a transformers model and its tokenizer: safetensors or GGUF, never a pickle.

``location`` is a folder, or a hub name whose files are on this machine (or may be downloaded).
"""

import importlib.util
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
)


def load_folder(
    folder: Path, *, dtype: torch.dtype, device: str | torch.device = "cpu"
) -> tuple[Any, Any]:
    """Model and tokenizer (None when the folder has none) of a folder written by transformers.

    Raises ValueError when the weights are missing, incomplete or pickled only.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(_why_no_model(folder))
    if not list(folder.glob("*.safetensors")):
        pickled = sorted({p.name for pattern in _PICKLES for p in folder.glob(pattern)})
        if pickled:
            raise ValueError(
                f"{folder} holds pickled weights only ({', '.join(pickled)}), which can run any "
                f"code when they are read. Convert them where you trust their origin: load there "
                f"and model.save_pretrained(...) writes safetensors"
            )
        raise ValueError(f"{folder} holds no weights: model.safetensors or its shards are missing")
    model = _load_model(str(folder), dtype=dtype, device=device, local_files_only=True)
    has_tokenizer = any((folder / name).is_file() for name in _TOKENIZER_FILES)
    tokenizer = (
        transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        if has_tokenizer
        else None
    )
    return model, tokenizer


def load_from_hub(
    name: str,
    *,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    revision: str | None = None,
    allow_download: bool = False,
) -> tuple[Any, Any]:
    """Model and tokenizer of a hub repository, from its local cache unless downloading is allowed.

    Raises FileNotFoundError when the files are not on this machine and may not be downloaded.
    """
    local_only = not allow_download
    try:
        model = _load_model(
            name, dtype=dtype, device=device, local_files_only=local_only, revision=revision
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            name, local_files_only=local_only, revision=revision
        )
    except OSError as error:
        if allow_download:
            raise
        raise FileNotFoundError(
            f"the hub model {name!r} is not complete on this machine, and nothing is downloaded "
            f"without being asked: interp.load({name!r}, allow_download=True)"
        ) from error
    return model, tokenizer


def load_gguf(
    file: Path, *, dtype: torch.dtype, device: str | torch.device = "cpu"
) -> tuple[Any, Any]:
    """Model and tokenizer of a GGUF file: dequantised to ``dtype``, an ordinary model."""
    if importlib.util.find_spec("gguf") is None:
        raise ImportError(f"reading {file.name} needs the package gguf: pip install 'interp[gguf]'")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype=dtype, local_files_only=True
    )
    # The weights are plain tensors now; what is left of the quantiser only forbids saving them.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        str(file.parent), gguf_file=file.name, local_files_only=True
    )
    return model.to(device).eval(), tokenizer


def model_class(config: transformers.PretrainedConfig) -> Any:
    """The class a checkpoint was saved from; without that note, the language model of its type."""
    for name in config.architectures or []:
        found = getattr(transformers, name, None)
        if found is None:
            raise ValueError(
                f"this checkpoint is a {name}, which transformers {transformers.__version__} does "
                f"not have: a newer transformers may, and code shipped with a checkpoint is not run"
            )
        return found
    for names, automatic in (
        (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, transformers.AutoModelForCausalLM),
        (modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, transformers.AutoModelForMaskedLM),
    ):
        if config.model_type in names:
            return automatic
    return transformers.AutoModel


def _load_model(
    location: str,
    *,
    dtype: torch.dtype,
    device: str | torch.device,
    local_files_only: bool,
    revision: str | None = None,
) -> Any:
    config = transformers.AutoConfig.from_pretrained(
        location, local_files_only=local_files_only, revision=revision
    )
    model, loading = model_class(config).from_pretrained(
        location,
        dtype=dtype,
        use_safetensors=True,
        local_files_only=local_files_only,
        revision=revision,
        output_loading_info=True,
    )
    wrong = sorted({*loading["missing_keys"], *map(str, loading["mismatched_keys"])})
    if wrong:
        shown = ", ".join(wrong[:5]) + (", ..." if len(wrong) > 5 else "")
        raise ValueError(
            f"the weights of {location} do not fill {type(model).__name__}: {len(wrong)} are "
            f"missing or of another shape and would be random numbers ({shown})"
        )
    return model.to(device).eval()


def _why_no_model(folder: Path) -> str:
    if (folder / "adapter_config.json").is_file():
        return (
            f"{folder} holds a peft adapter, not a model: load its base model and wrap it, "
            f"peft.PeftModel.from_pretrained(interp.load(BASE).model, {str(folder)!r})"
        )
    names = sorted(path.name for path in folder.iterdir())
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "") if names else "nothing"
    return f"{folder} is no model folder: it has no config.json (it has {shown})"
