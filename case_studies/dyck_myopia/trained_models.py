"""Train one model of the study and measure everything that needs no other model."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from interp.attention_terms import attention_terms
from interp.attention_variation import probe_pattern
from interp.balance import balance_surgery, balance_violation
from interp.case_studies.study import UnitResult
from interp.dyck_accuracy import ClosingAccuracy, model_closing_accuracy
from interp.frozen_attention import freeze_attention
from interp.models.config import TransformerConfig
from interp.models.dyck_language import DyckLanguage
from interp.models.dyck_presets import dyck_preset
from interp.models.dyck_training import train_dyck
from interp.models.dyck_vocabulary import START
from interp.models.transformer import Transformer
from interp.probes.controls import score_probe, sequence_groups
from interp.probes.linear import LinearProbe
from interp.pumping import pumping_curve
from interp.stack_top import model_stack_top_shares
from interp.subset_sum import imitate_weights

EXACT_EPS = 1e-12  # the norm's epsilon at which outputs that shrink like 1/n keep their direction
N_PRODUCTS = 14
N_SHARE_STRINGS = 400  # strings on which the stack-top share is taken


def compute_trained(params: Mapping[str, Any]) -> UnitResult:
    """Train the model that ``params`` describe; numbers, small arrays, and its weights."""
    language, train_tokens, long_tokens = data_sets(params)
    config, training = dyck_preset(params["preset"], language=language, seed=params["seed"])
    training = replace(training, n_epochs=max(1, round(training.n_epochs * params["epochs_share"])))
    model = Transformer(config)
    if params["scores"] != "learned":
        model = freeze_attention(model, language, scores=params["scores"], seed=params["seed"])
    history = train_dyck(model, train_tokens, language, training)

    inputs, long_inputs = train_tokens[:, :-1], long_tokens[:, :-1]
    numbers: dict[str, Any] = {"loss": float(history.loss[-10:].mean())}
    arrays = {f"weights/{name}": t.numpy() for name, t in model.state_dict().items()}
    _add_accuracies(numbers, arrays, "", model, inputs, long_inputs, language)
    arrays |= probe_patterns(model, language)
    shares = model_stack_top_shares(model, inputs[:N_SHARE_STRINGS], language)
    numbers["stack_top_share"] = [float(share) for share in shares.max(axis=1)]
    curve = pumping_curve(model, language, n_pairs=params["pumped_pairs"])
    arrays["flips"], arrays["pumping_errors"] = curve.flip_rates, curve.error_rates

    if config.n_layers == 1:
        numbers["balance_violation"] = balance_violation(model, language).mean
        numbers |= component_scores(model, language)
    if config.embedding == "dyck_joint":
        operated = balance_surgery(model, language)
        numbers["surgery_balance_violation"] = balance_violation(operated, language).mean
        _add_accuracies(numbers, arrays, "surgery_", operated, inputs, long_inputs, language)
        curve = pumping_curve(operated, language, n_pairs=params["pumped_pairs"])
        arrays["surgery_flips"] = curve.flip_rates
        arrays["surgery_pumping_errors"] = curve.error_rates
        imitation = imitate_model(model, seed=params["seed"])
        measured = model_closing_accuracy(imitation, inputs, language)
        numbers["imitation_train_threshold"] = measured.threshold
    if params["n_probe"]:
        numbers |= probe_scores(model, inputs[: params["n_probe"]], language)
    return UnitResult(numbers, arrays)


def data_sets(params: Mapping[str, Any]) -> tuple[DyckLanguage, Tensor, Tensor]:
    """The language, the training strings and the long strings that all models share."""
    data = params["data"]
    language = DyckLanguage(data["n_types"], data["max_depth"], p_open=data["p_open"])
    train_tokens = language.sample(data["n_train"], data["train_length"], seed=2 * data["seed"])
    long_tokens = language.sample(data["n_long"], data["long_length"], seed=2 * data["seed"] + 1)
    return language, train_tokens, long_tokens


def rebuild_model(params: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Transformer:
    """The trained model of a finished unit, from its parameters and its stored weights."""
    language, _, _ = data_sets(params)
    config, _ = dyck_preset(params["preset"], language=language, seed=params["seed"])
    model = Transformer(config)
    model.load_state_dict(
        {
            name.removeprefix("weights/"): torch.from_numpy(np.array(value))
            for name, value in arrays.items()
            if name.startswith("weights/")
        }
    )
    return model


def with_eps(model: Transformer, eps: float) -> Transformer:
    """A copy of a model whose norms have another epsilon."""
    config: TransformerConfig = replace(model.cfg, eps=eps)
    copy = Transformer(config)
    copy.load_state_dict(model.state_dict())
    return copy


def imitate_model(model: Transformer, *, seed: int) -> Transformer:
    """A copy whose every weight matrix and bias is a masked sum of random products."""
    copy = Transformer(model.cfg)
    state = model.state_dict()
    trained = {name for name, _ in model.named_parameters()}
    for index, name in enumerate(sorted(trained)):
        weights = imitate_weights(state[name].numpy(), n_products=N_PRODUCTS, seed=[seed, index])
        state[name] = torch.from_numpy(weights)
    copy.load_state_dict(state)
    return copy


def probe_patterns(model: Transformer, language: DyckLanguage) -> dict[str, np.ndarray]:
    """Patterns on the probe string, ``[layer, query_pos, key_pos]``, under each convention.

    ``pattern``: as the model attends; ``pattern_unmasked``: without the causal mask;
    ``pattern_start``: with START in front.
    """
    probe, layers = language.probe_tokens(), range(model.cfg.n_layers)
    return {
        "pattern": np.stack([probe_pattern(model, probe, layer=layer) for layer in layers]),
        "pattern_unmasked": np.stack(
            [probe_pattern(model, probe, layer=layer, mask="none") for layer in layers]
        ),
        "pattern_start": np.stack(
            [probe_pattern(model, probe, layer=layer, has_start=True) for layer in layers]
        ),
    }


def component_scores(model: Transformer, language: DyckLanguage) -> dict[str, float]:
    """What single components of a one-layer model say, each by itself.

    ``score_tie``: from W_Q and W_K alone: standard deviation over close queries of
    s(close|q) - s(open|q), averaged over pairs; 0 where scores are tied as balance demands.
    ``value_cosine``: from W_V alone: cosine of the centred values of the two brackets of a pair,
    averaged over pairs; -1 where values are opposite as balance demands.
    """
    tokens = torch.cat([torch.tensor([START]), language.probe_tokens()])
    terms = attention_terms(model, tokens, layer=0)
    values = terms.values - terms.values.mean(-1, keepdim=True)
    opens = language.is_open(tokens).nonzero()[:, 0]
    closes = language.matching_bracket(tokens)[opens]
    queries = closes[language.depth(tokens)[closes] > 0]
    gaps = terms.scores[queries][:, closes] - terms.scores[queries][:, opens]
    cosine = torch.nn.functional.cosine_similarity(values[opens], values[closes], dim=-1)
    return {"score_tie": float(gaps.std(0).mean()), "value_cosine": float(cosine.mean())}


def probe_scores(
    model: Transformer, inputs: Tensor, language: DyckLanguage
) -> dict[str, dict[str, float]]:
    """Linear probes for depth and for the type of the innermost open bracket, by layer."""
    names = [
        "blocks.0.hook_resid_pre",
        *(f"blocks.{layer}.hook_resid_post" for layer in range(model.cfg.n_layers)),
    ]
    with torch.no_grad():
        _, cache = model.run_with_cache(inputs, names_filter=names)
    top = language.stack_top(inputs)
    top_type = language.bracket_type(inputs.gather(-1, top.clamp(min=0)))
    labels = {
        "depth": language.depth(inputs),
        "top": torch.where(top >= 0, top_type, -1),
    }
    n_pos = inputs.shape[1]
    groups = np.repeat(sequence_groups(inputs.numpy()), n_pos)
    # a kind of item is a token at a position: eight tokens alone could be memorised
    items = (inputs * n_pos + torch.arange(n_pos)).flatten().numpy()
    scores = {}
    for what, label in labels.items():
        for layer, name in enumerate(names):
            score = score_probe(
                LinearProbe(),
                cache[name].flatten(0, 1).numpy(),
                labels=label.flatten().numpy(),
                groups=groups,
                items=items,
            )
            scores[f"probe_{what}_{layer}"] = {
                "accuracy": score.accuracy,
                "control": score.control_accuracy,
                "majority": score.majority_accuracy,
            }
    return scores


def _add_accuracies(
    numbers: dict[str, Any],
    arrays: dict[str, np.ndarray],
    prefix: str,
    model: Transformer,
    inputs: Tensor,
    long_inputs: Tensor,
    language: DyckLanguage,
) -> None:
    exact = with_eps(model, EXACT_EPS)
    for name, tokens in (("train", inputs), ("long", long_inputs)):
        measured = model_closing_accuracy(model, tokens, language)
        numbers[f"{prefix}{name}_threshold"] = measured.threshold
        numbers[f"{prefix}{name}_argmax"] = measured.argmax
        numbers[f"{prefix}{name}_threshold_exact"] = model_closing_accuracy(
            exact, tokens, language
        ).threshold
        arrays |= _by_position(f"{prefix}{name}", measured)


def _by_position(name: str, measured: ClosingAccuracy) -> dict[str, np.ndarray]:
    return {
        f"{name}_threshold_hits": measured.threshold_hits.astype(np.int32),
        f"{name}_argmax_hits": measured.argmax_hits.astype(np.int32),
        f"{name}_counts": measured.counts.astype(np.int32),
    }
