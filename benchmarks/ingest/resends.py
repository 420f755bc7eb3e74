"""How long a new leader takes until its windows are whole, and what the frames that agents send again cost it.

    python -m benchmarks.ingest.resends --nodes 100 --out benchmarks/results/resends.json

A real server with an empty folder on this machine, and a fleet whose former leader is lost: each node sends a frame a
second and, as agents do, 15 minutes of earlier ones in requests of 64, at the pace that the server asks for. Frames are
those of a host with eight GPUs on which every metric of the catalogue is observed. The time counts from the first
frame to the line with which the server says that its windows reach back; CPU is the server's.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from benchmarks.agent_overhead.outage import realistic
from eagle_eye.agent.transport.connection import FrameConnection, ServerAnswer
from eagle_eye.agent.transport.request_writer import RequestWriter, Written
from eagle_eye.agent.transport.server_connection import SYSTEMS, connect, path_on
from eagle_eye.schema.frame import KEPT_HEADER

KEPT = 900  # frames of each node
REQUEST = 64
QUIET_S = 20.0  # of live frames alone, before
THREADS = 24
SAID = "the windows reach back"
WITHIN_S = 600.0


class Node:
    """One node's connections and what it sends."""

    def __init__(self, number: int, url: str, began_s: float) -> None:
        self.name, self.rank, self.stream = f"gpu-node-{number:05d}", 8 * number, f"stream-{number}"
        path = path_on(url, "/api/v1/frames")
        self._live, self._again = (
            FrameConnection(partial(connect, url, SYSTEMS, 2.0, 30.0), url, path) for _ in range(2)
        )
        self._writer = RequestWriter(time.monotonic)
        self.sequence = KEPT
        pieces = [range(first, min(first + REQUEST, KEPT + 1)) for first in range(1, KEPT + 1, REQUEST)]
        self.kept = [self._written([self._frame(n, began_s - KEPT + n) for n in one]) for one in pieces]
        self.left = [one[0] - 1 for one in pieces]

    def live(self) -> ServerAnswer:
        """Send a frame of now."""
        self.sequence += 1
        written = self._writer.write([self._frame(self.sequence, time.time())], time.time())
        answer = self._live.post(written.body, "", written.content_type)
        self._writer.answered(answer.status, answer.reason)
        return answer

    def again(self) -> int:
        """Send the newest request that is left; return the answer's status."""
        written = self.kept[-1]
        more = {KEPT_HEADER: str(self.left[-1])} | ({"Content-Encoding": written.encoding} if written.encoding else {})
        status = self._again.post(written.body, "", written.content_type, more).status
        if status == 200:
            self.kept.pop()
            self.left.pop()
        return status

    def _frame(self, sequence: int, time_s: float) -> bytes:
        return realistic(self.stream, sequence, self.name, self.rank, time_s)

    def _written(self, frames: list[bytes]) -> Written:
        return RequestWriter(time.monotonic).write(frames, time.time())


def main() -> int:
    """Run, print, write the results; 1 when something is missing or twice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=100)
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
    return 0 if results["refused"] == 0 and results["whole_after_s"] is not None else 1


def measured(url: str, server: psutil.Process, log: Path, count: int) -> dict[str, Any]:
    """Return the times and costs."""
    nodes = [Node(number, url, time.time() + QUIET_S) for number in range(count)]
    statuses: dict[int, int] = {}
    requests = sum(len(node.kept) for node in nodes)
    live_cpu_ratio = begun_cpu_s = begun_s = whole_s = ended_s = None
    with ThreadPoolExecutor(THREADS) as pool:
        due: list[tuple[float, int, bool]] = []
        start_s = time.monotonic()
        for number in range(count):
            heapq.heappush(due, (start_s + number / count, number, False))
        before_cpu_s = _cpu_s(server)
        every_s = 0.0
        while True:
            at_s, number, is_kept = heapq.heappop(due)
            time.sleep(max(0.0, at_s - time.monotonic()))
            node, now_s = nodes[number], time.monotonic()
            if is_kept:
                if node.kept:
                    pool.submit(_note, statuses, node)
                    wait_s = max(1.0 * (0.5 + random.random()), every_s * (0.5 + random.random()))
                    heapq.heappush(due, (now_s + wait_s, number, True))
            else:
                pool.submit(node.live)
                heapq.heappush(due, (at_s + 1.0, number, False))
            if begun_s is None and now_s - start_s >= QUIET_S:
                begun_s, begun_cpu_s = now_s, _cpu_s(server)
                live_cpu_ratio = (begun_cpu_s - before_cpu_s) / (begun_s - start_s)
                answer = node.live()
                every_s = float(answer.fields.get("resend_seconds", 0.0))  # type: ignore[arg-type]
                for other in range(count):
                    heapq.heappush(due, (now_s + every_s * random.random(), other, True))
            if begun_s is not None and ended_s is None and not any(node.kept for node in nodes):
                ended_s, ended_cpu_s = now_s, _cpu_s(server)
            if ended_s is not None and whole_s is None and SAID in log.read_text():
                whole_s = now_s
            if begun_s is not None and (whole_s is not None or now_s - begun_s > WITHIN_S):
                break
    assert begun_s is not None and begun_cpu_s is not None and live_cpu_ratio is not None
    assert ended_s is not None
    refill = re.search(SAID + r'.*?"seconds": ?([\d.]+)', log.read_text()) or re.search(
        SAID + r".*?seconds=([\d.]+)", log.read_text()
    )
    cost_s = ended_cpu_s - begun_cpu_s - live_cpu_ratio * (ended_s - begun_s)
    return {
        "nodes": count,
        "requests": requests,
        "frames": count * KEPT,
        "request_bytes": None if not requests else sum(len(one.body) for one in nodes[0].kept) or None,
        "resend_seconds": every_s,
        "live_cpu_ratio": live_cpu_ratio,
        "sent_after_s": ended_s - begun_s,
        "whole_after_s": None if whole_s is None else whole_s - begun_s,
        "refill_s": float(refill[1]) if refill else None,
        "cpu_ms_per_request": 1e3 * cost_s / requests,
        "refused": statuses.get(503, 0),
    }


def _note(statuses: dict[int, int], node: Node) -> None:
    status = node.again()
    statuses[status] = statuses.get(status, 0) + 1


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    raise SystemExit(main())
