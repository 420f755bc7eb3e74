"""The nouns of detection: what a detector may see (``Window``) and what it may say (``Verdict``, ``Blind``)."""

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
    """A time without a finished step that ended well; ``phase`` is what the job said it was doing ("" nothing).

    ``accused`` says whether a node was told of meanwhile as the one that holds the job up.
    """

    phase: str
    seconds: float
    accused: bool = False


@dataclass(frozen=True, slots=True)
class Link:
    """One link row: a port of a node; ``switch`` is what it hangs on, "" unknown."""

    node: str
    link: str
    switch: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Steps:
    """What ranks reported, aligned by training step instead of by time, oldest first.

    Nodes' clocks and rows differ by seconds; a step is the same step everywhere. ``number`` (K,) is the last step that
    a line covers (a line covers one step, or as many as a row does where steps are shorter than the interval),
    ``times_s`` (K,) the end of the interval in which the first rank reported it. ``values[m]`` (K, S) is NaN where a
    rank has not reported the step. ``relative_compute`` (K, S) is a rank's compute time over the median of the
    other ranks of its role in that step, after what their work explains; NaN with fewer than two peers.
    """

    number: Floats
    times_s: Floats
    values: Mapping[str, Floats]
    relative_compute: Floats


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """The job as a whole by step, over a longer past than any other view: (H,) medians over the ranks.

    ``number`` (H,), ``times_s`` (H,) as in Steps; ``values[m]`` (H,) is NaN where no rank reported it, +inf where the
    median really was not finite. A metric that nobody sent is absent.
    """

    number: Floats
    times_s: Floats
    values: Mapping[str, Floats]

    def copied(self) -> Curve:
        """Return the same course in memory of its own."""
        values = {name: course.copy() for name, course in self.values.items()}
        return Curve(self.number.copy(), self.times_s.copy(), values)


@dataclass(frozen=True, slots=True, eq=False)
class Beginning:
    """What is known of an attempt's start beyond its rows.

    ``named`` (S,) is whether an agent has named the rank in this attempt (empty: not known), ``held_up_by`` are the
    ranks that keep the attempt from its first step by its launcher's word, ``mute_starts`` is how many attempts right
    before this one were past the start's deadline without a step, ``unreached`` the nodes that alone could not reach
    the others in attempts right before this one, none of which made a step.
    """

    named: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    held_up_by: frozenset[int] = frozenset()
    mute_starts: int = 0
    unreached: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """All that a detector may see: one attempt of one job, up to ``now_s``. Read-only.

    ``times_s`` (T,) are the ends of a common grid of intervals, oldest first; ``device[m]`` (T, S) holds metric m on
    it, ``node[m]`` (Tn, N) on ``node_times_s`` (Tn,), ``link[m]`` (Tl, L) on ``link_times_s`` (Tl,), NaN where
    nothing was observed; a metric that nobody sent is absent. +inf means that the quantity really was not
    finite. ``role_of`` (S,) maps a series to its group of comparable peers (same pipeline stage, same hardware),
    ``node_of`` (S,) to its node's index, ``switches`` (N,) name the switch that each node hangs on ("" unknown).
    ``models`` are the names that NVML has for the job's GPUs, each once ("" unknown), ``model_of`` (S,) maps a series
    to its own; both are empty where nobody has named any.
    ``steps`` and ``curve`` are the same reports by training step; ``earlier`` is the curve of the attempt before.
    ``first_step`` and ``last_step`` are the lowest and highest step that any rank finished in this attempt (NaN: none),
    ``advanced_s`` the end of the interval in which the last one finished (the attempt's start before).
    ``heard_s`` (N,) is when each node was last heard, in whichever attempt (-inf: never; later by its patience for one
    that reports far less often than the others), ``farewell`` (N,) whether its agent said goodbye since. ``silent_s``
    (S,) is for how long the rank's process has said nothing although it exists. ``watching_since_s`` is since when the
    observer itself has been watching without a gap: no silence is older than that. ``phase`` (one for each series) is
    what the rank said it is doing ("" unknown), ``phase_since_s`` (S,) since when (-inf unknown), ``pauses`` the job's
    own earlier times without a step, ``beginning`` what is known of the attempt's start beyond its rows.
    ``memo`` holds what detectors have worked out of this window, ``members_memo`` what of its members alone; a window
    of the same members may share the latter (``signs/once.py``). Neither tells anything that the window does not.
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
    events: tuple[Happening, ...] = ()
    beginning: Beginning = field(default_factory=Beginning)
    members_memo: dict[Any, Any] = field(default_factory=dict, repr=False)
    memo: dict[Any, Any] = field(init=False, default_factory=dict, repr=False)


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
    is the probability that the claim is true. ``onset_s`` is when the fault began. ``kinds`` names the independent
    kinds of evidence it rests on; ``fact`` is True where the evidence alone is proof. ``slowdown_ratio`` is by how
    much the job's steps are longer than they would be without the fault (0: not a slowness, or not known).
    ``asks`` is the action that this presentation of the fault deserves where it is another than the fault's
    default: a contained memory error restarts, a pending remap drains. ``application`` says that the user's
    program is to blame and no node: then nobody is excluded, however often it comes back.
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
