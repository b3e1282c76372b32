"""What counts when a model is trained on brackets, and that training works."""

from dataclasses import replace

import pytest
import torch

from interp.models.dyck_language import DyckLanguage
from interp.models.dyck_presets import dyck_preset
from interp.models.dyck_recognisers import uniform_recogniser
from interp.models.dyck_training import (
    DyckTrainingConfig,
    contrastive_distance,
    loss_targets,
    next_token_loss,
    train_dyck,
)
from interp.models.dyck_vocabulary import PAD, START
from interp.models.transformer import Transformer

LANGUAGE = DyckLanguage(2, 4)


def configure(
    *,
    n_epochs: int = 1,
    loss_positions: str = "close_brackets",
    contrastive_weight: float = 0.0,
    frozen: tuple[str, ...] = (),
) -> DyckTrainingConfig:
    return DyckTrainingConfig(
        n_epochs=n_epochs,
        batch_size=50,
        learning_rate=1e-2,
        loss_positions=loss_positions,
        contrastive_weight=contrastive_weight,
        frozen=frozen,
    )


def minimal_model(seed: int = 0) -> Transformer:
    return Transformer(dyck_preset("E1", seed=seed)[0])


def test_only_positions_before_a_close_bracket_have_a_loss() -> None:
    tokens = LANGUAGE.encode("^[(())[]")[None]
    assert loss_targets(tokens, LANGUAGE).tolist() == [[0, 0, 0, 7, 7, 0, 6]]
    assert loss_targets(tokens, LANGUAGE, loss_positions="all").tolist() == [[4, 5, 5, 7, 7, 4, 6]]
    padded = LANGUAGE.encode("^[]$_")[None]
    assert loss_targets(padded, LANGUAGE, loss_positions="all").tolist() == [[4, 6, 3, PAD]]


@torch.no_grad()
def test_the_loss_is_the_mean_cross_entropy_over_those_positions() -> None:
    model = minimal_model()
    tokens = LANGUAGE.sample(7, 28, seed=0)
    loss = next_token_loss(model, tokens[:, :-1], loss_targets(tokens, LANGUAGE))
    log_probs = model(tokens[:, :-1]).double().log_softmax(-1)
    losses = [
        -float(log_probs[row, position, tokens[row, position + 1]])
        for row in range(7)
        for position in range(28)
        if int(tokens[row, position + 1]) in LANGUAGE.close_tokens
    ]
    assert float(loss) == pytest.approx(sum(losses) / len(losses), rel=1e-6)


def longer_strings(inputs: torch.Tensor, inserted: torch.Tensor) -> torch.Tensor:
    rows = [[START, *inserted.tolist(), *row[1:]] for row in inputs.tolist()]
    return torch.tensor(rows)


@torch.no_grad()
def test_the_contrastive_distance_compares_the_same_brackets_with_and_without_insertion() -> None:
    model = minimal_model()
    inputs = LANGUAGE.sample(5, 11, seed=0)
    inserted = LANGUAGE.probe_with_pair(1, 2)
    logits = model(inputs)
    longer = model(longer_strings(inputs, inserted))
    expected = 0.0
    for row in range(5):
        for position in range(1, 12):
            expected += (longer[row, position + 18] - logits[row, position]).square().mean()
    distance = contrastive_distance(model, inputs, logits, inserted)
    assert float(distance) == pytest.approx(float(expected) / (5 * 11), rel=1e-4)
    assert float(distance) > 1e-6


@torch.no_grad()
def test_a_balanced_model_has_no_contrastive_distance() -> None:
    # the norm divides the length out, up to its eps
    model = uniform_recogniser(LANGUAGE, length=64)
    inputs = LANGUAGE.sample(5, 28, seed=0)
    depth = LANGUAGE.depth(inputs)
    assert (depth[:, 1:] == 0).any()
    inserted = LANGUAGE.probe_with_pair(0, 3)
    distance = contrastive_distance(model, inputs, model(inputs), inserted)
    assert float(distance) < 1e-6


def test_training_with_the_regulariser_brings_the_contrastive_distance_down() -> None:
    tokens = LANGUAGE.sample(500, 28, seed=0)
    distances = []
    for weight in (0.0, 3.0):
        model = minimal_model()
        train_dyck(model, tokens, LANGUAGE, configure(n_epochs=4, contrastive_weight=weight))
        inputs = tokens[:50, :-1]
        with torch.no_grad():
            inserted = LANGUAGE.probe_with_pair(1, 1)
            distances.append(float(contrastive_distance(model, inputs, model(inputs), inserted)))
    assert distances[1] < distances[0] / 2


def test_a_minimal_model_learns_which_bracket_closes() -> None:
    tokens = LANGUAGE.sample(1000, 28, seed=0)
    model = minimal_model()
    inputs, targets = tokens[:, :-1], loss_targets(tokens, LANGUAGE)
    before = next_token_loss(model, inputs, targets).item()
    history = train_dyck(model, tokens, LANGUAGE, configure(n_epochs=5))
    after = next_token_loss(model, inputs, targets).item()
    assert len(history.loss) == 5 * 20
    assert before > 1.5  # ln 8 = 2.08 is what an untrained model pays
    assert after < 0.1


@pytest.mark.parametrize("contrastive_weight", [0.0, 0.3])
def test_the_same_seed_trains_the_same_bits(contrastive_weight: float) -> None:
    tokens = LANGUAGE.sample(130, 28, seed=0)
    config = configure(contrastive_weight=contrastive_weight)
    weights = []
    for seed in (0, 0, 1):
        model = minimal_model()
        train_dyck(model, tokens, LANGUAGE, replace(config, seed=seed))
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(weights[0], weights[1], strict=True))
    assert not torch.equal(weights[0][0], weights[2][0])


def test_frozen_attention_keeps_given_scores_while_the_rest_is_trained() -> None:
    tokens = LANGUAGE.sample(500, 28, seed=0)
    model = minimal_model()
    attention = model.blocks[0].attn
    with torch.no_grad():
        attention.W_Q.zero_()
        attention.W_K.zero_()
    value_before = attention.W_V.detach().clone()
    train_dyck(model, tokens, LANGUAGE, configure(frozen=("W_Q", "W_K", "b_Q", "b_K")))
    assert not attention.W_Q.any()
    assert not attention.W_K.any()
    assert not torch.equal(attention.W_V, value_before)


def test_complete_strings_can_be_trained_on_at_every_position() -> None:
    tokens = LANGUAGE.sample(100, (2, 28), mode="complete", seed=0)
    model = minimal_model()
    history = train_dyck(model, tokens, LANGUAGE, configure(n_epochs=2, loss_positions="all"))
    assert float(history.loss[-1]) < float(history.loss[0])


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="loss_positions='closes' is unknown"):
        configure(loss_positions="closes")
    with pytest.raises(ValueError, match="contrastive_weight=-0.3"):
        configure(contrastive_weight=-0.3)
    with pytest.raises(ValueError, match="no position has a loss"):
        train_dyck(minimal_model(), LANGUAGE.encode("^[[")[None], LANGUAGE, configure())
