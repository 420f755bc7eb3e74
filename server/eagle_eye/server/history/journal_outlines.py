"""The outlines of the rows in the journal: written with the first row that needs them, gone some time after the last.

Used by the thread that writes the journal, but for ``listen`` and ``lost``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from eagle_eye.server.store import database

AT_ONCE = 5_000
KEPT_AT_ONCE = 500  # rows in one transaction: each is written anew with its outline, and new frames wait for no more
BEHIND_S = 240.0  # how far ``used_s`` may be behind before it is written again
KEPT_S = 600.0  # beyond the oldest chunk: far more than ``used_s`` is behind


class JournalOutlines:
    """What the writer knows of the table."""

    def __init__(self, writer: database.DurableConnection) -> None:
        self._writer = writer
        self._used: set[bytes] = set()  # bounded by the outlines that there are, however long the disk is full
        self._kept_s: dict[bytes, float] = {}  # when ``used_s`` was written last
        self._take_used: Callable[[], list[bytes]] = list
        self._lost: Callable[[Iterable[bytes]], None] = lambda _: None

    def listen(self, used: Callable[[], list[bytes]], lost: Callable[[Iterable[bytes]], None]) -> None:
        """Ask ``used`` which ids rows have come of since it was asked last, and tell ``lost`` which are no longer here.

        Both in the writer's thread.
        """
        self._take_used, self._lost = used, lost

    def write(self, outlines: Mapping[bytes, tuple[bytes, float]]) -> None:
        """Have the outlines (id: bytes, time of use) in the table, within a transaction."""
        for part in _parts(list(outlines), AT_ONCE):
            rows = [value for id_ in part for value in (id_, *outlines[id_])]
            places = ", ".join(["(?, ?, ?)"] * len(part))
            self._writer.execute(f"INSERT OR IGNORE INTO outlines (id, raw, used_s) VALUES {places}", rows)  # noqa: S608

    def keeping(self, now_s: float) -> Iterator[None]:
        """Write down what was used, and delete what no chunk can need any more.

        In a short transaction before each time this yields.
        """
        self._used.update(self._take_used())  # of a transaction that failed there may be some still
        due = [id_ for id_ in self._used if abs(now_s - self._kept_s.get(id_, float("-inf"))) >= BEHIND_S]
        for part in _parts(due, KEPT_AT_ONCE):
            places = ", ".join("?" * len(part))
            statement = f"UPDATE outlines SET used_s = max(used_s, ?) WHERE id IN ({places})"  # noqa: S608
            with database.transaction(self._writer):
                self._writer.execute(statement, [now_s, *part])
            self._kept_s.update(dict.fromkeys(part, now_s))
            yield
        self._used = set()
        with database.transaction(self._writer):
            oldest = self._writer.execute("SELECT received_s FROM chunks ORDER BY id LIMIT 1").fetchone() or (now_s,)
            gone = self._writer.execute(
                "DELETE FROM outlines WHERE used_s < ? RETURNING id", (min(oldest[0], now_s) - KEPT_S,)
            ).fetchall()
        if gone:
            for (id_,) in gone:
                self._kept_s.pop(id_, None)
            self._lost([id_ for (id_,) in gone])
        yield


def _parts(ids: Sequence[bytes], most: int) -> Iterator[Sequence[bytes]]:
    """Yield so many at a time that one statement can have them: with each the interpreter's lock is waited for."""
    for first in range(0, len(ids), most):
        yield ids[first : first + most]
