"""Same function, other attention: models of one family against their own edited selves."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from interp.case_studies.dyck_myopia.trained_models import data_sets, rebuild_model
from interp.case_studies.study import UnitResult
from interp.equivalence import noise_null, output_distances, pair_null
from interp.pattern_replacement import Replacement, run_with_replaced_patterns

REPLACEMENTS: tuple[Replacement, ...] = ("uniform", "shuffled", "simplex", "donor")
RELATIVE_NOISE = 0.01
N_NOISE_DRAWS = 10


def compute_equivalence(params: Mapping[str, Any], needs: Mapping[str, UnitResult]) -> UnitResult:
    """Output distances on fresh training-length strings, averaged over each string's positions.

    ``distance/<replacement>`` is ``[model, text]``: a model against itself with the last layer's
    pattern replaced, by the next model's for the donor. ``null/pair`` holds the mean distance of
    every pair of models, ``null/noise`` ``[model, draw]`` that of each model from itself with 1%
    noise on its embeddings.
    """
    language, _, _ = data_sets(params)
    data = params["data"]
    texts = language.sample(
        params["n_texts"], data["train_length"], seed=2 * data["seed"] + 2_000_003
    )[:, :-1]
    counted = language.closing_bracket(texts) >= 0
    models = [
        rebuild_model({**params, "seed": seed}, result.arrays)
        for seed, result in zip(params["seeds"], needs.values(), strict=True)
    ]
    with torch.no_grad():
        outputs = [model(texts) for model in models]
    heads = [(models[0].cfg.n_layers - 1, 0)]
    arrays: dict[str, np.ndarray] = {
        "null/pair": pair_null(outputs, counted=counted),
        "null/noise": np.stack(
            [
                noise_null(
                    model,
                    texts,
                    relative_noise=RELATIVE_NOISE,
                    n_draws=N_NOISE_DRAWS,
                    counted=counted,
                    seed=index,
                )
                for index, model in enumerate(models)
            ]
        ),
    }
    for replacement in REPLACEMENTS:
        distances = []
        for index, model in enumerate(models):
            edited = run_with_replaced_patterns(
                model,
                texts,
                heads=heads,
                replacement=replacement,
                donor=models[(index + 1) % len(models)] if replacement == "donor" else None,
                seed=index,
            )
            distances.append(output_distances(outputs[index], edited, counted=counted))
        arrays[f"distance/{replacement}"] = np.stack(distances)
    return UnitResult({}, arrays)
