"""What copies of checkpoints cost a job that shares a network link with them: at once, and between collectives.

    python -m benchmarks.checkpoint.traffic --seconds 180 --rate 1gbit --out benchmarks/results/traffic.json

Needs root and iproute2: the nodes are network namespaces, joined by a bridge over links that ``tc`` shapes (on loopback
the CPU is the limit, and no copy is in anybody's way). A real DDP job trains in blocks of steps that take turns:
without captures, with one each step that is copied at once, with one each step that is copied between collectives.
Exit code 1: a mode had no whole step, or nothing was learned.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.checkpoint.namespaces import address, inside, nodes, why_not
from benchmarks.checkpoint.traffic_job import MODES
from eagle_eye.checkpoint.store import ask_status
from eagle_eye.checkpoint.store_client import answers
from eagle_eye.schema.checkpoint_files import STORE_WORDS

MARGIN_S = 600.0  # beyond the seconds that were asked for: start, last block, end


def main(words: list[str] | None = None) -> int:
    """Run it, print the table, write the figures; return the exit code."""
    args = _parser().parse_args(words)
    reason = why_not()
    if reason:
        print(f"skipped: {reason}", file=sys.stderr)
        return 0
    found = measured(args)
    if args.json:
        print(json.dumps(found, indent=2))
    else:
        print(table(found))
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    captured = [found["modes"][mode] for mode in MODES[1:]]
    return 0 if all(mode["whole_steps"] for mode in captured) and found["modes"]["scheduled"]["idle_spans_s"] else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint.traffic")
    parser.add_argument("--seconds", type=float, default=180.0, help="of training (180)")
    parser.add_argument("--rate", default="1gbit", help="of each link, as tc writes it (1gbit)")
    parser.add_argument("--nodes", type=int, default=2, help="each with one rank (2)")
    parser.add_argument("--width", type=int, default=1600, help="of two layers: 8 bytes x width² of gradients (1600)")
    parser.add_argument("--micro-batches", type=int, default=4, help="in a step, each with its all-reduce (4)")
    parser.add_argument("--compute", type=float, default=0.15, metavar="S", help="of each micro-batch (0.15)")
    parser.add_argument("--block", type=int, default=10, help="steps that are counted in a row (10)")
    parser.add_argument("--copy-rate", default=None, metavar="SIZE", help="cap of the stores (none)")
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument("--out", type=Path, default=None, help="where the figures go")
    return parser


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """Run the job; return what it took. Raises RuntimeError where it does not come to its end."""
    with ExitStack() as stack:
        names = stack.enter_context(nodes(args.nodes, args.rate))
        memory = Path(tempfile.mkdtemp(prefix="eagle-eye-traffic-", dir="/dev/shm"))
        stack.callback(shutil.rmtree, memory, ignore_errors=True)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="eagle-eye-traffic-")))
        for number, name in enumerate(names):
            for mode in MODES[1:]:
                stack.callback(_end, _store(args, name, number, memory / mode / f"node{number}", mode, folder))
        for number in range(args.nodes):
            for mode in MODES[1:]:  # a rank that finds none starts one of its own, which is not told how to copy
                _serves(memory / mode / f"node{number}", folder)
        ranks = [_rank(args, name, number, memory, folder) for number, name in enumerate(names)]
        for rank in ranks:
            stack.callback(_end, rank)
        _until(folder / "figures.json", ranks, args.seconds + MARGIN_S, folder)
        reported = {
            mode: [_asked(memory / mode / f"node{number}") for number in range(args.nodes)] for mode in MODES[1:]
        }
        (folder / "asked").touch()
        for rank in ranks:
            rank.wait(timeout=MARGIN_S)
        figures = json.loads((folder / "figures.json").read_text(encoding="utf-8"))
    return _report(args, figures, reported)


def _store(
    args: argparse.Namespace, name: str, number: int, memory: Path, mode: str, folder: Path
) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "eagle_eye.cli.main",
        *STORE_WORDS,
        "--folder",
        str(memory),
        "--node",
        f"node{number}",
    ]
    command += ["--listen", f"{address(number)}:0"]
    command += ["--copy-at-once"] if mode == "at_once" else []
    command += ["--copy-rate", args.copy_rate] if args.copy_rate else []
    return _started(inside(name, command), folder / f"store-{mode}-{number}.log", {})


def _serves(store: Path, folder: Path) -> None:
    until_s = time.monotonic() + MARGIN_S
    while not answers(store):
        if time.monotonic() > until_s:
            raise RuntimeError(f"no store answers in {store} within {MARGIN_S:g} s:\n{_logs(folder)}")
        time.sleep(0.1)


def _rank(args: argparse.Namespace, name: str, number: int, memory: Path, folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.checkpoint.traffic_job", str(memory), str(folder / "figures.json")]
    command += ["--seconds", f"{args.seconds}", "--width", f"{args.width}", "--compute", f"{args.compute}"]
    command += ["--micro-batches", f"{args.micro_batches}", "--block", f"{args.block}"]
    meeting = {"MASTER_ADDR": address(0), "MASTER_PORT": "29500", "WORLD_SIZE": f"{args.nodes}", "RANK": f"{number}"}
    meeting |= {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    return _started(inside(name, command), folder / f"rank-{number}.log", meeting)


def _started(command: list[str], log: Path, variables: dict[str, str]) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(command, env={**os.environ, **variables}, stdout=file, stderr=file)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _until(path: Path, ranks: list[subprocess.Popen[bytes]], seconds: float, folder: Path) -> None:
    until_s = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > until_s or any(rank.poll() is not None for rank in ranks):
            raise RuntimeError(f"the job has not come to its end within {seconds:g} s:\n{_logs(folder)}")
        time.sleep(0.2)


def _logs(folder: Path) -> str:
    return "\n".join(f"{log.name}: {log.read_text(errors='replace')[-2000:]}" for log in sorted(folder.glob("*.log")))


def _asked(folder: Path) -> dict[str, Any]:
    (job,) = ask_status(folder)
    return job


def _report(args: argparse.Namespace, figures: dict[str, Any], reported: dict[str, list[Any]]) -> dict[str, Any]:
    usual = statistics.median(figures["none"]["step_s"])
    modes = {}
    for mode in MODES:
        times = figures[mode]["step_s"]
        quartiles = statistics.quantiles(times, n=4)
        modes[mode] = {
            "steps": len(times),
            "step_s_p25": round(quartiles[0], 4),
            "step_s_p50": round(quartiles[1], 4),
            "step_s_p75": round(quartiles[2], 4),
            "ratio": round(statistics.median(times) / usual, 4),
            "captured": figures[mode]["counts"].get("captured", 0),
            "skipped": sum(figures[mode]["counts"].get(which, 0) for which in ("skipped", "not_due")),
            "whole_steps": figures[mode]["whole"],
        }
        if mode in reported:
            stores = reported[mode]
            links = [link for store in stores for link in store["links"]]
            modes[mode]["shard_bytes"] = max(copy["bytes"] for store in stores for copy in store["copies"])
            counts: Counter[str] = sum((Counter(store["counts"]) for store in stores), Counter())
            modes[mode]["store_counts"] = dict(sorted(counts.items()))
            modes[mode]["troubles"] = [text for store in stores for text in store["troubles"]]
            modes[mode]["idle_spans_s"] = links[0]["idle_spans_s"] if links else []
            modes[mode]["links"] = links
    settings = {"rate": args.rate, "nodes": args.nodes, "width": args.width, "micro_batches": args.micro_batches}
    settings |= {"compute_s": args.compute, "block": args.block, "copy_rate": args.copy_rate}
    return {
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": f"{os.cpu_count()} cores, Linux {platform.release()}",
        "settings": settings,
        "modes": modes,
    }


def table(found: dict[str, Any]) -> str:
    """Return the figures for people."""
    lines = [
        "| | steps | step p50 | p25 to p75 | ratio | captured | skipped | whole |",
        "|---|---|---|---|---|---|---|---|",
    ]
    names = {"none": "no captures", "at_once": "copied at once", "scheduled": "copied between collectives"}
    for mode, name in names.items():
        one = found["modes"][mode]
        spread = f"{one['step_s_p25']:.3f} to {one['step_s_p75']:.3f}"
        lines.append(
            f"| {name} | {one['steps']} | {one['step_s_p50']:.3f} s | {spread} | {one['ratio']:.3f}"
            f" | {one['captured']:.0f} | {one['skipped']:.0f} | {one['whole_steps']} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
