"""Writes one segment atomically: it appears complete, durable and under its name, or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from eagle_eye.server.history.segments.facts import FACTS_FILE, PARTIAL, Facts, Step, no_step
from eagle_eye.server.history.segments.layout import (
    FRAMES_FILE,
    LINKS_FILE,
    SAMPLES_FILE,
)
from eagle_eye.server.history.segments.row_tables import Tables

SomeFacts = TypeVar("SomeFacts", bound=msgspec.Struct)

# Numeric columns are written byte-stream-split and compressed. With few distinct values in random order (hundredths,
# clocks in steps) dictionary indexes are smaller, but take twice the time.
DISTINCT_MAX = 1_024
DICTIONARY_SAVES_BYTES = 0.5  # per value at least, or it is not worth it


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

    def append(self, name: str, table: pa.Table, options: Callable[[], dict[str, Any]]) -> None:
        """Add one row group to the table of this name; ``options`` returns its write options and is called once."""
        writer = self._tables.get(name)
        if writer is None:
            path = self._draft / name
            path.touch(mode=0o600)
            writer = self._tables[name] = pq.ParquetWriter(path, table.schema, **options())
        writer.write_table(table, row_group_size=max(len(table), 1))

    def finish(self, facts: SomeFacts) -> SomeFacts:
        """Move the folder into place, durably, and return the facts with its size."""
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
    """Writes a segment's tables below ``folder``, a row group at a time: memory does not grow with the segment.

    The column encodings are chosen from ``sample``, some of the rows, or else from the first row group.
    """

    def __init__(self, folder: Path, name: str, step: Step = no_step, sample: Tables | None = None) -> None:
        self._draft = Draft(folder, name, step)
        self._samples = _named(sample) if sample is not None else {}

    def write(self, tables: Tables) -> None:
        """Add one row group to each table."""
        for name, table in _named(tables).items():
            options = partial(_encodings, self._samples.get(name, table))
            self._draft.append(name, table.cast(_written(table.schema)), options)

    def finish(self, facts: Facts) -> Facts:
        """Move the segment into place, durably, and return the facts with its size."""
        return self._draft.finish(facts)

    def discard(self) -> None:
        """Remove what was written of an unfinished segment."""
        self._draft.discard()


def _named(tables: Tables) -> dict[str, pa.Table]:
    named = {FRAMES_FILE: tables.frames, SAMPLES_FILE: tables.samples, LINKS_FILE: tables.links}
    return {name: table for name, table in named.items() if table is not None}


def _written(schema: pa.Schema) -> pa.Schema:
    """Return the schema with texts as dictionaries, so that equal texts are encoded once."""
    text = pa.dictionary(pa.int32(), pa.string())
    return pa.schema([field.with_type(text) if field.type == pa.string() else field for field in schema])


def _encodings(sample: pa.Table) -> dict[str, Any]:
    """Return how each column is written, chosen from some of its rows."""
    dictionary, split, summarized = [], {}, []
    for name, column in zip(sample.schema.names, sample.columns, strict=True):
        if name in ("frame", "sequence"):
            split[name] = "DELTA_BINARY_PACKED"
        elif not pa.types.is_floating(column.type) or _suits_dictionary(column):
            dictionary.append(name)
        else:
            split[name] = "BYTE_STREAM_SPLIT"
        if pa.types.is_primitive(column.type) or name in ("node", "link", "raw"):
            summarized.append(name)
    return {
        "compression": "lz4",
        "write_statistics": summarized,
        "use_dictionary": dictionary,
        "column_encoding": split,
        "write_page_checksum": True,
        "store_schema": False,  # or readers would be told that texts are dictionaries
    }


def _suits_dictionary(column: pa.ChunkedArray) -> bool:
    """Return whether a dictionary is worth its cost: about twice the time of compressed byte streams."""
    if not 1 < len(column.unique()) <= DISTINCT_MAX:
        return False
    sizes = []
    for options in ({"use_dictionary": True}, {"use_dictionary": False, "use_byte_stream_split": True}):
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table({"": column}), sink, compression="lz4", **options)
        sizes.append(sink.tell())
    return bool(sizes[1] - sizes[0] > DICTIONARY_SAVES_BYTES * len(column))


def _sync(path: Path) -> None:
    """Flush a file's contents, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
