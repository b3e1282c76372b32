"""Myopia audit: what does a claim about one component say about the whole model?

A claim looks at one head or one matrix ("layer 1 attends to the stack top", "values of pairs are
opposite"). The audit takes many models that do the same task equally well and asks two questions:

- of how many is the claim true? If some do without, the component does not *have* to be so;
- does its score tell which models go on working on longer inputs, and does it tell as much as a
  measure of the whole model does?

Both answers are possible. Wen et al. 2023 (arXiv 2312.01429) argue that one component tells
little; Li et al. 2025 (arXiv 2507.06445) find that attention patterns predict behaviour out of
distribution.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import numpy as np
from jaxtyping import Bool, Float

from interp.bootstrap import BootstrapInterval, Correlation, bootstrap_interval, correlation

Model = TypeVar("Model")
AuditVerdict = Literal["predictive", "not predictive", "undecided"]

# rank correlations this small explain under a tenth of the variance of ranks
NEGLIGIBLE = 0.3


@dataclass(frozen=True)
class ComponentClaim(Generic[Model]):
    """A statement about one component that each model either bears out or does not."""

    name: str
    statement: str
    component: str
    """What it looks at, e.g. ``"blocks.1.attn head 0"`` or ``"W_V"``."""
    score: Callable[[Model], float]
    """One number from that component alone."""
    holds: Callable[[float], bool]
    """Whether a model of this score bears the claim out."""


@dataclass(frozen=True)
class Audit:
    """A claim over models that are equally good where they were trained."""

    claim: str
    n_models: int
    n_holding: int
    holding: BootstrapInterval
    """Share of models that bear the claim out, with its interval over models."""
    spearman: Correlation | None
    """Score against outcome; None where one of them is constant or there are fewer than 4."""
    pearson: Correlation | None
    advantage: BootstrapInterval | None
    """|Spearman| of the full-model measure minus that of the score; None without such a measure."""

    @property
    def verdict(self) -> AuditVerdict:
        """Whether the score tells models apart out of distribution.

        ``"predictive"``: both intervals of the rank correlation exclude 0. ``"not predictive"``:
        both lie within +-``NEGLIGIBLE``, or the score is the same in every model. Else undecided.
        """
        if self.spearman is None:
            return "not predictive" if self.n_models >= 4 else "undecided"
        if self.spearman.excludes_zero():
            return "predictive"
        bounds = (*self.spearman.bootstrap, *self.spearman.fisher)
        is_small = max(abs(bound) for bound in bounds) < NEGLIGIBLE
        return "not predictive" if is_small else "undecided"


def audit_models(
    models: Mapping[str, Model],
    claim: ComponentClaim[Model],
    *,
    outcomes: Mapping[str, float],
    full_scores: Mapping[str, float] | None = None,
    n_resamples: int = 2000,
    seed: int = 0,
) -> Audit:
    """Audit one claim over models that are held to be equally good.

    Args:
        models: by name.
        claim: scores one component of a model.
        outcomes: by the same names, what shall be predicted (such as accuracy on long strings).
        full_scores: by the same names, a measure of the whole model.
        n_resamples, seed: of the bootstrap over models.

    Raises:
        ValueError: names that differ, no models, or scores that are not finite.
    """
    names = list(models)
    for label, given in (("outcomes", outcomes), ("full_scores", full_scores)):
        if given is not None and set(given) != set(names):
            raise ValueError(
                f"{label}: got names {sorted(given)}, expected those of the models {sorted(names)}"
            )
    scores = np.array([float(claim.score(models[name])) for name in names])
    return audit_scores(
        scores,
        np.array([float(outcomes[name]) for name in names]),
        claim=claim.name,
        holds=np.array([bool(claim.holds(float(score))) for score in scores]),
        full_scores=(
            None if full_scores is None else np.array([float(full_scores[name]) for name in names])
        ),
        n_resamples=n_resamples,
        seed=seed,
    )


def audit_scores(
    scores: Float[np.ndarray, " model"],
    outcomes: Float[np.ndarray, " outcome"],
    *,
    claim: str,
    holds: Bool[np.ndarray, " judged"],
    full_scores: Float[np.ndarray, " full_score"] | None = None,
    n_resamples: int = 2000,
    seed: int = 0,
) -> Audit:
    """The audit of scores that were measured before.

    Args:
        scores: ``[model]``, of one component.
        outcomes: ``[model]``, what shall be predicted.
        claim: its name.
        holds: ``[model]``, which models bear the claim out.
        full_scores: ``[model]``, a measure of the whole model.
        n_resamples, seed: of the bootstrap over models.

    Raises:
        ValueError: no models, lengths that differ, or numbers that are not finite.
    """
    n_models = len(scores)
    for name, given in (("outcomes", outcomes), ("holds", holds), ("full_scores", full_scores)):
        if given is not None and len(given) != n_models:
            raise ValueError(f"{name}: got {len(given)} entries, expected {n_models} as in scores")
    holding = bootstrap_interval(holds.astype(float), n_resamples=n_resamples, seed=seed)
    can_correlate = n_models >= 4 and _varies(scores) and _varies(outcomes)
    spearman = pearson = advantage = None
    if can_correlate:
        spearman = correlation(
            scores, outcomes, kind="spearman", n_resamples=n_resamples, seed=seed
        )
        pearson = correlation(scores, outcomes, n_resamples=n_resamples, seed=seed)
    if can_correlate and full_scores is not None and _varies(full_scores):
        advantage = bootstrap_interval(
            np.stack([full_scores, scores, outcomes], axis=1),
            _advantage,
            n_resamples=n_resamples,
            seed=seed,
        )
    return Audit(claim, n_models, int(holds.sum()), holding, spearman, pearson, advantage)


def _advantage(rows: Float[np.ndarray, "model 3"]) -> float:
    """|Spearman(full, outcome)| - |Spearman(score, outcome)|; a side without spread counts as 0."""
    from scipy.stats import rankdata

    ranks = rankdata(rows, axis=0)
    centred = ranks - ranks.mean(axis=0)
    lengths = np.sqrt((centred**2).sum(axis=0))
    products = centred[:, :2].T @ centred[:, 2]
    scale = lengths[:2] * lengths[2]
    full, part = np.abs(np.divide(products, scale, out=np.zeros(2), where=scale > 0))
    return float(full - part)


def _varies(values: Float[np.ndarray, " model"]) -> bool:
    return bool(len(values) and (values != values[0]).any())
