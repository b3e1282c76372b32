from itertools import combinations

import numpy as np
import pytest
import torch

from interp.attention_variation import (
    attention_variation,
    probe_pattern,
    random_attention,
    random_attention_variation,
)
from interp.models.config import TransformerConfig
from interp.models.dyck_language import DyckLanguage
from interp.models.transformer import Transformer

LANGUAGE = DyckLanguage(2, 4)


def _model(seed=0, **changes):
    sizes = {"n_layers": 2, "d_model": 12, "n_heads": 3, "d_head": 5, "d_mlp": 7, "n_ctx": 40}
    config = TransformerConfig(
        **{**sizes, "d_vocab": LANGUAGE.d_vocab, "seed": seed, "initializer_range": 0.7, **changes}
    )
    return Transformer(config)


def test_it_is_the_mean_squared_frobenius_distance_over_pairs():
    patterns = np.random.default_rng(3).random((7, 5, 11))
    pairs = [((a - b) ** 2).sum() for a, b in combinations(patterns, 2)]
    assert attention_variation(patterns) == pytest.approx(np.mean(pairs), rel=1e-12)


def test_equal_patterns_do_not_vary_and_opposite_ones_vary_by_two_a_row():
    one_hot = np.eye(13)[None]
    assert attention_variation(np.repeat(one_hot, 3, axis=0)) == 0
    assert (
        attention_variation(np.concatenate([one_hot, one_hot[:, ::-1]])) == 2 * 12
    )  # centre meets


def test_causal_random_attention_on_16_tokens_varies_by_the_published_constant():
    harmonic = sum(1 / i for i in range(1, 17))
    assert random_attention_variation(16) == pytest.approx(2 * harmonic + 4 / 17 - 4, abs=1e-12)
    assert random_attention_variation(16) == pytest.approx(2.997, abs=5e-4)


@pytest.mark.parametrize("mask", ["causal", "none"])
@pytest.mark.parametrize("n_pos", [1, 7, 16])
def test_the_closed_form_is_what_random_attention_gives(mask, n_pos):
    patterns = random_attention(4000, n_pos, mask=mask, seed=n_pos)
    assert patterns.sum(-1) == pytest.approx(1)
    if mask == "causal":
        assert not np.triu(patterns, 1).any()
    # 4000 patterns: relative standard error of the variance about 1%
    assert attention_variation(patterns) == pytest.approx(
        random_attention_variation(n_pos, mask=mask), rel=0.03, abs=1e-12
    )


@pytest.mark.parametrize("changes", [{}, {"n_key_value_heads": 1}])
@pytest.mark.parametrize("positions", ["standard", "rotary"])
def test_the_causal_probe_pattern_is_the_models_own(changes, positions):
    if positions == "rotary":
        changes = {**changes, "d_head": 6}
    model = _model(positional_embedding_type=positions, **changes)
    probe = LANGUAGE.probe_tokens()
    _, cache = model.run_with_cache(probe[None])
    for layer in range(2):
        expected = cache[f"blocks.{layer}.attn.hook_pattern"][0, 2]
        measured = probe_pattern(model, probe, layer=layer, head=2)
        # the model runs in float32
        assert measured == pytest.approx(expected.numpy(), abs=1e-5)


def test_layer_mask_and_start_each_change_the_pattern():
    model, probe = _model(), LANGUAGE.probe_tokens()
    plain = probe_pattern(model, probe, layer=1)
    unmasked = probe_pattern(model, probe, layer=1, mask="none")
    started = probe_pattern(model, probe, layer=1, has_start=True)
    assert plain.shape == unmasked.shape == (16, 16)
    assert started.shape == (17, 17)
    assert not np.triu(plain, 1).any()
    assert (np.triu(unmasked, 1)[:-1].sum(-1) > 0).all()
    assert unmasked.sum(-1) == pytest.approx(1)
    assert abs(plain - probe_pattern(model, probe, layer=0)).max() > 1e-2
    # the last row sees every key with or without the mask
    assert plain[-1] == pytest.approx(unmasked[-1])
    with_start = torch.cat([torch.tensor([2]), probe])
    assert started == pytest.approx(probe_pattern(model, with_start, layer=1))


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: attention_variation(np.zeros((1, 3, 3))), "patterns: got 1"),
        (lambda: random_attention_variation(0), "n_pos"),
        (lambda: random_attention(0, 5), "n_models"),
        (lambda: probe_pattern(_model(), LANGUAGE.probe_tokens(), layer=2), "layer: got 2"),
        (lambda: probe_pattern(_model(), LANGUAGE.probe_tokens(), layer=0, head=3), "head: got 3"),
    ],
)
def test_refusals_name_the_argument(call, named):
    with pytest.raises(ValueError, match=named):
        call()
