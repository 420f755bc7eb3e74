"""One segment written: it appears whole, durable and under its name, or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from eagle_eye.server.segments.facts import FACTS_FILE, PARTIAL, Facts, Step, no_step
from eagle_eye.server.segments.layout import (
    FRAMES_FILE,
    LINKS_FILE,
    SAMPLES_FILE,
)
from eagle_eye.server.segments.row_tables import Tables

SomeFacts = TypeVar("SomeFacts", bound=msgspec.Struct)

# A column with more different values than this in its first row group is written as its bytes' streams, which zstd
# compresses better than indexes into a dictionary that is as long as the column.
DISTINCT_MAX = 4_096


class Draft:
    """A folder of tables below ``folder`` that appears under its name when it is finished."""

    def __init__(self, folder: Path, name: str, step: Step = no_step) -> None:
        self._folder = folder
        self._name = name
        self._step = step
        self._draft = folder / f"{PARTIAL}{name}"
        self._tables: dict[str, pq.ParquetWriter] = {}
        shutil.rmtree(self._draft, ignore_errors=True)
        self._draft.mkdir(parents=True, mode=0o700)
        step("draft")

    def append(self, name: str, table: pa.Table, options: Callable[[pa.Table], dict[str, Any]]) -> None:
        """Add one row group to the table of this name; ``options`` of its first say how all are written."""
        writer = self._tables.get(name)
        if writer is None:
            path = self._draft / name
            path.touch(mode=0o600)
            writer = self._tables[name] = pq.ParquetWriter(path, table.schema, **options(table))
        writer.write_table(table, row_group_size=max(len(table), 1))

    def finish(self, facts: SomeFacts) -> SomeFacts:
        """Put the folder in its place, durably, and return the facts with its size."""
        for table in self._tables.values():
            table.close()
        self._step("tables")
        size = sum((self._draft / name).stat().st_size for name in self._tables)
        facts = msgspec.structs.replace(facts, bytes=size)
        (self._draft / FACTS_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(facts), indent=1) + b"\n")
        for path in (*self._draft.iterdir(), self._draft):
            _sync(path)
        self._step("synced")
        self._draft.rename(self._folder / self._name)
        self._step("renamed")
        _sync(self._folder)
        self._step("durable")
        return facts

    def discard(self) -> None:
        """Remove what was written of an unfinished folder."""
        for table in self._tables.values():
            table.close()
        shutil.rmtree(self._draft, ignore_errors=True)


class SegmentWriter:
    """Writes a segment's tables below ``folder``, a row group at a time: memory does not grow with the segment."""

    def __init__(self, folder: Path, name: str, step: Step = no_step) -> None:
        self._draft = Draft(folder, name, step)

    def write(self, tables: Tables) -> None:
        """Add one row group to each table."""
        for name, table in ((FRAMES_FILE, tables.frames), (SAMPLES_FILE, tables.samples), (LINKS_FILE, tables.links)):
            if table is not None:
                self._draft.append(name, table, _encodings)

    def finish(self, facts: Facts) -> Facts:
        """Put the segment in its place, durably, and return the facts with its size."""
        return self._draft.finish(facts)

    def discard(self) -> None:
        """Remove what was written of an unfinished segment."""
        self._draft.discard()


def _encodings(first: pa.Table) -> dict[str, Any]:
    """Return how each column is written, by what its first row group holds."""
    dictionary, split = [], {}
    for name, column in zip(first.schema.names, first.columns, strict=True):
        metric = pa.types.is_floating(column.type) and name not in ("time", "received", "node_time")
        if name in ("frame", "sequence"):
            split[name] = "DELTA_BINARY_PACKED"
        elif metric and len(column.unique()) > DISTINCT_MAX:
            split[name] = "BYTE_STREAM_SPLIT"
        else:
            dictionary.append(name)
    return {
        "compression": "zstd",
        "use_dictionary": dictionary,
        "column_encoding": split,
        "write_page_checksum": True,
    }


def _sync(path: Path) -> None:
    """Have a file's content, or a folder's names, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
