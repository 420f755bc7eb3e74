"""A model of healthy nodes made by hand: four metrics, nothing trained, spans that fit into a story's minute."""

from __future__ import annotations

from typing import Any

import numpy as np

from eagle_eye.detectors.signs.learned_features import FEATURES, Metric, View
from eagle_eye.detectors.signs.learned_model import AutoencoderLayer, Covariance, Forest, LearnedModel, ScoreTail

METRICS = (
    Metric("gpu_power_watts", True, 5.0, "watts"),
    Metric("gpu_temperature_celsius", True, 1.0, "celsius"),
    Metric("node_cpu_utilization_ratio", False, 0.01, "ratio"),
    Metric("node_memory_used_ratio", False, 0.01, "ratio"),
)
WIDTH = len(METRICS) * len(FEATURES)


def stump() -> Forest:
    """Return a forest of one tree that cuts off whoever is odd in the last metric."""
    return Forest(
        feature=np.array([3, 0, 0], np.int32),
        threshold=np.array([3.0, 0.0, 0.0]),
        left=np.array([1, 1, 2], np.int32),
        right=np.array([2, 1, 2], np.int32),
        path=np.array([0.0, 8.0, 1.0]),
        roots=np.array([0], np.int32),
        depth=1,
        normal=8.0,
    )


def tiny_model(**changes: Any) -> LearnedModel:
    """Return the model: it expects every feature to be 0, within a few grains."""
    fields: dict[str, Any] = {
        "view": View(metrics=METRICS, span_s=10.0, past_s=15.0),
        "looks": 2,
        "interval_s": 1.0,
        "gpus_per_node": (1, 8),
        "power_limits_watts": (700.0,),
        "gpu_models": (),
        "centre": np.zeros((len(METRICS), len(FEATURES)), np.float32),
        "scale": np.full((len(METRICS), len(FEATURES)), 4.0, np.float32),
        "layers": (AutoencoderLayer(np.zeros((WIDTH, WIDTH), np.float32), np.zeros(WIDTH, np.float32)),),
        "forest": stump(),
        "covariance": Covariance(np.zeros(2 * len(METRICS)), np.eye(2 * len(METRICS))),
        "tails": (ScoreTail(1.0, 0.1, 0.0, 10.0), ScoreTail(0.6, 0.02, 0.0, 10.0), ScoreTail(1.0, 0.1, 0.0, 10.0)),
        "node_days": 10.0,
        "from_s": 0.0,
        "until_s": 86_400.0,
        "digest": "tiny",
    }
    return LearnedModel(**{**fields, **changes})
