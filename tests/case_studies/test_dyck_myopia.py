import io
import subprocess
import sys

import numpy as np
import pytest
import torch

from interp.balance import balance_violation
from interp.case_studies.dyck_myopia.claims import CLAIMS
from interp.case_studies.dyck_myopia.config import SCALES, Config
from interp.case_studies.dyck_myopia.figures import FIGURES
from interp.case_studies.dyck_myopia.study import compute, units
from interp.case_studies.dyck_myopia.trained_models import (
    component_scores,
    imitate_model,
    rebuild_model,
    with_eps,
)
from interp.case_studies.judge import judge
from interp.case_studies.keys import result_hash, unit_keys
from interp.case_studies.study import Results, UnitResult
from interp.models.dyck_language import DyckLanguage
from interp.models.dyck_presets import dyck_preset
from interp.models.dyck_recognisers import random_pair_tied_recogniser, uniform_recogniser
from interp.models.transformer import Transformer

LANGUAGE = DyckLanguage(2, 4)
TINY = Config(
    n_e1=2,
    n_e2=1,
    n_e3=0,
    n_e4=0,
    n_e5=2,
    n_e6=0,
    n_frozen=1,
    n_recognisers=2,
    train_tokens=700,
    long_tokens=202,
    long_length=101,
    construction_lengths=(101,),
    pumped_pairs=(0, 3),
    epochs_share=0.05,
    n_equivalence=11,
    n_probe=5,
)


# judged as if at the paper's scale, with as many models as the measures need
PLANTED = Config(n_e1=24, n_e2=5, n_e5=5, n_e6=5, n_frozen=4, n_recognisers=4)


def _units(config):
    return {unit.name: unit for unit in units(config)}


@pytest.fixture(scope="module")
def computed():
    """Every unit of a run that is far too small to show anything."""
    found = {}
    for name, unit in _units(TINY).items():
        found[name] = compute(unit, {need: found[need] for need in unit.needs})
    return Results(found, config=TINY)


def test_listing_the_study_imports_no_torch():
    code = (
        "import sys; from interp.case_studies.dyck_myopia import config, claims; "
        "sys.exit('torch' in sys.modules or 'scipy.stats' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("scale", list(SCALES))
def test_units_of_every_scale_have_keys_of_their_own(scale):
    listed = units(SCALES[scale])
    keys = unit_keys("dyck_myopia", listed, source="", packages={})
    assert len(set(keys.values())) == len(listed)


def test_quick_has_the_numbers_of_models_that_the_claims_need():
    quick, paper = SCALES["quick"], SCALES["paper"]
    assert (quick.n_e1, quick.n_e2, quick.n_e5, quick.n_e6) == (24, 4, 4, 4)
    assert (paper.n_e1, paper.n_e2, paper.n_e5, paper.n_e6) == (40, 40, 30, 30)
    assert (paper.n_train, paper.n_long) == (3572, 25)


def test_a_model_trained_at_quick_scale_is_the_one_of_the_paper_scale():
    keys = [
        unit_keys("dyck_myopia", units(SCALES[scale]), source="", packages={})
        for scale in ("quick", "paper")
    ]
    for name in ("e1/seed=23", "e5/seed=3", "frozen/untied/seed=0", "language"):
        assert keys[0][name] == keys[1][name]


def test_seeds_scale_every_part_and_leave_none_out():
    config = SCALES["quick"].with_seeds(12)
    assert (config.n_e1, config.n_e2, config.n_e5, config.n_frozen) == (12, 2, 2, 2)
    assert SCALES["quick"].with_seeds(1).n_e6 == 1
    assert SCALES["smoke"].with_seeds(8).n_e3 == 0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"n_e1": 0}, "n_e1: got 0"),
        ({"train_tokens": 0}, "train_tokens"),
        ({"epochs_share": 0.0}, "epochs_share"),
        ({"p_open": 1.0}, "p_open"),
        ({"max_depth": 1}, "max_depth"),
        ({"pumped_pairs": (1, 2)}, "pumped_pairs"),
        ({"construction_lengths": ()}, "construction_lengths"),
    ],
)
def test_configs_that_make_no_sense_are_refused(changes, named):
    with pytest.raises(ValueError, match=named):
        Config(**changes)


def test_the_same_unit_computed_twice_has_the_same_hash(computed):
    for name in ("e1/seed=1", "e5/seed=0"):
        assert result_hash(compute(_units(TINY)[name], {})) == result_hash(computed[name])
    assert result_hash(computed["e1/seed=0"]) != result_hash(computed["e1/seed=1"])


def test_a_stored_model_computes_what_the_trained_one_did(computed):
    params = _units(TINY)["e5/seed=1"].params
    model = rebuild_model(params, computed["e5/seed=1"].arrays)
    _, cache = model.run_with_cache(LANGUAGE.probe_tokens()[None])
    pattern = cache["blocks.1.attn.hook_pattern"][0, 0].detach().numpy()
    assert pattern == pytest.approx(computed["e5/seed=1"].arrays["pattern"][1], abs=1e-5)
    untrained = Transformer(dyck_preset("E5", language=LANGUAGE, seed=1)[0])
    assert not torch.equal(untrained.unembed.W_U, model.unembed.W_U)


def test_frozen_attention_ends_as_it_began(computed):
    for scores in ("uniform", "pair_tied", "untied"):
        numbers = computed[f"frozen/{scores}/seed=0"].numbers
        assert (numbers["score_tie"] < 1e-5) == (scores != "untied")


def test_component_scores_of_a_balanced_model_are_those_that_balance_demands():
    for model in (
        uniform_recogniser(LANGUAGE, length=50),
        random_pair_tied_recogniser(LANGUAGE, length=50, seed=1),
    ):
        scores = component_scores(model, LANGUAGE)
        assert scores["score_tie"] == pytest.approx(0, abs=1e-9)
        assert scores["value_cosine"] == pytest.approx(-1)
    untrained = component_scores(Transformer(dyck_preset("E1", language=LANGUAGE)[0]), LANGUAGE)
    assert untrained["value_cosine"] > -0.9


def test_scores_are_asked_of_closes_that_leave_a_bracket_open_alone():
    def tie(depth):
        model = random_pair_tied_recogniser(LANGUAGE, length=50, seed=1, beta=10.0)
        attention, embed = model.blocks[0].attn, model.embed
        cell = embed.table[embed.row(LANGUAGE.close_tokens[0], depth)].argmax()
        noise = torch.randn(attention.W_Q.shape[-1], generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            attention.W_Q[0, cell] += noise
        return component_scores(model, LANGUAGE)["score_tie"]

    assert tie(1) < 1e-9  # the close of depth 1 leaves nothing to predict
    assert tie(2) > 1e-3


def test_an_imitated_model_is_close_but_not_equal_and_another_draw_is_another_imitation():
    model = Transformer(dyck_preset("E1", language=LANGUAGE, seed=3)[0])
    first, second = imitate_model(model, seed=0), imitate_model(model, seed=1)
    for name, _ in model.named_parameters():
        ours, theirs = first.state_dict()[name], model.state_dict()[name]
        # the error is heavy-tailed: a few weights draw products that fit badly
        assert (ours - theirs).abs().median() <= 1e-3 * theirs.abs().max(), name
    assert not torch.equal(first.unembed.W_U, model.unembed.W_U)
    assert not torch.equal(first.unembed.W_U, second.unembed.W_U)


def test_another_epsilon_changes_outputs_that_are_small_and_nothing_else():
    model = Transformer(dyck_preset("E1", language=LANGUAGE, seed=3)[0])
    exact = with_eps(model, 1e-12)
    assert exact.cfg.eps == 1e-12
    assert model.cfg.eps == 1e-5
    tokens = LANGUAGE.probe_tokens()[None]
    # untrained values are about .02, so that 1e-5 is no longer small beside their variance
    assert (exact(tokens) - model(tokens)).abs().max() > 1e-6
    assert balance_violation(exact, LANGUAGE).mean == balance_violation(model, LANGUAGE).mean


def test_every_claim_is_measured_and_every_figure_drawn_on_a_real_run(computed):
    for scale in SCALES:
        for judgement in judge(CLAIMS, computed, scale=scale):
            assert not judgement.error, f"{judgement.claim.id}: {judgement.error}"
    for figure in FIGURES:
        _picture(figure.draw(computed))


def _picture(drawing):
    buffer = io.BytesIO()
    drawing.savefig(buffer, format="png", dpi=40)
    assert buffer.tell() > 1000


def test_figures_survive_a_run_of_one_model():
    config = SCALES["smoke"].with_seeds(1)
    results = Results(_planted(config), config=config)
    for figure in FIGURES:
        _picture(figure.draw(results))


def test_claims_hold_for_numbers_that_bear_them_out():
    verdicts = _verdicts(_planted(PLANTED), PLANTED)
    assert {claim: v for claim, v in verdicts.items() if v != "reproduced"} == {}


@pytest.mark.parametrize(
    ("prefix", "number", "value", "claim"),
    [
        ("e1/seed=7", "train_threshold", 0.98, "e1-learns"),
        ("e1/", "long_threshold", 0.95, "e1-long"),
        ("e1/", "balance_violation", 0.1, "e1-balance"),
        ("e2/", "balance_violation", 0.4, "contrastive-balances"),
        ("e2/", "long_threshold", 0.85, "contrastive-helps"),
        ("e1/seed=7", "surgery_long_argmax", 0.99, "surgery-long"),
        ("e1/seed=7", "surgery_train_threshold", 0.9, "surgery-train"),
        ("e1/seed=7", "surgery_balance_violation", 1e-3, "surgery-balance"),
        ("e5/", "train_threshold", 0.9, "e5-learns"),
        ("e6/", "train_threshold", 0.9, "e6-learns"),
        ("e5/seed=3", "stack_top_share", [0.1, 0.7], "e5-stack-top"),
        ("e1/", "imitation_train_threshold", 0.98, "imitation-works"),
        ("frozen/uniform/seed=2", "train_threshold", 0.9, "frozen-uniform"),
        ("frozen/pair_tied/", "train_threshold", 0.38, "frozen-tied"),
        ("recogniser/uniform", "argmax_4000", 0.999, "uniform-4000"),
        ("recogniser/pair_tied/draw=3", "argmax_400", 0.999, "random-attention-works"),
        ("language", "p_open", 0.52, "sampler-open"),
        ("subset_sum", "median_error_14", 1e-3, "subset-sum"),
    ],
)
def test_a_claim_fails_where_the_number_it_speaks_of_is_off(prefix, number, value, claim):
    planted = _planted(PLANTED)
    for name in planted:
        if name.startswith(prefix):
            planted[name].numbers[number] = value
    assert _verdicts(planted, PLANTED, claim)[claim] == "not reproduced"


@pytest.mark.parametrize(
    ("prefix", "array", "value", "claim"),
    [
        ("e1/", "flips", 0.1, "pumping-flips"),
        ("e1/seed=7", "surgery_flips", 0.1, "pumping-surgery"),
        ("e5/", "pattern", 0.25, "e5-varies"),
        ("e6/", "pattern", 0.25, "e6-varies"),
        ("recogniser/pair_tied", "pattern", 0.25, "random-attention-varies"),
        ("equivalence/e1", "distance/donor", 0.001, "e1-not-interchangeable"),
        ("equivalence/e5", "distance/donor", 0.001, "e5-not-interchangeable"),
    ],
)
def test_a_claim_fails_where_the_arrays_are_off(prefix, array, value, claim):
    planted = _planted(PLANTED)
    for name, result in planted.items():
        if name.startswith(prefix) and array in result.arrays:
            result.arrays[array] = np.full_like(result.arrays[array], value)
    assert _verdicts(planted, PLANTED, claim)[claim] == "not reproduced"


def test_the_audit_can_come_out_either_way():
    planted = _planted(PLANTED)
    rng = np.random.default_rng(7)
    for name, result in planted.items():
        if name.startswith("e1/"):
            # now where the head looks decides, and the values tell nothing
            result.numbers["stack_top_share"] = [result.numbers["long_threshold"]]
            result.numbers["value_cosine"] = float(rng.normal())
            result.numbers["balance_violation"] += float(rng.normal(0, 0.03))
    verdicts = _verdicts(planted, PLANTED, "audit-stack-top", "audit-values")
    assert verdicts["audit-stack-top"] == "not reproduced"
    assert verdicts["audit-values"] == "not reproduced"


def test_balance_that_tells_nothing_of_length_fails_its_claim_and_few_models_leave_it_open():
    planted = _planted(PLANTED)
    rng = np.random.default_rng(5)
    for name, result in planted.items():
        if name.startswith("e1/"):
            result.numbers["long_threshold"] = float(rng.normal(0.845, 0.02))
    claim = "balance-predicts-length"
    assert _verdicts(planted, PLANTED, claim)[claim] == "not reproduced"
    few = PLANTED.with_seeds(8)
    assert _verdicts(_planted(few), few, claim)[claim] == "not measured at this scale"


def _verdicts(planted, config, *only):
    claims = [claim for claim in CLAIMS if not only or claim.id in only]
    judged = judge(claims, Results(planted, config=config), scale="paper")
    return {judgement.claim.id: judgement.verdict for judgement in judged}


def _planted(config):
    """Results that bear every claim out, unit by unit, without training anything."""
    rng = np.random.default_rng(3)
    return {unit.name: _planted_unit(unit, config, rng) for unit in units(config)}


def _planted_unit(unit, config, rng):
    params = unit.params
    if params["part"] == "language":
        return UnitResult({"length": 28, "max_depth": 4, "p_open": 0.501, "n_choices": 10**5})
    if params["part"] == "subset_sum":
        return UnitResult({f"median_error_{n}": 7e-5 for n in (6, 10, 14, 18)})
    if params["part"] == "recogniser":
        scores = {f"{kind}_{n}": 1.0 for n in params["lengths"] for kind in ("argmax", "threshold")}
        return UnitResult(scores, _all_patterns(rng, 1))
    if params["part"] == "equivalence":
        n = len(params["seeds"])
        arrays = {
            f"distance/{kind}": 0.2 + 0.05 * rng.random((n, 17))
            for kind in ("uniform", "shuffled", "simplex", "donor")
        }
        nulls = {"null/pair": 0.01 * rng.random(n * (n - 1) // 2), "null/noise": np.zeros((n, 3))}
        return UnitResult({}, arrays | nulls)
    return _planted_model(params, config, rng)


def _planted_model(params, config, rng):
    preset = params["preset"]
    violation = float(rng.normal(0.13 if preset == "E2" else 0.44, 0.03))
    long = 0.845 - 0.5 * (violation - 0.44) if preset == "E1" else 0.97
    n_layers = 2 if preset in ("E5", "E6") else 1
    learned = {"pair_tied": 0.85, "untied": 0.4}.get(params["scores"], 1.0)
    numbers = {
        "train_threshold": learned,
        "train_argmax": 1.0,
        "long_threshold": long,
        "long_argmax": float(rng.normal(0.93, 0.01)),
        "long_threshold_exact": long + 0.01,
        "balance_violation": violation,
        "score_tie": float(rng.random()),
        "value_cosine": 0.2 * violation - 1 + float(rng.normal(0, 0.002)),
        "stack_top_share": [float(rng.uniform(0.1, 0.3)) for _ in range(n_layers)],
        "surgery_balance_violation": 1e-7,
        "surgery_train_threshold": 1.0,
        "surgery_long_argmax": 1.0,
        "surgery_long_threshold": 0.99,
        "imitation_train_threshold": 1.0,
    }
    positions, pairs = config.long_length, len(config.pumped_pairs)
    arrays = {
        **_all_patterns(rng, n_layers),
        "flips": np.linspace(0, 0.6, pairs),
        "surgery_flips": np.zeros(pairs),
    }
    for name in ("long", "surgery_long"):
        arrays[f"{name}_threshold_hits"] = np.full(positions, 20, dtype=np.int32)
        arrays[f"{name}_counts"] = np.full(positions, 23, dtype=np.int32)
    return UnitResult(numbers, arrays)


def _all_patterns(rng, n_layers):
    names = ("pattern", "pattern_unmasked", "pattern_start")
    return {name: _patterns(rng, n_layers, sharp=n_layers > 1) for name in names}


def _patterns(rng, n_layers, *, sharp=False):
    """Random causal patterns; sharp ones put everything on one key, so that they vary more."""
    weights = np.tril(rng.exponential(size=(n_layers, 16, 16)) ** (8 if sharp else 1))
    return weights / weights.sum(-1, keepdims=True)
