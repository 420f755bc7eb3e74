"""Detects a failed start in which exactly one node could not reach the others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eagle_eye.detectors.signs.exits import Exit, unplanned_exits
from eagle_eye.detectors.types import Evidence, Verdict, Window
from eagle_eye.schema.last_words import WAITED, cause, headline, last_words

NODES_MIN = 3  # with two nodes it is undecidable which one fails to reach the other
UNREACHED = "rendezvous"  # the kind of evidence
CONFIDENCE_ALONE, CONFIDENCE_AGAIN = 0.9, 0.96


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedStart:
    """Names the node that alone could not reach the others at rendezvous: ``network_hang``.

    Its ranks ended because a connection could not be made, before any step; every other node's ranks still wait, or
    ended because this node's ranks were gone, so the others can reach each other. One such start asks for a restart, a
    second one excludes the node (policy, ``repetition``): a peer that was slow to listen looks the same once.
    Undecidable, so no node is accused: a job of two nodes, and consecutive starts that name different nodes. No verdict
    if several nodes could not reach others, as with those of one switch, or a rank ended for another reason. The
    verdict waits ``settle_s`` for the other ranks' exits and ``silent_s`` for a node that does not report. Cannot see:
    a broken path between two nodes only.
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
            return []  # a dead node cannot be reached
        return [_verdict(window, unreached)]

    def _unheard(self, window: Window) -> bool:
        heard_s = np.maximum(window.heard_s, window.watching_since_s)
        return bool((window.now_s - heard_s > max(self.silent_s, 2 * window.interval_s)).any())


def _stopped_before(window: Window, first: Exit) -> bool:
    """Whether another node's rank had ended by then, even if it was told to stop."""
    return any(
        event.kind == "process_exit" and event.node != first.node and event.time_s <= first.time_s
        for event in window.events
    )


def _cannot_connect(item: Exit) -> bool:
    return cause(last_words(item.error)) == "unreached"


def _followed(item: Exit) -> bool:
    """Whether the rank ended because a peer had gone or did not show up."""
    words = last_words(item.error)
    return cause(words) == "echo" or (cause(words) == "own" and WAITED.search(words) is not None)


def _verdict(window: Window, unreached: list[Exit]) -> Verdict:
    first = unreached[0]
    accused = sorted({*window.beginning.unreached, first.node})
    alone = len(accused) == 1
    times = window.beginning.unreached.count(first.node) + 1
    words = last_words(first.error)
    line = headline(words)[:160]
    summary = f"no step was made: {first.who} could not reach its peers ({line}), and no other node's ended so"
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
            Evidence("error", first.node, first.device, words[:500]),
        ),
        kinds=frozenset({UNREACHED, "exit"}),
        asks="restart_job",
    )
