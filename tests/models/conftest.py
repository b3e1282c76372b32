"""Configs of tiny models, one for each family, with sizes that no two axes share."""

from dataclasses import replace

import pytest
import torch

from interp.models.config import TransformerConfig
from interp.models.transformer import Transformer

# One layer, attention alone: no norm before it, no residuals, no W_O, then a LayerNorm and a head.
MINIMAL = TransformerConfig(
    n_layers=1,
    d_model=34,
    n_heads=1,
    d_head=34,
    d_vocab=8,
    n_ctx=19,
    output_projection=False,
    attention_norm=None,
    attention_residual=False,
    embedding="dyck_joint",
    max_depth=4,
    positional_embedding_type="none",
    initializer_range=0.5,
    dtype=torch.float64,
)
# Two layers, a norm before the MLP alone, residuals, linear positions on frozen one-hots.
STANDARD = TransformerConfig(
    n_layers=2,
    d_model=23,
    n_heads=2,
    d_head=11,
    d_mlp=17,
    d_vocab=8,
    n_ctx=19,
    attention_norm=None,
    final_norm=None,
    embedding="one_hot",
    positional_embedding_type="linear",
    linear_position_divisor=10.0,
    initializer_range=0.5,
    dtype=torch.float64,
)
# What language models use: rotary positions, grouped heads, a gated MLP, RMSNorm, no biases.
MODERN = TransformerConfig(
    n_layers=2,
    d_model=23,
    n_heads=4,
    d_head=6,
    n_key_value_heads=2,
    d_mlp=17,
    gated_mlp=True,
    act_fn="silu",
    attention_norm="RMS",
    mlp_norm="RMS",
    final_norm="RMS",
    attention_biases=False,
    mlp_biases=False,
    d_vocab=13,
    n_ctx=19,
    positional_embedding_type="rotary",
    initializer_range=0.5,
    dtype=torch.float64,
)
# GPT-2's shape: learned positions, LayerNorm everywhere, biases, tied head.
CLASSIC = TransformerConfig(
    n_layers=3,
    d_model=23,
    n_heads=2,
    d_head=11,
    d_mlp=17,
    d_vocab=13,
    n_ctx=19,
    tie_embeddings=True,
    initializer_range=0.5,
    dtype=torch.float64,
)
# An encoder: every token sees every other.
ENCODER = replace(
    CLASSIC,
    n_layers=1,
    attention_dir="bidirectional",
    positional_embedding_type="sinusoidal",
    d_model=26,
    act_fn="relu",
    tie_embeddings=False,
    unembed_bias=True,
    attn_scale=2.5,
)
CONFIGS = {
    "minimal": MINIMAL,
    "standard": STANDARD,
    "modern": MODERN,
    "classic": CLASSIC,
    "encoder": ENCODER,
}


def build(config: TransformerConfig) -> Transformer:
    """The config's model with biases, gains and positions away from their neutral values."""
    model = Transformer(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.rsplit(".", 1)[-1].startswith("W_"):
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.add_(0.3 * noise)
    return model


@pytest.fixture(scope="session", params=CONFIGS)
def tiny(request: pytest.FixtureRequest) -> Transformer:
    """Each family in turn. Nobody changes its weights."""
    return build(CONFIGS[request.param])


@pytest.fixture(scope="session")
def family() -> dict[str, Transformer]:
    """All families by name. Nobody changes their weights."""
    return {name: build(config) for name, config in CONFIGS.items()}


@pytest.fixture(scope="session")
def tokens_for():
    """Function from a config to tokens [3, 7] that it can read."""

    def make(config: TransformerConfig) -> torch.Tensor:
        if config.max_depth is not None:  # START, then well-nested brackets of two types
            lines = [[2, 4, 5, 7, 6, 5, 7], [2, 4, 4, 4, 6, 6, 5], [2, 5, 4, 5, 7, 6, 7]]
            return torch.tensor(lines)
        generator = torch.Generator().manual_seed(2)
        return torch.randint(config.d_vocab, (3, 7), generator=generator)

    return make


@pytest.fixture(scope="session")
def config_for():
    """Function from a family's name to its config, with changes."""

    def make(name: str, **changes: object) -> TransformerConfig:
        return replace(CONFIGS[name], **changes)

    return make


@pytest.fixture(scope="session")
def build_model():
    """Function from a config to a model whose biases and gains are not neutral."""
    return build
