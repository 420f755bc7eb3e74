"""What an hour without the server costs an agent: room on disk, time, memory; and whether new frames wait for old ones.

    python -m benchmarks.agent_overhead.outage --out benchmarks/results/agent-outage.json

A real spool and a real uplink on this machine's disk, a real server in a process of its own. Frames are those of a host
with eight GPUs, ten ports and eight ranks on which every metric of the catalogue is observed. The hour passes as fast
as frames can be appended; the steady state and the catch-up run in real time. CPU is this process's, all threads.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from eagle_eye.agent.clock import SystemClock
from eagle_eye.agent.collector import Drops
from eagle_eye.agent.transport.servers import Servers
from eagle_eye.agent.transport.spool import BYTES_MAX, Spool
from eagle_eye.agent.transport.uplink import Destination, Uplink
from eagle_eye.schema.frame import Rank
from eagle_eye.schema.metrics import Scope, names
from eagle_eye.schema.rows import VERSION, RowTemplate, RowWriter, Tail, table

GPUS = 8
PORTS = 10
HOUR = 3600  # frames at 1 Hz
NODE = "gpu-node-0123.cluster.example"
WARM_UP = 5  # seconds in which connections are made
UP_S = 30.0
CPU_LIMIT_RATIO = 0.0005  # of one core, at 1 Hz
LIVE_LIMIT_S = 1.0


_writer = RowWriter()


def main() -> int:
    """Run, print, write the results; 1 when a limit was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60, help="how long the steady state runs")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="eagle-eye-outage-", dir=Path.cwd()) as name:
        folder = Path(name)
        results: dict[str, Any] = {"frame_bytes": len(realistic("s" * 36, HOUR))}
        with server(folder / "server") as url:
            results |= steady(url, folder / "steady", args.seconds)
        results |= outage(folder / "spool")
        results |= start(folder / "spool")
        with server(folder / "server") as url:
            results |= catch_up(url, folder / "spool")
    print(json.dumps(results, indent=1))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    kept = results["outage_frames_dropped"] == 0 and results["catch_up_frames_left"] == 0
    cheap = results["steady_cpu_ratio"] < CPU_LIMIT_RATIO
    return 0 if kept and cheap and results["live_ack_max_s"] < LIVE_LIMIT_S else 1


def realistic(stream: str, sequence: int) -> bytes:
    """Return a frame with every metric of the catalogue."""
    devices = {gpu: dict.fromkeys(names(Scope.DEVICE), 1.0 + gpu) for gpu in range(GPUS)}
    links = {f"mlx5_{port}/1": dict.fromkeys(names(Scope.LINK), 1.0) for port in range(PORTS)}
    tables = [
        table(Scope.DEVICE, devices),
        table(Scope.NODE, {-1: dict.fromkeys(names(Scope.NODE), 1.0)}),
        table(Scope.LINK, links),
    ]
    template = RowTemplate(
        version=VERSION,
        node=NODE,
        boot_id="0f2a4c1e-5a36-4b8f-9f5b-0a9f6f1a2b3c",
        stream=stream,
        interval_s=1.0,
        agent_version="0.1.0",
        job="llm-pretrain-70b",
        ranks=[Rank("llm-pretrain-70b", gpu, 1024, gpu, 0, 100_000 + gpu, "stage-3") for gpu in range(GPUS)],
        blocks=[block for block, _ in tables],
        collectors=dict.fromkeys(("host", "nvml", "fabric", "kernel_log", "training"), "ok"),
    )
    numbers = b"".join([part for _, part in tables])
    return _writer.write(template, sequence, time.time(), numbers, Tail())


def steady(url: str, folder: Path, seconds: int) -> dict[str, Any]:
    """At 1 Hz with a server that answers: what keeping and delivering a frame costs. Encoding it is not counted."""
    drops = Drops()
    spool = Spool(folder, NODE, drops)
    uplink = Uplink(Destination(Servers([url])), spool, drops, SystemClock())
    uplink.start()
    appended_s: list[float] = []
    encoded_s: list[float] = []
    cpu_s = 0.0
    for second in range(WARM_UP + seconds):
        if second == WARM_UP:
            cpu_s = time.process_time()
            appended_s.clear()
            encoded_s.clear()
        begin_s = time.perf_counter()
        spool.append(lambda stream, sequence: _timed(encoded_s, stream, sequence))
        uplink.notify()
        appended_s.append(time.perf_counter() - begin_s)
        time.sleep(1.0)
    cpu_s = time.process_time() - cpu_s - sum(encoded_s)
    written = sum(file.stat().st_size for file in folder.glob("*.frames"))
    uplink.stop(1.0)
    spool.close()
    return {
        "steady_seconds": seconds,
        "steady_cpu_ratio": cpu_s / seconds,
        "steady_cpu_us_per_frame": 1e6 * cpu_s / seconds,
        "steady_append_wall_us_p50": 1e6 * statistics.median(appended_s),
        "steady_append_wall_us_max": 1e6 * max(appended_s),
        "steady_delivered": uplink.delivered,
        "steady_bytes_on_disk": written,
    }


def outage(folder: Path) -> dict[str, Any]:
    """An hour of frames with nobody to take them."""
    drops = Drops()
    rss_before = _rss_bytes()
    spool = Spool(folder, NODE, drops)
    encoded_s: list[float] = []
    begin_cpu_s, begin_s = time.process_time(), time.perf_counter()
    for _ in range(HOUR):
        spool.append(lambda stream, sequence: _timed(encoded_s, stream, sequence))
    cpu_s, wall_s = time.process_time() - begin_cpu_s - sum(encoded_s), time.perf_counter() - begin_s
    waiting, rss = spool.waiting(), _rss_bytes()
    spool.close()
    used = sum(file.stat().st_size for file in folder.glob("*.frames"))
    return {
        "outage_frames": HOUR,
        "outage_frames_dropped": HOUR - waiting + sum(drops.snapshot().values()),
        "outage_bytes_on_disk": used,
        "outage_hours_that_fit": BYTES_MAX / used,
        "outage_append_cpu_us": 1e6 * cpu_s / HOUR,
        "outage_append_wall_us": 1e6 * (wall_s - sum(encoded_s)) / HOUR,
        "outage_rss_more_bytes": rss - rss_before,
        "fsync_ms_p50": 1e3 * statistics.median(_fsyncs(folder)),
    }


def start(folder: Path) -> dict[str, Any]:
    """What a start costs that finds the hour."""
    begin_cpu_s, begin_s = time.process_time(), time.perf_counter()
    spool = Spool(folder, NODE, Drops())
    wall_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
    spool.close()
    return {"start_wall_s": wall_s, "start_cpu_s": cpu_s}


def catch_up(url: str, folder: Path) -> dict[str, Any]:
    """The server is back: old frames go while a new one comes each second."""
    drops = Drops()
    acknowledged = threading.Event()
    spool = Spool(folder, NODE, drops)
    uplink = Uplink(
        Destination(Servers([url])), spool, drops, SystemClock(), answered=lambda _fields: acknowledged.set()
    )
    uplink.start()
    begin_cpu_s, begin_s = time.process_time(), time.monotonic()
    live_s = []
    while spool.has_backlog() and time.monotonic() - begin_s < 600.0:
        time.sleep(0.5)
        acknowledged.clear()
        appended_s = time.perf_counter()
        spool.append(realistic)
        uplink.notify()
        acknowledged.wait(10.0)
        live_s.append(time.perf_counter() - appended_s)
    took_s, cpu_s = time.monotonic() - begin_s, time.process_time() - begin_cpu_s
    uplink.stop(2.0)
    left = spool.waiting()
    spool.close()
    return {
        "catch_up_s": took_s,
        "catch_up_cpu_ratio": cpu_s / took_s,
        "catch_up_frames_left": left,
        "live_frames": len(live_s),
        "live_ack_p50_s": statistics.median(live_s),
        "live_ack_max_s": max(live_s),
    }


@contextlib.contextmanager
def server(folder: Path) -> Iterator[str]:
    """A server on a free port of loopback, in a process of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        listen = f"127.0.0.1:{free.getsockname()[1]}"
    command = [sys.executable, "-m", "eagle_eye.cli.main", "server", "--listen", listen, "--data", str(folder)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        _until(lambda: _answers(listen))
        yield f"http://{listen}"
    finally:
        process.terminate()
        process.wait(30)


def _answers(listen: str) -> bool:
    host, port = listen.split(":")
    try:
        socket.create_connection((host, int(port)), timeout=1.0).close()
    except OSError:
        return False
    return True


def _until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + UP_S
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"the server does not listen after {UP_S:g} s")
        time.sleep(0.1)


def _timed(durations_s: list[float], stream: str, sequence: int) -> bytes:
    begin_s = time.thread_time()
    raw = realistic(stream, sequence)
    durations_s.append(time.thread_time() - begin_s)
    return raw


def _fsyncs(folder: Path) -> list[float]:
    """Return how long syncing 8 KiB takes on this disk, in seconds."""
    taken_s = []
    with (folder / "probe").open("wb") as file:
        for _ in range(20):
            file.write(bytes(8192))
            file.flush()
            begin_s = time.perf_counter()
            os.fsync(file.fileno())
            taken_s.append(time.perf_counter() - begin_s)
    (folder / "probe").unlink()
    return taken_s


def _rss_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    sys.exit(main())
