"""The nouns of detection: what a detector may see (``Window``) and what it may say (``Verdict``, ``Blind``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating[Any]]
Integers = NDArray[np.integer[Any]]


class Blind(Exception):  # noqa: N818 - not an error: the third answer
    """Cannot tell. The message says what was missing; absence is never health."""


@dataclass(frozen=True, slots=True)
class Series:
    """One device row: a GPU, or without GPUs a local rank, of a node; ``rank`` is -1 when no rank uses it."""

    node: str
    device: int
    rank: int = -1

    def __str__(self) -> str:
        """Return "node17/gpu3", the name people use."""
        return f"{self.node}/gpu{self.device}"


@dataclass(frozen=True, slots=True)
class Happening:
    """An event as detectors see it; ``time_s`` is on the window's clock, ``node`` None for the whole job."""

    time_s: float
    node: str | None
    device: int
    kind: str
    attributes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Pause:
    """A time without a finished step that ended well; ``phase`` is what the job said it was doing ("" nothing)."""

    phase: str
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """All that a detector may see: one attempt of one job, up to ``now_s``. Read-only.

    ``times_s`` (T,) are the ends of a common grid of intervals, oldest first; ``device[m]`` (T, S) and
    ``node[m]`` (T, N) hold metric m on it, NaN where nothing was observed; a metric that nobody sent is
    absent. +inf means that the quantity really was not finite. ``role_of`` (S,) maps
    a series to its group of comparable peers. ``heard_s`` (N,) is when each node was last
    heard (-inf: never in this attempt), ``farewell`` (N,) whether its agent said goodbye since.
    ``silent_s`` (S,) is for how long the rank's process has said nothing although it exists.
    ``watching_since_s`` is since when the observer itself has been watching without a gap: no silence
    is older than that. ``phase`` (one for each series) is what the rank said it is doing ("" unknown),
    ``phase_since_s`` (S,) since when (-inf unknown), ``pauses`` the job's own earlier times without a step.
    """

    now_s: float
    job: str
    attempt: int
    started_s: float
    interval_s: float
    times_s: Floats
    nodes: tuple[str, ...]
    series: tuple[Series, ...]
    role_of: Integers
    device: Mapping[str, Floats]
    node: Mapping[str, Floats]
    heard_s: Floats
    farewell: NDArray[np.bool_]
    silent_s: Floats
    watching_since_s: float
    phase: tuple[str, ...]
    phase_since_s: Floats
    pauses: tuple[Pause, ...] = ()
    events: tuple[Happening, ...] = ()


@dataclass(frozen=True, slots=True)
class Evidence:
    """One observation behind a verdict, checkable by a person."""

    metric: str
    node: str | None
    device: int | None
    value: float | str | None
    peers_median: float | None = None
    threshold: float | None = None
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One detector's claim.

    ``nodes`` are those concerned; ``node`` is the one accused, None where none or several are. ``confidence``
    is between 0 and 1. ``onset_s`` is when the fault began. ``kinds`` names the independent kinds of evidence
    it rests on; ``fact`` is True where the evidence alone is proof. ``slowdown_ratio`` is by how much
    the job's steps are longer than they would be without the fault (0: not a slowness).
    """

    detector: str
    fault: str
    job: str
    nodes: tuple[str, ...]
    node: str | None
    device: int | None
    confidence: float
    onset_s: float
    summary: str
    evidence: tuple[Evidence, ...]
    kinds: frozenset[str] = field(default_factory=frozenset)
    fact: bool = False
    slowdown_ratio: float = 0.0


class Detector(Protocol):
    """Finds one kind of fault in a window.

    ``detect`` returns [] for healthy, verdicts for faults, and raises Blind when it cannot tell. It is a pure
    function of the window: no clock, no I/O, no state kept between calls.
    """

    @property
    def name(self) -> str:
        """The detector's name, as in configuration and metrics."""
        ...

    def detect(self, window: Window) -> list[Verdict]:
        """Return what is wrong, [] when nothing is; raise Blind when that cannot be told."""
        ...
