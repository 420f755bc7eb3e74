"""Fewer nodes by plan: what is left of the throughput, how soon a job trains on, and what a storm does to it.

    python -m benchmarks.replanning --draws 20 --out benchmarks/results/replanning.json
    python -m benchmarks.replanning --parts lost_node storm --out benchmarks/results/replanning.json
    python -m benchmarks.replanning --parts compare --faults 20 --out benchmarks/results/replanning.json

throughput is simulated, with layers measured here, and takes Eagle Eye's own pause from the lost_node in FILE. The
others are real: server, agents, launcher and a job of pipelines on four nodes of this machine, which does nothing else;
in compare torchrun and torchft come through the same storm. FILE is whole after every loss, job of the storm and arm,
keeps the parts that are not asked for, and the same command goes on with what it lacks. Exit code 1: a figure is
missed; 2: wrong usage.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.replanning import compare, lost_node, storm, throughput
from benchmarks.replanning.show import show
from benchmarks.result_file import write_result
from eagle_eye.demo.stack import StageFailed

MISSES: Mapping[str, Callable[[dict[str, Any]], list[str]]] = {
    "lost_node": lost_node.misses,
    "throughput": throughput.misses,
    "storm": storm.misses,
    "compare": compare.misses,
}
PARTS = (*MISSES,)
SAID_EACH_S = 30.0  # where nobody sees the progress


def main() -> int:
    """Measure, simulate, print and keep."""
    args = _arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        parts = _kept(args.out)
    except ValueError as error:
        sys.stderr.write(f"benchmarks.replanning: --out: {error}\n")
        return 2
    failures, code = list[str](), 0
    for part in [name for name in PARTS if name in args.parts]:
        try:
            with _workplace(args.folder) as folder, _saying(part) as say:
                _measure(part, args, parts, folder, say)
        except (StageFailed, subprocess.SubprocessError) as failure:
            failures.append(f"{part}: {failure}")
        except KeyboardInterrupt:
            failures.append(f"{part}: interrupted")
            code = 130
            break
    asked = {name: found for name, found in parts.items() if name in args.parts}
    missed = [*failures, *(miss for name, found in asked.items() for miss in MISSES[name](found))]
    if args.json:
        sys.stdout.buffer.write(msgspec.json.encode(asked) + b"\n")
    else:
        show(asked, missed, Console(highlight=False))
    return code or (1 if missed else 0)


def _measure(
    part: str, args: argparse.Namespace, parts: dict[str, Any], folder: Path, say: Callable[[str], None]
) -> None:
    """The part's figures are among the others, and on disk where there is a file."""
    load = [round(one, 2) for one in os.getloadavg()]
    machine = {"cores": os.cpu_count(), "kernel": platform.release(), "load_average_before": load}
    until_s = time.monotonic() + 60 * args.minutes

    def heard(found: dict[str, Any]) -> None:
        parts[part] = {**found, "machine": machine}
        _keep(args.out, parts)

    if part == "lost_node":
        heard(lost_node.measure(args.repetitions, args.seed, folder, until_s, say, heard))
    elif part == "throughput":
        repair_s = 60 * args.repair_minutes
        pauses = _pauses(parts.get("lost_node"))
        found = throughput.measure(args.nodes, args.micro_batches, args.draws, args.seed, repair_s, pauses, say)
        heard({**found, "seed": args.seed})
    elif part == "compare":
        settings = {**_storm(args), "calm_s": args.calm, "collective_s": args.collective_seconds}
        heard(compare.measure(settings, args.arms, parts.get(part, {}), folder, until_s, say, heard))
    else:
        settings = {**_storm(args), "each": args.each}
        heard(storm.measure(settings, parts.get(part, {}), folder, until_s, say, heard))


def _storm(args: argparse.Namespace) -> dict[str, Any]:
    return {"every_s": args.every, "repair_s": args.repair_after, "seed": args.seed, "faults": args.faults}


def _pauses(own: Mapping[str, Any] | None) -> dict[str, float | None]:
    """Return Eagle Eye's own, None where none was measured."""
    if own is None:
        return {"first_step_s": None, "grow_s": None, "steps_lost": None}
    return {
        "first_step_s": own["first_step_s"]["p50"], "grow_s": own["grow_s"]["p50"],
        "steps_lost": own["steps_lost"]["mean"],
    }  # fmt: skip


@contextlib.contextmanager
def _saying(part: str) -> Iterator[Callable[[str], None]]:
    """Give what takes a line on how far the part has come: shown as it is on a terminal, else now and then."""
    if sys.stderr.isatty():
        columns = (SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.fields[now]}"))
        with Progress(*columns, console=Console(stderr=True)) as progress:
            task = progress.add_task(part, total=None, now="")
            yield lambda text: progress.update(task, now=f"{part}: {text}")
        return
    said_s = -SAID_EACH_S

    def say(text: str) -> None:
        nonlocal said_s
        if time.monotonic() - said_s >= SAID_EACH_S:
            said_s = time.monotonic()
            sys.stderr.write(f"{part}: {text}\n")
            sys.stderr.flush()

    yield say


@contextlib.contextmanager
def _workplace(where: Path | None) -> Iterator[Path]:
    """A folder for a part, which stays where something failed: its logs say why."""
    folder = Path(tempfile.mkdtemp(prefix="replanning-", dir=where))
    try:
        yield folder
    except Exception:
        sys.stderr.write(f"benchmarks.replanning: what was logged is in {folder}\n")
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def _kept(file: Path | None) -> dict[str, Any]:
    """Return the parts in the file. Raises ValueError where it is no result of this benchmark."""
    if file is None or not file.exists():
        return {}
    try:
        kept = msgspec.json.decode(file.read_bytes(), type=dict[str, dict[str, Any]])
    except msgspec.MsgspecError as error:
        raise ValueError(f"{file} is no result of this benchmark ({error}); name another file") from None
    if not {*kept} <= {*PARTS}:
        raise ValueError(f"{file} is no result of this benchmark; name another file")
    return kept


def _keep(file: Path | None, parts: Mapping[str, Any]) -> None:
    if file is not None:
        write_result(file, parts)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.replanning",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=["throughput"], metavar="PART",
        help=f"of {', '.join(PARTS)} (throughput)")  # fmt: skip
    add("--seed", type=int, default=1, help="of all that is drawn (1)")
    add("--minutes", type=float, default=60.0, metavar="M", help="after which no loss or job is begun (60)")
    add("--repetitions", type=int, default=4, metavar="N", help="lost_node: losses (4)")
    add("--nodes", type=int, default=8, metavar="N", help="throughput: nodes that are simulated (8)")
    add("--micro-batches", type=int, default=64, metavar="N", help="throughput: of a step (64)")
    add("--draws", type=int, default=2, metavar="N", help="throughput: traces of each frequency (2)")
    add("--repair-minutes", type=float, default=30.0, metavar="M", help="throughput: a node is away so long (30)")
    add("--faults", type=int, default=100, metavar="N", help="storm, compare: in all (100)")
    add("--each", type=int, default=20, metavar="N", help="storm: of them on each of the jobs in a row (20)")
    add("--every", type=float, default=15.0, metavar="S", help="storm, compare: from one to the next, on average (15)")
    add("--repair-after", type=float, default=20.0, metavar="S", help="storm, compare: nodes come back (20)")
    add("--arms", nargs="+", choices=compare.ARMS, default=compare.ARMS, metavar="ARM",
        help=f"compare: of {', '.join(compare.ARMS)} (all)")  # fmt: skip
    add("--calm", type=float, default=30.0, metavar="S", help="compare: undisturbed before the storm (30)")
    add("--collective-seconds", type=float, default=10.0, metavar="S",
        help="compare: after which a collective of the others has failed (10)")  # fmt: skip
    add("--folder", type=Path, help="where it runs (temporary folders)")
    add("--out", type=Path, metavar="FILE")
    add("--json", action="store_true", help="one JSON object on stdout")
    args = parser.parse_args()
    for name in ("minutes", "repetitions", "micro_batches", "draws", "repair_minutes", "faults", "each", "every",
                 "repair_after", "calm", "collective_seconds"):  # fmt: skip
        if getattr(args, name) <= 0:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name):g}: expected more than 0")
    if not throughput.NODES_MIN <= args.nodes <= throughput.NODES_MAX:
        parser.error(f"--nodes {args.nodes}: expected {throughput.NODES_MIN} to {throughput.NODES_MAX}")
    if args.micro_batches < args.nodes:
        parser.error(f"--micro-batches {args.micro_batches}: expected {args.nodes} at least, one for each node")
    return args


if __name__ == "__main__":
    sys.exit(main())
