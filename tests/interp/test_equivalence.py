import numpy as np
import pytest
import torch

from interp.equivalence import (
    equivalence_test,
    judge_equivalence,
    noise_null,
    output_distances,
    pair_null,
)
from interp.models.config import TransformerConfig
from interp.models.transformer import Transformer


def _model(seed=0, **changes):
    sizes = {"n_layers": 2, "d_model": 12, "n_heads": 3, "d_head": 5, "d_vocab": 11, "n_ctx": 40}
    return Transformer(
        TransformerConfig(**{**sizes, "initializer_range": 0.7, "seed": seed, **changes})
    )


def _tokens(n=31, length=13, seed=3):
    return torch.randint(11, (n, length), generator=torch.Generator().manual_seed(seed))


def _logits(seed, n=5, length=7, d_vocab=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, length, d_vocab, generator=generator, dtype=torch.float64)


def test_total_variation_and_kl_are_those_of_the_distributions():
    ours, theirs = _logits(1), _logits(2)
    p, q = ours.softmax(-1).numpy(), theirs.softmax(-1).numpy()
    variation = 0.5 * np.abs(p - q).sum(-1).mean(1)
    kl = (p * np.log(p / q)).sum(-1).mean(1)
    assert output_distances(ours, theirs) == pytest.approx(variation)
    assert output_distances(ours, theirs, distance="kl") == pytest.approx(kl)
    disagreement = (p.argmax(-1) != q.argmax(-1)).mean(1)
    measured = output_distances(ours, theirs, distance="disagreement")
    assert measured == pytest.approx(disagreement)


def test_adding_a_constant_to_the_logits_is_no_difference():
    ours = _logits(1)
    for distance in ("total_variation", "kl", "disagreement"):
        assert output_distances(ours, ours + 5, distance=distance) == pytest.approx(0, abs=1e-12)


def test_only_counted_positions_count_and_texts_without_any_are_left_out():
    ours, theirs = _logits(1), _logits(2)
    counted = torch.zeros(5, 7, dtype=torch.bool)
    counted[1, 3] = counted[4, 0] = counted[4, 6] = True
    everything = output_distances(ours[:, :, :], theirs)
    some = output_distances(ours, theirs, counted=counted)
    assert everything.shape == (5,)
    assert some.shape == (2,)
    alone = output_distances(ours[1:2, 3:4], theirs[1:2, 3:4])
    assert some[0] == pytest.approx(alone[0])


@pytest.mark.parametrize(
    ("centre", "expected"), [(0.02, "equivalent"), (0.1, "undecided"), (0.3, "different")]
)
def test_the_verdict_depends_on_which_side_of_the_margin_the_interval_lies(centre, expected):
    noise = np.random.default_rng(5).normal(size=43)
    distances = centre * np.exp(0.4 * (noise - noise.mean()) - 0.08)
    assert judge_equivalence(distances, margin=0.1).verdict == expected


def test_equivalence_is_rarely_declared_at_the_margin_itself():
    rng = np.random.default_rng(7)
    verdicts = [
        judge_equivalence(rng.exponential(0.1, 47), margin=0.1, n_resamples=300, seed=i).verdict
        for i in range(200)
    ]
    # 5% by construction; the percentile interval of a skewed mean at n = 47 runs to about 8%
    assert verdicts.count("equivalent") / 200 < 0.13
    assert verdicts.count("undecided") / 200 > 0.75


def test_heads_that_do_nothing_are_equivalent_and_heads_that_matter_are_not():
    model, tokens = _model(), _tokens()
    with torch.no_grad():
        model.blocks[1].attn.W_O[1].zero_()  # head (1, 1) writes nothing
    tests = {
        head: equivalence_test(model, tokens, heads=[head], replacement="uniform", margin=0.01)
        for head in [(1, 1), (0, 0)]
    }
    assert tests[1, 1].verdict == "equivalent"
    assert tests[1, 1].distance.estimate == pytest.approx(0, abs=1e-6)
    assert tests[0, 0].verdict == "different"


def test_a_model_whose_attention_is_uniform_is_equivalent_to_its_shuffled_self():
    model, tokens = _model(), _tokens()
    with torch.no_grad():
        for block in model.blocks:
            block.attn.W_Q.zero_()
            block.attn.b_Q.zero_()
    heads = [(layer, head) for layer in range(2) for head in range(3)]
    arguments = {"heads": heads, "margin": 0.01}
    shuffled = equivalence_test(model, tokens, replacement="shuffled", **arguments)
    simplex = equivalence_test(model, tokens, replacement="simplex", **arguments)
    assert shuffled.verdict == "equivalent"
    assert simplex.verdict == "different"


def test_the_null_share_ranks_a_distance_among_those_that_mean_nothing():
    null = [0.1, 0.2, 0.3, 0.4]
    assert judge_equivalence(np.full(9, 0.25), margin=1.0, null=null).null_share == 3 / 5
    assert judge_equivalence(np.full(9, 0.5), margin=1.0, null=null).null_share == 1 / 5
    assert judge_equivalence(np.full(9, 0.5), margin=1.0).null_share == 1


def test_noise_null_grows_with_the_noise_and_is_seeded():
    model, tokens = _model(), _tokens()
    small = noise_null(model, tokens, relative_noise=1e-3, n_draws=5)
    large = noise_null(model, tokens, relative_noise=1e-1, n_draws=5)
    assert (small > 0).all()
    assert (small.max() < large).all()
    assert small.max() < 0.01
    again = noise_null(model, tokens, relative_noise=1e-1, n_draws=5)
    assert np.array_equal(large, again)
    assert not any(point.is_wanted for point in model.hook_dict.values())


def test_pair_null_has_one_distance_for_every_pair():
    outputs = [_logits(seed) for seed in range(4)]
    null = pair_null(outputs)
    assert null.shape == (6,)
    assert null[0] == pytest.approx(output_distances(outputs[0], outputs[1]).mean())
    assert null[5] == pytest.approx(output_distances(outputs[2], outputs[3]).mean())


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: judge_equivalence(np.ones(5), margin=0.0), "margin: got 0"),
        (lambda: judge_equivalence(-np.ones(5), margin=0.1), "distances: some are negative"),
        (lambda: pair_null([_logits(1)]), "outputs: got 1"),
        (lambda: noise_null(_model(), _tokens(), relative_noise=0.0), "relative_noise"),
        (
            lambda: output_distances(
                _logits(1), _logits(2), counted=torch.zeros(5, 7, dtype=torch.bool)
            ),
            "counted: no position",
        ),
    ],
)
def test_refusals_name_the_argument(call, named):
    with pytest.raises(ValueError, match=named):
        call()
