"""The outlines of the rows in the journal: written with the first row that needs them, gone some time after the last.

Used by the thread that writes the journal, but for ``listen`` and ``lost``.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

AT_ONCE = 5_000
KEPT_S = 600.0  # beyond the oldest chunk: far more than ``used_s`` is behind


class JournalOutlines:
    """What the writer knows of the table."""

    def __init__(self, writer: sqlite3.Connection) -> None:
        self._writer = writer
        self._used: set[bytes] = set()  # bounded by the outlines that there are, however long the disk is full
        self._gone: list[bytes] = []
        self._take_used: Callable[[], list[bytes]] = list
        self._lost: Callable[[Iterable[bytes]], None] = lambda _: None

    def listen(self, used: Callable[[], list[bytes]], lost: Callable[[Iterable[bytes]], None]) -> None:
        """Ask ``used`` which ids rows have come of since it was asked last, and tell ``lost`` which are no longer here.

        Both in the writer's thread.
        """
        self._take_used, self._lost = used, lost

    def write(self, outlines: Mapping[bytes, tuple[bytes, float]]) -> None:
        """Have the outlines (id: bytes, time of use) in the table, within a transaction."""
        for part in _parts(list(outlines)):
            rows = [value for id_ in part for value in (id_, *outlines[id_])]
            places = ", ".join(["(?, ?, ?)"] * len(part))
            self._writer.execute(f"INSERT OR IGNORE INTO outlines (id, raw, used_s) VALUES {places}", rows)  # noqa: S608

    def keep_used(self, now_s: float) -> None:
        """Write down what was used, and delete what no chunk can need any more, within a transaction."""
        self._used.update(self._take_used())  # of a transaction that failed there may be some still
        for part in _parts(list(self._used)):
            places = ", ".join("?" * len(part))
            statement = f"UPDATE outlines SET used_s = max(used_s, ?) WHERE id IN ({places})"  # noqa: S608
            self._writer.execute(statement, [now_s, *part])
        (oldest_s,) = self._writer.execute("SELECT received_s FROM chunks ORDER BY id LIMIT 1").fetchone() or (now_s,)
        self._gone = [
            id_
            for (id_,) in self._writer.execute(
                "DELETE FROM outlines WHERE used_s < ? RETURNING id", (min(oldest_s, now_s) - KEPT_S,)
            )
        ]

    def kept(self) -> None:
        """Know that what ``keep_used`` wrote is durable."""
        self._used = set()
        if self._gone:
            self._lost(self._gone)
            self._gone = []


def _parts(ids: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Yield so many at a time that one statement can have them: with each the interpreter's lock is waited for."""
    for first in range(0, len(ids), AT_ONCE):
        yield ids[first : first + AT_ONCE]
