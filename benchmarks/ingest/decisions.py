"""What a decision costs with records in SQLite: the transaction that writes a hang's incident, action and events.

    python -m benchmarks.ingest.decisions --decisions 60 --rounds 5 --beside ../eagle-eye-before --out FILE.json

Each round is a process of its own, of this working tree and of the other one in turn; each has a new file and one
subscription, and the tree's own detection loop sees one job after the other hang. Milliseconds, on disk (``fsync``).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[2]
HEALTHY_S, HANGS_S = 20, 14
FLEET = 10_000  # nodes, of which the budget is a share


def main() -> int:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ingest.decisions", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--decisions", type=int, default=60, help="in a round (60)")
    parser.add_argument("--rounds", type=int, default=5, help="of each tree (5)")
    parser.add_argument("--beside", type=Path, metavar="FOLDER", help="another working tree")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # a round, in this process
    args = parser.parse_args()
    if args.one:
        sys.stdout.write(json.dumps(_decided(args.decisions)) + "\n")
        return 0
    trees = {"this": HERE, **({} if args.beside is None else {"beside": args.beside.resolve()})}
    rounds: dict[str, list[dict[str, list[float]]]] = {name: [] for name in trees}
    for _ in range(args.rounds):
        for name, tree in trees.items():
            rounds[name].append(_round(tree, args.decisions))
    found: dict[str, Any] = {name: _figures(several) for name, several in rounds.items()}
    if args.beside is not None:
        found["ratio"] = {key: round(value / found["beside"][key], 2) for key, value in found["this"].items()}
    found["load_average"] = round(os.getloadavg()[1], 2)
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    if args.out is not None:
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


def _round(tree: Path, decisions: int) -> dict[str, list[float]]:
    parts = [str(part.parent) for part in sorted(tree.glob("*/eagle_eye"))]
    words = [sys.executable, str(Path(__file__).resolve()), "--one", "--decisions", str(decisions)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), *parts])}
    done = subprocess.run(words, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"benchmarks.ingest.decisions: {tree}: {done.stderr[-2000:]}")
    found: dict[str, list[float]] = json.loads(done.stdout)
    return found


def _figures(rounds: list[dict[str, list[float]]]) -> dict[str, float]:
    wall, cpu = ([one for found in rounds for one in found[key]] for key in ("wall_ms", "cpu_ms"))
    return {
        "wall_ms_p50": round(statistics.median(wall), 3),
        "wall_ms_p95": round(statistics.quantiles(wall, n=20)[-1], 3),
        "cpu_ms_p50": round(statistics.median(cpu), 3),
        "cpu_ms_mean": round(statistics.fmean(cpu), 3),
    }


def _decided(decisions: int) -> dict[str, list[float]]:
    """Return what each decision took, in the tree that Python's path leads to."""
    from eagle_eye.server import process
    from eagle_eye.server.engine.engine import Engine
    from eagle_eye.server.engine.settings import PolicySettings
    from eagle_eye.server.monitor.detection_loop import DetectionLoop
    from eagle_eye.server.store.store import ACTIONS, Change
    from tests.server.builders import subscription
    from tests.server.engine.frames import SETTINGS, START_S, Fleet

    class Clock:
        time_s = START_S

        def now_s(self) -> float:
            return self.time_s

        def monotonic_s(self) -> float:
            return self.time_s

    process.collect_seldom()  # as the server does: else the garbage of many modules is looked through meanwhile
    taken: dict[str, list[float]] = {"wall_ms": [], "cpu_ms": []}
    with tempfile.TemporaryDirectory() as folder:
        store, clock = _opened(Path(folder) / "records.db"), Clock()
        store.commit(Change(subscriptions=(subscription(),)))
        update = store.update

        def timed(work: Any) -> Any:
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            change = update(work)
            if change.actions:
                taken["wall_ms"].append(1e3 * (time.perf_counter() - wall_s))
                taken["cpu_ms"].append(1e3 * (time.process_time() - cpu_s))
            return change

        store.update = timed
        policy = PolicySettings(
            mode="act", exclusions_fleet_ratio=1.0, restarts_fleet=10 * decisions, breaker_actions=10 * decisions
        )
        for number in range(decisions):
            fleet = Fleet(4)
            fleet.job, fleet.nodes = f"job-{number}", [f"n{number}-{place}" for place in range(4)]
            loop = DetectionLoop(
                Engine(SETTINGS, watching_since_s=clock.time_s), store, clock, policy, "http://localhost"
            )
            loop.count_fleet(lambda: FLEET)
            for second in range(HEALTHY_S + HANGS_S):
                clock.time_s += 1.0
                fleet.now_s = clock.time_s
                fleet.stopped = second >= HEALTHY_S
                fleet.silent_s = {fleet.nodes[1]: 9.0} if fleet.stopped else {}
                fleet.step += not fleet.stopped
                for node in fleet.nodes:
                    loop.observe(fleet.frame(node), clock.time_s, 0.0)
                loop.tick(clock.time_s)
        asked = len(store.all(ACTIONS))
        store.close()
    if asked < decisions:
        raise SystemExit(f"{asked} decisions came of {decisions} hangs")
    return taken


def _opened(file: Path) -> Any:
    try:
        from eagle_eye.server.store.sql_store import open_file
    except ModuleNotFoundError:
        import importlib  # trees from before records had two engines

        return importlib.import_module("eagle_eye.server.store.sqlite_store").SqliteStore(file)
    return open_file(file)


if __name__ == "__main__":
    sys.exit(main())
