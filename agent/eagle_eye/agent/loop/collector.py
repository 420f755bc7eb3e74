"""The seam between the agent's loop and what it observes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from eagle_eye.schema.events import Event
from eagle_eye.schema.frame import Rank


class Unsupported(Exception):
    """This host will never have what the collector reads; it is not asked again."""


class CollectFailed(Exception):
    """The collector could not read this time; it is asked again at the next interval."""


@dataclass
class Observed:
    """What one collector saw in one interval; names and units are the catalogue's, absent is not observed.

    ``devices`` maps a device index to its metrics, ``links`` a link's name to its metrics, ``node`` holds
    the node's. ``problem`` says what a collector that saw the rest could not see; empty when all is well.
    """

    devices: dict[int, dict[str, float]] = field(default_factory=dict)
    node: dict[str, float] = field(default_factory=dict)
    links: dict[str, dict[str, float]] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    ranks: list[Rank] = field(default_factory=list)
    problem: str = ""


class Collector(Protocol):
    """Reads one source. The loop times it, counts it and keeps its failures from the others."""

    @property
    def name(self) -> str:
        """The collector's name in ``Frame.collectors``."""
        ...

    def collect(self, now_s: float) -> Observed:
        """Return what is seen at ``now_s``, Unix seconds. Raises Unsupported, CollectFailed."""
        ...

    def close(self) -> None:
        """Give back what the collector holds."""
        ...
