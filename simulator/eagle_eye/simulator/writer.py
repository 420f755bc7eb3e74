"""Writes a recording as a trace folder (``eagle-eye-trace/1``), as recorded by one kind of site."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from eagle_eye.schema.metrics import METRICS, MetricSpec, Scope
from eagle_eye.simulator.arrays import Booleans, Floats, Integers
from eagle_eye.simulator.profiles import RankKnowledge, SiteProfile, profile
from eagle_eye.simulator.recording import Membership, RecordedEvent, Recording

FORMAT = "eagle-eye-trace/1"
FILES = ("trace.json", "samples.parquet", "links.parquet", "events.jsonl", "faults.jsonl", "membership.jsonl")
SLAB_CELLS = 250_000  # device rows that are in memory as columns at a time
WHOLE_NODE = -1


class FolderTaken(ValueError):
    """The folder holds a trace already, or something else; it is left as it is."""


def write(recording: Recording, folder: Path, profile_name: str = "full", *, overwrite: bool = False) -> None:
    """Write the trace; ``overwrite``: in place of the one there. Raises FolderTaken, OSError as the disk does."""
    site = profile(profile_name)
    check_free(folder, overwrite=overwrite)
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    stride = _stride(recording, site)
    view = _View(recording, site, stride)
    view.samples(folder / "samples.parquet")
    if recording.link:
        view.links(folder / "links.parquet")
    _lines(folder / "events.jsonl", (event._asdict() for event in view.events()))
    _lines(
        folder / "faults.jsonl",
        (label._asdict() | {"nodes": list(label.nodes)} for label in recording.labels),
    )
    later = recording.members[1:]
    if later and site.membership is not RankKnowledge.NODES:
        _lines(
            folder / "membership.jsonl",
            ({"time": m.time, "attempt": m.attempt, "ranks": _ranks(m, site)} for m in later),
        )
    # Last: a folder with this file is a whole trace.
    (folder / "trace.json").write_text(json.dumps(_header(recording, site, stride), indent=1) + "\n", encoding="utf-8")


def check_free(folder: Path, *, overwrite: bool = False) -> None:
    """Return if a trace may be written to the folder: it is not there, empty or, with ``overwrite``, holds a trace.

    Raises FolderTaken, and OSError where the folder cannot be read.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise FolderTaken(f"{folder} is a file; expected a folder to write a trace to")
    names = sorted(path.name for path in folder.iterdir())
    others = [name for name in names if name not in FILES]
    if names and (others or not _is_trace(folder / "trace.json")):
        found = others[0] if others else "no trace.json of ours"
        raise FolderTaken(f"{folder} is not empty and holds no trace ({found}); name another folder")
    if names and not overwrite:
        raise FolderTaken(f"{folder} holds a trace; name another folder, or add --overwrite to replace it")


def _is_trace(path: Path) -> bool:
    try:
        return bool(json.loads(path.read_text(encoding="utf-8")).get("format") == FORMAT)
    except (OSError, ValueError, AttributeError):
        return False


def _stride(recording: Recording, site: SiteProfile) -> int:
    """Return of how many rows a site keeps one."""
    return max(1, math.ceil(site.scrape_s / recording.scenario.interval_s - 1e-9))


def _header(recording: Recording, site: SiteProfile, stride: int) -> dict[str, Any]:
    layout = recording.layout
    nodes = []
    for n, name in enumerate(layout.names):
        links = [
            {"link": link, "switch": switch} for link, switch in zip(layout.links, layout.link_switch[n], strict=True)
        ]
        model = layout.models[n].name
        nodes.append(
            {"node": name, "gpus": layout.gpus, "switch": layout.switch[n], "gpu_model": model, "links": links}
        )
    header = {
        "format": FORMAT,
        "job": recording.job,
        "interval_s": recording.scenario.interval_s * stride,
        "start": recording.start,
        "end": recording.end,
        "nodes": nodes,
    }
    if site.membership is not RankKnowledge.NODES:
        header["ranks"] = _ranks(recording.members[0], site)
    return header


def _ranks(members: Membership, site: SiteProfile) -> list[dict[str, Any]]:
    names = ("rank", "node", "device", "dp", "pp", "tp")
    known = names if site.membership is RankKnowledge.LAYOUT else names[:3]
    return [dict(zip(known, rank, strict=False)) for rank in members.ranks]


def _lines(path: Path, items: Iterable[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for item in items:
            file.write(json.dumps(item, separators=(",", ":")) + "\n")


# What exporters and DCGM's profiling fields take from counters that run between two scrapes.
SHARES_OF_TIME = frozenset(
    {
        "gpu_tensor_active_ratio",
        "gpu_sm_active_ratio",
        "gpu_dram_active_ratio",
        "node_cpu_utilization_ratio",
        "node_cpu_steal_ratio",
        "node_cpu_pressure_ratio",
        "node_memory_pressure_ratio",
        "node_io_pressure_ratio",
        "node_iowait_ratio",
    }
)


class _View:
    """A recording through one site's instruments: every ``stride``-th row, the profile's metrics and events."""

    def __init__(self, recording: Recording, site: SiteProfile, stride: int) -> None:
        self._recording = recording
        self._site = site
        self._stride = stride
        # The last row of each group: counters and gauges are read when the scrape comes.
        self._rows: Integers = np.arange(stride - 1, len(recording.time), stride)
        self._time = recording.true_time if site.true_clock else recording.time
        self._names = pa.array(recording.layout.names)

    def samples(self, path: Path) -> None:
        """Write device and node rows, a slab of time after the other."""
        recording = self._recording
        scopes = ((Scope.DEVICE, recording.device), (Scope.NODE, recording.node))
        columns = [
            spec
            for spec in METRICS
            if spec.name in self._site.metrics and any(spec.name in values for _, values in scopes)
        ]
        schema = pa.schema(
            [("time", pa.float64()), ("node", pa.dictionary(pa.int32(), pa.string())), ("device", pa.int16())]
            + [(spec.name, _type(spec)) for spec in columns]
        )
        nodes, gpus = recording.layout.nodes, recording.layout.gpus
        size = max(1, SLAB_CELLS // (nodes * gpus))
        with pq.ParquetWriter(path, schema, compression="zstd", compression_level=1) as writer:
            for first in range(0, len(self._rows), size):
                rows = self._rows[first : first + size]
                here = recording.arrived[rows][:, :, None] & recording.device_arrived[rows]
                devices = np.broadcast_to(np.arange(gpus, dtype=np.int16), here.shape)
                writer.write_table(self._slab(schema, columns, recording.device, rows, here, devices))
                here = recording.arrived[rows]
                whole = np.full(here.shape, WHOLE_NODE, dtype=np.int16)
                writer.write_table(self._slab(schema, columns, recording.node, rows, here, whole))

    def links(self, path: Path) -> None:
        """Write link rows."""
        recording, layout = self._recording, self._recording.layout
        columns = [spec for spec in METRICS if spec.name in self._site.metrics and spec.name in recording.link]
        schema = pa.schema(
            [
                ("time", pa.float64()),
                ("node", pa.dictionary(pa.int32(), pa.string())),
                ("link", pa.dictionary(pa.int32(), pa.string())),
            ]
            + [(spec.name, _type(spec)) for spec in columns]
        )
        links = pa.array(layout.links)
        width = len(layout.links)
        size = max(1, SLAB_CELLS // (layout.nodes * width))
        with pq.ParquetWriter(path, schema, compression="zstd", compression_level=1) as writer:
            for first in range(0, len(self._rows), size):
                rows = self._rows[first : first + size]
                here = np.repeat(recording.arrived[rows][:, :, None], width, axis=2)
                which = np.broadcast_to(np.arange(width, dtype=np.int32), here.shape)[here]
                arrays = [*self._keys(rows, here), pa.DictionaryArray.from_arrays(pa.array(which), links)]
                arrays += [_column(recording.link[spec.name][rows][here], spec) for spec in columns]
                writer.write_table(pa.Table.from_arrays(arrays, schema=schema))

    def events(self) -> list[RecordedEvent]:
        """Return the events that the site has."""
        found = [event for event in self._recording.events if event.kind in self._site.events]
        if not self._site.last_xid_only:
            return found
        xids = self._scraped([event for event in found if event.kind == "xid"]) if self._recording.exports_xid else []
        return sorted([event for event in found if event.kind != "xid"] + xids, key=lambda event: event.time)

    def _scraped(self, xids: list[RecordedEvent]) -> list[RecordedEvent]:
        """Return what a scrape of the gauge of the last XID shows: one code a device, at the scrape's time."""
        seen: dict[tuple[int, int, str | None, int], RecordedEvent] = {}
        for event in xids:
            node = self._recording.layout.names.index(event.node or "")
            row = int(np.searchsorted(self._time[self._rows, node], event.time))
            if row < len(self._rows) and self._recording.arrived[self._rows[row], node]:
                time = float(self._time[self._rows[row], node])
                seen[row, node, event.node, event.device] = event._replace(
                    time=time, attributes={"code": event.attributes["code"]}
                )
        return list(seen.values())

    def _slab(
        self,
        schema: pa.Schema,
        columns: list[MetricSpec],
        values: dict[str, Floats],
        rows: Integers,
        here: Booleans,
        devices: Integers,
    ) -> pa.Table:
        arrays = [*self._keys(rows, here), pa.array(devices[here])]
        number = int(here.sum())
        for spec in columns:
            known = values.get(spec.name)
            if known is None:
                arrays.append(pa.nulls(number, _type(spec)))
            else:
                arrays.append(_column(self._read(known, rows, spec.name)[here], spec))
        return pa.Table.from_arrays(arrays, schema=schema)

    def _read(self, values: Floats, rows: Integers, name: str) -> Floats:
        """Return what the site reads in these rows, (rows, N[, G]).

        A level is read when the scrape comes; a rate or a share of time is the growth of a counter since the last one.
        """
        if self._stride == 1 or not (name.endswith("_per_second") or name in SHARES_OF_TIME):
            return values[rows]
        groups = values[rows[0] - self._stride + 1 : rows[-1] + 1].reshape(len(rows), self._stride, *values.shape[1:])
        mean: Floats = groups.mean(axis=1)
        return mean

    def _keys(self, rows: Integers, here: Booleans) -> list[Any]:
        time = self._time[rows]
        nodes = np.arange(time.shape[1], dtype=np.int32)[None, :]
        if here.ndim > time.ndim:
            time, nodes = time[:, :, None], nodes[:, :, None]
        node = pa.array(np.broadcast_to(nodes, here.shape)[here])
        return [pa.array(np.broadcast_to(time, here.shape)[here]), pa.DictionaryArray.from_arrays(node, self._names)]


def _type(spec: MetricSpec) -> Any:
    return pa.float64() if spec.exact else pa.float32()


def _column(values: Floats, spec: MetricSpec) -> Any:
    return pa.array(values, type=_type(spec))
