"""Keeps the journal small: deletes chunks that are in segments, and saves what is known of streams and templates.

A round is many short transactions, between which new frames are written, so that none waits for the whole round.
"""

from __future__ import annotations

from collections.abc import Iterator

from eagle_eye.server.history.journal_reader import JournalReader
from eagle_eye.server.history.journal_schema import live_bytes
from eagle_eye.server.history.journal_streams import Streams
from eagle_eye.server.history.journal_templates import JournalTemplates
from eagle_eye.server.history.settings import HistorySettings
from eagle_eye.server.store import database

RETENTION_S = 30.0  # from one round to the next
DELETE_BATCH = 200  # chunks deleted in one transaction


class Retention:
    """Retention rounds, run by the journal's writer thread; ``dropped`` counts deleted frames that no segment had."""

    def __init__(
        self,
        writer: database.DurableConnection,
        reader: JournalReader,
        streams: Streams,
        templates: JournalTemplates,
        settings: HistorySettings,
        window_s: float,
    ) -> None:
        self.dropped = 0
        self._writer = writer
        self._reader = reader
        self._streams = streams
        self._templates = templates
        self._settings = settings
        self._window_s = window_s

    def round(self, now_s: float, replay_id: int) -> Iterator[None]:
        """Do all that is due at ``now_s``, one short transaction before each yield.

        A restart would not replay chunks up to ``replay_id``. Raises sqlite3.Error.
        """
        oldest_s = now_s - self._settings.retention_s
        yield from self._streams.noting()  # saves what is known from chunks before they are deleted
        while self._delete_some(now_s, oldest_s, replay_id) == DELETE_BATCH:
            yield
        yield
        with database.transaction(self._writer):
            self._streams.forget(oldest_s)
        yield
        yield from self._templates.keeping(now_s)

    def _delete_some(self, now_s: float, oldest_s: float, replay_id: int) -> int:
        """Delete one batch of chunks that are in segments, too old or too many; return how many were deleted."""
        with database.transaction(self._writer):
            doomed: list[tuple[int, int]] = self._writer.execute(
                "SELECT c.id, 0 FROM shards s JOIN chunks c ON c.shard = s.shard AND c.id <= min(s.sealed_id, ?)"
                " WHERE NOT ? AND (c.id <= ? OR c.received_s < ?) LIMIT ?",
                (self._streams.noted_id, self._reader.in_use(), replay_id, now_s - self._window_s, DELETE_BATCH),
            ).fetchall()
            if not doomed:  # no sealed chunk is free to go, so unsealed ones beyond the limits may have to
                doomed = self._too_much(oldest_s)
            ids = [id_ for id_, _ in doomed]
            self._writer.execute(f"DELETE FROM chunks WHERE id IN ({', '.join('?' * len(ids))})", ids)  # noqa: S608
        self.dropped += sum(frames for _, frames in doomed)
        return len(doomed)

    def _too_much(self, oldest_s: float) -> list[tuple[int, int]]:
        """Return the oldest chunks beyond the age or size limit, each with how many of its frames no segment has."""
        surplus = live_bytes(self._writer) - self._settings.retention_bytes
        doomed = []
        for id_, size, received_s, lost in self._writer.execute(
            "SELECT c.id, c.size, c.received_s, iif(c.id <= coalesce(s.sealed_id, 0), 0, c.frames)"
            " FROM (SELECT id, shard, size, received_s, frames FROM chunks WHERE id <= ? ORDER BY id LIMIT ?) c"
            " LEFT JOIN shards s ON s.shard = c.shard ORDER BY c.id",
            (self._streams.noted_id, DELETE_BATCH),
        ):
            if surplus <= 0 and received_s >= oldest_s:
                break
            surplus -= size
            doomed.append((id_, lost))
        return doomed
