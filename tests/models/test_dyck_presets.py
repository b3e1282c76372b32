"""The published configurations, number by number."""

import math

import pytest
import torch

from interp.models.dyck_language import DyckLanguage
from interp.models.dyck_presets import PRESETS, dyck_preset
from interp.models.dyck_training import next_token_loss
from interp.models.transformer import Transformer

MINIMAL = ("E1", "E2", "E3", "E4")


@pytest.mark.parametrize(
    ("name", "n_layers", "embedding", "learning_rate", "n_epochs", "contrastive_weight"),
    [
        ("E1", 1, "dyck_joint", 1e-2, 10, 0.0),
        ("E2", 1, "dyck_joint", 1e-2, 10, 0.3),
        ("E3", 1, "dyck_separate", 1e-2, 20, 0.0),
        ("E4", 1, "dyck_angle", 1e-2, 40, 0.0),
        ("E5", 2, "one_hot", 3e-3, 40, 0.0),
        ("E6", 2, "one_hot", 3e-3, 40, 0.0),
    ],
)
def test_presets_are_the_published_table(
    name: str,
    n_layers: int,
    embedding: str,
    learning_rate: float,
    n_epochs: int,
    contrastive_weight: float,
) -> None:
    model, training = dyck_preset(name, seed=7)
    assert (model.n_layers, model.embedding) == (n_layers, embedding)
    assert (model.d_model, model.n_heads, model.d_head, model.d_vocab) == (50, 1, 50, 8)
    assert model.score_scale == pytest.approx(math.sqrt(50))
    assert model.d_mlp == (None if name in MINIMAL else 50)
    assert model.act_fn == "gelu_new"
    assert model.attention_dir == "causal"
    assert (model.initializer_range, model.eps) == (0.02, 1e-5)
    assert model.attention_norm is None
    assert model.final_norm == ("LN" if name in MINIMAL else None)
    assert model.mlp_norm == "LN"
    assert model.output_projection is model.attention_residual is (name not in MINIMAL)
    assert model.mlp_residual
    assert not model.tie_embeddings
    assert not model.unembed_bias
    assert model.positional_embedding_type == ("linear" if name == "E6" else "none")
    assert model.linear_position_divisor == 6000
    assert (training.learning_rate, training.n_epochs) == (learning_rate, n_epochs)
    assert (training.batch_size, training.weight_decay, training.schedule) == (100, 0.0, "cosine")
    assert training.max_gradient_norm is None
    assert training.contrastive_weight == contrastive_weight
    assert training.loss_positions == "close_brackets"
    assert model.seed == training.seed == 7


def test_a_hundred_thousand_training_tokens_are_36_steps_an_epoch() -> None:
    _, training = dyck_preset("E1")
    assert len(training.learning_rates(n_examples=3572)) == 36 * 10


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("language", [DyckLanguage(2, 4), DyckLanguage(8, 10), DyckLanguage(1, 1)])
def test_every_preset_builds_and_learns_for_every_language(
    name: str, language: DyckLanguage
) -> None:
    config, _ = dyck_preset(name, language=language)
    model = Transformer(config)
    tokens = language.sample(3, 13, seed=0)
    assert model(tokens).shape == (3, 14, language.d_vocab)
    next_token_loss(model, tokens[:, :-1], tokens[:, 1:]).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    assert any(bool(gradient.any()) for gradient in gradients.values())


def test_frozen_embeddings_are_no_parameters() -> None:
    for name in PRESETS:
        names = [n for n, _ in Transformer(dyck_preset(name)[0]).named_parameters()]
        assert not any(n.startswith("embed") or n.startswith("pos_embed") for n in names)


def test_a_wider_language_gets_the_width_its_one_hots_need() -> None:
    config, _ = dyck_preset("E1", language=DyckLanguage(8, 10))
    assert config.d_model == config.d_head == config.n_embedding_dimensions == 4 + 16 * 11


def test_seeds_change_the_weights_and_nothing_else() -> None:
    first, again, other = (Transformer(dyck_preset("E5", seed=seed)[0]) for seed in (1, 1, 2))
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name))
        if name.rsplit(".", 1)[-1].startswith("W_"):
            assert not torch.equal(parameter, other.get_parameter(name))


@pytest.mark.parametrize(("name", "seed"), [("E7", 0), ("e1", 0), ("E1", -1)])
def test_unknown_presets_and_bad_seeds_are_refused(name: str, seed: int) -> None:
    with pytest.raises(ValueError, match="is no preset|seed=-1"):
        dyck_preset(name, seed=seed)
