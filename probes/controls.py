"""A probe's score beside the two numbers without which it says nothing.

*Majority*: always guess the commonest training label. *Control task* (Hewitt & Liang 2019, arXiv
1909.03368, section 2): give every kind of item a random label, fixed once, drawn from the label
distribution; a probe that does well there memorises items. Selectivity is the difference.

Rows from one sequence share their past, so train and test are split by sequence, never by row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int, Num, Shaped
from sklearn.base import ClassifierMixin, clone
from sklearn.model_selection import GroupShuffleSplit


@dataclass(frozen=True)
class ProbeScore:
    """Accuracies in [0, 1] on the same held-out rows."""

    accuracy: float
    control_accuracy: float
    majority_accuracy: float
    n_train: int
    n_test: int

    @property
    def selectivity(self) -> float:
        """Accuracy minus control accuracy (Hewitt & Liang 2019), in [-1, 1]."""
        return self.accuracy - self.control_accuracy


def score_probe(
    probe: ClassifierMixin,
    features: Float[np.ndarray, "row feature"],
    *,
    labels: Shaped[np.ndarray, " label_row"],
    groups: Int[np.ndarray, " group_row"],
    items: Int[np.ndarray, " item_row"],
    test_fraction: float = 0.25,
    seed: int = 0,
) -> ProbeScore:
    """Accuracy of a probe on held-out sequences, with its control task and majority baseline.

    Args:
        probe: any scikit-learn classifier; it is cloned and itself stays unfitted.
        features: ``[row, feature]``, activations.
        labels: ``[row]``, what the probe shall read.
        groups: ``[row]``, the sequence that each row comes from (see ``sequence_groups``).
        items: ``[row]``, the kind of each row to which the control task ties its random label: a
            word, or, in a small vocabulary, token and position together.
        test_fraction: share of *groups* held out, in (0, 1).
        seed: seeds the split and the control labels.

    Returns:
        Held-out accuracies of probe, control probe and majority guess.

    Raises:
        ValueError: lengths that differ, fewer than two groups, or a fraction out of range.
    """
    train, test = split_by_group(groups, test_fraction=test_fraction, seed=seed)
    for name, given in (("labels", labels), ("groups", groups), ("items", items)):
        if len(given) != len(features):
            raise ValueError(f"{name}: got {len(given)} rows, expected {len(features)} as features")
    control = control_labels(items, labels, seed=seed)
    kinds, counts = np.unique(labels[train], return_counts=True)
    return ProbeScore(
        accuracy=_held_out_accuracy(probe, features, labels, train, test),
        control_accuracy=_held_out_accuracy(probe, features, control, train, test),
        majority_accuracy=float(np.mean(labels[test] == kinds[counts.argmax()])),
        n_train=len(train),
        n_test=len(test),
    )


def control_labels(
    items: Int[np.ndarray, " row"], labels: Shaped[np.ndarray, " row"], *, seed: int
) -> Shaped[np.ndarray, " row"]:
    """Random labels that depend on the kind of item alone, drawn from the label distribution.

    Args:
        items: ``[row]``, the kind of each row.
        labels: ``[row]``, the true labels, whose frequencies the control labels follow.
        seed: seeds a generator of its own.

    Returns:
        ``[row]``, equal for equal items.
    """
    kinds, kind_of_row = np.unique(items, return_inverse=True)
    drawn = np.random.default_rng(seed).integers(len(labels), size=len(kinds))
    return np.asarray(labels[drawn][kind_of_row])


def split_by_group(
    groups: Int[np.ndarray, " row"], *, test_fraction: float = 0.25, seed: int = 0
) -> tuple[Int[np.ndarray, " train_row"], Int[np.ndarray, " test_row"]]:
    """Row numbers for training and testing; no group is on both sides.

    Args:
        groups: ``[row]``, the sequence of each row.
        test_fraction: share of groups held out, in (0, 1).
        seed: seeds the draw.

    Raises:
        ValueError: fewer than two groups, or a fraction out of range.
    """
    if not 0 < test_fraction < 1:
        raise ValueError(f"test_fraction: got {test_fraction}, expected a share between 0 and 1")
    n_groups = len(np.unique(groups))
    if n_groups < 2:
        raise ValueError(f"groups: got {n_groups} group, expected at least 2; number each sequence")
    n_test = min(max(1, round(test_fraction * n_groups)), n_groups - 1)
    splitter = GroupShuffleSplit(n_splits=1, test_size=n_test, random_state=seed)
    train, test = next(splitter.split(groups, groups=groups))
    return train, test


def sequence_groups(sequences: Num[np.ndarray, "sequence pos"]) -> Int[np.ndarray, " sequence"]:
    """Number sequences so that copies share a number and cannot leak from train to test."""
    _, numbers = np.unique(sequences, axis=0, return_inverse=True)
    return np.asarray(numbers.reshape(-1))


def _held_out_accuracy(
    probe: ClassifierMixin,
    features: np.ndarray,
    labels: np.ndarray,
    train: np.ndarray,
    test: np.ndarray,
) -> float:
    if (labels[train] == labels[train][0]).all():  # nothing to fit: the constant is the answer
        return float(np.mean(labels[test] == labels[train][0]))
    fitted = clone(probe).fit(features[train], labels[train])
    return float(np.mean(fitted.predict(features[test]) == labels[test]))
