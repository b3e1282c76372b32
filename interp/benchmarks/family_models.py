"""Tiny random models of every text architecture that the installed transformers knows.

A config is shrunk by what its fields are called: sizes become small numbers in which no two axes
are equal where the architecture allows it, lists with one entry per layer are cut to the layers.
"""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.pytorch_utils import Conv1D

D_VOCAB = 97
MOST_PARAMETERS = 5_000_000
N_LAYERS = 2
# Layer types that are softmax attention; a hybrid gets as many layers as one of them needs.
_SOFTMAX_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")
_MORE_LAYERS = (4, 6, 8)

# name of a config field -> its tiny value; where a config has several names for one thing they
# all are set alike
_SIZES: dict[str, Any] = {
    "vocab_size": D_VOCAB,
    "hidden_size": 32,
    "d_model": 32,
    "embedding_size": 32,
    "num_attention_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rotary_dim": 4,
    "d_kv": 8,
    "intermediate_size": 44,
    "ffn_dim": 44,
    "encoder_ffn_dim": 44,
    "decoder_ffn_dim": 44,
    "d_ff": 44,
    "max_position_embeddings": 64,
    "max_source_positions": 64,
    "max_target_positions": 64,
    "type_vocab_size": 2,
    "sliding_window": 5,
    "attention_chunk_size": 7,
    # latent attention
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "qk_head_dim": 10,
    "v_head_dim": 8,
    # mixtures of experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "top_k": 2,
    "moe_intermediate_size": 20,
    "expert_ffn_hidden_size": 20,
    "shared_expert_intermediate_size": 20,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # linear attention and state spaces
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "state_size": 8,
    "n_groups": 1,
    "lru_width": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "mask_token_id": 3,
}


_LAYER_COUNTS = (
    "num_hidden_layers",
    "encoder_layers",
    "decoder_layers",
    "num_decoder_layers",
    "num_layers",
)
# Set even where the default is None, since the model computes with them.
_ALWAYS = ("head_dim", "pad_token_id", "bos_token_id", "eos_token_id")

# What names alone do not tell.
_SPECIAL: dict[str, dict[str, Any]] = {}


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture: its model type and the class that is built."""

    model_type: str
    class_name: str

    @property
    def model_class(self) -> type[PreTrainedModel]:
        return getattr(transformers, self.class_name)


def text_families() -> list[Family]:
    """Every architecture that transformers can use as a language model or as a text encoder."""
    chosen: dict[str, str] = {}
    for names in (
        modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
    ):
        for model_type, class_name in names.items():
            chosen.setdefault(model_type, class_name)
    return [Family(model_type, name) for model_type, name in sorted(chosen.items())]


def tiny_config(model_type: str, **overrides: Any) -> PretrainedConfig:
    """The smallest config of this architecture that still has everything it is known for."""
    config_class = CONFIG_MAPPING[model_type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        default = config_class()
        wanted = {**_SIZES, **_SPECIAL.get(model_type, {}), **overrides}
        if getattr(default, "kv_lora_rank", None) is not None:
            wanted["num_key_value_heads"] = wanted["num_attention_heads"]
        for n_layers in (N_LAYERS, *_MORE_LAYERS):
            layers = dict.fromkeys(_LAYER_COUNTS, n_layers)
            config = config_class(**_fit(config_class, default, {**wanted, **layers}))
            types = getattr(config, "layer_types", None)
            if not types or any(kind in _SOFTMAX_LAYERS for kind in types):
                break
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 1
    return config


def _fit(
    config_class: type[PretrainedConfig], default: PretrainedConfig, wanted: Mapping[str, Any]
) -> dict[str, Any]:
    """Values for the fields that this config has, lists by layer cut to the layers."""
    fields = {field.name for field in dataclasses.fields(config_class)}
    aliases = config_class.attribute_map
    sizes: dict[str, Any] = {}
    for name, value in wanted.items():
        own = aliases.get(name, name)
        if (
            own in fields
            and own not in sizes
            and (vars(default).get(own) is not None or name in _ALWAYS)
        ):
            sizes[own] = value
    return sizes


def tiny_model(family: Family, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random model of this family in evaluation mode; global random state is left alone.

    Small projections are enlarged to a standard deviation of 0.2, so that attention has something
    to say: freshly initialised, every pattern is uniform to three digits.

    Raises ValueError where the tiny config is not tiny.
    """
    config = tiny_config(family.model_type, **overrides)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.device("meta"):
            n_parameters = sum(p.numel() for p in family.model_class(config).parameters())
        if n_parameters > MOST_PARAMETERS:
            raise ValueError(f"the tiny config still has {n_parameters:,} parameters")
        torch.manual_seed(seed)
        model = family.model_class(config)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear | Conv1D):
                deviation = float(module.weight.std())
                if 0 < deviation < 0.1:
                    module.weight.mul_(0.2 / deviation)
    return model.eval()
