"""The whole suite: tune the baselines, judge every reporting case, write the figures.

Resumable: what was measured lies in a folder named after the plan and the code, one line for each trace and profile.
Ctrl-C writes the figures of what there is; the same command goes on from there, unless the code has changed: figures
of two versions are never mixed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import pickle
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.detection import generate, judge
from benchmarks.detection.findings import findings
from benchmarks.detection.matrix import TraceMatrix
from benchmarks.detection.mix import MIX
from benchmarks.detection.panel import Panel, assemble
from benchmarks.detection.plan import Case, Plan
from benchmarks.detection.promptness import promptness
from benchmarks.detection.report import markdown
from benchmarks.detection.score import Outcome, figures
from eagle_eye.simulator.scenario import PHYSICS

REPOSITORY = Path(__file__).resolve().parents[2]
console = Console(stderr=True, highlight=False)


def main() -> int:
    """Run the suite; 130 when it was interrupted, with the figures so far written."""
    args = _arguments()
    plan = Plan(
        faults=args.faults,
        node_days=args.node_days,
        profiles=args.profiles,
        situations=generate.situations(),
        tuning_faults=args.tuning_faults,
        tuning_quiet=args.tuning_quiet,
        gpus=args.gpus,
        quiet_nodes=args.quiet_nodes,
        quiet_minutes=args.quiet_minutes,
        quiet_interval_s=args.quiet_interval,
        physics=args.physics,
        first_seed=args.first_seed,
    )
    who = "alone" if args.alone else "all"
    folder = f"eagle-eye-detection-{who}-{plan.digest()}-{_code_digest()}"
    work = (args.work or Path(tempfile.gettempdir())) / folder
    work.mkdir(parents=True, exist_ok=True)
    console.print(f"seeds: {plan.seeds()}; measured so far is kept in {work}", markup=False)
    panels, found, interrupted = {}, _read(work / "outcomes.jsonl"), False
    try:
        panels = {} if args.alone else _panels(plan, work, args.jobs)
        found = _judge_all(plan, work, panels, found, args.jobs)
    except KeyboardInterrupt:
        interrupted = True
        found = _read(work / "outcomes.jsonl")
    results = _results(plan, panels, found)
    out = args.out or Path("benchmarks/results") / (
        "detection.json" if plan.physics == "own" else "detection-second.json"
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(markdown(results))
    return 130 if interrupted else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.detection", description=__doc__)
    parser.add_argument("--faults", type=int, default=1000, help="reporting traces with a fault (default 1000)")
    parser.add_argument("--node-days", type=float, default=1000.0, help="watched while nothing is wrong (default 1000)")
    parser.add_argument("--profiles", nargs="+", choices=generate.profiles(), default=generate.profiles())
    parser.add_argument("--jobs", type=int, default=2, help="worker processes (default 2)")
    parser.add_argument("--alone", action="store_true", help="without the baselines, which take longest")
    parser.add_argument("--out", type=Path, help="default benchmarks/results/detection.json, -second.json of the other")
    parser.add_argument(
        "--physics", choices=PHYSICS, default="own", help="the simulator's own, or drawn for each trace"
    )
    parser.add_argument(
        "--first-seed", type=int, help="of the reported traces: new ones, once these have been looked at"
    )
    parser.add_argument("--work", type=Path, help="where to keep what was measured (default: the temporary folder)")
    parser.add_argument("--tuning-faults", type=int, default=69, help="tuning traces with a fault (default 69)")
    parser.add_argument("--tuning-quiet", type=int, default=30, help="tuning traces without (default 30)")
    parser.add_argument("--gpus", type=int, default=8, help="GPUs a node (default 8)")
    parser.add_argument(
        "--quiet-nodes",
        type=int,
        default=64,
        help="nodes of a trace without a fault, of second physics at most (default 64)",
    )
    parser.add_argument("--quiet-minutes", type=float, default=30.0, help="their length (default 30)")
    parser.add_argument("--quiet-interval", type=float, default=5.0, help="their sampling interval, s (default 5)")
    return parser.parse_args()


def _code_digest() -> str:
    """Return a short name that changes with any of the code that is measured or measures."""
    digest = hashlib.sha256()
    for root in ("schema", "detectors", "server", "simulator", "benchmarks/detection"):
        for path in sorted((REPOSITORY / root).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def _pool(jobs: int, panels: dict[str, Path]) -> ProcessPoolExecutor:
    # Spawned, not forked: torch's threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(jobs, mp_context=context, initializer=judge.prepare, initargs=(panels,))


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=console, disable=not sys.stderr.isatty())


def _panels(plan: Plan, work: Path, jobs: int) -> dict[str, Path]:
    """Return where the fitted baselines of each profile lie, fitting those that are not there yet."""
    paths = {profile: work / f"panel-{profile}.pickle" for profile in plan.profiles}
    missing = [profile for profile, path in paths.items() if not path.exists()]
    if not missing:
        return paths
    traces: dict[str, list[TraceMatrix]] = {profile: [] for profile in missing}
    with _progress() as progress, _pool(jobs, {}) as pool:
        cases = plan.tuning()
        task = progress.add_task("tuning traces", total=len(cases))
        futures = [pool.submit(judge.matrices, case, missing) for case in cases]
        with _cancelled(futures):
            # In the order of the cases, whoever finishes first: what is learnt must not depend on it.
            for future in futures:
                for profile, matrix in future.result().items():
                    traces[profile].append(matrix)
                progress.advance(task)
        task = progress.add_task("fitting", total=len(missing))
        for profile in missing:
            partial = paths[profile].with_suffix(".partial")
            partial.write_bytes(pickle.dumps(assemble(traces[profile])))
            partial.replace(paths[profile])
            progress.advance(task)
    return paths


def _judge_all(plan: Plan, work: Path, panels: dict[str, Path], found: list[Outcome], jobs: int) -> list[Outcome]:
    """Judge the cases that were not judged yet, keeping each outcome at once, and return all."""
    known = {(outcome.key, outcome.profile) for outcome in found}
    todo: list[tuple[Case, list[str]]] = []
    for case in plan.reporting():
        profiles = [p for p in plan.profiles if (case.key, p) not in known and generate.is_visible(case, p)]
        if profiles:
            todo.append((case, profiles))
    with _progress() as progress, _pool(jobs, panels) as pool, (work / "outcomes.jsonl").open("ab") as file:
        task = progress.add_task("traces", total=len(todo))
        futures = {pool.submit(judge.outcomes, case, profiles): case for case, profiles in todo}
        with _cancelled(futures):
            for future in as_completed(futures):
                for outcome in future.result():
                    file.write(msgspec.json.encode(outcome) + b"\n")
                    found.append(outcome)
                file.flush()
                progress.advance(task)
    return found


@contextmanager
def _cancelled(futures: Iterable[Future[Any]]) -> Iterator[None]:
    """Cancel what has not begun if the block is interrupted: else the pool, as it is left, waits for all of it."""
    try:
        yield
    except KeyboardInterrupt:
        for future in futures:
            future.cancel()
        raise


def _read(path: Path) -> list[Outcome]:
    """Return the outcomes kept so far; a line cut off by a kill is dropped."""
    found = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            found.append(msgspec.json.decode(line, type=Outcome))
        except msgspec.DecodeError:
            console.print(f"{path}: a broken line is left out", markup=False)
    return found


def _results(plan: Plan, panels: dict[str, Path], found: Sequence[Outcome]) -> dict[str, Any]:
    planned = sum(generate.is_visible(case, p) for case in plan.reporting() for p in plan.profiles)
    tuned: dict[str, Any] = {}
    for profile, path in panels.items():
        panel: Panel = pickle.loads(path.read_bytes())
        tuned[profile] = panel.describe()
    return {
        "code": _code_digest(),
        "plan": msgspec.to_builtins(plan),
        "seeds": plan.seeds(),
        "mix": [share._asdict() for share in MIX],
        "complete": len(found) == planned,
        "judged": len(found),
        "planned": planned,
        "not_visible": {
            profile: sum(not generate.is_visible(case, profile) for case in plan.reporting())
            for profile in plan.profiles
        },
        "tuned": tuned,
        # In a fixed order, so that sums of floats do not depend on which worker was faster.
        "findings": findings(plan.reporting(), sorted(found, key=lambda o: (o.key, o.profile))),
        "promptness": {
            profile: promptness(plan.reporting(), [outcome for outcome in found if outcome.profile == profile])
            for profile in plan.profiles
        },
        "profiles": figures(sorted(found, key=lambda o: (list(plan.profiles).index(o.profile), o.key))),
    }
