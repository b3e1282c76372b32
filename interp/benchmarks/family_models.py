"""Tiny random models of every text architecture that the installed transformers knows.

A config is shrunk by what its fields are called: sizes become small numbers in which no two axes
are equal where the architecture allows it, lists with one entry per layer are cut to the layers.
"""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.pytorch_utils import Conv1D

D_VOCAB = 97
MOST_PARAMETERS = 12_000_000
N_LAYERS = 2
# Layer types that are softmax attention; a hybrid gets as many layers as one of them needs.
_SOFTMAX_LAYERS = (
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "indexed_attention",
    "hybrid",
)
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
    "moe_num_active_experts": 2,
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
    "mamba_d_ssm": 64,
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
_ALWAYS = (
    "vocab_size",
    "head_dim",
    "num_key_value_heads",
    "n_routed_experts",
    "num_experts_per_tok",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
)
# Sub-configs that describe parts of a language model and no model beside it.
_PARTS_OF_ONE_MODEL = ("attn_config", "ffn_config", "esmfold_config")

_QWEN4_EXP = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 4,
    "indexer_compress_ratio": 2,
    "hc_count": 2,
    "hc_lowrank": 8,
}
# What names alone do not tell: fields by model type, set whatever their default is.
_SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "dots1": {"n_shared_experts": 1},
    "esm": {"mask_token_id": 3, "position_embedding_type": "rotary"},
    "esmc": {"num_key_value_heads": 4},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": [44] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "vocab_size_per_layer_input": D_VOCAB,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
    },
    "gemma4_text": {
        "vocab_size_per_layer_input": D_VOCAB,
        "hidden_size_per_layer_input": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "kimi_linear": {"linear_head_dim": 8, "linear_num_heads": 4, "num_expert_group": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"head_dim": 4},
    "luke": {"entity_vocab_size": 11, "entity_emb_size": 16},
    "mamba2": {"num_heads": 8},
    "neomme": {"head_dim": 16},
    "qwen4_exp": _QWEN4_EXP,
    "qwen4_exp_text": _QWEN4_EXP,
    "reformer": {"axial_pos_embds_dim": [16, 16], "axial_pos_shape": [8, 8]},
    "roc_bert": {
        "pronunciation_vocab_size": 11,
        "pronunciation_embed_dim": 16,
        "shape_vocab_size": 13,
        "shape_embed_dim": 16,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "mamba_dt_rank": 4,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"],
        "hybrid_layer_ids": [1],
        "mamba_headdim": 8,
        "n_mamba_heads": 8,
        "mamba_ngroups": 1,
        "num_key_value_heads": 4,
        "attention_head_dim": 16,
        "attention_hidden_size": 64,
        "adapter_rank": 8,
    },
    "zaya": {"num_experts_per_tok": 1},
}
# Freshly initialised projections of these are left as they are: without a normalisation between
# them, larger ones drive scores to where single precision knows two digits.
_LEFT_AS_BORN = ("mobilebert",)


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture: its model type and the class that is built."""

    model_type: str
    class_name: str

    @property
    def is_causal(self) -> bool:
        """Whether the class that is built predicts the next token."""
        return modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(self.model_type) == (
            self.class_name
        )

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


def tiny_config(family: Family, **overrides: Any) -> PretrainedConfig:
    """The smallest config of this architecture that still has everything it is known for.

    Raises ValueError for a model that is put together from several, such as vision and language.
    """
    config_class = family.model_class.config_class
    others = [name for name in config_class.sub_configs if name not in _PARTS_OF_ONE_MODEL]
    if others:
        raise ValueError(f"is put together from several models ({', '.join(others)})")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        default = config_class()
        special = {**_SPECIAL.get(family.model_type, {}), **overrides}
        wanted = {**_SIZES, **special}
        if vars(default).get("kv_lora_rank") is not None:
            wanted["num_key_value_heads"] = wanted["num_attention_heads"]  # latent: one each
        for n_layers in (N_LAYERS, *_MORE_LAYERS):
            layers = dict.fromkeys(_LAYER_COUNTS, n_layers)
            fitted = _fit(config_class, default, {**layers, **wanted}, always=(*_ALWAYS, *special))
            config = config_class(**fitted)
            types = getattr(config, "layer_types", None)
            if not types or any(kind in _SOFTMAX_LAYERS for kind in types):
                break
    if family.is_causal and hasattr(config, "is_decoder"):
        config.is_decoder = True
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 1
    return config


def _fit(
    config_class: type[PretrainedConfig],
    default: PretrainedConfig,
    wanted: Mapping[str, Any],
    *,
    always: Sequence[str],
) -> dict[str, Any]:
    """Of the wanted values those for fields that this config has and, unless always, uses."""
    fields = {field.name for field in dataclasses.fields(config_class)}
    sizes: dict[str, Any] = {}
    for name, value in wanted.items():
        own = config_class.attribute_map.get(name, name)
        if own in fields and (name in always or vars(default).get(own) is not None):
            sizes[own] = value
    return sizes


def tiny_model(family: Family, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A random model of this family in evaluation mode; global random state is left alone.

    Small projections are enlarged to a standard deviation of 0.2, and zeros drawn anew, so that
    attention has something to say and is heard: freshly initialised, every pattern is uniform to
    three digits.

    Raises ValueError where the tiny config is not tiny.
    """
    config = tiny_config(family, **overrides)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.device("meta"):
            n_parameters = sum(p.numel() for p in family.model_class(config).parameters())
        if n_parameters > MOST_PARAMETERS:
            raise ValueError(f"the tiny config still has {n_parameters:,} parameters")
        torch.manual_seed(seed)
        model = family.model_class(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules() if family.model_type not in _LEFT_AS_BORN else ():
            if isinstance(module, nn.Linear | Conv1D) and module.weight.numel() > 1:
                deviation = float(module.weight.std())
                if deviation == 0:
                    module.weight.normal_(0, 0.2, generator=generator)
                elif deviation < 0.1:
                    module.weight.mul_(0.2 / deviation)
    return model.eval()
