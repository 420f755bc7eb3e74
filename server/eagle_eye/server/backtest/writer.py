"""Writes a trace folder (``eagle-eye-trace/1``), table rows a chunk at a time: memory does not grow with the trace."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from eagle_eye.schema import metrics as catalogue
from eagle_eye.schema.metrics import Scope
from eagle_eye.server.backtest.trace_format import (
    EVENTS_FILE,
    HEADER_FILE,
    LABELS_FILE,
    LINKS_FILE,
    MEMBERSHIP_FILE,
    SAMPLES_FILE,
    SILENCE_COLUMN,
    BadTrace,
    Header,
    Label,
    MembershipLine,
    TraceEvent,
)

SAMPLE_METRICS = (*catalogue.names(Scope.DEVICE), *catalogue.names(Scope.NODE))
LINK_METRICS = catalogue.names(Scope.LINK)
Column = Sequence[Any] | np.ndarray[Any, Any]


class TraceWriter:
    """Writes one trace, as a context manager; the folder appears whole when ``finish`` returns, or not at all.

    Raises BadTrace when ``folder`` exists already: a trace is never overwritten.
    """

    def __init__(self, folder: Path) -> None:
        if folder.exists():
            raise BadTrace(f"{folder} exists already; a trace is not overwritten: name another folder or remove it")
        self.folder = folder
        self._draft = folder.with_name(f".{folder.name}.partial")
        self._tables: dict[str, pq.ParquetWriter] = {}

    def __enter__(self) -> Self:
        shutil.rmtree(self._draft, ignore_errors=True)
        self._draft.mkdir(parents=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for table in self._tables.values():
            table.close()
        shutil.rmtree(self._draft, ignore_errors=True)

    def samples(self, columns: Mapping[str, Column]) -> None:
        """Add device and node rows: ``time``, ``node``, ``device`` (-1: a node row) and any metrics; NaN unobserved.

        All columns are of one length. A metric that the catalogue lacks is a KeyError.
        """
        self._append(SAMPLES_FILE, ("device", pa.int16()), (*SAMPLE_METRICS, SILENCE_COLUMN), columns)

    def links(self, columns: Mapping[str, Column]) -> None:
        """Add link rows: ``time``, ``node``, ``link`` and any link metrics, as ``samples`` does."""
        self._append(LINKS_FILE, ("link", pa.dictionary(pa.int32(), pa.string())), LINK_METRICS, columns)

    def finish(
        self,
        header: Header,
        events: Iterable[TraceEvent] = (),
        memberships: Iterable[MembershipLine] = (),
        labels: Iterable[Label] | None = None,
    ) -> None:
        """Write the rest and move the folder into place. ``labels`` None: the trace has none."""
        if SAMPLES_FILE not in self._tables:
            self.samples({"time": [], "node": [], "device": []})
        for table in self._tables.values():
            table.close()
        self._tables.clear()
        (self._draft / HEADER_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(header), indent=1) + b"\n")
        reported: list[TraceEvent] = sorted(events, key=lambda event: event.time)
        members: list[MembershipLine] = sorted(memberships, key=lambda one: one.time)
        self._lines(EVENTS_FILE, reported)
        self._lines(MEMBERSHIP_FILE, members)
        if labels is not None:
            self._lines(LABELS_FILE, labels, even_empty=True)
        self._draft.rename(self.folder)

    def _append(self, name: str, key: tuple[str, Any], metrics: Sequence[str], columns: Mapping[str, Column]) -> None:
        unknown = columns.keys() - {"time", "node", key[0], *metrics}
        if unknown:
            raise KeyError(f"no such column of {name}: {', '.join(sorted(unknown))}")
        fields = {
            "time": pa.float64(),
            "node": pa.dictionary(pa.int32(), pa.string()),
            key[0]: key[1],
            **{metric: _kind(metric) for metric in metrics},
        }
        rows = len(columns["time"])
        table = self._tables.get(name)
        if table is None:
            table = pq.ParquetWriter(self._draft / name, pa.schema(list(fields.items())), compression="zstd")
            self._tables[name] = table
        arrays = [
            pa.array(columns[field], from_pandas=True).cast(kind, safe=False)
            if field in columns
            else pa.nulls(rows, kind)
            for field, kind in fields.items()
        ]
        table.write_table(pa.table(arrays, schema=pa.schema(list(fields.items()))))

    def _lines(self, name: str, records: Iterable[msgspec.Struct], even_empty: bool = False) -> None:
        lines = b"".join(msgspec.json.encode(record) + b"\n" for record in records)
        if lines or even_empty:
            (self._draft / name).write_bytes(lines)


def _kind(metric: str) -> Any:
    spec = catalogue.BY_NAME.get(metric)
    return pa.float64() if spec is not None and spec.exact else pa.float32()
