"""SmolLM2-135M on news: sinks, massive activations and streaming, at a size of a minute or two.

Bounds are those of the full measurement (12,288 tokens of AG News each, no beginning-of-sequence
token); the samples here are a prefix of it. Layers and blocks are counted from 0.
"""

import os
from pathlib import Path

import pytest
import torch

from interp.language_loss import perplexity, token_losses
from interp.loading import load
from interp.model_cache import cache_folder
from interp.residual_profile import residual_profile
from interp.residual_stream import block_outputs, block_writes, edited_block_output
from interp.sink_profile import sink_profile, value_drains
from interp.streaming import streaming_losses
from interp.token_windows import packed_windows, read_texts, text_windows

NAME = "smollm2-135m"
BLOCK, DIMENSION = 11, 507  # where the massive activation is written, at position 0

_models = os.environ.get("INTERP_MODELS")
_data = os.environ.get("INTERP_DATA")
_places = [cache_folder() / "models" / NAME, *([Path(_models) / NAME] if _models else [])]

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.slow,
    pytest.mark.skipif(
        not any(place.is_dir() for place in _places),
        reason=f"{NAME} is neither in INTERP_MODELS nor in the cache: run `interp fetch {NAME}`",
    ),
    pytest.mark.skipif(
        _data is None, reason="INTERP_DATA does not name the folder that holds ag_news/"
    ),
]


@pytest.fixture(scope="module")
def loaded():
    return load(NAME)


@pytest.fixture(scope="module")
def model(loaded):
    return loaded.model


@pytest.fixture(scope="module")
def texts():
    return read_texts(Path(_data) / "ag_news" / "test.csv", columns=(1, 2))


@pytest.fixture(scope="module")
def short(loaded, texts):
    return text_windows(texts, loaded.tokenizer, n_tokens=64, n_windows=24)


@pytest.fixture(scope="module")
def long(loaded, texts):
    return packed_windows(texts, loaded.tokenizer, n_tokens=256, n_windows=6)


@pytest.fixture(scope="module")
def sinks(model, short):
    return sink_profile(model, short)


@pytest.fixture(scope="module")
def residual(model, long):
    return residual_profile(model, long, batch_size=2)


def test_three_heads_in_four_have_a_sink_and_the_layers_come_in_two_waves(sinks):
    assert 0.70 <= sinks.sink_rate(epsilon=0.3) <= 0.80
    by_layer = sinks.sink_rate_by_layer(epsilon=0.3)
    assert by_layer[12:28].min() >= 0.65
    assert by_layer[10:12].max() <= 0.05
    assert by_layer[:2].max() <= 0.05


def test_sinks_drain_their_values_where_they_are_sinks_and_only_there(model, short):
    drain = value_drains(model, short[:8]).mean((0, 2))
    assert drain[12:29].mean() <= 0.30
    assert drain[10:12].mean() >= 0.8


def test_every_text_has_the_massive_activation_at_its_first_token(residual):
    places = residual.places()
    place = (places["position"] == 0) & (places["dimension"] == DIMENSION)
    found = places[place].set_index("layer")["share"]
    assert set(found.index) >= set(range(11, 28))
    assert (found.loc[11:27] == 1).all()
    assert residual.outliers.query("12 <= layer <= 27")["position"].eq(0).all()


def test_one_mlp_writes_the_massive_activation(model, long):
    writes = block_writes(model, long[:2], BLOCK, position=0, dimension=DIMENSION, batch_size=2)
    change = writes["after"] - writes["before"]
    assert (writes["mlp"] / change).min() >= 0.95


def test_early_secondary_sinks_are_nearly_all_one_token(residual, loaded, long):
    first_wave = residual.waves()[0]
    assert first_wave.last_layer < BLOCK
    found = residual.secondary_sinks(first_wave)
    tokens = long[found["sample"].tolist(), found["position"].tolist()]
    values, counts = tokens.unique(return_counts=True)
    assert counts.max() / counts.sum() >= 0.8
    assert loaded.tokenizer.decode([int(values[counts.argmax()])]) == " the"


def test_what_removing_the_massive_activation_does_and_what_its_mean_does_not(model, long):
    measured, held_out = long[:3], long[3:]
    mean = torch.cat([h[:, BLOCK, 0] for h in block_outputs(model, held_out)]).mean(0)
    ranked = mean.abs().argsort(descending=True).tolist()
    assert ranked[0] == DIMENSION

    def set_to(dimensions, value):
        def edit(states):
            states[:, dimensions] = value
            return states

        return edit

    def measure(edit):
        with edited_block_output(model, BLOCK, edit):
            return perplexity(token_losses(model, measured))

    plain = perplexity(token_losses(model, measured))
    assert measure(set_to([DIMENSION], 0.0)) >= 1000 * plain
    assert measure(set_to([DIMENSION], float(mean[DIMENSION]))) == pytest.approx(plain, rel=0.02)
    assert measure(set_to(ranked[1:9], 0.0)) == pytest.approx(plain, rel=0.15)
    # The control that forbids to call the sink indispensable: without the whole vector the model
    # does far better than without its largest entry.
    assert measure(torch.zeros_like) <= 2 * plain


def test_streaming_needs_sinks_near_by(model, loaded, texts):
    tokens = packed_windows(texts, loaded.tokenizer, n_tokens=512, n_windows=2)

    def measure(n_sinks, n_recent, **positions):
        losses = streaming_losses(model, tokens, n_sinks=n_sinks, n_recent=n_recent, **positions)
        return perplexity(losses[:, 96:])  # once the cache is full

    without, with_sinks = measure(0, 96), measure(4, 92)
    shifted = measure(4, 92, positions="shifted")
    assert without >= 1.5 * with_sinks
    assert shifted == pytest.approx(with_sinks, rel=0.02)
    assert measure(4, 92, gap=16384) >= 10 * shifted
