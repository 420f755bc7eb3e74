"""Follows one TensorBoard event file. Touches: one file, read only."""

from __future__ import annotations

import os
from pathlib import Path

from eagle_eye.agent.files.foreign import Identity, open_file
from eagle_eye.agent.loop.drops import Drops
from eagle_eye.agent.training_logs.tensorboard_events import DamagedRecord, Scalar, next_record, read_records

ENTER_BYTES = 1 << 14  # from the end of a pre-existing file: some hundred scalars
READ_BYTES_MAX = 1 << 17  # per read: more than the records that one collection takes
TORN_READS_MAX = 10  # reads after which an invalid record is damaged rather than incomplete, on a network file system


class EventFile:
    """The records added to a file since the last read.

    An incomplete record waits. Records with a wrong checksum are counted as ``tensorboard_damaged``; reading continues
    at the next record. A truncated file is read from its beginning.
    """

    def __init__(self, path: Path, drops: Drops, identity: Identity | None = None) -> None:
        """Open the file; reading starts at the beginning. Raises OSError, NotTheirs as ``open_file`` does."""
        self._descriptor = open_file(path, identity=identity)
        self._drops = drops
        self._at = self._size = 0
        self._torn_reads = 0

    def enter(self) -> list[Scalar]:
        """Seek to the end; return the last scalars before it. Raises OSError."""
        size = os.fstat(self._descriptor).st_size
        self._at = max(0, size - ENTER_BYTES)
        if self._at:
            start = next_record(os.pread(self._descriptor, ENTER_BYTES, self._at))
            if start is None:
                self._at = size
                return []
            self._at += start
        return self.read(ENTER_BYTES)

    def read(self, records_max: int) -> list[Scalar]:
        """Return the scalars of the next records; none: nothing is new. Raises OSError."""
        size = os.fstat(self._descriptor).st_size
        if size < self._size:
            self._at = 0
        self._size = size
        if size <= self._at:  # a large record being skipped may still be incomplete
            return []
        data = os.pread(self._descriptor, min(READ_BYTES_MAX, size - self._at), self._at)
        try:
            records = read_records(data, records_max)
        except DamagedRecord:
            self._torn_reads += 1
            if self._torn_reads > TORN_READS_MAX:
                self._torn_reads = 0
                self._drops.count("tensorboard_damaged")
                self._at += next_record(data, 1) or len(data)
            return []
        self._torn_reads = 0
        self._drops.count("tensorboard_damaged", records.damaged)
        self._at += records.used
        return records.scalars

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)
