"""Parses the exception that ended a rank: type, place, and whether a faulty node may have caused it. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from eagle_eye.detectors.signs.exits import Exit
from eagle_eye.detectors.types import Window
from eagle_eye.schema.last_words import (
    ECHO,
    HEADER,
    KINDS_OF_OTHERS,
    KINDS_OF_STORAGE,
    WORDS_OF_OTHERS,
    chained,
    parts,
)

TRACEBACK_CHARS_MAX = 4_096
_ENDING = re.compile(r"(?P<kind>(?:[A-Za-z_]\w{0,100}\.){0,12}[A-Za-z_]\w{0,100})(?::\s?(?P<message>.*))?\Z", re.DOTALL)
# What one node's wrong numbers do to all ranks, by the message or by the line that raised it.
_NUMBERS = re.compile(r"\bnan\b|\binf(?:inity|inite)?\b|is_?(?:nan|inf|finite)|(?:not|non)[- _]?finite", re.IGNORECASE)


def exception(text: str) -> str:
    """Return the type and place of the exception in a traceback: "KeyError at train.py:7 in main".

    "" if its place is missing, or if a peer, a device, memory, the network, storage or a signal may be the cause, of it
    or of one that it was chained to. The place is that of the innermost frame; values in the message differ between
    ranks and are ignored.
    """
    begun = text.startswith(HEADER)
    found = [_one(part) for part in text.removeprefix(HEADER).split("\n" + HEADER)]
    if not all(found) or (chained(text) and not begun):  # the chained exception may have been cut off
        return ""
    return found[-1]


def _one(traceback: str) -> str:
    place, source, ending = parts(traceback)
    found = _ENDING.match(ending)
    if place is None or found is None:
        return ""
    kind, message = found["kind"].rpartition(".")[2], found["message"] or ""
    others = KINDS_OF_OTHERS.search(kind) or KINDS_OF_STORAGE.search(kind) or WORDS_OF_OTHERS.search(message)
    if others or ECHO.search(message) or _NUMBERS.search(message) or _NUMBERS.search(source):
        return ""
    function = f" in {place['function']}" if place["function"] else ""
    return f"{kind} at {place['file']}:{place['line']}{function}"


def shared_exception(window: Window, exits: Sequence[Exit]) -> tuple[str, list[Exit]]:
    """Return the exception that ended most ranks of the job, and their exits; ("", []) if none did.

    If the job has several nodes the ranks must be on more than one: a single node may be the cause itself.
    """
    ends: dict[str, list[Exit]] = {}
    for item in exits:
        if item.error and (name := exception(item.error)):
            ends.setdefault(name, []).append(item)
    ranks = max(sum(series.rank >= 0 for series in window.series), len(exits))
    for name, ended in ends.items():
        nodes = {item.node for item in ended}
        if 2 * len(ended) > ranks and len(nodes) >= min(2, len(window.nodes)):
            return name, ended
    return "", []
