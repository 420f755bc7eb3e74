"""What one client that asks for nothing sensible does to the agents: a flood of each kind against a server.

    python -m benchmarks.flood --seconds 20 --out benchmarks/results/flood.json
    python -m benchmarks.flood --kind garbage --kind idle --seconds 5
    python -m benchmarks.flood --without-limits

The server runs on core 0, the bad client (two processes, from 127.0.0.2) and the agents (from 127.0.0.1) on core 1. The
agents' acknowledgements are timed before, during and after. ``--without-limits`` shows what the limits are for. Exit
code 1: a frame of an agent was refused or lost, or the server was not as before at the end.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.flood import agents, kinds
from benchmarks.ingest.processes import GENERATOR_CORE, free_port, look, program

CLIENTS = 2  # processes of the bad client
CALM_S = 5.0
NO_LIMITS = {"bad_requests_per_s": 1e9, "bad_burst": 10**9, "address_connections": 10**9, "connections": 10**9}
COUNTED = ("connections_refused_total", "connections_closed_total", "ingest_rejected_total", "http_refused_total")


def main() -> int:
    """Measure, print and keep the figures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.flood", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", action="append", choices=sorted(kinds.BY_NAME), help="repeatable; all of them")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each flood (20)")
    parser.add_argument("--without-limits", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.sched_setaffinity(0, {GENERATOR_CORE})
    runs = []
    for name in args.kind or kinds.BY_NAME:
        with tempfile.TemporaryDirectory(prefix="flood-") as folder:
            run = measure(Path(folder), name, args.seconds, limited=not args.without_limits)
        _say(run)
        runs.append(run)
    machine = {"cores": os.cpu_count(), "kernel": platform.release(), "load_average": os.getloadavg()}
    found = {"limited": not args.without_limits, "seconds": args.seconds, "runs": runs, "machine": machine}
    text = msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n"
    if args.out:
        args.out.write_bytes(text)
    sys.stdout.buffer.write(text)
    return 0 if all(run["agents_lost"] == 0 and run["recovered"] for run in runs) else 1


def measure(folder: Path, kind: str, seconds: float, *, limited: bool) -> dict[str, Any]:
    """Return what one kind of flood did to a fresh server in the folder."""
    admin = _token(folder, "--scope", "admin")
    tokens = [_token(folder, "--scope", "agent", "--node", name) for name in agents.NODES]
    file = folder / "server.toml"
    limits = {} if limited else NO_LIMITS
    file.write_text("[limits]\n" + "".join(f"{key} = {value}\n" for key, value in limits.items()))
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    words = ["--listen", f"127.0.0.1:{port}", "--data", str(folder / "data"), "--config", str(file)]
    command = [sys.executable, "-m", "eagle_eye.cli.main", "server", *words]
    with program(command, folder / "log", f"{url}/healthz") as pid:
        good = agents.Agents(port, tokens)
        time.sleep(CALM_S)
        counted = multiprocessing.Value("q", 0)
        stopping = multiprocessing.Event()
        bad = [
            multiprocessing.Process(target=kinds.flood, args=(kind, port, counted, stopping)) for _ in range(CLIENTS)
        ]
        began_s, before = time.time(), look(pid)
        for one in bad:
            one.start()
        time.sleep(seconds)
        sent, after, ended_s = counted.value, look(pid), time.time()
        files = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
        stopping.set()
        for one in bad:
            one.join(10.0)
            one.kill()
        time.sleep(CALM_S)
        waits = good.stop()
        metrics = _metrics(url, admin)
    lasted_s = ended_s - began_s
    return {
        "kind": kind,
        "sent_per_second": sent / lasted_s,
        "core_busy_ratio": (after.cpu_s - before.cpu_s) / (after.time_s - before.time_s),
        "rss_bytes": after.rss_bytes,
        "open_files": files,
        "acknowledged_seconds": {
            "before": waits.between(0.0, began_s),
            "during": waits.between(began_s, ended_s),
            "after": waits.between(ended_s + 1.0, time.time()),
        },
        "agents_sent": len(waits.found),
        "agents_lost": waits.lost,
        "recovered": metrics.get('eagle_eye_connections{client="unauthenticated"}', 0.0) <= agents.UNAUTHENTICATED_MAX,
        "log_bytes": waits.log_bytes(folder / "log"),
        "counted": {name: value for name, value in metrics.items() if name.startswith(_COUNTED) and value},
    }


_COUNTED = tuple(f"eagle_eye_{name}" for name in COUNTED)


def _token(folder: Path, *words: str) -> str:
    command = [sys.executable, "-m", "eagle_eye.cli.main", "tokens", "create", *words, "--data", str(folder / "data")]
    done = subprocess.run([*command, "--json"], check=True, capture_output=True)
    text: str = msgspec.json.decode(done.stdout)["token"]
    return text


def _metrics(url: str, token: str) -> dict[str, float]:
    request = urllib.request.Request(f"{url}/metrics", headers={"authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=30.0) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def _say(run: dict[str, Any]) -> None:
    took = run["acknowledged_seconds"]
    phases = ", ".join(f"{phase} p50 {one['p50']:.3f} p99 {one['p99']:.3f}" for phase, one in took.items())
    sys.stderr.write(
        f"{run['kind']}: {run['sent_per_second']:.0f}/s, {run['core_busy_ratio']:.0%} busy, {run['open_files']} files,"
        f" {run['rss_bytes'] / 1e6:.0f} MB; agents: {phases} s, lost {run['agents_lost']}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
