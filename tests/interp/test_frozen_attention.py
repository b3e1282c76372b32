from dataclasses import replace

import pytest
import torch

from interp.attention_terms import attention_terms
from interp.frozen_attention import freeze_attention
from interp.models.dyck_language import DyckLanguage
from interp.models.dyck_presets import dyck_preset
from interp.models.dyck_training import train_dyck
from interp.models.transformer import Transformer

LANGUAGE = DyckLanguage(2, 4)
PROBE = LANGUAGE.probe_tokens()


def _model(name="E1"):
    return Transformer(dyck_preset(name, language=LANGUAGE)[0])


def _gaps(model):
    """s(close|q) - s(open|q) for every query and pair of the probe string."""
    scores = attention_terms(model, PROBE, layer=0).scores
    opens = LANGUAGE.is_open(PROBE).nonzero()[:, 0]
    closes = LANGUAGE.matching_bracket(PROBE)[opens]
    return scores[:, closes] - scores[:, opens]


def test_uniform_scores_are_all_the_same():
    scores = attention_terms(
        freeze_attention(_model(), LANGUAGE, scores="uniform"), PROBE, layer=0
    ).scores
    assert not scores.any()


@pytest.mark.parametrize("scores", ["pair_tied", "untied"])
@pytest.mark.parametrize("sd", [1.0, 0.25])
def test_random_scores_have_the_asked_spread(scores, sd):
    drawn = torch.stack(
        [
            attention_terms(
                freeze_attention(_model(), LANGUAGE, scores=scores, sd=sd, seed=seed),
                PROBE,
                layer=0,
            ).scores
            for seed in range(8)
        ]
    )
    assert float(drawn.std()) == pytest.approx(sd, rel=0.15)


def test_pairs_are_tied_or_not():
    tied = freeze_attention(_model(), LANGUAGE, scores="pair_tied")
    untied = freeze_attention(_model(), LANGUAGE, scores="untied")
    assert _gaps(tied).std(0).max() < 1e-6
    assert _gaps(untied).std(0).min() > 0.3


def test_training_moves_everything_but_the_scores_and_the_original_stays():
    original = _model()
    before = {name: value.clone() for name, value in original.state_dict().items()}
    frozen = freeze_attention(original, LANGUAGE, scores="untied", seed=3)
    start = {name: value.clone() for name, value in frozen.state_dict().items()}
    training = replace(dyck_preset("E1", language=LANGUAGE)[1], n_epochs=1)
    train_dyck(frozen, LANGUAGE.sample(100, 28, seed=1), LANGUAGE, training)
    for name, value in frozen.state_dict().items():
        is_frozen = name.endswith(("W_Q", "W_K", "b_Q", "b_K", "table"))
        assert torch.equal(value, start[name]) == is_frozen, name
    for name, value in original.state_dict().items():
        assert torch.equal(value, before[name])


def test_refusals_name_the_argument():
    with pytest.raises(ValueError, match="sd: got 0"):
        freeze_attention(_model(), LANGUAGE, scores="untied", sd=0.0)
    with pytest.raises(ValueError, match="n_layers=2"):
        freeze_attention(_model("E5"), LANGUAGE, scores="uniform")
