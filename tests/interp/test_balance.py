import pytest
import torch

from interp.balance import balance_surgery, balance_violation
from interp.dyck_accuracy import model_closing_accuracy
from interp.models.dyck_language import DyckLanguage
from interp.models.dyck_presets import dyck_preset
from interp.models.dyck_recognisers import random_pair_tied_recogniser, uniform_recogniser
from interp.models.transformer import Transformer
from interp.pumping import pumping_curve

LANGUAGE = DyckLanguage(2, 4)
OTHER = DyckLanguage(3, 3)


def _untrained(name="E1", language=LANGUAGE, seed=0):
    """A preset with weights large enough that pairs and biases all matter."""
    model = Transformer(dyck_preset(name, language=language, seed=seed)[0])
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "ln" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def _cell(model, language, kind, depth, is_close):
    tokens = language.close_tokens if is_close else language.open_tokens
    return int(model.embed.table[model.embed.row(tokens[kind], depth)].argmax())


@pytest.mark.parametrize("language", [LANGUAGE, OTHER])
def test_models_that_are_right_at_every_length_are_perfectly_balanced(language):
    assert balance_violation(uniform_recogniser(language, length=64), language).mean < 1e-10
    for seed in range(3):
        # beta^(D - 1) rounding units is what float64 leaves of a pair: 1e-13 here, 1e-10 at 100
        model = random_pair_tied_recogniser(language, length=64, seed=seed, beta=10.0)
        assert balance_violation(model, language).mean < 1e-10


def test_a_recogniser_whose_closes_are_scaled_off_is_not_balanced():
    model = uniform_recogniser(LANGUAGE, length=64)
    with torch.no_grad():
        cell = _cell(model, LANGUAGE, 1, 2, is_close=True)
        model.blocks[0].attn.W_V[0, cell] *= 1.1
    assert balance_violation(model, LANGUAGE).mean > 1e-3


def test_a_tie_broken_for_one_query_is_a_violation_for_that_query_alone():
    model = random_pair_tied_recogniser(LANGUAGE, length=64, seed=1, beta=10.0)
    with torch.no_grad():
        attention = model.blocks[0].attn
        query = _cell(model, LANGUAGE, 0, 3, is_close=True)
        changed = torch.randn(attention.W_Q.shape[-1], generator=torch.Generator().manual_seed(1))
        attention.W_Q[0, query] += changed
    by_query = balance_violation(model, LANGUAGE).by_query
    # queries in order: type 0 leaving 1, 2, 3 open, then type 1; closing depth 3 leaves 2 open
    assert by_query[1] > 1e-4
    assert by_query[[0, 2, 3, 4, 5]].max() < 1e-10


def test_it_is_the_definition_written_out_key_by_key():
    model = _untrained()
    measured = balance_violation(model, LANGUAGE)
    attention, table, embed = model.blocks[0].attn, model.embed.table.double(), model.embed
    vectors = {"S": table[embed.row(2, 0)]}
    for kind in range(2):
        for depth in range(1, 5):
            opens = _cell(model, LANGUAGE, kind, depth, False)
            closes = _cell(model, LANGUAGE, kind, depth, True)
            vectors["o", kind, depth] = torch.eye(50, dtype=torch.float64)[opens]
            vectors["c", kind, depth] = torch.eye(50, dtype=torch.float64)[closes]
    W_Q, W_K, W_V = (getattr(attention, w)[0].detach().double() for w in ("W_Q", "W_K", "W_V"))
    b_Q, b_K, b_V = (getattr(attention, b)[0].detach().double() for b in ("b_Q", "b_K", "b_V"))

    def term(key, query):
        score = (vectors[query] @ W_Q + b_Q) @ (vectors[key] @ W_K + b_K) / 50**0.5
        value = vectors[key] @ W_V + b_V
        return score.exp() * (value - value.mean())

    ratios = []
    for kind in range(2):
        for n_open in range(1, 4):
            query = ("c", kind, n_open + 1)
            worst = max(
                (term(("o", t, d), query) + term(("c", t, d), query)).norm()
                for t in range(2)
                for d in range(1, 5)
            )
            outputs = []
            for code in range(2**n_open):
                string = ["S", *(("o", code >> d & 1, d + 1) for d in range(n_open))]
                string += [("o", kind, n_open + 1), query]
                outputs.append(sum(term(key, query) for key in string).norm())
            ratios.append(float(worst / min(outputs)))
    assert measured.by_query.tolist() == pytest.approx(ratios, rel=1e-5)
    assert measured.mean == pytest.approx(sum(ratios) / 6, rel=1e-5)
    assert measured.mean > 0.1


@pytest.mark.parametrize("language", [LANGUAGE, OTHER])
def test_surgery_balances_any_model_and_touches_only_close_brackets(language):
    model = _untrained(language=language)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    operated = balance_surgery(model, language)
    assert balance_violation(model, language).mean > 0.1
    assert balance_violation(operated, language).mean < 1e-5
    closes = {
        _cell(model, language, kind, depth, True)
        for kind in range(language.n_types)
        for depth in range(1, language.max_depth + 1)
    }
    for name, value in operated.state_dict().items():
        assert torch.equal(model.state_dict()[name], before[name])
        changed = (value != before[name]).nonzero()
        if name.endswith(("W_K", "W_V")):
            assert set(changed[:, 1].tolist()) == closes
        else:
            assert len(changed) == 0


def test_surgery_stops_the_flips_that_pumping_causes():
    model = uniform_recogniser(LANGUAGE, length=600, dtype=torch.float64)
    with torch.no_grad():
        # the pair of type 1 at depth 2 leaves a remainder that grows with every copy
        model.blocks[0].attn.W_V[0, _cell(model, LANGUAGE, 1, 2, is_close=True)] *= 0.9
    sick = pumping_curve(model, LANGUAGE, n_pairs=[0, 1, 256])
    healed = pumping_curve(balance_surgery(model, LANGUAGE), LANGUAGE, n_pairs=[0, 1, 256])
    assert sick.flip_rates[:2].tolist() == [0, 0]
    assert sick.flip_rates[2] > 0.05
    assert not healed.flip_rates.any()
    assert not healed.error_rates.any()
    tokens = LANGUAGE.sample(7, 300, seed=1)
    assert model_closing_accuracy(balance_surgery(model, LANGUAGE), tokens, LANGUAGE).argmax == 1


@pytest.mark.parametrize(
    ("name", "measure", "named"),
    [
        ("E5", balance_violation, "n_layers=2"),
        ("E5", balance_surgery, "n_layers=2"),
        ("E3", balance_surgery, "embedding='dyck_separate'"),
        ("E4", balance_surgery, "embedding='dyck_angle'"),
    ],
)
def test_models_without_keys_and_values_of_type_and_depth_are_refused(name, measure, named):
    with pytest.raises(ValueError, match=named):
        measure(_untrained(name), LANGUAGE)


def test_a_language_of_another_size_is_refused():
    with pytest.raises(ValueError, match="d_vocab=8, expected 10"):
        balance_violation(_untrained(), OTHER)
    with pytest.raises(ValueError, match="up to depth 4"):
        balance_violation(_untrained(), DyckLanguage(2, 5))
    with pytest.raises(ValueError, match="prefixes to search"):
        balance_violation(_untrained(language=DyckLanguage(8, 10)), DyckLanguage(8, 10))
    shallow = DyckLanguage(2, 1)
    with pytest.raises(ValueError, match="max_depth 1"):
        balance_violation(_untrained(language=shallow), shallow)
