"""The result of one loop tick, for its consumers: /metrics, the service manager and the host verdict."""

from __future__ import annotations

from dataclasses import dataclass

from eagle_eye.agent.loop.collector import Observed
from eagle_eye.schema.events import Event


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
