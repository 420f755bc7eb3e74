"""The templates of the journal's rows: written with the first row that needs them, deleted some time after the last.

Used by the journal's writer thread, except ``listen``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from eagle_eye.server.store import database

AT_ONCE = 5_000
KEPT_AT_ONCE = 500  # rows per transaction: each update rewrites the whole template, and new frames wait meanwhile
BEHIND_S = 240.0  # how stale ``used_s`` may be before it is written again
KEPT_S = 600.0  # beyond the oldest chunk: far more than ``used_s`` can be stale


class JournalTemplates:
    """The writer's view of the table of templates, which an earlier version named ``outlines``."""

    def __init__(self, writer: database.DurableConnection) -> None:
        self._writer = writer
        self._used: set[bytes] = set()  # bounded by the number of templates, however long the disk is full
        self._kept_s: dict[bytes, float] = {}  # when ``used_s`` was last written
        self._take_used: Callable[[], list[bytes]] = list
        self._lost: Callable[[Iterable[bytes]], None] = lambda _: None

    def listen(self, used: Callable[[], list[bytes]], lost: Callable[[Iterable[bytes]], None]) -> None:
        """Register callbacks: ``used`` returns ids used since its last call, ``lost`` receives the ids deleted.

        Both are called in the writer thread.
        """
        self._take_used, self._lost = used, lost

    def write(self, templates: Mapping[bytes, tuple[bytes, float]]) -> None:
        """Insert templates (id: bytes, time of use) that the table lacks, within a transaction."""
        for part in _parts(list(templates), AT_ONCE):
            rows = [value for id_ in part for value in (id_, *templates[id_])]
            places = ", ".join(["(?, ?, ?)"] * len(part))
            self._writer.execute(f"INSERT OR IGNORE INTO outlines (id, raw, used_s) VALUES {places}", rows)  # noqa: S608

    def keeping(self, now_s: float) -> Iterator[None]:
        """Record which templates were used, and delete those that no chunk can need any more.

        Runs a short transaction before each yield.
        """
        self._used.update(self._take_used())  # may still hold ids from a failed transaction
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
    """Yield parts small enough for one statement; each statement waits for the GIL, so parts are large."""
    for first in range(0, len(ids), most):
        yield ids[first : first + most]
