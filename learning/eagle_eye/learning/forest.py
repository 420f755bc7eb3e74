"""The isolation forest: trained with scikit-learn, exported as plain arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.ensemble import IsolationForest

from eagle_eye.detectors.signs.learned_model import Forest
from eagle_eye.detectors.types import Floats

TREES = 100
SAMPLES = 256  # for each tree: enough, and small ones swamp less (Liu, Ting & Zhou 2008)
EULER = 0.5772156649015329


def grow(magnitudes: Floats, seed: int, trees: int = TREES) -> IsolationForest:
    """Return a forest of (N, metrics) magnitudes; the same for the same seed and values."""
    return IsolationForest(
        n_estimators=trees, max_samples=min(SAMPLES, len(magnitudes)), random_state=seed, n_jobs=1
    ).fit(np.asarray(magnitudes, np.float32))


def exported(grown: IsolationForest) -> Forest:
    """Return the forest as arrays over all trees' nodes."""
    parts: dict[str, list[Any]] = {n: [] for n in ("feature", "threshold", "left", "right", "path")}
    roots, start, depth = [], 0, 1
    for estimator, columns in zip(grown.estimators_, grown.estimators_features_, strict=True):
        tree = estimator.tree_
        here = np.arange(tree.node_count) + start
        leaf = tree.children_left < 0
        levels = _depths(tree)
        parts["feature"].append(np.where(leaf, 0, np.asarray(columns)[np.where(leaf, 0, tree.feature)]))
        parts["threshold"].append(np.where(leaf, 0.0, tree.threshold))
        parts["left"].append(np.where(leaf, here, tree.children_left + start))
        parts["right"].append(np.where(leaf, here, tree.children_right + start))
        parts["path"].append(np.where(leaf, levels + average_path(tree.n_node_samples), 0.0))
        roots.append(start)
        start += tree.node_count
        depth = max(depth, int(levels.max()))
    whole = {name: np.concatenate(found) for name, found in parts.items()}
    return Forest(
        feature=whole["feature"].astype(np.int32),
        threshold=whole["threshold"].astype(np.float64),
        left=whole["left"].astype(np.int32),
        right=whole["right"].astype(np.int32),
        path=whole["path"].astype(np.float64),
        roots=np.array(roots, np.int32),
        depth=depth,
        normal=float(average_path(np.array([grown.max_samples_]))[0]),
    )


def average_path(samples: Any) -> Floats:
    """Return the mean path of an unsuccessful search in a binary search tree of so many samples: (n,)."""
    n = np.asarray(samples, np.float64)
    many = np.maximum(n, 3.0)
    long = 2.0 * (np.log(many - 1.0) + EULER) - 2.0 * (many - 1.0) / many
    result: Floats = np.where(n <= 1, 0.0, np.where(n <= 2, 1.0, long))
    return result


def _depths(tree: Any) -> Any:
    depths = np.zeros(tree.node_count, np.int64)
    for node in range(tree.node_count):  # parents come before their children
        for child in (tree.children_left[node], tree.children_right[node]):
            if child >= 0:
                depths[child] = depths[node] + 1
    return depths
