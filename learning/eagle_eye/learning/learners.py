"""The three views of a node, trained with scikit-learn and torch and exported as plain arrays."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from sklearn.covariance import MinCovDet
from sklearn.ensemble import IsolationForest
from torch import Tensor, nn

from eagle_eye.detectors.signs.learned_model import AutoencoderLayer, Covariance, Forest
from eagle_eye.detectors.types import Floats

SUPPORT = 0.9  # share of the looks assumed healthy
SAMPLES_MAX = 2_000  # more make it slow and hardly better
RIDGE = 0.1  # variance of one robust deviation squared: what never varied must not make a grain a mile


def fit_covariance(places: Floats, seed: int) -> Covariance:
    """Return location and precision of (N, metrics * 2) levels and changes; the same for the same seed and values."""
    rng = np.random.default_rng(seed)
    chosen = rng.choice(len(places), min(len(places), SAMPLES_MAX), replace=False)
    with warnings.catch_warnings():
        # Metrics that never vary make the sample's own matrix singular; the ridge is what we rely on.
        warnings.simplefilter("ignore")
        found = MinCovDet(support_fraction=SUPPORT, random_state=seed).fit(np.asarray(places[chosen], np.float64))
    matrix = found.covariance_ + RIDGE * np.eye(places.shape[1])
    return Covariance(found.location_.astype(np.float64), np.linalg.inv(matrix))


TREES = 100
SAMPLES = 256  # for each tree: enough, and small ones swamp less (Liu, Ting & Zhou 2008)
EULER = 0.5772156649015329


def grow_forest(magnitudes: Floats, seed: int, trees: int = TREES) -> IsolationForest:
    """Return a forest of (N, metrics) magnitudes; the same for the same seed and values."""
    return IsolationForest(
        n_estimators=trees, max_samples=min(SAMPLES, len(magnitudes)), random_state=seed, n_jobs=1
    ).fit(np.asarray(magnitudes, np.float32))


def exported_forest(grown: IsolationForest) -> Forest:
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


EPOCHS = 60
TRIM_EPOCHS = 20  # after which the worst-fitting windows are removed
TRIM_RATIO = 0.02  # healthy history is never entirely healthy
BATCH = 256
BATCHES_MAX = 400  # per epoch: more history gives better samples, not longer training
LEARNING_RATE = 3e-3
WEIGHT_DECAY = 1e-5
HIDDEN_RATIO, CODE_RATIO = 2, 6  # the input is this many times as wide
HIDDEN_MAX, CODE_MIN = 128, 2
DROPPED_RATIO = 0.1  # of the inputs are masked: it must learn how metrics relate (Vincent et al. 2008)


def network(width: int) -> nn.Sequential:
    """Return an untrained autoencoder."""
    hidden = min(max(width // HIDDEN_RATIO, CODE_MIN), HIDDEN_MAX)
    code = max(width // CODE_RATIO, CODE_MIN)
    return nn.Sequential(
        nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, code), nn.Tanh(),
        nn.Linear(code, hidden), nn.Tanh(), nn.Linear(hidden, width),
    )  # fmt: skip


def train_autoencoder(inputs: Floats, seed: int, epochs: int = EPOCHS) -> nn.Sequential:
    """Return an autoencoder of (N, width) inputs, NaN where not observed; the same for the same seed and inputs.

    Leaves torch's own random state and number of threads as they were.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the same sums in the same order, and the machine is left to others
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return _trained(torch.from_numpy(np.array(inputs, np.float32)), epochs)
    finally:
        torch.set_num_threads(threads)


def _trained(inputs: Tensor, epochs: int) -> nn.Sequential:
    known = torch.isfinite(inputs)
    filled = torch.where(known, inputs, 0.0)
    model = network(inputs.shape[1])
    optimiser = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, epochs)
    for epoch in range(epochs):
        if epoch == min(TRIM_EPOCHS, epochs // 3):
            keep = _ordinary(model, filled, known)
            filled, known = filled[keep], known[keep]
        order = torch.randperm(len(filled))[: BATCHES_MAX * BATCH]
        for batch in torch.split(order, BATCH):
            value, mask = filled[batch], known[batch]
            shown = value * (torch.rand_like(value) >= DROPPED_RATIO)
            # Linear beyond a few deviations: outliers in training must not distort the rest.
            loss = nn.functional.smooth_l1_loss(model(shown), value, beta=3.0, reduction="none")
            loss = (loss * mask).sum() / mask.sum().clamp(min=1)
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        schedule.step()
    return model


def _ordinary(model: nn.Sequential, filled: Tensor, known: Tensor) -> Tensor:
    """Return the rows without those that fit worst."""
    with torch.no_grad():
        error = ((model(filled) - filled) ** 2 * known).sum(dim=1) / known.sum(dim=1).clamp(min=1)
    return torch.argsort(error)[: max(int(len(error) * (1 - TRIM_RATIO)), 1)].sort().values


def exported_autoencoder(model: nn.Sequential) -> tuple[AutoencoderLayer, ...]:
    """Return the network's weights as arrays."""
    linear = [part for part in model if isinstance(part, nn.Linear)]
    return tuple(AutoencoderLayer(p.weight.detach().numpy().copy(), p.bias.detach().numpy().copy()) for p in linear)
