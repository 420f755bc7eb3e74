"""Writes a recording as a trace folder (``eagle-eye-trace/1``), as recorded by one kind of site."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from eagle_eye.schema.metrics import METRICS, MetricSpec, Scope
from eagle_eye.simulator.arrays import Booleans, Floats, Integers
from eagle_eye.simulator.scenario import Scenario
from eagle_eye.simulator.simulate import Membership, RecordedEvent, Recording
from eagle_eye.simulator.sites import (
    GPU_EXPORTER,
    INTERVALS_S,
    NODE_EXPORTER,
    RankKnowledge,
    Reads,
    SiteProfile,
    of_exporter,
    profile,
    scraping,
    with_each_row,
)

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
    view = _View(recording, site)
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
    (folder / "trace.json").write_text(json.dumps(_header(recording, site), indent=1) + "\n", encoding="utf-8")


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


def _header(recording: Recording, site: SiteProfile) -> dict[str, Any]:
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
        "interval_s": interval_s(recording.scenario, site),
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


def interval_s(scenario: Scenario, site: SiteProfile) -> float:
    """Return the interval of a site's most frequent rows."""
    scraped_s = [scraping(scenario.seed, exporter).interval_s for exporter in INTERVALS_S] if site.scraped else [0.0]
    return max(scenario.interval_s, min(scraped_s))


class _View:
    """A recording through one site's instruments: when they are read, and the profile's metrics and events."""

    def __init__(self, recording: Recording, site: SiteProfile) -> None:
        self._recording = recording
        self._site = site
        self._gpus = self._hosts = with_each_row(recording)
        if site.scraped:
            seed = recording.scenario.seed
            self._gpus = of_exporter(recording, GPU_EXPORTER, scraping(seed, GPU_EXPORTER))
            self._hosts = of_exporter(recording, NODE_EXPORTER, scraping(seed, NODE_EXPORTER))
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
            for first in range(0, max(len(self._gpus.row), len(self._hosts.row)), size):
                reads = self._slice(self._gpus, first, size)
                here = reads.here[:, :, None] & self._values(recording.device_arrived, reads.row)
                devices = np.broadcast_to(np.arange(gpus, dtype=np.int16), here.shape)
                writer.write_table(self._slab(schema, columns, recording.device, reads, here, devices))
                reads = self._slice(self._hosts, first, size)
                whole = np.full(reads.here.shape, WHOLE_NODE, dtype=np.int16)
                writer.write_table(self._slab(schema, columns, recording.node, reads, reads.here, whole))

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
            for first in range(0, len(self._hosts.row), size):
                reads = self._slice(self._hosts, first, size)
                here = np.repeat(reads.here[:, :, None], width, axis=2)
                which = np.broadcast_to(np.arange(width, dtype=np.int32), here.shape)[here]
                arrays = [*self._keys(reads, here), pa.DictionaryArray.from_arrays(pa.array(which), links)]
                arrays += [
                    _column(self._read(recording.link[spec.name], reads, spec.name)[here], spec) for spec in columns
                ]
                writer.write_table(pa.Table.from_arrays(arrays, schema=schema))

    def events(self) -> list[RecordedEvent]:
        """Return the events that the site has."""
        found = [event for event in self._recording.events if event.kind in self._site.events]
        if not self._site.scraped:
            return found
        xids = self._scraped([event for event in found if event.kind == "xid"]) if self._recording.exports_xid else []
        return sorted([event for event in found if event.kind != "xid"] + xids, key=lambda event: event.time)

    def _scraped(self, xids: list[RecordedEvent]) -> list[RecordedEvent]:
        """Return what scrapes of the gauge of the last XID show: one code a device, when an answer next comes."""
        seen: dict[tuple[int, int, str | None, int], RecordedEvent] = {}
        for event in xids:
            node = self._recording.layout.names.index(event.node or "")
            times = self._gpus.time[self._gpus.here[:, node], node]
            answer = int(np.searchsorted(times, event.time))
            if answer < len(times):
                seen[answer, node, event.node, event.device] = event._replace(
                    time=float(times[answer]), attributes={"code": event.attributes["code"]}
                )
        return list(seen.values())

    def _slab(
        self,
        schema: pa.Schema,
        columns: list[MetricSpec],
        values: dict[str, Floats],
        reads: Reads,
        here: Booleans,
        devices: Integers,
    ) -> pa.Table:
        arrays = [*self._keys(reads, here), pa.array(devices[here])]
        number = int(here.sum())
        for spec in columns:
            known = values.get(spec.name)
            if known is None:
                arrays.append(pa.nulls(number, _type(spec)))
            else:
                arrays.append(_column(self._read(known, reads, spec.name)[here], spec))
        return pa.Table.from_arrays(arrays, schema=schema)

    def _read(self, values: Floats, reads: Reads, name: str) -> Floats:
        """Return what the site reads, (R, N[, G]).

        A level is read when the scrape comes; a rate or a share of time is the growth of a counter since the last one.
        """
        if not self._site.scraped or not (name.endswith("_per_second") or name in SHARES_OF_TIME):
            return self._values(values, reads.row)
        rows = reads.rows.reshape(*reads.rows.shape, *[1] * (values.ndim - 2))
        total = np.zeros((*reads.row.shape, *values.shape[2:]))
        for back in range(int(rows.max(initial=0))):
            total += np.where(back < rows, self._values(values, np.maximum(reads.row - back, 0)), 0.0)
        mean: Floats = total / rows
        return mean

    def _values(self, values: NDArray[Any], row: Integers) -> NDArray[Any]:
        """Return each node's values in its own rows: (R, N[, G])."""
        found: NDArray[Any] = values[row, np.arange(values.shape[1])[None, :]]
        return found

    def _slice(self, reads: Reads, first: int, size: int) -> Reads:
        some = slice(first, first + size)
        return Reads(reads.row[some], reads.time[some], reads.here[some], reads.rows[some])

    def _keys(self, reads: Reads, here: Booleans) -> list[Any]:
        time = reads.time
        nodes = np.arange(time.shape[1], dtype=np.int32)[None, :]
        if here.ndim > time.ndim:
            time, nodes = time[:, :, None], nodes[:, :, None]
        node = pa.array(np.broadcast_to(nodes, here.shape)[here])
        return [pa.array(np.broadcast_to(time, here.shape)[here]), pa.DictionaryArray.from_arrays(node, self._names)]


def _type(spec: MetricSpec) -> Any:
    return pa.float64() if spec.exact else pa.float32()


def _column(values: Floats, spec: MetricSpec) -> Any:
    return pa.array(values, type=_type(spec))
