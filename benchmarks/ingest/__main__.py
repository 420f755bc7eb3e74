"""What taking a fleet's frames costs the server, alone and beside Prometheus and VictoriaMetrics.

    python -m benchmarks.ingest --curve 100,1000,3000,6000,12500 --seconds 60
    python -m benchmarks.ingest --curve 12500 --seconds 600 --out benchmarks/results/ingest.json
    python -m benchmarks.ingest --peak 12500
    python -m benchmarks.ingest --peers --samples 100000000 --out benchmarks/results/ingest.json
    python -m benchmarks.ingest --peers victoriametrics --per-node --samples 100000000

Server (and compactor), and each peer in its turn, run on core 0, the load generator on core 1; the machine should do
nothing else. Detection is on and the history durable: the server has its defaults. ``--out`` keeps what earlier runs
wrote there for other parts. Exit code 1: something acknowledged is not in the history.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.ingest import eagle_eye_run, peers
from benchmarks.ingest.eagle_eye_run import Plan
from benchmarks.ingest.processes import GENERATOR_CORE
from eagle_eye.simulator.load.fleet import METRICS, Load

PEER_NODES = 1_000
PEAK_STEP = 1.15  # from one rate to the next
PEAK_SECONDS = 90.0  # of which the fleet is new to the server for 30
P99_S_MAX, BUSY_MAX = 0.25, 0.95


def main() -> int:
    """Measure, print and keep the figures."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ingest", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--curve", metavar="N,N,...", help="nodes, one run each")
    parser.add_argument("--peak", type=int, metavar="N", help="raise the rate of so many nodes until it is too much")
    parser.add_argument("--peers", nargs="*", choices=[peer.name for peer in peers.PEERS], metavar="NAME",
                        help="beside Prometheus and VictoriaMetrics, or one of them")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run of the curve (60)")
    parser.add_argument("--samples", type=int, default=100_000_000, help="for the peers (100 million)")
    parser.add_argument("--peer-nodes", type=int, default=PEER_NODES)
    parser.add_argument("--hurry", action="store_true", help="peers get the samples as fast as they take them")
    parser.add_argument(
        "--per-node",
        action="store_true",
        help="peers get a request a node and interval, as the server does, not 10,000 samples in each",
    )
    parser.add_argument("--folder", type=Path, help="where data goes (a temporary folder)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not (args.curve or args.peak or args.peers is not None):
        parser.error("expected --curve, --peak or --peers")
    os.sched_setaffinity(0, {GENERATOR_CORE})  # what is started from here goes where it belongs
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="ingest-") as folder:
        found = _measured(Path(folder), args)
    found["machine"] = {"processor": _processor(), "cores": os.cpu_count(), "kernel": platform.release()}
    if args.out:
        kept = msgspec.json.decode(args.out.read_bytes()) if args.out.exists() else {}
        args.out.write_bytes(msgspec.json.format(msgspec.json.encode({**kept, **found}), indent=1) + b"\n")
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
    runs = [*found.get("curve", []), *found.get("peak", {}).get("runs", [])]
    if args.peers is not None:
        runs.append(found[_peers_name(args)]["eagle_eye"])
    return 0 if all(run["lost"] == "nothing" for run in runs) else 1


def _measured(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if args.curve:
        found["curve"] = []
        for nodes in map(int, args.curve.split(",")):
            run = eagle_eye_run.measure(folder / f"curve-{nodes}", Plan(nodes, args.seconds))
            _say(run)
            found["curve"].append(run)
    if args.peak:
        found["peak"] = _peak(folder, args.peak)
    if args.peers is not None:
        found[_peers_name(args)] = _peers(folder, args)
    return found


def _peers_name(args: argparse.Namespace) -> str:
    return "peers_per_node" if args.per_node else "peers"


def _peak(folder: Path, nodes: int) -> dict[str, Any]:
    """Return the runs at rising rates; ``samples_per_second`` is that of the last one within the limits.

    What the generator itself sends late counts against the server: acknowledgements are measured from when it was due.
    """
    runs: list[dict[str, Any]] = []
    best = 0.0
    while True:
        interval_s = PEAK_STEP ** -len(runs)
        run = eagle_eye_run.measure(
            folder / f"peak-{len(runs)}", Plan(nodes, PEAK_SECONDS, interval_s, warm_up_s=eagle_eye_run.WARM_UP_S)
        )
        runs.append(run)
        _say(run)
        fits = (
            (run["acknowledged_seconds"]["p99"] or 0.0) <= P99_S_MAX
            and run["core_busy_ratio"] <= BUSY_MAX
            and run["lost"] == "nothing"
        )
        if not fits:
            return {"samples_per_second": best, "runs": runs}
        best = run["samples_per_second"]


def _peers(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    each = args.peer_nodes * 8 * len(METRICS)
    load = Load(nodes=args.peer_nodes, duration_s=float(max(args.samples // each, 1)))
    found: dict[str, Any] = {"nodes": load.nodes, "samples": each * load.intervals}
    found["eagle_eye"] = eagle_eye_run.measure(folder / "eagle-eye", Plan(load.nodes, load.duration_s))
    _say(found["eagle_eye"])
    beside = [peer for peer in peers.PEERS if peer.name in args.peers or not args.peers]
    for peer in beside:
        found[peer.name] = peers.measure(
            peer, folder / peer.name, load, realtime=not args.hurry, per_node=args.per_node
        )
        sys.stderr.write(f"{peer.name}: {found[peer.name]}\n")
    ours = found["eagle_eye"]
    for peer in beside:
        theirs = found[peer.name]
        if "skipped" not in theirs:
            each_million = "cpu_seconds_per_million_samples"
            whole = theirs[f"{each_million}_with_flush"], ours[f"{each_million}_with_compaction"]
            theirs["cpu_times_ours"] = whole[0] / whole[1]
            theirs["disk_times_ours"] = theirs["disk_bytes_per_sample"] / ours["segment_bytes_per_sample"]
    return found


def _say(run: dict[str, Any]) -> None:
    took = run["acknowledged_seconds"]
    sys.stderr.write(
        f"{run['nodes']} nodes: {run['samples_per_second'] / 1e6:.3f} M samples/s, {run['core_busy_ratio']:.0%} busy,"
        f" p99 {took['p99'] or 0.0:.3f} s, {run['rss_bytes_max'] / 1e6:.0f} MB,"
        f" {run['segment_bytes_per_sample']:.2f} bytes a sample, lost: {run['lost']}\n"
    )


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


if __name__ == "__main__":
    sys.exit(main())
