"""Checkpoints in memory: what they cost a step, how soon they are back, beside others, and Gemini's simulation.

    python -m benchmarks.checkpoint --gib 1.0 --rounds 10 --step 0.5 --out benchmarks/results/checkpoint.json

Without arguments a look of small sizes. All of one run is measured side by side, in turns, on this machine; a file of
``--out`` keeps the parts that are not measured again. Peers are looked for in ``--peers-path`` (the README says how
they come there). Exit code 1: something was restored wrongly; 2: wrong usage.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.checkpoint import capture, peers, restore, simulation
from benchmarks.checkpoint.machine import described
from benchmarks.checkpoint.peers import PEERS_VARIABLE
from benchmarks.checkpoint.show import show
from benchmarks.result_file import write_result

PARTS = ("capture", "restore", "peers", "simulation")
GIB = 1 << 30


def main() -> int:
    """Measure, print and keep."""
    args = _arguments()
    result: dict[str, Any] = {}
    if args.out and args.out.exists():
        try:
            result = msgspec.json.decode(args.out.read_bytes(), type=dict[str, Any])
        except msgspec.MsgspecError as error:
            sys.stderr.write(f"benchmarks.checkpoint: --out: {args.out} is no result ({error}); name another file\n")
            return 2
    for part in args.parts:
        began_s = time.time()
        sys.stderr.write(f"{part} ...\n")
        figures = _PARTS[part](args, result)
        result[part] = {
            "figures": figures,
            "settings": {"seed": args.seed, "rounds": args.rounds, "step_s": args.step, "gib": args.gib},
            "machine": described(),
            "began_s": round(began_s),
            "took_s": round(time.time() - began_s, 1),
        }
        if args.out:
            write_result(args.out, result)
    if args.json:
        sys.stdout.buffer.write(msgspec.json.encode(result) + b"\n")
    else:
        show(result)
    return 0 if result.get("restore", {}).get("figures", {}).get("right", True) else 1


def _capture(args: argparse.Namespace, _: dict[str, Any]) -> dict[str, Any]:
    return capture.measure(
        capture.CapturePlan(
            width=args.width, blocks=args.blocks, step_s=args.step, rounds=args.rounds,
            block_steps=args.block_steps, seed=args.seed,
        )
    )  # fmt: skip


def _restore(args: argparse.Namespace, _: dict[str, Any]) -> dict[str, Any]:
    return restore.measure(
        restore.RestorePlan(
            rank_bytes=int(args.gib * GIB), tensors=args.tensors, rounds=args.rounds,
            share_bytes_per_s=args.share * 1e6, seed=args.seed,
        )
    )  # fmt: skip


def _peers(args: argparse.Namespace, _: dict[str, Any]) -> dict[str, Any]:
    plan = peers.PeersPlan(
        width=args.width, blocks=args.blocks, step_s=args.step, steps=args.block_steps, rounds=args.rounds,
        seed=args.seed,
    )  # fmt: skip
    return peers.measure(plan, args.peers_path)


def _simulation(args: argparse.Namespace, result: dict[str, Any]) -> dict[str, Any]:
    """Ours is in it where the same file or run has measured what it costs."""
    more = {}
    if "capture" in result and "restore" in result:
        costs = next(iter(result["capture"]["figures"].values()))
        more["Eagle Eye"] = simulation.ours(costs, result["restore"]["figures"])
    return simulation.measure(args.seed, args.days, more)


_PARTS: dict[str, Callable[[argparse.Namespace, dict[str, Any]], dict[str, Any]]] = {
    "capture": _capture,
    "restore": _restore,
    "peers": _peers,
    "simulation": _simulation,
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.checkpoint",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART",
                        help=f"of {', '.join(PARTS)} (all)")  # fmt: skip
    parser.add_argument("--gib", type=float, default=0.0625, help="of state a rank restores (0.0625)")
    parser.add_argument("--tensors", type=int, default=64, help="that they are (64)")
    parser.add_argument("--share", type=float, default=200.0, metavar="MB", help="a second, of shared storage (200)")
    parser.add_argument("--step", type=float, default=0.1, metavar="S", help="of the reference job (0.1)")
    parser.add_argument("--width", type=int, default=384, help="of the reference job's model (384)")
    parser.add_argument("--blocks", type=int, default=6, help="of the reference job's model (6)")
    parser.add_argument("--rounds", type=int, default=3, help="of each measurement, in turns (3)")
    parser.add_argument("--block-steps", type=int, default=10, help="in a row of one kind (10)")
    parser.add_argument("--days", type=float, default=1_000.0, help="that are simulated (1000)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--peers-path", type=Path, default=os.environ.get(PEERS_VARIABLE) or None, metavar="DIR",
                        help=f"where other libraries are installed ({PEERS_VARIABLE})")  # fmt: skip
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    args = parser.parse_args()
    for name, least in (("gib", 1e-4), ("rounds", 1), ("step", 1e-3), ("block_steps", 1), ("tensors", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: expected {least:g} or more")
    return args


if __name__ == "__main__":
    sys.exit(main())
