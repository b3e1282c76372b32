import itertools

import numpy as np
import pytest

from interp.subset_sum import best_masked_sums, imitate_weights, subset_sum_errors


@pytest.mark.parametrize("n_products", [1, 2, 5, 7])
def test_meeting_in_the_middle_finds_what_trying_every_mask_finds(n_products):
    rng = np.random.default_rng(n_products)
    targets, products = rng.normal(size=23), rng.normal(size=(23, n_products))
    sums, masks = best_masked_sums(targets, products)
    every_mask = np.array(list(itertools.product([0, 1], repeat=n_products)))
    best = np.abs(products @ every_mask.T - targets[:, None]).min(axis=1)
    assert np.abs(sums - targets) == pytest.approx(best, abs=1e-12)
    assert (products * masks).sum(axis=1) == pytest.approx(sums, abs=1e-12)


def test_a_planted_subset_is_found_exactly():
    rng = np.random.default_rng(3)
    products = rng.uniform(-1, 1, (11, 18))
    planted = rng.random((11, 18)) < 0.5
    targets = (products * planted).sum(axis=1)
    sums, masks = best_masked_sums(targets, products)
    assert sums == pytest.approx(targets, abs=1e-12)
    assert np.array_equal(masks, planted)


def test_error_falls_exponentially_with_the_number_of_products():
    medians = [np.median(subset_sum_errors(n, n_targets=400)) for n in (6, 10, 14, 18)]
    # four more products are 16 times as many sums over a range that grows slowly
    ratios = np.array(medians[:-1]) / medians[1:]
    assert (ratios > 8).all()
    assert (ratios < 32).all()
    assert medians[2] < 5e-4


def test_one_product_is_no_imitation():
    assert np.median(subset_sum_errors(1, n_targets=400)) > 0.1


def test_imitated_weights_keep_shape_scale_and_precision():
    weights = np.random.default_rng(5).normal(size=(3, 5, 7)).astype(np.float32) * 40
    imitation = imitate_weights(weights, n_products=14)
    assert imitation.shape == weights.shape
    assert imitation.dtype == np.float32
    errors = np.abs(imitation - weights) / np.abs(weights).max()
    assert 0 < np.median(errors) < 5e-4
    assert not np.array_equal(imitation, imitate_weights(weights, n_products=14, seed=1))


def test_zero_weights_stay_zero():
    assert not imitate_weights(np.zeros((2, 3))).any()


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: subset_sum_errors(0), "n_products"),
        (lambda: subset_sum_errors(41), "n_products"),
        (lambda: subset_sum_errors(5, n_targets=0), "n_targets"),
        (lambda: best_masked_sums(np.zeros(3), np.zeros((2, 5))), "products: got 2 rows"),
        (lambda: imitate_weights(np.array([1.0, np.inf])), "weights"),
    ],
)
def test_refusals_name_the_argument(call, named):
    with pytest.raises(ValueError, match=named):
        call()
