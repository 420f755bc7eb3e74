"""Queues input for the engine: rows that many nodes send at about the same time are applied together, later.

While the detection loop evaluates jobs, all input waits, so that the data does not change during evaluation.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from eagle_eye.schema.frame import Frame
from eagle_eye.server.engine.engine import Engine
from eagle_eye.server.model.batch import Batch, ResolvedTemplate, Times

WAITING_MAX = 65_536  # rows
GATHERS = "evidence"  # the collector by which an agent reports that it can gather evidence


class Intake:
    """Durable frames and rows waiting for the engine, in the order of their arrival.

    ``gatherers`` are the nodes whose agents gather evidence, and when each was last heard.
    """

    def __init__(self, engine: Engine) -> None:
        self.gatherers: dict[str, float] = {}
        self.engine = engine
        self._waiting: list[Batch | Callable[[], None]] = []
        self._rows = 0
        self._held = False

    def observe(self, frame: Frame, received_s: float) -> None:
        """Take a frame."""
        self.observe_in_turn(functools.partial(self._show, frame, received_s))

    def observe_in_turn(self, show: Callable[[], None]) -> None:
        """Call ``show`` once the engine has everything that arrived before."""
        self._waiting.append(show)
        self.take_in()

    def observe_rows(self, batches: Sequence[Batch]) -> None:
        """Take durable rows of numbers."""
        self._waiting.extend(batches)
        self._rows += sum([len(batch.resolved) for batch in batches])
        if self._rows >= WAITING_MAX:
            self.take_in()

    def take_in(self) -> None:
        """Pass what waits to the engine; does nothing while held."""
        if not self._held:
            for _ in self.taking_in():
                pass

    def taking_in(self) -> Iterator[None]:
        """Pass what waits to the engine, in parts with a yield after each; after an error the rest keeps waiting."""
        waiting, self._waiting = deque(self._waiting), []
        self._rows = 0
        together: list[Batch] = []
        try:
            while waiting:
                one = waiting[0]
                if isinstance(one, Batch):
                    self._note_rows(one.resolved, one.received_s)
                    together.append(one)
                    waiting.popleft()
                    continue
                yield from self.engine.observing_rows(together)
                together = []
                waiting.popleft()
                one()
            yield from self.engine.observing_rows(together)
        finally:
            self._waiting[:0] = waiting
            self._rows += sum(len(one.resolved) for one in waiting if isinstance(one, Batch))

    def hold(self) -> None:
        """Keep input waiting until ``release``."""
        self._held = True

    def release(self) -> None:
        """Let input pass again."""
        self._held = False

    def _show(self, frame: Frame, received_s: float) -> None:
        self._note(frame.node, frame.collectors.get(GATHERS) == "ok", received_s)
        self.engine.observe(frame, received_s)

    def _note_rows(self, resolved: Sequence[ResolvedTemplate], received_s: Times) -> None:
        gather = [one.template.collectors.get(GATHERS) == "ok" for one in resolved]
        if True in gather or self.gatherers:
            for one, gathers, at_s in zip(resolved, gather, received_s.tolist(), strict=True):
                self._note(one.node, gathers, at_s)

    def _note(self, node: str, gathers: bool, received_s: float) -> None:
        if gathers:
            self.gatherers[node] = received_s
        else:
            self.gatherers.pop(node, None)
