import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from interp.probes.linear import LinearProbe


@parametrize_with_checks(
    [LinearProbe()],
    expected_failed_checks=lambda _: {
        "check_do_not_raise_errors_in_init_or_set_params": "annotations are checked under pytest"
    },
)
def test_linear_probe_keeps_scikit_learns_contract(estimator, check):
    check(estimator)


def _blobs(n_classes, seed=3):
    rng = np.random.default_rng(seed)
    labels = rng.integers(n_classes, size=173)
    centres = rng.normal(size=(n_classes, 7)) * 2
    features = (centres[labels] + rng.normal(size=(173, 7))) * np.array([1e-3, 1, 50, 1, 1, 1, 1])
    return features + 11, labels


@pytest.mark.parametrize("n_classes", [2, 5])
def test_it_is_scaled_logistic_regression_in_the_units_of_the_features(n_classes):
    features, labels = _blobs(n_classes)
    probe = LinearProbe(l2=0.5, tol=1e-8).fit(features, labels)
    scaled = StandardScaler().fit_transform(features)
    reference = LogisticRegression(C=2.0, tol=1e-8, max_iter=1000).fit(scaled, labels)
    assert probe.predict_proba(features) == pytest.approx(reference.predict_proba(scaled), abs=1e-6)
    assert np.array_equal(probe.predict(features), reference.predict(scaled))
    assert probe.score(features, labels) > 0.8


def test_features_rescaled_give_the_same_predictions():
    features, labels = _blobs(3)
    scales = np.array([1e4, 3, 0.2, 1e-4, 7, 1, 1])
    plain = LinearProbe(tol=1e-8).fit(features, labels)
    rescaled = LinearProbe(tol=1e-8).fit(features * scales, labels)
    assert rescaled.predict_proba(features * scales) == pytest.approx(
        plain.predict_proba(features), abs=1e-5
    )
    assert rescaled.coef_ * scales == pytest.approx(plain.coef_, rel=1e-3, abs=1e-4)


def test_a_constant_feature_is_harmless():
    features, labels = _blobs(3)
    features[:, 4] = 0.1
    assert np.isfinite(LinearProbe().fit(features, labels).coef_).all()


def test_a_stronger_penalty_shrinks_the_weights():
    features, labels = _blobs(3)
    probes = [LinearProbe(l2=l2).fit(features, labels) for l2 in (0.1, 10, 1e3)]
    norms = [np.linalg.norm(probe.coef_) for probe in probes]
    assert norms[0] > norms[1] > norms[2]


def test_refusals_name_the_argument():
    features, labels = _blobs(3)
    with pytest.raises(ValueError, match="l2: got -1"):
        LinearProbe(l2=-1).fit(features, labels)
    with pytest.raises(ValueError, match="y: got one class"):
        LinearProbe().fit(features, np.zeros(len(labels), dtype=int))
