"""What the agent costs its host, beside node_exporter and netdata, on one machine in one run.

    python -m benchmarks.agent_overhead --seconds 3600 --out benchmarks/results/agent-overhead.json
    python -m benchmarks.agent_overhead --seconds 1200 --beside ../eagle-eye-before

The agent runs at 1 Hz with eight simulated GPUs and every host source, and sends to a server that takes everything, and
names its journal: what it acknowledged is kept. ``--beside`` names a working tree whose agent runs in the same run.
node_exporter is scraped once a second; netdata collects once a second, its cloud and health checks off. CPU is the
processor time of the process and its children over the run. Memory is the resident set of the process and those of its
children that last: the largest seen, each minute's median, and the slope of those over the run's second half, at most
half an hour: what still grows then does not end with the start. Exit code 1: the agent passed a limit; its growth is
judged over an hour or more.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import psutil

from eagle_eye.agent.transport.uplink import PATH as FRAMES_PATH
from eagle_eye.schema.rows import decode_rows_request, is_row, row_head

WARM_UP_S = 20.0
LOOK_EVERY_S = 1.0
MINUTE_S = 60.0
SLOPE_S = 1800.0  # what begins to grow later than the first half hour of an hour is seen, what only warms up is not
CPU_RATIO_MAX = 0.005  # of one core
RSS_BYTES_MAX = 45_000_000
JUDGED_S = 3600.0  # shorter runs do not show growth
GROWTH_BYTES_PER_HOUR_MAX = 64 << 10  # 1.5 MiB a day; a page now and then is the measure's own noise
AGENT = "eagle-eye agent"
BESIDE = "eagle-eye agent of the other tree"
NETDATA = """
[global]
    run as user = root
[db]
    mode = ram
    update every = 1
[directories]
    cache = {folder}/cache
    lib = {folder}/lib
    log = {folder}/log
    lock = {folder}/lib/lock
[web]
    bind to = 127.0.0.1:19999
[health]
    enabled = no
[ml]
    enabled = no
"""


class Guest(NamedTuple):
    """One program that watches the host; ``poll`` is what its site does to it once a second."""

    name: str
    needs: str
    start: Callable[[Path, int], subprocess.Popen[bytes]]
    poll: Callable[[], None]


class Server:
    """Takes frames and acknowledges them, without keeping any."""

    def __init__(self) -> None:
        self.frames = 0
        self.bytes = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.path != FRAMES_PATH:
                    self.send_error(404)
                    return
                outer.bytes += len(body)
                if self.headers.get("Content-Encoding") == "deflate":
                    body = zlib.decompress(body)
                frames = decode_rows_request(body).rows
                outer.frames += len(frames)
                last = frames[-1]
                newest = row_head(last).sequence if is_row(last) else msgspec.msgpack.decode(last)["sequence"]
                said = {"accepted": len(frames), "duplicates": 0, "watermark": newest, "journal": "overhead"}
                answer = json.dumps(said).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, daemon=True).start()


def main() -> int:
    """Run the guests beside each other, print a table, write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--beside", type=Path, metavar="FOLDER", help="another working tree, whose agent runs, too")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # through the guests' ends: none outlives us
    server = Server()
    guests = [
        Guest(AGENT, "", _agent, lambda: None),
        Guest("node_exporter", "prometheus-node-exporter", _node_exporter, lambda: _get(19100, "/metrics")),
        Guest("netdata", "netdata", _netdata, lambda: None),
    ]
    if args.beside is not None:
        guests.append(Guest(BESIDE, "", partial(_agent_of, args.beside.resolve()), lambda: None))
    missing = [guest.needs for guest in guests if guest.needs and shutil.which(guest.needs) is None]
    if missing:
        print(f"not measured, for it is not installed: {', '.join(missing)} (Debian: apt-get install)", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        running = {}
        for guest in guests:
            if guest.needs not in missing:
                home = Path(folder) / guest.name.replace(" ", "-")
                home.mkdir()
                running[guest.name] = (stack.enter_context(_started(guest, home, server.port)), guest.poll)
        results = measured(running, args.seconds)
    results[AGENT] |= {"frames": server.frames, "frame_bytes": server.bytes / max(1, server.frames)}
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    _print(results)
    passed = passed_limits(results[AGENT])
    for limit in passed:
        print(limit, file=sys.stderr)
    return 1 if passed else 0


def measured(running: dict[str, tuple[psutil.Process, Callable[[], None]]], seconds: float) -> dict[str, Any]:
    """Return what each program cost over the same ``seconds``."""
    _pass_time(running, WARM_UP_S, lambda _name, _bytes: None)
    resident: dict[str, list[tuple[float, int]]] = {name: [] for name in running}
    begin = {name: _cpu_s(process) for name, (process, _) in running.items()}
    begin_s = time.monotonic()
    _pass_time(running, seconds, lambda name, size: resident[name].append((time.monotonic() - begin_s, size)))
    elapsed_s = time.monotonic() - begin_s
    results = {}
    for name, (process, _) in running.items():
        cpu_s = _cpu_s(process) - begin[name]
        minutes = by_minute(resident[name])
        results[name] = {
            "seconds": elapsed_s,
            "cpu_s": cpu_s,
            "cpu_ratio": cpu_s / elapsed_s,
            "rss_bytes_max": max(size for _, size in resident[name]),
            "rss_growth_bytes": minutes[-1] - minutes[0],
            "rss_growth_bytes_per_hour": growth_per_hour(minutes),
            "rss_bytes_by_minute": minutes,
        }
    return results


def by_minute(sizes: Sequence[tuple[float, int]]) -> list[int]:
    """Return the median of each minute's sizes, which come with the seconds since the begin; a rest counts as one."""
    minutes: dict[int, list[int]] = {}
    for since_s, size in sizes:
        minutes.setdefault(int(since_s // MINUTE_S), []).append(size)
    return [statistics.median_low(found) for _, found in sorted(minutes.items())]


def growth_per_hour(minutes: Sequence[int]) -> float | None:
    """Return the slope of the last minutes' sizes, half of them and SLOPE_S at most; None for fewer than two."""
    last = minutes[-min(int(SLOPE_S / MINUTE_S), len(minutes) // 2) :] if len(minutes) > 3 else []
    return statistics.linear_regression(range(len(last)), last).slope * 3600.0 / MINUTE_S if last else None


def passed_limits(found: dict[str, Any]) -> list[str]:
    """Return what the agent may not cost and did, a sentence each."""
    passed = []
    if found["cpu_ratio"] > CPU_RATIO_MAX:
        passed.append(f"the agent took {found['cpu_ratio']:.2%} of a core; at most {CPU_RATIO_MAX:.2%} are its due")
    if found["rss_bytes_max"] > RSS_BYTES_MAX:
        passed.append(f"the agent held {found['rss_bytes_max']} bytes; at most {RSS_BYTES_MAX} are its due")
    growth = found["rss_growth_bytes_per_hour"]
    if found["seconds"] >= JUDGED_S and growth > GROWTH_BYTES_PER_HOUR_MAX:
        passed.append(f"the agent grew by {growth:.0f} bytes an hour; at most {GROWTH_BYTES_PER_HOUR_MAX} are noise")
    return passed


def _pass_time(
    running: dict[str, tuple[psutil.Process, Callable[[], None]]], seconds: float, look: Callable[[str, int], None]
) -> None:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        for name, (process, poll) in running.items():
            poll()
            look(name, _resident_bytes(process))
        time.sleep(LOOK_EVERY_S)


def _resident_bytes(process: psutil.Process) -> int:
    """Return what the process and its lasting children hold; one just forked shares all that its parent has."""
    total = process.memory_info().rss
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if time.time() - child.create_time() > LOOK_EVERY_S:
                total += child.memory_info().rss
    return int(total)


def _family(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def _cpu_s(process: psutil.Process) -> float:
    """Return the processor seconds of the process, its living and its ended children."""
    total_s = 0.0
    for one in _family(process):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = one.cpu_times()
            total_s += times.user + times.system + times.children_user + times.children_system
    return total_s


@contextlib.contextmanager
def _started(guest: Guest, home: Path, server_port: int) -> Iterator[psutil.Process]:
    process = guest.start(home, server_port)
    try:
        time.sleep(3.0)
        if process.poll() is not None:
            raise SystemExit(f"{guest.name} ended with {process.returncode}; see {home}")
        yield psutil.Process(process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(15.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _agent(home: Path, server_port: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "eagle_eye.cli.main", "agent", "--simulate"]
    command += ["--server", f"http://127.0.0.1:{server_port}", "--spool", str(home / "spool")]
    command += ["--hook-socket", str(home / "hook.sock"), "--node", "overhead"]
    return _popen(command, home)


def _agent_of(tree: Path, home: Path, server_port: int) -> subprocess.Popen[bytes]:
    parts = os.pathsep.join(str(part.parent) for part in sorted(tree.glob("*/eagle_eye")))
    with mock.patch.dict(os.environ, {"PYTHONPATH": parts, "EAGLE_EYE_METRICS_LISTEN": "127.0.0.1:8472"}):
        return _agent(home, server_port)


def _node_exporter(home: Path, _: int) -> subprocess.Popen[bytes]:
    return _popen(["prometheus-node-exporter", "--web.listen-address=127.0.0.1:19100"], home)


def _netdata(home: Path, _: int) -> subprocess.Popen[bytes]:
    for name in ("cache", "lib", "log"):
        (home / name).mkdir()
    (home / "netdata.conf").write_text(NETDATA.format(folder=home))
    return _popen(["netdata", "-D", "-c", str(home / "netdata.conf"), "-P", str(home / "pid")], home)


def _popen(command: list[str], home: Path) -> subprocess.Popen[bytes]:
    with (home / "output").open("wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "HOME": str(home)})


def _get(port: int, path: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5.0)
    with contextlib.closing(connection):
        connection.request("GET", path)
        connection.getresponse().read()


def _print(results: dict[str, Any]) -> None:
    print("| program | CPU, share of one core | RSS, largest | RSS, growth | in its second half, an hour |")
    print("|---|---|---|---|---|")
    for name, found in results.items():
        growth, slope = found["rss_growth_bytes"] / 2**20, found["rss_growth_bytes_per_hour"]
        print(
            f"| {name} | {found['cpu_ratio']:.2%} | {found['rss_bytes_max'] / 2**20:.1f} MiB | {growth:+.2f} MiB |"
            f" {'' if slope is None else f'{slope / 2**20:+.3f} MiB'} |"
        )


if __name__ == "__main__":
    raise SystemExit(main())
