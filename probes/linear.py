"""A linear probe: what a linear readout of activations can tell about a label."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.linear_model import LogisticRegression
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

ArrayLike = Any  # what scikit-learn accepts: lists, arrays, data frames


class LinearProbe(ClassifierMixin, BaseEstimator):
    """Multinomial logistic regression on features scaled to unit variance.

    Scaling makes the penalty mean the same for residual streams of any size; the fitted weights
    are given back in the units of the features, so that ``coef_`` can be compared with, projected
    on or subtracted from activations directly.

    Args:
        l2: weight of the penalty, at least 0: l2 / (2 n) |w|^2 beside the mean log loss over n
            rows, w in scaled units.
        max_iter: most steps of the optimiser (L-BFGS).
        tol: gradient tolerance at which it stops.

    Attributes:
        classes_: ``[class]``, the labels in ascending order.
        coef_: ``[class, feature]`` (``[1, feature]`` for two classes), in feature units.
        intercept_: ``[class]`` (``[1]`` for two classes).
        n_features_in_: number of features seen in ``fit``.
        n_iter_: steps that the optimiser took.
    """

    def __init__(self, *, l2: float = 1.0, max_iter: int = 1000, tol: float = 1e-4) -> None:
        self.l2 = l2
        self.max_iter = max_iter
        self.tol = tol

    def fit(self, X: ArrayLike, y: ArrayLike) -> LinearProbe:
        """Fit on features ``X [row, feature]`` and labels ``y [row]``.

        Raises:
            ValueError: a negative ``l2``, fewer than two classes, shapes that do not fit or
                entries that are not finite.
        """
        if self.l2 < 0:
            raise ValueError(f"l2: got {self.l2}, expected at least 0")
        X, y = validate_data(self, X, y, dtype=[np.float64, np.float32])
        check_classification_targets(y)
        self.classes_ = np.unique(y)
        if len(self.classes_) < 2:
            raise ValueError(f"y: got one class, {self.classes_[0]!r}, expected at least two")
        mean, scale = X.mean(axis=0), X.std(axis=0)
        scale[scale <= 1e-7 * np.abs(X).max(axis=0, initial=0.0)] = 1  # a constant feature
        scale[scale == 0] = 1
        regression = LogisticRegression(
            C=1 / self.l2 if self.l2 else np.inf, max_iter=self.max_iter, tol=self.tol
        ).fit((X - mean) / scale, y)
        self.coef_ = regression.coef_ / scale
        self.intercept_ = regression.intercept_ - self.coef_ @ mean
        self.n_iter_ = int(regression.n_iter_.max())
        return self

    def decision_function(self, X: ArrayLike) -> np.ndarray:
        """Logits ``[row, class]``, or ``[row]`` for two classes (positive: the second)."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        logits = X @ self.coef_.T + self.intercept_
        return np.asarray(logits[:, 0] if len(self.classes_) == 2 else logits)

    def predict(self, X: ArrayLike) -> np.ndarray:
        """The most likely label of each row, ``[row]``."""
        logits = self.decision_function(X)
        chosen = (logits > 0).astype(int) if logits.ndim == 1 else logits.argmax(axis=1)
        return np.asarray(self.classes_[chosen])

    def predict_proba(self, X: ArrayLike) -> np.ndarray:
        """Probabilities ``[row, class]``; rows sum to 1."""
        logits = self.decision_function(X)
        if logits.ndim == 1:
            logits = np.stack([np.zeros_like(logits), logits], axis=1)
        odds = np.exp(logits - logits.max(axis=1, keepdims=True))
        return np.asarray(odds / odds.sum(axis=1, keepdims=True))
