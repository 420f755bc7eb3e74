"""Which senders of remote write name no series that is mapped. Written on the event loop, read from any thread.

Their requests are answered as written, because senders would take anything else for a failure and send them again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

SINCE_S_MIN = 180.0  # one request of several may well have nothing that is mapped
HEARD_S_MAX = 600.0
NAMES_SHOWN = 4
NAME_CHARS_MAX = 80
_OF_EVERY_TARGET = ("scrape_", "target_info", "otel_scope_info")  # these names say nothing about the sender


@dataclass(slots=True)
class _Sender:
    since_s: float  # of the first request after the last with a mapped series
    heard_s: float = 0.0
    names: list[str] = field(default_factory=list)


class UnmappedSenders:
    """The senders whose series are all unmapped, since when, and some of the names."""

    def __init__(self) -> None:
        self._senders: dict[str, _Sender] = {}

    def note(self, sender: str, unmapped: Iterable[bytes], now_s: float, *, mapped: bool) -> None:
        """Note a request: some names that are not mapped, and whether any other is."""
        names = sorted((name.decode(errors="replace") for name in unmapped), key=_is_of_every_target)
        if mapped:
            self._senders.pop(sender, None)
        elif names:
            known = self._senders.setdefault(sender, _Sender(now_s))
            known.heard_s, known.names = now_s, names[:NAMES_SHOWN]

    def said(self, now_s: float) -> Iterator[str]:
        """Yield what to say of each sender that goes on like this."""
        for sender, known in sorted(self._senders.copy().items()):
            if known.heard_s - known.since_s >= SINCE_S_MIN and now_s - known.heard_s <= HEARD_S_MAX:
                names = ", ".join(f"{name[:NAME_CHARS_MAX]!a}" for name in known.names)
                yield f"none of the series that {sender} writes is mapped, among them {names}"


def _is_of_every_target(name: str) -> bool:
    return name.startswith(_OF_EVERY_TARGET)
