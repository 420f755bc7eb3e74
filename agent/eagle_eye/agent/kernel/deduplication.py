"""Deduplicates kernel messages: collapses bursts of repeats into a few, and reports each link state change once.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from eagle_eye.agent.kernel.messages import KernelMessage, Kind

FOLD_S = 59.0  # repeats within this are folded: detectors treat messages up to 60 s apart as one occurrence
KILLS_FOLD_S = 5.0  # shorter: a kill must be close to the exit of the rank that it explains (10 s)
KEYS_MAX = 1_024
BRING_UP_S = 300.0  # a link first seen going down this soon after boot is not reported: nothing is plugged in
CHANGES_MAX = 10  # per link and minute; beyond it only the final state is reported


class NewMessage(NamedTuple):
    """A message to report; ``more`` repeats since the last one reported, the last of them at ``at_s``, since boot."""

    message: KernelMessage
    at_s: float
    more: int = 0


@dataclass
class _Reported:
    """What was last reported of a message, and what has been folded since."""

    message: KernelMessage
    reported_s: float
    last_s: float
    more: int = 0


class Repeats:
    """Folds repeats of a message: 800,000 lines of one XID become a handful.

    The first is reported at once; those that follow within FOLD_S as one at the end of that time, dated to the last of
    them. No gap between reports is longer than between the lines, so that grouping reports by time gives as many
    occurrences as grouping the lines.
    """

    def __init__(self) -> None:
        self._reported: dict[tuple[str, str, str], _Reported] = {}

    def add(self, message: KernelMessage, at_s: float) -> list[NewMessage]:
        """Add a message; return what to report now."""
        key = (message.kind, message.subject, message.address)
        fold_s = _fold_s(message)
        known = self._reported.get(key)
        news: list[NewMessage] = []
        if known is not None:
            if known.more and at_s - known.reported_s > fold_s:
                news.append(_fold(known))
            if at_s - known.reported_s <= fold_s:
                known.more += 1
                known.last_s = max(known.last_s, at_s)
                return news
            del self._reported[key]  # keeps the dict in reporting order
        elif len(self._reported) >= KEYS_MAX:
            oldest = self._reported.pop(next(iter(self._reported)))
            news += [_fold(oldest)] if oldest.more else []
        self._reported[key] = _Reported(message, at_s, at_s)
        return [*news, NewMessage(message, at_s)]

    def due(self, now_s: float) -> list[NewMessage]:
        """Return the repeats due at ``now_s``, and forget messages that were not repeated."""
        news: list[NewMessage] = []
        for key, known in list(self._reported.items()):
            if now_s - known.reported_s > _fold_s(known.message):
                if known.more:
                    news.append(_fold(known))
                else:
                    del self._reported[key]
        return news


def _fold_s(message: KernelMessage) -> float:
    return KILLS_FOLD_S if message.kind == "oom_kill" else FOLD_S


def _fold(known: _Reported) -> NewMessage:
    news = NewMessage(known.message, known.last_s, known.more)
    known.reported_s, known.more = known.last_s, 0
    return news


@dataclass
class _Link:
    """A link's current and last reported state; ``changes`` since ``minute_s``."""

    kind: Kind
    reported: Kind
    last_s: float
    minute_s: float
    changes: int = 1


class LinkChanges:
    """Reports each link change once, whether the driver or the bond above it logs it."""

    def __init__(self) -> None:
        self._links: dict[str, _Link] = {}

    def add(self, message: KernelMessage, at_s: float) -> list[NewMessage]:
        """Add a message; return what to report now."""
        known = self._links.get(message.subject)
        if known is None:
            if len(self._links) >= KEYS_MAX:
                del self._links[next(iter(self._links))]
            self._links[message.subject] = _Link(message.kind, message.kind, at_s, at_s)
            return [] if message.kind == "link_down" and at_s < BRING_UP_S else [NewMessage(message, at_s)]
        same, near = message.kind == known.kind, at_s - known.last_s <= FOLD_S
        known.kind, known.last_s = message.kind, at_s
        if same and near:
            return []
        if at_s - known.minute_s > FOLD_S:
            known.minute_s, known.changes = at_s, 0
        known.changes += 1
        if known.changes > CHANGES_MAX:
            return []
        known.reported = message.kind
        return [NewMessage(message, at_s)]

    def due(self, now_s: float) -> list[NewMessage]:
        """Return the final states of links that changed too often."""
        news: list[NewMessage] = []
        for link, known in self._links.items():
            if known.reported != known.kind and now_s - known.minute_s > FOLD_S:
                known.reported = known.kind
                news.append(NewMessage(KernelMessage(known.kind, link), known.last_s))
        return news
