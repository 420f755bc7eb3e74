"""Prometheus and VictoriaMetrics taking the same samples by remote write, each on one core."""

from __future__ import annotations

import http.client
import json
import shutil
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.ingest.processes import Course, bytes_in, free_port, look, program
from benchmarks.ingest.remote_write import HEADERS, Bodies
from eagle_eye.simulator.load.fleet import METRICS, FleetValues, Load, SimulatedFleet

SETTLE_S = 10.0
SEED = 0


class Peer(NamedTuple):
    """One store. ``command`` gets folder and port; ``flush`` too, has what is in memory written, and returns bytes."""

    name: str
    program: str
    package: str
    command: Callable[[Path, int], list[str]]
    write_path: str
    ready_path: str
    flush: Callable[[Path, int], dict[str, int]]


def measure(peer: Peer, folder: Path, load: Load, *, realtime: bool, per_node: bool) -> dict[str, Any]:
    """Return what the load costs a peer in an empty folder."""
    if shutil.which(peer.program) is None:
        return {"skipped": f"{peer.program} is not installed: apt-get install {peer.package}"}
    folder.mkdir(parents=True)
    fleet = SimulatedFleet(load, "")
    bodies = Bodies(fleet.names, load.gpus, per_node=per_node)
    samples = load.nodes * load.gpus * len(METRICS) * load.intervals
    port = free_port()
    ready = f"http://127.0.0.1:{port}{peer.ready_path}"
    with program(peer.command(folder, port), folder / "log", ready) as pid:
        course = Course(pid)
        before = look(pid)
        waited_s = _send(peer, port, bodies, fleet, load, realtime)
        time.sleep(SETTLE_S)
        sent = look(pid)
        disk = peer.flush(folder, port)
        flushed = look(pid)
        looks = course.stop()
    return {
        "samples": samples,
        "cpu_seconds_per_million_samples": 1e6 * (sent.cpu_s - before.cpu_s) / samples,
        "cpu_seconds_per_million_samples_with_flush": 1e6 * (flushed.cpu_s - before.cpu_s) / samples,
        "seconds": sent.time_s - before.time_s - SETTLE_S,
        "request_seconds_p99": waited_s,
        "rss_bytes_max": max(one.rss_bytes for one in looks),
        **{f"{name}_bytes_per_sample": size / samples for name, size in disk.items()},
    }


def _send(peer: Peer, port: int, bodies: Bodies, fleet: SimulatedFleet, load: Load, realtime: bool) -> float:
    """Send all intervals; return the 99th percentile of the answers' times."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60.0)
    begin_s = float(int(time.time())) - (0.0 if realtime else load.duration_s)
    values = FleetValues(fleet.jobs, load.gpus, load.interval_s, load.step_s, begin_s, SEED)
    took_s: list[float] = []
    for interval in range(load.intervals):
        time_s = begin_s + interval * load.interval_s
        if realtime:
            time.sleep(max(time_s - time.time(), 0.0))
        for body in bodies.of(values.read(0, load.nodes, time_s), time_s):
            sent_s = time.monotonic()
            connection.request("POST", peer.write_path, body, HEADERS)
            answer = connection.getresponse()
            said = answer.read()
            if answer.status not in (200, 204):
                raise RuntimeError(f"{peer.name} answered {answer.status}: {said[:300]!r}")
            took_s.append(time.monotonic() - sent_s)
    connection.close()
    return sorted(took_s)[int(0.99 * (len(took_s) - 1))]


def _post(port: int, path: str, method: str) -> bytes:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", method=method)
    with urllib.request.urlopen(request, timeout=600.0) as answer:
        body: bytes = answer.read()
    return body


def _prometheus(folder: Path, port: int) -> list[str]:
    (folder / "p.yml").write_text("global: {}\n")
    return [
        "prometheus",
        f"--config.file={folder}/p.yml",
        f"--storage.tsdb.path={folder}/tsdb",
        f"--web.listen-address=127.0.0.1:{port}",
        "--web.enable-remote-write-receiver",
        "--web.enable-admin-api",
        "--storage.tsdb.retention.time=30d",
    ]


def _flush_prometheus(folder: Path, port: int) -> dict[str, int]:
    """Write the head as a block, as Prometheus does after two hours; until then there are its log and head chunks."""
    log = bytes_in(folder / "tsdb" / "wal", folder / "tsdb" / "chunks_head")
    said = json.loads(_post(port, "/api/v1/admin/tsdb/snapshot", "POST"))
    block = bytes_in(folder / "tsdb" / "snapshots" / said["data"]["name"])
    return {"log": log, "disk": block}


def _victoria(folder: Path, port: int) -> list[str]:
    return [
        "victoria-metrics",
        f"-storageDataPath={folder}/vm",
        f"-httpListenAddr=127.0.0.1:{port}",
        "-retentionPeriod=12",
    ]


def _flush_victoria(folder: Path, port: int) -> dict[str, int]:
    _post(port, "/internal/force_flush", "GET")
    flushed = bytes_in(folder / "vm")
    _post(port, "/internal/force_merge", "GET")
    size = flushed
    for _ in range(60):  # the merge runs by itself: until nothing changes any more
        time.sleep(2.0)
        now = bytes_in(folder / "vm")
        if now == size:
            break
        size = now
    return {"flushed": flushed, "disk": size}


PEERS = (
    Peer("prometheus", "prometheus", "prometheus", _prometheus, "/api/v1/write", "/-/ready", _flush_prometheus),
    Peer(
        "victoriametrics",
        "victoria-metrics",
        "victoria-metrics",
        _victoria,
        "/api/v1/write",
        "/health",
        _flush_victoria,
    ),
)
