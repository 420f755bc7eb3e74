"""The robust covariance of levels and changes: minimum covariance determinant, with scikit-learn."""

from __future__ import annotations

import warnings

import numpy as np
from sklearn.covariance import MinCovDet

from eagle_eye.detectors.signs.learned_model import Covariance
from eagle_eye.detectors.types import Floats

SUPPORT = 0.9  # share of the looks assumed healthy
SAMPLES_MAX = 2_000  # more make it slow and hardly better
RIDGE = 0.1  # variance of one robust deviation squared: what never varied must not make a grain a mile


def fit(places: Floats, seed: int) -> Covariance:
    """Return location and precision of (N, metrics * 2) levels and changes; the same for the same seed and values."""
    rng = np.random.default_rng(seed)
    chosen = rng.choice(len(places), min(len(places), SAMPLES_MAX), replace=False)
    with warnings.catch_warnings():
        # Metrics that never vary make the sample's own matrix singular; the ridge is what we rely on.
        warnings.simplefilter("ignore")
        found = MinCovDet(support_fraction=SUPPORT, random_state=seed).fit(np.asarray(places[chosen], np.float64))
    matrix = found.covariance_ + RIDGE * np.eye(places.shape[1])
    return Covariance(found.location_.astype(np.float64), np.linalg.inv(matrix))
