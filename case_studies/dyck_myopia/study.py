"""The units of the Dyck study, and what each of them computes."""

from collections.abc import Mapping
from typing import Any

from interp.case_studies.dyck_myopia.config import Config
from interp.case_studies.study import Unit, UnitResult

FROZEN_SCORES = ("uniform", "pair_tied", "untied")
# seconds on one core, roughly
COST = {"E1": 5.0, "E2": 9.0, "E3": 7.0, "E4": 12.0, "E5": 30.0, "E6": 30.0}


def units(config: Config) -> list[Unit]:
    """One unit a trained model, one a recogniser, one a family for comparing its models."""
    data = {
        "n_types": config.n_types,
        "max_depth": config.max_depth,
        "p_open": config.p_open,
        "train_length": config.train_length,
        "n_train": config.n_train,
        "long_length": config.long_length,
        "n_long": config.n_long,
        "seed": config.data_seed,
    }
    return [
        Unit("language", {"part": "language", "data": data}),
        Unit("subset_sum", {"part": "subset_sum", "n_targets": 1000, "seed": 0}),
        *_recognisers(config, data),
        *_trained(config, data),
        *_frozen(config, data),
        *_equivalence(config, data),
    ]


def compute(unit: Unit, needs: Mapping[str, UnitResult]) -> UnitResult:
    """Compute one unit; what it imports is only needed here, and takes seconds to import."""
    params = unit.params
    if params["part"] == "trained":
        from interp.case_studies.dyck_myopia.trained_models import compute_trained

        return compute_trained(params)
    if params["part"] == "equivalence":
        from interp.case_studies.dyck_myopia.shared_function import compute_equivalence

        return compute_equivalence(params, {name: needs[name] for name in unit.needs})
    from interp.case_studies.dyck_myopia import constructions

    parts = {
        "language": constructions.compute_language,
        "recogniser": constructions.compute_recogniser,
        "subset_sum": constructions.compute_subset_sums,
    }
    return parts[params["part"]](params)


def _recognisers(config: Config, data: dict[str, Any]) -> list[Unit]:
    shared = {"part": "recogniser", "data": data, "lengths": list(config.construction_lengths)}
    uniform = Unit("recogniser/uniform", {**shared, "attention": "uniform"}, cost=3)
    # random attention is asked about at the shorter lengths only
    shared["lengths"] = [min(config.construction_lengths)]
    return [
        uniform,
        *(
            Unit(f"recogniser/pair_tied/draw={i}", {**shared, "attention": "pair_tied", "draw": i})
            for i in range(config.n_recognisers)
        ),
    ]


def _trained(config: Config, data: dict[str, Any]) -> list[Unit]:
    return [
        _trained_unit(config, data, f"{preset.lower()}/seed={seed}", preset, seed)
        for preset in COST
        for seed in range(getattr(config, f"n_{preset.lower()}"))
    ]


def _frozen(config: Config, data: dict[str, Any]) -> list[Unit]:
    return [
        _trained_unit(config, data, f"frozen/{scores}/seed={seed}", "E1", seed, scores=scores)
        for scores in FROZEN_SCORES
        for seed in range(config.n_frozen)
    ]


def _trained_unit(
    config: Config,
    data: dict[str, Any],
    name: str,
    preset: str,
    seed: int,
    *,
    scores: str = "learned",
) -> Unit:
    params = {
        "part": "trained",
        "preset": preset,
        "seed": seed,
        "scores": scores,
        "epochs_share": config.epochs_share,
        "pumped_pairs": list(config.pumped_pairs),
        # in the one-layer models depth is part of the input
        "n_probe": config.n_probe if preset in ("E5", "E6") else 0,
        "data": data,
    }
    return Unit(name, params, cost=COST[preset] * config.epochs_share)


def _equivalence(config: Config, data: dict[str, Any]) -> list[Unit]:
    found = []
    for preset in ("E1", "E5", "E6"):
        n_models = getattr(config, f"n_{preset.lower()}")
        if n_models < 2:
            continue
        names = tuple(f"{preset.lower()}/seed={seed}" for seed in range(n_models))
        params = {
            "part": "equivalence",
            "preset": preset,
            "seeds": list(range(n_models)),
            "n_texts": config.n_equivalence,
            "data": data,
        }
        found.append(Unit(f"equivalence/{preset.lower()}", params, needs=names, cost=n_models))
    return found
