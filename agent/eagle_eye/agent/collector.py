"""What a collector is, what it observes and how it stands; and the thread that each one runs in.

A hung driver thus costs one collector, not the agent.
"""

from __future__ import annotations

import logging
import queue
import re
import threading
from collections.abc import Callable, Iterable
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


SIMULATED = "simulated: no device answered, but a stand-in"

_AGES = re.compile(r"for \d+ s\b")

_log = logging.getLogger("eagle_eye.agent")


class CollectorRunner:
    """One collector, its thread and its state.

    ``state`` is as in ``Frame.collectors``: "ok", "simulated: what", "unsupported: why" (not run again) or "failed:
    why" (run again).
    ``duration_s`` is how long the last collection took, ``failures`` counts the intervals for which the collector gave
    no answer, or an incomplete one.
    """

    def __init__(self, collector: Collector, drops: Drops, monotonic_s: Callable[[], float]) -> None:
        self.collector = collector
        self.state = "failed: not asked yet"
        self.duration_s = 0.0
        self.failures = 0
        self._drops = drops
        self._monotonic_s = monotonic_s
        self._asked_s = 0.0
        self._said = ""
        self._busy = False
        self._supported = True
        self._late_events: list[Event] = []
        self._questions: queue.SimpleQueue[float | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Observed | Exception, float]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"collect-{collector.name}", daemon=True)
        self._thread.start()

    def start_collection(self, now_s: float) -> None:
        """Start a collection, unless one is still pending or the collector is unsupported."""
        if self._busy and not self._answers.empty():
            late, self.duration_s = self._answers.get()  # it arrived after its interval's frame was sent
            self._busy = False
            if isinstance(late, Observed):
                self._late_events = late.events  # rows are valid at their moment only, events carry their time
            self._drops.count(f"collector_late_{self.collector.name}")
        if self._supported and not self._busy:
            self._busy = True
            self._asked_s = self._monotonic_s()
            self._questions.put(now_s)

    def answer(self, timeout_s: float) -> Observed:
        """Return what was collected; empty when there was nothing, or nothing within ``timeout_s``."""
        if not self._busy:
            return Observed()
        try:
            answer, self.duration_s = self._answers.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            self._set(f"failed: no answer for {self._monotonic_s() - self._asked_s:.0f} s", "no answer")
            return Observed()
        self._busy = False
        if isinstance(answer, Observed):
            answer.events[:0] = self._late_events
            self._late_events = []
            read = SIMULATED if answer.simulated else "ok"
            self._set(f"failed: {answer.problem}" if answer.problem else read)
            return answer
        if isinstance(answer, Unsupported):
            self._supported = False
            self._set(f"unsupported: {answer}")
        else:
            self._set(f"failed: {answer if isinstance(answer, CollectFailed) else repr(answer)}")
        return Observed()

    def standing(self) -> CollectorStanding:
        """Return the collector's current standing."""
        return CollectorStanding(self.collector.name, self.state, self.duration_s, self.failures)

    def close(self) -> None:
        """End the thread and the collector, unless it hangs in a call."""
        if not self._busy:
            self._questions.put(None)
            self._thread.join(timeout=1.0)
            self.collector.close()

    def _set(self, state: str, said: str = "") -> None:
        self.state = state
        if state.startswith("failed"):
            self.failures += 1
        said = said or _AGES.sub("", state)  # a text that changes only in its durations is logged once
        if said != self._said:
            news = self._said or state != "ok"  # a source that is read from the start is in the agent's greeting
            self._said = said
            level = logging.WARNING if state.startswith("failed") else logging.INFO if news else logging.DEBUG
            _log.log(level, "collector %s: %s", self.collector.name, state)

    def _run(self) -> None:
        while True:
            now_s = self._questions.get()
            if now_s is None:
                return
            begin_s = self._monotonic_s()
            answer: Observed | Exception
            try:
                answer = self.collector.collect(now_s)
            except Exception as error:  # noqa: BLE001 - one collector's failure is its own state, not the agent's end
                answer = error
            self._answers.put((answer, self._monotonic_s() - begin_s))


def gathered(runners: Iterable[CollectorRunner], deadline_s: float, monotonic_s: Callable[[], float]) -> Observed:
    """Return what all have collected since they were asked, of those that answer before the deadline."""
    everything = Observed()
    for runner in runners:
        seen = runner.answer(deadline_s - monotonic_s())
        for device, row in seen.devices.items():
            everything.devices.setdefault(device, {}).update(row)
        everything.node.update(seen.node)
        everything.links.update(seen.links)
        everything.events.extend(seen.events)
        everything.ranks.extend(seen.ranks)
        everything.read_since_s = max(everything.read_since_s, seen.read_since_s)
    return everything
