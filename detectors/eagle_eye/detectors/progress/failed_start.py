"""A start that failed because one node alone could not reach the others."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from eagle_eye.detectors.signs.exceptions import last_words
from eagle_eye.detectors.signs.exits import CANNOT_CONNECT, ECHO, Exit, unplanned_exits
from eagle_eye.detectors.types import Evidence, Verdict, Window

NODES_MIN = 3  # of two nodes nobody can say which one does not reach the other
UNREACHED = "rendezvous"  # the kind of evidence
CONFIDENCE_ALONE, CONFIDENCE_AGAIN = 0.9, 0.96
# Whoever waits for a peer that does not come gives up in the end, and accuses nobody.
WAITED = re.compile(r"waiting for clients|wait timeout|barrier", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedStart:
    """Names the node that alone could not reach the others when the attempt's ranks met: ``network_hang``.

    Its ranks ended by a connection that could not be made, before any step; every other node's still wait, or ended
    because its had gone. So the others do without it. One such start asks for a restart, a second for the node's
    exclusion (policy, ``repetition``): a peer that was slow to listen looks the same once. Of two nodes, and where
    starts in a row name different ones, nobody can tell; nor is anything said where several nodes did not reach others,
    as those of one switch do, or a rank ended of anything else. The verdict waits ``settle_s`` for the others' ends and
    ``silent_s`` for a node that is not heard. Cannot see: a path between two nodes alone that is broken.
    """

    settle_s: float
    silent_s: float
    name: str = "failed_start"

    def detect(self, window: Window) -> list[Verdict]:
        """Return at most one verdict."""
        exits = unplanned_exits(window) if np.isnan(window.last_step) else []
        if not exits or len(window.nodes) < NODES_MIN or window.now_s - exits[0].time_s < self.settle_s:
            return []
        unreached = [item for item in exits if _cannot_connect(item)]
        nodes = {item.node for item in unreached}
        rest = [item for item in exits if item not in unreached]
        if len(nodes) != 1 or not all(item.node in nodes or _followed(item) for item in rest):
            return []
        if self._unheard(window) or _stopped_before(window, unreached[0]):
            return []  # what is gone nobody reaches
        return [_verdict(window, unreached)]

    def _unheard(self, window: Window) -> bool:
        heard_s = np.maximum(window.heard_s, window.watching_since_s)
        return bool((window.now_s - heard_s > max(self.silent_s, 2 * window.interval_s)).any())


def _stopped_before(window: Window, first: Exit) -> bool:
    """Whether another node's rank had ended by then, be it that it was told to."""
    return any(
        event.kind == "process_exit" and event.node != first.node and event.time_s <= first.time_s
        for event in window.events
    )


def _cannot_connect(item: Exit) -> bool:
    return CANNOT_CONNECT.search(last_words(item.error)) is not None


def _followed(item: Exit) -> bool:
    """Whether the rank ended because another one had gone or did not come."""
    words = last_words(item.error)
    return ECHO.search(words) is not None or WAITED.search(words) is not None


def _verdict(window: Window, unreached: list[Exit]) -> Verdict:
    first = unreached[0]
    accused = sorted({*window.beginning.unreached, first.node})
    alone = len(accused) == 1
    times = window.beginning.unreached.count(first.node) + 1
    lines = last_words(first.error).splitlines()
    summary = (
        f"no step was made: {first.who} could not reach its peers ({lines[0][:160]}), and no other node's ended so"
    )
    if not alone:
        summary += f"; starts before accused {', '.join(set(accused) - {first.node})}: which one it is cannot be told"
    elif times > 1:
        summary += f"; {times} starts in a row"
    return Verdict(
        detector="failed_start",
        fault="network_hang",
        job=window.job,
        nodes=tuple(accused),
        node=first.node if alone else None,
        device=None,
        confidence=CONFIDENCE_AGAIN if alone and times > 1 else CONFIDENCE_ALONE,
        onset_s=first.time_s,
        summary=summary,
        evidence=(
            Evidence("process_exit", first.node, first.device, first.how),
            Evidence("unreached_starts", first.node, None, float(times), None, 0.0, "starts"),
            Evidence("error", first.node, first.device, "\n".join(lines)[:500]),
        ),
        kinds=frozenset({UNREACHED, "exit"}),
        asks="restart_job",
    )
