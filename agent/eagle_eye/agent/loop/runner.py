"""Runs one collector in its own thread, so that a hung driver costs one collector, not the agent."""

from __future__ import annotations

import logging
import queue
import re
import threading
from collections.abc import Callable, Iterable

from eagle_eye.agent.loop.collector import CollectFailed, Collector, CollectorStanding, Drops, Observed, Unsupported
from eagle_eye.schema.events import Event

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

    def ask(self, now_s: float) -> None:
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
