"""The interface between the agent's loop and its collectors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from eagle_eye.schema.events import Event
from eagle_eye.schema.frame import Rank


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
