"""The interface between the agent's loop and its collectors: what each observes, how it stands, what is dropped."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Protocol

from eagle_eye.schema.events import Event
from eagle_eye.schema.frame import Rank

REASONS_MAX = 256  # ours are below a hundred; a server may invent reasons for what it rejects
OTHER_REASONS = "other_reasons"


class Drops:
    """Drop counts since the agent started, by a stable reason; thread-safe.

    Beyond REASONS_MAX different reasons, further ones are counted as OTHER_REASONS.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()

    def count(self, reason: str, times: int = 1) -> None:
        """Add ``times`` to a reason."""
        if times > 0:
            with self._lock:
                if reason not in self._counts and len(self._counts) >= REASONS_MAX:
                    reason = OTHER_REASONS
                self._counts[reason] = self._counts.get(reason, 0) + times

    def snapshot(self) -> dict[str, int]:
        """Return a copy of the counts."""
        with self._lock:
            return dict(self._counts)


class Unsupported(Exception):
    """This host will never have what the collector reads; it is not run again."""


class CollectFailed(Exception):
    """The collector could not read this time; it runs again at the next interval."""


@dataclass
class Observed:
    """One collector's observations in one interval; names and units are the catalogue's, absent means not observed.

    ``devices`` maps a device index to its metrics, ``links`` a link's name to its metrics, ``node`` holds the node's.
    ``problem`` says what could not be read although the rest was; empty when all is well. ``simulated`` says that a
    stand-in answered, and no device. ``read_since_s``, Unix seconds: of a log, what came before is lost (0.0: nothing).
    """

    devices: dict[int, dict[str, float]] = field(default_factory=dict)
    node: dict[str, float] = field(default_factory=dict)
    links: dict[str, dict[str, float]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    ranks: list[Rank] = field(default_factory=list)
    problem: str = ""
    simulated: bool = False
    read_since_s: float = 0.0


class Collector(Protocol):
    """Reads one source. The loop times it, counts its runs and isolates its failures."""

    @property
    def name(self) -> str:
        """The collector's name in ``Frame.collectors``."""
        ...

    def collect(self, now_s: float) -> Observed:
        """Return the observations at ``now_s``, Unix seconds. Raises Unsupported, CollectFailed."""
        ...

    def close(self) -> None:
        """Release the collector's resources."""
        ...


@dataclass(frozen=True)
class CollectorStanding:
    """One collector's standing. ``state`` as in ``Frame.collectors``; ``failures`` counts since the agent started.

    ``duration_s`` is how long its last answer took.
    """

    name: str
    state: str
    duration_s: float
    failures: int

    @property
    def ok(self) -> bool:
        """Whether it read everything it should."""
        return self.state == "ok"

    @property
    def failing(self) -> bool:
        """Whether it could not read, or not everything."""
        return self.state.startswith("failed")

    @property
    def simulated(self) -> bool:
        """Whether a stand-in answers for the device."""
        return self.state.startswith("simulated")

    @property
    def supported(self) -> bool:
        """Whether this host has what it reads."""
        return not self.state.startswith("unsupported")


@dataclass(frozen=True)
class TickFrame:
    """One frame made at a tick; shared between threads, so treat it as immutable.

    ``time_s`` and ``interval_s`` are the frame's, ``seen`` its rows and ranks, ``events`` all its events, including
    those from before the tick. ``frames`` counts the frames made since the agent started.
    """

    time_s: float
    interval_s: float
    seen: Observed
    events: tuple[Event, ...]
    collectors: tuple[CollectorStanding, ...]
    frames: int
