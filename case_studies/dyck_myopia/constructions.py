"""What needs no training: the sampler, recognisers built by hand, random gadgets for weights."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from interp.case_studies.dyck_myopia.trained_models import data_sets, probe_patterns
from interp.case_studies.study import UnitResult
from interp.dyck_accuracy import model_closing_accuracy
from interp.models.dyck_recognisers import random_pair_tied_recogniser, uniform_recogniser
from interp.subset_sum import subset_sum_errors

N_STRINGS = {True: 4, False: 25}  # evaluated strings: fewer of the very long ones
PRODUCTS = (6, 10, 14, 18)


def compute_language(params: Mapping[str, Any]) -> UnitResult:
    """What the training strings look like, counted on them."""
    language, train_tokens, _ = data_sets(params)
    depth = language.depth(train_tokens)
    before, following = depth[:, :-1], train_tokens[:, 1:]
    can_choose = (before > 0) & (before < language.max_depth)
    is_open = language.is_open(following)[can_choose]
    return UnitResult(
        {
            "length": train_tokens.shape[1] - 1,
            "max_depth": int(depth.max()),
            "p_open": float(is_open.double().mean()),
            "n_choices": len(is_open),
        }
    )


def compute_recogniser(params: Mapping[str, Any]) -> UnitResult:
    """Accuracies of one hand-built recogniser at each length, and its patterns on the probe string.

    float64, as the sums hold values from beta to beta^max_depth.
    """
    language, _, _ = data_sets(params)
    lengths = params["lengths"]
    if params["attention"] == "uniform":
        model = uniform_recogniser(language, length=max(lengths))
    else:
        model = random_pair_tied_recogniser(language, length=max(lengths), seed=params["draw"])
    numbers = {}
    for length in lengths:
        n_strings = N_STRINGS[length > 1000]
        tokens = language.sample(n_strings, length, seed=2 * params["data"]["seed"] + 1)
        measured = model_closing_accuracy(model, tokens, language)
        numbers[f"argmax_{length}"] = measured.argmax
        numbers[f"threshold_{length}"] = measured.threshold
    return UnitResult(numbers, probe_patterns(model, language))


def compute_subset_sums(params: Mapping[str, Any]) -> UnitResult:
    """Errors of imitating one weight by a masked sum of n random products, for several n."""
    errors = [
        subset_sum_errors(n, n_targets=params["n_targets"], seed=params["seed"]) for n in PRODUCTS
    ]
    numbers = {
        f"median_error_{n}": float(np.median(e)) for n, e in zip(PRODUCTS, errors, strict=True)
    }
    return UnitResult(numbers, {"errors": np.stack(errors)})
