"""What the frames that agents send again cost a new leader, and the windows that it fills from them.

    python -m benchmarks.ingest.resends --nodes 20 --out benchmarks/results/resends.json

A real server with an empty folder on this machine. Each node sends one frame, then 15 minutes of earlier ones in
requests of 64 with the header of kept frames, all nodes in turn, as fast as they are acknowledged. Frames are those of
a host with eight GPUs and ten ports on which every metric of the catalogue is observed. CPU is the server's, of all its
threads; what it takes of itself meanwhile is in it. After the nodes' last requests it fills its windows from what was
sent: that with these requests is ``fill_cpu_s``. Exit code 1: it did not, or something was refused.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.agent_overhead.outage import GPUS, PORTS
from eagle_eye.agent.transport.servers import SYSTEMS, connect, path_on
from eagle_eye.agent.transport.uplink import FrameConnection, RequestWriter
from eagle_eye.schema.frame import KEPT_HEADER, Rank
from eagle_eye.schema.metrics import Scope, names
from eagle_eye.schema.rows import VERSION, RowTemplate, RowWriter, Tail, table

KEPT = 900  # frames of each node
REQUEST = 64
FILLED = "the windows reach back"
WITHIN_S = 120.0


class Node:
    """What one node's agent has kept."""

    def __init__(self, number: int, nodes: int) -> None:
        devices = {gpu: dict.fromkeys(names(Scope.DEVICE), 1.0 + gpu) for gpu in range(GPUS)}
        links = {f"mlx5_{port}/1": dict.fromkeys(names(Scope.LINK), 1.0) for port in range(PORTS)}
        node = table(Scope.NODE, {-1: dict.fromkeys(names(Scope.NODE), 1.0)})
        tables = [table(Scope.DEVICE, devices), node, table(Scope.LINK, links)]
        self._numbers = b"".join([part for _, part in tables])
        self._template = RowTemplate(
            version=VERSION,
            node=f"gpu-node-{number:05d}.cluster.example",
            boot_id="0f2a4c1e-5a36-4b8f-9f5b-0a9f6f1a2b3c",
            stream=f"stream-{number}",
            interval_s=1.0,
            agent_version="0.1.0",
            job="llm-pretrain-70b",
            ranks=[Rank("llm-pretrain-70b", GPUS * number + gpu, GPUS * nodes, gpu) for gpu in range(GPUS)],
            blocks=[block for block, _ in tables],
            collectors=dict.fromkeys(("host", "nvml", "fabric", "kernel_log", "training"), "ok"),
        )
        self._writer = RowWriter()

    def frames(self, sequences: range, first_s: float) -> list[bytes]:
        """Return frames, one a second."""
        return [self._writer.write(self._template, n, first_s + n, self._numbers, Tail()) for n in sequences]


def main() -> int:
    """Run, print, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=20)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="eagle-eye-resends-") as name:
        log = Path(name) / "log"
        command = [sys.executable, "-m", "eagle_eye.cli.main", "server", "--listen", "127.0.0.1:0", "--data", name]
        with log.open("wb") as stderr:
            process = subprocess.Popen(command, stderr=stderr)
        try:
            while not (found := re.search(r"serving (http://[\d.:]+)", log.read_text())):
                time.sleep(0.1)
            results = measured(found[1], psutil.Process(process.pid), log, args.nodes)
        finally:
            process.kill()
            process.wait()
    print(json.dumps(results, indent=1))
    if args.out is not None:
        args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 0 if results["fill_cpu_s"] is not None and not results["refused"] else 1


def measured(url: str, server: psutil.Process, log: Path, count: int) -> dict[str, Any]:
    """Return the costs."""
    nodes = [Node(number, count) for number in range(count)]
    connection = FrameConnection(partial(connect, url, SYSTEMS, 2.0, 30.0), url, path_on(url, "/api/v1/frames"))
    first_s = time.time() - KEPT - 1
    for node in nodes:
        written = RequestWriter(time.monotonic).write(node.frames(range(KEPT + 1, KEPT + 2), first_s), time.time())
        connection.post(written.body, "", written.content_type)
    before_s = sent_s = _cpu_s(server)
    sent_bytes = refused = requests = 0
    for together in zip(*[_requests(node, first_s) for node in nodes], strict=True):
        if together[0].left == 0:
            sent_s = _cpu_s(server)
        for one in together:
            more = {KEPT_HEADER: str(one.left), **({"Content-Encoding": one.encoding} if one.encoding else {})}
            refused += connection.post(one.body, "", one.kind, more).status != 200
            sent_bytes += len(one.body)
            requests += 1
    end_s = time.monotonic() + WITHIN_S
    while FILLED not in log.read_text() and time.monotonic() < end_s:
        time.sleep(0.1)
    filled = FILLED in log.read_text()
    return {
        "nodes": count,
        "requests": requests,
        "refused": refused,
        "bytes_per_request": sent_bytes / requests,
        "cpu_ms_per_request": 1e3 * (sent_s - before_s) / (requests - count),
        "frames": count * (KEPT + 1),
        "fill_cpu_s": _cpu_s(server) - sent_s if filled else None,
    }


class Again(NamedTuple):
    """A request; ``left`` frames follow it."""

    body: bytes
    encoding: str
    kind: str
    left: int


def _requests(node: Node, first_s: float) -> Iterator[Again]:
    """Yield what an agent sends again."""
    writer = RequestWriter(time.monotonic)
    for first in range(KEPT - REQUEST + 1, 1 - REQUEST, -REQUEST):
        one = range(max(first, 1), first + REQUEST)
        written = writer.write(node.frames(one, first_s), time.time())
        writer.answered(200, "")
        yield Again(written.body, written.encoding, written.content_type, one[0] - 1)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    raise SystemExit(main())
