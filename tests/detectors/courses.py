"""Jobs whose own course by step is given, one step a second, and detectors asked step by step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from eagle_eye.detectors.types import Curve, Detector, Floats, Verdict, Window
from tests.detectors.windows import NOW_S, Story

LENGTH = 400
PLAIN = Story(rows=3).window()


def curve(first: int = 1, **values: Any) -> Curve:
    """Return a course of one step a second that ends at NOW_S."""
    length = len(next(iter(values.values())))
    return Curve(
        number=np.arange(float(first), first + length),
        times_s=NOW_S - np.arange(length - 1.0, -1.0, -1.0),
        values=values,
    )


def learning(length: int = LENGTH, noise: float = 0.02, seed: int = 0, start: int = 0) -> Floats:
    """Return the loss of a job that learns: a power law with the noise of its batches."""
    steps = np.arange(start, start + length)
    random = np.random.default_rng(seed)
    return np.asarray((1.8 + 9 * (steps + 10.0) ** -0.35) * np.exp(noise * random.normal(size=length)))


def norms(length: int = LENGTH, noise: float = 0.25, seed: int = 1) -> Floats:
    """Return gradient norms: lognormal."""
    return np.asarray(0.5 * np.exp(noise * np.random.default_rng(seed).normal(size=length)))


def paces(length: int = LENGTH, noise: float = 0.01, step_s: float = 2.0, seed: int = 2) -> Floats:
    """Return step times with a slow start."""
    seconds = step_s * np.exp(noise * np.random.default_rng(seed).normal(size=length))
    seconds[:4] *= (20.0, 4.0, 2.0, 1.5)
    return np.asarray(seconds)


def window(course: Curve, **changes: Any) -> Window:
    """Return the window of a job with this course."""
    return replace(PLAIN, curve=course, **changes)


def first_said(detector: Detector, course: Curve, since: int, **changes: Any) -> tuple[int, Verdict] | None:
    """Return after how many steps from line ``since`` on the detector speaks first, and what; None: never."""
    for reports in range(1, len(course.number) - since + 1):
        end = since + reports
        seen = Curve(course.number[:end], course.times_s[:end], {m: v[:end] for m, v in course.values.items()})
        said = detector.detect(window(seen, now_s=float(course.times_s[end - 1]), **changes))
        if said:
            return reports, said[0]
    return None


def job(rows: int = 120, nodes: int = 8) -> Story:
    """Return a healthy job of one step a row that also reports checksums."""
    story = Story(nodes=nodes, rows=rows)
    shape = story.device["train_step"].shape
    random = np.random.default_rng(8)
    story.device |= {
        "train_step": np.repeat(np.arange(1.0, rows + 1)[:, None], shape[1], axis=1),
        "train_step_seconds": np.exp(0.01 * random.normal(size=(rows, 1))) * np.ones(shape),
        "train_loss": np.repeat(learning(rows)[:, None], shape[1], axis=1),
        "train_local_grad_norm": 1.5 * np.exp(0.2 * random.normal(size=shape)),
        "train_parameter_checksum": np.repeat(random.normal(size=(rows, 1)), shape[1], axis=1),
    }
    return story


def wrong_gradient() -> Story:
    story = job()
    story.device["train_local_grad_norm"][[-7, -4, -1], 5] *= 30
    return story


def wrong_parameters() -> Story:
    story = job()
    story.device["train_parameter_checksum"][-4:, 3] += 1.0
    return story


def spiking() -> Story:
    story = job()
    story.device["train_loss"][-4:] *= 3
    return story


def diverging() -> Story:
    story = job()
    story.device["train_loss"][-30:] *= np.exp(0.05 * np.arange(30))[:, None]
    return story


def slowed() -> Story:
    story = job()
    story.device["train_step_seconds"][-30:] *= 1.5
    story.device["train_compute_seconds"][-30:] *= 1.5
    return story


def uneven() -> Story:
    story = job()
    story.device["train_compute_seconds"] = 0.6 * np.exp(0.3 * np.random.default_rng(9).normal(size=(120, 8)))
    return story
