"""Would the model compute the same function if a head attended elsewhere?

A head's pattern is replaced while the model runs, the outputs before and after are compared text by
text, and the mean distance gets a bootstrap interval. Three verdicts are possible: *equivalent* if
the interval lies below a margin, *different* if it lies above, *undecided* otherwise. With a level
of 0.9 this is the pair of one-sided tests at 5% (Schuirmann 1987).

A margin is a claim about what does not matter, so it needs a reason. ``noise_null`` and
``pair_null`` give two: how far apart are the outputs of this model and of itself under a little
noise, and how far apart are models that are equally good?

Anything hookable will do that answers tokens with logits and has ``blocks.{l}.attn.hook_pattern``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformer_lens import HookedRootModule

from interp.bootstrap import BootstrapInterval, bootstrap_interval
from interp.pattern_replacement import Head, Replacement, run_with_replaced_patterns

OutputDistance = Literal["total_variation", "kl", "disagreement"]
Verdict = Literal["equivalent", "different", "undecided"]


@dataclass(frozen=True)
class EquivalenceTest:
    """A measured distance against a margin, beside distances that mean nothing."""

    distance: BootstrapInterval
    """Mean over texts, with its interval."""
    margin: float
    null: tuple[float, ...] = ()
    """Mean distances between models that count as the same."""

    @property
    def verdict(self) -> Verdict:
        """On which side of the margin the whole interval lies, if on any."""
        if self.distance.high < self.margin:
            return "equivalent"
        return "different" if self.distance.low > self.margin else "undecided"

    @property
    def null_share(self) -> float:
        """Share in (0, 1] of the null at least as far apart, the measurement itself included."""
        return (1 + sum(d >= self.distance.estimate for d in self.null)) / (1 + len(self.null))


def equivalence_test(
    model: HookedRootModule,
    tokens: Int[Tensor, "batch pos"],
    *,
    heads: Sequence[Head],
    replacement: Replacement,
    margin: float,
    donor: HookedRootModule | None = None,
    null: Sequence[float] = (),
    distance: OutputDistance = "total_variation",
    counted: Bool[Tensor, "batch pos"] | None = None,
    level: float = 0.9,
    seed: int = 0,
    batch_size: int = 64,
) -> EquivalenceTest:
    """Test whether replacing the patterns of some heads leaves a model's outputs the same.

    Args:
        model: answers tokens with logits ``[batch, pos, d_vocab]``.
        tokens: ``[batch, pos]``; the texts are what the interval is about.
        heads: pairs ``(layer, head)``.
        replacement: ``"uniform"``, ``"shuffled"``, ``"simplex"`` or ``"donor"``, see
            ``interp.pattern_replacement``.
        margin: mean distance below which two models count as the same, more than 0.
        donor: whose patterns ``"donor"`` takes.
        null: mean distances of what counts as the same, for ``null_share``.
        distance: ``"total_variation"`` in [0, 1], ``"kl"`` (nats, from the model to the edited one)
            or ``"disagreement"`` (argmax differs).
        counted: ``[batch, pos]``, the positions that count; all by default.
        level: coverage of the interval.
        seed: seeds the random replacements and the bootstrap.
        batch_size: texts at a time; random replacements depend on it.

    Returns:
        The test with its verdict.

    Raises:
        ValueError: a margin that is not positive, or what the parts refuse.
    """
    batches = tokens.split(batch_size)
    with torch.no_grad():
        before = torch.cat([model(part) for part in batches])
    after = run_with_replaced_patterns(
        model,
        tokens,
        heads=heads,
        replacement=replacement,
        donor=donor,
        seed=seed,
        batch_size=batch_size,
    )
    distances = output_distances(before, after, distance=distance, counted=counted)
    return judge_equivalence(distances, margin=margin, null=null, level=level, seed=seed)


def judge_equivalence(
    distances: Float[np.ndarray, " batch"],
    *,
    margin: float,
    null: Sequence[float] = (),
    level: float = 0.9,
    seed: int = 0,
    n_resamples: int = 2000,
) -> EquivalenceTest:
    """The verdict on distances by text.

    Args:
        distances: ``[batch]``, one a text, at least 0.
        margin: more than 0.
        null: mean distances of what counts as the same.
        level: coverage of the bootstrap interval over texts.
        seed: seeds the bootstrap.
        n_resamples: bootstrap resamples.

    Raises:
        ValueError: a margin that is not positive, or distances that are negative or not finite.
    """
    if not margin > 0:
        raise ValueError(
            f"margin: got {margin}, expected more than 0; no finite sample shows a distance of 0"
        )
    if (distances < 0).any():
        raise ValueError("distances: some are negative, expected at least 0")
    interval = bootstrap_interval(distances, level=level, seed=seed, n_resamples=n_resamples)
    return EquivalenceTest(interval, margin, tuple(float(d) for d in null))


def output_distances(
    logits: Float[Tensor, "batch pos d_vocab"],
    others: Float[Tensor, "batch pos d_vocab"],
    *,
    distance: OutputDistance = "total_variation",
    counted: Bool[Tensor, "batch pos"] | None = None,
) -> Float[np.ndarray, " text"]:
    """Distance of two models' next-token distributions, averaged over each text's positions.

    Args:
        logits, others: ``[batch, pos, d_vocab]``.
        distance: ``"total_variation"`` in [0, 1], ``"kl"`` (nats, of ``others`` from ``logits``) or
            ``"disagreement"``.
        counted: ``[batch, pos]``, the positions that count; texts without any are left out.

    Returns:
        ``[text]``, at least 0.

    Raises:
        ValueError: an unknown distance, or no position that counts.
    """
    if distance not in get_args(OutputDistance):
        raise ValueError(f"distance: got {distance!r}, expected one of {get_args(OutputDistance)}")
    if counted is None:
        counted = torch.ones(logits.shape[:2], dtype=torch.bool, device=logits.device)
    if distance == "disagreement":
        apart = (logits.argmax(-1) != others.argmax(-1)).double()
    else:
        ours, theirs = logits.double().log_softmax(-1), others.double().log_softmax(-1)
        if distance == "kl":
            apart = (ours.exp() * (ours - theirs)).sum(-1).clamp(min=0)
        else:
            apart = (ours.exp() - theirs.exp()).abs().sum(-1) / 2
    n_counted = counted.sum(-1)
    has_any = n_counted > 0
    if not has_any.any():
        raise ValueError("counted: no position counts, expected some True")
    means = (apart * counted).sum(-1)[has_any] / n_counted[has_any]
    return np.asarray(means.cpu().numpy())


def pair_null(
    outputs: Sequence[Float[Tensor, "batch pos d_vocab"]],
    *,
    distance: OutputDistance = "total_variation",
    counted: Bool[Tensor, "batch pos"] | None = None,
) -> Float[np.ndarray, " pair"]:
    """Mean output distance of every pair of models that are held to be the same.

    Args:
        outputs: logits of each model on the same texts.
        distance, counted: as in ``output_distances``.

    Returns:
        ``[pair]``, in the order of ``itertools.combinations``.

    Raises:
        ValueError: fewer than two models.
    """
    if len(outputs) < 2:
        raise ValueError(f"outputs: got {len(outputs)} models, expected at least 2")
    return np.array(
        [
            output_distances(a, b, distance=distance, counted=counted).mean()
            for a, b in combinations(outputs, 2)
        ]
    )


def noise_null(
    model: HookedRootModule,
    tokens: Int[Tensor, "batch pos"],
    *,
    relative_noise: float,
    n_draws: int = 20,
    point: str = "hook_embed",
    distance: OutputDistance = "total_variation",
    counted: Bool[Tensor, "batch pos"] | None = None,
    seed: int = 0,
) -> Float[np.ndarray, " draw"]:
    """Mean output distance of a model from itself with noise added at one hook point.

    Args:
        model: answers tokens with logits.
        tokens: ``[batch, pos]``.
        relative_noise: length of the noise over the length of each activation vector, more than 0.
        n_draws: independent draws.
        point: name of the hook point that gets the noise.
        distance, counted: as in ``output_distances``.
        seed: seeds a generator of its own.

    Returns:
        ``[draw]``, at least 0.

    Raises:
        ValueError: noise or draws that are not positive.
    """
    if not relative_noise > 0 or n_draws < 1:
        raise ValueError(
            f"relative_noise, n_draws: got {relative_noise} and {n_draws}, expected more than 0 "
            "and at least 1"
        )
    generator = torch.Generator().manual_seed(seed)

    def add_noise(activation: Tensor, hook: Any) -> Tensor:
        noise = torch.randn(activation.shape, generator=generator, dtype=torch.float64)
        noise = (noise / noise.norm(dim=-1, keepdim=True)).to(activation)
        return activation + relative_noise * activation.norm(dim=-1, keepdim=True) * noise

    hooks: list[tuple[str, Callable[..., Tensor]]] = [(point, add_noise)]
    with torch.no_grad():
        clean = model(tokens)
        distances = []
        for _ in range(n_draws):
            with model.hooks(fwd_hooks=hooks):
                noisy = model(tokens)
            distances.append(
                output_distances(clean, noisy, distance=distance, counted=counted).mean()
            )
    return np.array(distances)
