"""The array shapes used here: K rows in time, N nodes, G GPUs a node, S training steps, L links a node."""

from __future__ import annotations

import zlib
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.floating[Any]]
Integers: TypeAlias = NDArray[np.integer[Any]]
Booleans: TypeAlias = NDArray[np.bool_]


def stream(seed: int, topic: str) -> np.random.Generator:
    """Return the random generator of one topic of one seed.

    Every topic draws from its own stream, so that a run with a fault and the same run without it share all noise.
    """
    return np.random.default_rng([seed, zlib.crc32(topic.encode())])


def normal(rng: np.random.Generator, shape: tuple[int, ...], deviation: float, mean: float = 0.0) -> Floats:
    """Return float32 normal noise of the given standard deviation."""
    noise = rng.standard_normal(shape, dtype=np.float32)
    noise *= np.float32(deviation)
    noise += np.float32(mean)
    return noise
