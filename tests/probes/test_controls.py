import numpy as np
import pytest
from sklearn.neighbors import KNeighborsClassifier

from interp.probes.controls import control_labels, score_probe, sequence_groups, split_by_group
from interp.probes.linear import LinearProbe


def _rows(n_sequences=61, length=11, n_items=23, seed=3):
    rng = np.random.default_rng(seed)
    groups = np.repeat(np.arange(n_sequences), length)
    items = rng.integers(n_items, size=len(groups))
    return rng, groups, items


def test_a_property_of_the_context_is_read_and_random_item_labels_are_not():
    rng, groups, items = _rows()
    features = rng.normal(size=(len(items), 13))
    labels = (features[:, 5] > 0).astype(int)
    score = score_probe(LinearProbe(), features, labels=labels, groups=groups, items=items)
    assert score.accuracy > 0.95
    assert score.control_accuracy < 0.7
    assert 0.4 < score.majority_accuracy < 0.65
    assert score.selectivity == pytest.approx(score.accuracy - score.control_accuracy)
    assert score.n_train + score.n_test == len(items)


def test_a_probe_that_memorises_items_is_shown_up_by_its_control():
    _, groups, items = _rows()
    features = np.eye(23)[items]  # nothing but the item's identity
    labels = items % 2
    score = score_probe(LinearProbe(l2=1e-3), features, labels=labels, groups=groups, items=items)
    assert score.accuracy == 1
    assert score.control_accuracy == 1
    assert score.selectivity == 0


def test_random_labels_score_at_chance_and_the_majority_is_counted_on_training_rows():
    rng, groups, items = _rows(n_sequences=211)
    features = rng.normal(size=(len(items), 5))
    labels = rng.choice(3, size=len(items), p=[0.2, 0.5, 0.3])
    score = score_probe(LinearProbe(), features, labels=labels, groups=groups, items=items)
    assert score.accuracy == pytest.approx(0.5, abs=0.06)
    assert score.majority_accuracy == pytest.approx(0.5, abs=0.06)


def test_the_majority_is_that_of_the_training_rows_counted_on_the_test_rows():
    rng, groups, items = _rows(n_sequences=7)
    features = rng.normal(size=(len(items), 5))
    labels = (groups % 3 == 0).astype(int)  # constant in each sequence, so that sides differ
    train, test = split_by_group(groups, seed=2)
    majority = int(labels[train].mean() > 0.5)
    assert np.mean(labels[test] == majority) != pytest.approx(np.mean(labels[train] == majority))
    score = score_probe(LinearProbe(), features, labels=labels, groups=groups, items=items, seed=2)
    assert score.majority_accuracy == pytest.approx(np.mean(labels[test] == majority))


def test_groups_keep_copies_of_a_sequence_from_leaking():
    rng = np.random.default_rng(5)
    originals = rng.integers(1000, size=(97, 3))
    sequences = np.repeat(originals, 4, axis=0)  # each four times
    labels = rng.integers(2, size=len(sequences))
    labels = labels[::4].repeat(4)
    features = sequences.astype(float)
    memoriser = KNeighborsClassifier(n_neighbors=1)
    items = np.arange(len(sequences))

    leaked = score_probe(memoriser, features, labels=labels, groups=items, items=items)
    groups = sequence_groups(sequences)
    kept = score_probe(memoriser, features, labels=labels, groups=groups, items=items)
    assert leaked.accuracy > 0.9
    assert kept.accuracy == pytest.approx(0.5, abs=0.2)


def test_no_group_is_on_both_sides_and_every_row_is_on_one():
    groups = np.random.default_rng(7).integers(29, size=307)
    train, test = split_by_group(groups, test_fraction=0.3, seed=1)
    assert not set(groups[train]) & set(groups[test])
    assert sorted([*train, *test]) == list(range(307))
    assert len(set(groups[test])) == round(0.3 * 29)
    again = split_by_group(groups, test_fraction=0.3, seed=1)
    other = split_by_group(groups, test_fraction=0.3, seed=2)
    assert np.array_equal(test, again[1])
    assert not np.array_equal(test, other[1])


def test_control_labels_depend_on_the_item_alone_and_follow_the_label_distribution():
    rng = np.random.default_rng(11)
    items = rng.integers(2000, size=20011)
    labels = rng.choice(["a", "b"], size=len(items), p=[0.8, 0.2])
    control = control_labels(items, labels, seed=1)
    for item in (0, 3, 1999):
        assert len(set(control[items == item])) == 1
    assert np.mean(control == "a") == pytest.approx(0.8, abs=0.04)
    assert not np.array_equal(control, control_labels(items, labels, seed=2))


def test_the_probe_that_was_passed_stays_unfitted():
    rng, groups, items = _rows()
    features = rng.normal(size=(len(items), 5))
    probe = LinearProbe()
    score_probe(
        probe, features, labels=(features[:, 0] > 0).astype(int), groups=groups, items=items
    )
    assert not hasattr(probe, "coef_")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"groups": np.zeros(671, dtype=int)}, "groups: got 1 group"),
        ({"test_fraction": 1.0}, "test_fraction"),
        ({"labels": np.zeros(5, dtype=int)}, "labels: got 5 rows"),
        ({"items": np.zeros(7, dtype=int)}, "items: got 7 rows"),
    ],
)
def test_refusals_name_the_argument(changes, named):
    rng, groups, items = _rows()
    arguments = {"labels": items % 2, "groups": groups, "items": items, **changes}
    with pytest.raises(ValueError, match=named):
        score_probe(LinearProbe(), rng.normal(size=(671, 5)), **arguments)
