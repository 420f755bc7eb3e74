"""Input and output types of detectors: ``Window`` goes in, ``Verdict`` or ``Blind`` comes out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from eagle_eye.detectors.faults import DefaultAction

Floats = NDArray[np.floating[Any]]
Integers = NDArray[np.integer[Any]]


class Blind(Exception):
    """Raised when a detector cannot decide. The message names what is missing; missing data never counts as healthy."""


@dataclass(frozen=True, slots=True)
class Series:
    """One row of device metrics: a GPU, or a local rank on a node without GPUs. ``rank`` is -1 when no rank uses it."""

    node: str
    device: int
    rank: int = -1

    def __str__(self) -> str:
        """Return the display name, such as "node17/gpu3"."""
        return f"{self.node}/gpu{self.device}"


@dataclass(frozen=True, slots=True)
class WindowEvent:
    """An event. ``time_s`` is on the window's clock; ``node`` is None for an event of the whole job."""

    time_s: float
    node: str | None
    device: int
    kind: str
    attributes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Pause:
    """A period without a finished step after which the job resumed. ``phase`` is the reported phase, "" if none.

    ``accused`` is True if a verdict named a node as holding the job up during the pause.
    """

    phase: str
    seconds: float
    accused: bool = False


@dataclass(frozen=True, slots=True)
class Reports:
    """How often progress is heard of: ``count`` times so far in this attempt, ``usual_s`` apart (the median).

    A log with a line every hundred steps says so every hundred steps. ``usual_s`` is 0 until two are known.
    """

    count: int = 0
    usual_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Link:
    """One row of link metrics: a port of a node. ``switch`` is the switch it connects to, "" if unknown."""

    node: str
    link: str
    switch: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """Per-rank reports aligned by training step instead of by time, oldest first.

    Nodes' clocks and rows differ by seconds, but step numbers match across nodes. ``number`` (K,) is the last step that
    a line covers: a line covers one step, or as many as one row does where steps are shorter than the interval.
    ``times_s`` (K,) is the end of the interval in which the first rank reported it. ``values[m]`` (K, S) is NaN where a
    rank has not reported the step. ``relative_compute`` (K, S) is a rank's compute time divided by the median of the
    other ranks of its role in that step, corrected for reported work; NaN with fewer than two peers.
    """

    number: Floats
    times_s: Floats
    values: Mapping[str, Floats]
    relative_compute: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """Job-level medians over ranks by step, (H,), over a longer history than any other view.

    ``number`` (H,) and ``times_s`` (H,) are as in Steps. ``values[m]`` (H,) is NaN where no rank reported it and +inf
    where the median itself was not finite. A metric that nothing reported is absent.
    """

    number: Floats
    times_s: Floats
    values: Mapping[str, Floats]

    def copied(self) -> Curve:
        """Return a deep copy of the curve."""
        values = {name: course.copy() for name, course in self.values.items()}
        return Curve(self.number.copy(), self.times_s.copy(), values)


@dataclass(frozen=True, slots=True, eq=False)
class Beginning:
    """What is known about the start of an attempt besides its rows.

    ``named`` (S,) is True where an agent has reported the rank in this attempt (empty: not known). ``held_up_by`` are
    the ranks that, according to the launcher, keep the attempt from its first step. ``mute_starts`` counts the
    immediately preceding attempts that passed the start deadline without a step. ``unreached`` lists the nodes that
    were each the only one unable to reach the others in immediately preceding attempts, none of which made a step.
    """

    named: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    held_up_by: frozenset[int] = frozenset()
    mute_starts: int = 0
    unreached: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Everything a detector may read: one attempt of one job, up to ``now_s``. Read-only.

    ``times_s`` (T,) are the ends of a common grid of intervals, oldest first. ``device[m]`` (T, S) holds metric m on
    that grid, ``node[m]`` (Tn, N) on ``node_times_s`` (Tn,) and ``link[m]`` (Tl, L) on ``link_times_s`` (Tl,). NaN
    means not observed, +inf that the value itself was not finite; a metric that nothing reported is absent. ``role_of``
    (S,) maps a series to its group of comparable peers (same pipeline stage, same hardware), ``node_of`` (S,) to its
    node's index. ``switches`` (N,) names the switch each node connects to ("" unknown). ``models`` are the distinct
    NVML names of the job's GPUs ("" unknown) and ``model_of`` (S,) maps a series to its model; both are empty where no
    model was reported. ``steps`` and ``curve`` are the same reports by training step; ``earlier`` is the curve of the
    previous attempt. ``first_step`` and ``last_step`` are the lowest and highest step that any rank finished in this
    attempt (NaN: none). ``advanced_s`` is the end of the interval in which the last one finished, or the attempt's
    start if none has. ``heard_s`` (N,) is when each node last reported, in any attempt (-inf: never; for a node that
    reports much less often than the others its extra patience is added). ``farewell`` (N,) is True if its agent has
    said goodbye since. ``silent_s`` (S,) is how long the rank's process has reported nothing although it exists.
    ``watching_since_s`` is since when the server has been receiving without a gap: no silence can be older. ``phase``
    (one per series) is the phase that the rank reported ("" unknown), ``phase_since_s`` (S,) its start (-inf unknown).
    ``pauses`` are the job's earlier periods without a step; ``reports`` says how often progress is heard of;
    ``beginning`` is what is known about the attempt's start besides its rows. ``memo`` caches what detectors compute
    from this window, ``members_memo`` what they compute from its members alone, which windows with the same members may
    share (``signs/once.py``). Both caches hold derived values only.
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
    node_of: Integers
    device: Mapping[str, Floats]
    node: Mapping[str, Floats]
    node_times_s: Floats
    heard_s: Floats
    farewell: NDArray[np.bool_]
    silent_s: Floats
    watching_since_s: float
    phase: tuple[str, ...]
    phase_since_s: Floats
    first_step: float
    last_step: float
    advanced_s: float
    steps: Steps
    curve: Curve
    earlier: Curve | None = None
    switches: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    model_of: Integers = field(default_factory=lambda: np.zeros(0, dtype=np.intp))
    links: tuple[Link, ...] = ()
    link: Mapping[str, Floats] = field(default_factory=dict)
    link_times_s: Floats = field(default_factory=lambda: np.zeros(0))
    pauses: tuple[Pause, ...] = ()
    reports: Reports = Reports()
    events: tuple[WindowEvent, ...] = ()
    beginning: Beginning = field(default_factory=Beginning)
    members_memo: dict[Any, Any] = field(default_factory=dict, repr=False)
    memo: dict[Any, Any] = field(init=False, default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class Evidence:
    """One observation behind a verdict that an operator can check."""

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

    ``nodes`` are the nodes involved; ``node`` is the accused one, None if there is none or more than one.
    ``confidence`` is the probability that the claim is true. ``onset_s`` is when the fault began. ``kinds`` names the
    independent kinds of evidence behind the claim; ``fact`` is True if the evidence alone is proof. ``slowdown_ratio``
    is how much longer the job's steps are than without the fault (0: no slowdown, or not known). ``asks`` overrides the
    fault's default action where this case deserves another: a contained memory error restarts, a pending remap drains.
    ``application`` is True if the user's program is to blame and no node; then no node is excluded, however often the
    fault recurs.
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
    asks: DefaultAction | None = None
    application: bool = False


class Detector(Protocol):
    """Finds one kind of fault in a window.

    ``detect`` returns [] for healthy, verdicts for faults, and raises Blind when it cannot decide. It is a pure
    function of the window: no clock, no I/O, no state kept between calls.
    """

    @property
    def name(self) -> str:
        """The detector's name in configuration and metrics."""
        ...

    def detect(self, window: Window) -> list[Verdict]:
        """Return a verdict for each fault found, [] if none; raise Blind when the data does not suffice."""
        ...
