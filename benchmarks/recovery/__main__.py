"""The loop under fire: a real training job, faults of all kinds in a row, and the same under torchrun alone.

    python -m benchmarks.recovery --faults 100 --seed 1 --out benchmarks/results/recovery-memory.json

Some 22 s an item, and ``--without-minutes`` for the other arm; all of it within ``--minutes``, on a machine that does
nothing else. The file is whole after every item: the same command goes on where one was interrupted or time was up.
Exit code 1: somebody had to help, a healthy node was excluded, an attempt was begun for nothing, or a void action was
carried out; 2: wrong usage.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn

from benchmarks.recovery import unattended
from benchmarks.recovery.figures import Session, passed, starts
from benchmarks.recovery.fire import Fire
from benchmarks.recovery.hand import Hand
from benchmarks.recovery.keeping import Kept, keep, opened
from benchmarks.recovery.plan import PROCESS_KINDS, SHARES, Item, draw
from benchmarks.recovery.show import show
from benchmarks.recovery.site import (
    BUDGETS,
    JOB_ARGUMENTS,
    NODES,
    SOME_NODES,
    STANDBY_FLAGS,
    START_DEADLINE_S,
    FireStack,
    can_simulate_gpus,
)
from benchmarks.recovery.spent import spent
from benchmarks.recovery.yard import Yard
from eagle_eye.demo.stack import DemoSite, StageFailed, open_site

ITEM_S = 22.0
OTHER_ARM_S = 90.0  # its start and end


def main() -> int:
    """Measure, print and keep."""
    args = _arguments()
    until_s = time.monotonic() + 60 * args.minutes
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    no_gpus = can_simulate_gpus()
    items = draw(args.faults, args.seed, gpus=not no_gpus, only=args.shapes, kinds_only=args.kinds)
    settings: dict[str, Any] = {
        "repair_after_s": args.repair_after,
        "without_minutes": args.without_minutes,
        "standby": args.standby,
        "checkpoints": args.checkpoints,
        "restarts": args.restarts,
        "notice_s": args.notice,
        "every_s": args.every,
        "budgets": dict(line.split(" = ") for line in BUDGETS.split("\n") if line),
        "start_deadline_s": START_DEADLINE_S,
        "gpu_faults": no_gpus or "simulated GPUs",
    }
    if args.shapes:
        settings["shapes"] = args.shapes
    if args.kinds:
        settings["kinds"] = args.kinds
    try:
        kept = opened(args.out, items, args.seed, settings)
    except ValueError as error:
        sys.stderr.write(f"benchmarks.recovery: --out: {error}\n")
        return 2
    left = items[len(kept.outcomes) :]
    console = Console(stderr=True)
    minutes = (len(left) * ITEM_S + args.calm) / 60 + (0.0 if kept.without else args.without_minutes)
    console.print(
        f"{len(left)} of {len(items)} items are left: about {minutes:.0f} minutes, {args.minutes:g} at most"
        f" ({settings['gpu_faults']})"
    )
    try:
        with Progress(*_COLUMNS, console=console, disable=not sys.stderr.isatty()) as progress:
            _measure(args, kept, items, left, until_s, progress)
    except KeyboardInterrupt:
        console.print("interrupted; the same command goes on from here" if args.out else "interrupted")
        keep(args.out, kept)
        show(kept, as_json=args.json)
        return 130
    except StageFailed as failure:
        console.print(f"{failure}", markup=False)
        keep(args.out, kept)
        show(kept, as_json=args.json)
        return 1
    if unplayed := len(items) - len(kept.outcomes):
        console.print(
            f"{unplayed} items were not played in {args.minutes:g} minutes; the same command goes on with them"
        )
    show(kept, as_json=args.json)
    return 0 if passed(kept.figures) else 1


_COLUMNS = (*Progress.get_default_columns(), TimeElapsedColumn(), TextColumn("{task.fields[now]}"))


@contextlib.contextmanager
def _workplace(where: Path | None) -> Iterator[Path]:
    """A folder for the run, which stays where a stage failed: its logs say why."""
    folder = Path(tempfile.mkdtemp(prefix="recovery-", dir=where))
    try:
        yield folder
    except StageFailed:
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def _measure(
    args: argparse.Namespace, kept: Kept, items: list[Item], left: list[Item], until_s: float, progress: Progress
) -> None:
    other = args.without_minutes > 0 and not kept.without
    with _workplace(args.folder) as folder:
        if left:
            (fire := folder / "fire").mkdir()
            spare_s = 60 * args.without_minutes + OTHER_ARM_S if other else 0.0
            _under_fire(args, kept, left, fire, until_s - spare_s, progress)
        if other:
            (alone := folder / "alone").mkdir()
            task = progress.add_task("without Eagle Eye", total=None, now="")

            def heard(found: dict[str, Any]) -> None:
                kept.without = found
                keep(args.out, kept)

            with contextlib.closing(open_site(NODES)) as site:
                unattended.measure(
                    site,
                    alone,
                    items,
                    60 * args.without_minutes,
                    args.notice,
                    lambda text: progress.update(task, now=text),
                    heard,
                )
    keep(args.out, kept)


def _under_fire(
    args: argparse.Namespace, kept: Kept, left: list[Item], folder: Path, until_s: float, progress: Progress
) -> None:
    """Items were played for as long as there was time to begin one."""
    task = progress.add_task("items", total=len(left), now="starting")
    with (
        contextlib.closing(open_site(NODES)) as site,
        contextlib.closing(_stack(site, folder, args)) as stack,
    ):
        stack.start()
        hand = Hand(stack)
        yard = Yard(stack, args.repair_after)
        fire = Fire(stack, hand, yard, lambda text: progress.update(task, now=text), args.every)
        if not fire.trains():
            raise StageFailed(f"the job does not train; logs in {stack.folder / 'logs'}")
        calm_s, first = time.time(), stack.steps()[-1]["step"]
        fire.until(lambda: None, args.calm)
        session = Session(calm_s=time.time() - calm_s, calm_steps=stack.steps()[-1]["step"] - first)
        kept.sessions.append(session)
        before = len(kept.outcomes)
        began_s, first = time.time(), stack.steps()[-1]["step"]
        for item in left:
            if time.monotonic() > until_s:
                break
            outcome = fire.play(item)
            kept.outcomes.append(outcome)
            session.fire_s, session.fire_steps = time.time() - began_s, stack.steps()[-1]["step"] - first
            session.returned, session.forced, session.refused = yard.returned, yard.forced, dict(yard.refused)
            session.starts = starts(stack.reported())
            faults_s = [one.at_s for done in kept.outcomes[before:] for one in done.harms if one.kind != "flapping"]
            session.spent = spent(
                [step for step in stack.steps() if step["time_s"] > began_s], stack.reported(), faults_s
            )
            keep(args.out, kept)
            if args.json:
                sys.stdout.buffer.write(msgspec.json.encode(outcome) + b"\n")
                sys.stdout.flush()
            progress.advance(task)


def _stack(site: DemoSite, folder: Path, args: argparse.Namespace) -> FireStack:
    arguments = {**JOB_ARGUMENTS, "checkpoints": args.checkpoints, "restarts": args.restarts}
    flags = (*SOME_NODES, *(STANDBY_FLAGS if args.standby else ()))
    return FireStack(site, folder, gpus=not can_simulate_gpus(), arguments=arguments, flags=flags)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recovery", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=100, help="in all (100); 10 for a quick look")
    parser.add_argument("--seed", type=int, default=1, help="of the plan (1)")
    parser.add_argument("--shapes", nargs="+", choices=SHARES, default=[], metavar="SHAPE",
                        help="of these alone, in turns (all, by their shares)")  # fmt: skip
    parser.add_argument("--kinds", nargs="+", choices=PROCESS_KINDS, default=[], metavar="KIND",
                        help="of faults, of these alone (all)")  # fmt: skip
    parser.add_argument("--repair-after", type=float, default=20.0, metavar="S", help="nodes come back (20)")
    parser.add_argument("--calm", type=float, default=30.0, metavar="S", help="undisturbed, for the pace (30)")
    parser.add_argument("--without-minutes", type=float, default=12.0, metavar="M", help="of torchrun alone (12)")
    parser.add_argument("--minutes", type=float, default=45.0, metavar="M", help="for all of it (45)")
    parser.add_argument(
        "--standby", action="store_true", help="ranks come from processes that have imported everything"
    )
    parser.add_argument("--checkpoints", choices=("memory", "storage"), default="memory",
                        help="at each step in memory, or each tenth on storage (memory)")  # fmt: skip
    parser.add_argument("--restarts", choices=("in-process", "process"), default="in-process",
                        help="ranks have restart points, so that processes may stay, or none (in-process)")  # fmt: skip
    parser.add_argument("--notice", type=float, default=300.0, metavar="S",
                        help="when a person looks after a job without Eagle Eye (300)")  # fmt: skip
    parser.add_argument("--every", type=float, default=14.0, metavar="S",
                        help="from one item to the next, where recovery leaves that long (14)")  # fmt: skip
    parser.add_argument("--folder", type=Path, help="where it runs (a temporary folder)")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", action="store_true", help="one JSON object a line, the figures last")
    args = parser.parse_args()
    if args.faults < 1:
        parser.error(f"--faults {args.faults}: expected 1 or more")
    return args


if __name__ == "__main__":
    sys.exit(main())
