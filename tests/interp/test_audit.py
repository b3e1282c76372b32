import numpy as np
import pytest

from interp.audit import ComponentClaim, audit_models, audit_scores


def _population(n_models, *, share, seed=3):
    """Models with a component, a rest, and an outcome of which the component makes up `share`."""
    rng = np.random.default_rng(seed)
    component, rest = rng.normal(size=(2, n_models))
    outcome = share * component + (1 - share) * rest
    return {
        f"seed={i}": {"component": component[i], "rest": rest[i], "outcome": outcome[i]}
        for i in range(n_models)
    }


CLAIM = ComponentClaim(
    name="component above 0",
    statement="the component is positive",
    component="blocks.0.attn head 0",
    score=lambda model: float(model["component"]),
    holds=lambda score: score > 0,
)


def _audit(models, **arguments):
    outcomes = {name: float(model["outcome"]) for name, model in models.items()}
    return audit_models(models, CLAIM, outcomes=outcomes, **arguments)


def test_a_component_that_decides_the_outcome_is_found_predictive():
    audit = _audit(_population(43, share=0.7))
    assert audit.verdict == "predictive"
    assert audit.spearman.value > 0.5
    assert audit.pearson.excludes_zero()


def test_a_component_that_is_irrelevant_is_found_not_predictive_given_enough_models():
    assert _audit(_population(400, share=0.0)).verdict == "not predictive"


def test_few_models_leave_it_undecided():
    assert _audit(_population(11, share=0.0)).verdict == "undecided"


def test_a_score_that_never_varies_predicts_nothing():
    models = _population(13, share=0.7)
    for model in models.values():
        model["component"] = 1.0
    audit = _audit(models)
    assert audit.spearman is None
    assert audit.verdict == "not predictive"
    assert (audit.n_holding, audit.n_models) == (13, 13)
    assert audit.holding.low == 1


def test_how_many_models_bear_the_claim_out_is_counted_with_an_interval():
    models = _population(37, share=0.5)
    audit = _audit(models)
    n_holding = sum(model["component"] > 0 for model in models.values())
    assert audit.n_holding == n_holding
    assert audit.holding.estimate == pytest.approx(n_holding / 37)
    assert audit.holding.low < audit.holding.estimate < audit.holding.high


def test_the_full_measure_is_set_against_the_component_either_way():
    blind, telling = _population(61, share=0.1), _population(61, share=0.9)
    for models, sign in ((blind, 1), (telling, -1)):
        full = {name: float(-model["rest"]) for name, model in models.items()}
        advantage = _audit(models, full_scores=full).advantage
        assert sign * advantage.estimate > 0.3
        assert sign * (advantage.low if sign > 0 else advantage.high) > 0


def test_scores_measured_before_give_the_same_audit():
    models = _population(29, share=0.6)
    columns = {
        key: np.array([model[key] for model in models.values()]) for key in ("component", "outcome")
    }
    again = audit_scores(
        columns["component"],
        columns["outcome"],
        claim=CLAIM.name,
        holds=columns["component"] > 0,
    )
    assert again == _audit(models)


def test_refusals_name_the_argument():
    models = _population(7, share=0.5)
    with pytest.raises(ValueError, match="full_scores: got names"):
        _audit(models, full_scores={"seed=0": 1.0})
    with pytest.raises(ValueError, match="outcomes: got 3 entries"):
        audit_scores(np.zeros(5), np.zeros(3), claim="c", holds=np.zeros(5, dtype=bool))
