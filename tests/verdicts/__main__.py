"""Verdicts on some 400 traces, kept as a digest each, to show that code which only moves judges as before.

``python -m tests.verdicts --data FOLDER`` judges them and names those whose verdicts differ from the record;
``--record`` writes the record, ``--live`` has servers judge some of them that come over the network. The traces are
the simulator's in both physics and all profiles, others' physics, and
cuts out of recordings of real GPUs, which are not kept here.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console
from rich.progress import track

from eagle_eye.simulator.names import FAULTS, SITUATIONS
from eagle_eye.simulator.scenario import Scenario
from eagle_eye.simulator.simulate import simulate
from eagle_eye.simulator.sites import PROFILES
from eagle_eye.simulator.writer import write
from eagle_eye.traces import backtest
from tests.verdicts.live import WAYS, lived

RECORD = Path(__file__).with_name("record.txt")
FIRST_SEED = 190_000_000
OTHERS_FIRST_SEED, OTHERS = 9_000, 48  # of each of others' physics
CUT_S, CUTS = 540.0, 6  # of each recording of GPUs that save
NODES_OF_EIGHT = (1, 2, 4, 8)
LIVE, LIVE_STRIDE = 40, 61  # traces through a server, and how far they are apart among all
LIVE_REPLAYED = 8  # of so many one is replayed on the real clock
DIGITS = 6  # of a float: processors differ in the last ones

Made = Callable[[Path], None]  # writes a trace into a folder that does not exist


def simulated(fault: str, profile: str, seed: int, physics: str, folder: Path) -> None:
    """Write a trace of our simulator."""
    scenario = Scenario(fault=fault, nodes=6, gpus=4, minutes=7.0, seed=seed, physics=physics)
    write(simulate(scenario), folder, profile)


def others(data: Path, seed: int, physics: int, folder: Path) -> None:
    """Write a trace of others' physics."""
    program = [sys.executable, str(data / "other_physics/generate.py"), str(folder.parent)]
    subprocess.run([*program, "--seeds", str(seed), "--physics", str(physics)], check=True, stdout=subprocess.DEVNULL)
    next(folder.parent.glob("[0-9]*[0-9]")).rename(folder)


def cut(file: Path, number: int, folder: Path) -> None:
    """Write a part of a recording of eight GPUs as a trace of one to eight nodes."""
    nodes = NODES_OF_EIGHT[number % len(NODES_OF_EIGHT)]
    samples = pd.read_parquet(file)
    begin_s = number * (float(samples["time_s"].max()) - CUT_S) / (CUTS - 1)
    samples = samples[samples["time_s"].between(begin_s, begin_s + CUT_S)]
    seconds = samples["time_s"].floordiv(2.0).mul(2.0).rename("time")
    rows = samples.groupby([seconds, "gpu"]).mean().reset_index()
    folder.mkdir()
    start_s = 1.76e9
    pd.DataFrame(
        {
            "time": start_s + rows["time"],
            "node": "n" + (rows["gpu"] * nodes // 8).astype(str),
            "device": rows["gpu"] % (8 // nodes),
            "gpu_power_watts": rows["power_w"],
            "gpu_utilization_ratio": rows["utilization_percent"] / 100.0,
            "gpu_memory_used_bytes": rows["memory_used_mib"] * 2.0**20,
        }
    ).to_parquet(folder / "samples.parquet")
    header: dict[str, Any] = {"format": "eagle-eye-trace/1", "job": "real", "interval_s": 2.0}
    header |= {"start": start_s + begin_s, "end": start_s + begin_s + CUT_S}
    header["nodes"] = [{"node": f"n{node}", "gpus": 8 // nodes} for node in range(nodes)]
    (folder / "trace.json").write_text(json.dumps(header))


def copied(source: Path, folder: Path) -> None:
    """Take a trace as it is."""
    folder.symlink_to(source)


def cases(data: Path) -> Iterator[tuple[str, Made]]:
    """Yield each trace's name and how it is made."""
    names = [one.name for one in PROFILES]
    for number, fault in enumerate((*FAULTS, *SITUATIONS)):
        for profile in names:
            yield f"own/{fault}/{profile}", partial(simulated, fault, profile, FIRST_SEED + number, "own")
        profile = names[number % len(names)]
        yield f"second/{fault}/{profile}", partial(simulated, fault, profile, FIRST_SEED + number, "second")
    for physics in (1, 2):
        for seed in range(OTHERS_FIRST_SEED, OTHERS_FIRST_SEED + OTHERS):
            yield f"others/{physics}/{seed}", partial(others, data, seed, physics)
    for file in sorted((data / "real/h100_ddp").glob("*.parquet")):
        for number in range(CUTS):
            yield f"real/{file.stem}/{number}", partial(cut, file, number)
    for source in sorted(one.parent for one in (data / "traces").glob("*/trace.json")):
        yield f"traces/{source.name}", partial(copied, source)


def live_cases(data: Path) -> Iterator[tuple[str, Callable[[], list[str]]]]:
    """Yield a name for each of 40 traces in each way that it can come to a server, and what says what it answers."""
    named = list(cases(data))
    for number in range(LIVE):
        name, make = named[number * LIVE_STRIDE % len(named)]
        for way in WAYS:
            if (way != "remote_write" or "/remote_write" in name) and (way != "replay" or number % LIVE_REPLAYED == 0):
                yield f"live/{way}/{name}", partial(lived, make, way)


def judged(make: Made) -> list[str]:
    """Return what the engine says of the trace, a line for each verdict, without its id and its folder."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace"
        make(trace)
        said = backtest(trace)
    report = said.attrs["report"]
    lines = [json.dumps(plain(row), sort_keys=True) for row in said.drop(columns=["trace", "id"]).to_dict("records")]
    return [*lines, json.dumps({"blind_ratio": report["blind_ratio"]}, sort_keys=True)]


def plain(value: Any) -> Any:
    """Return the value as JSON has it, floats with few digits."""
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if isinstance(value, pd.Timestamp):
        return f"{value.timestamp():.3f}"
    return f"{value:.{DIGITS}g}" if isinstance(value, float) else value


def digest(lines: list[str]) -> str:
    """Return a short digest of the verdicts."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def main() -> int:
    """Judge the traces; 1 where the verdicts of any differ from the record."""
    parser = argparse.ArgumentParser(prog="python -m tests.verdicts", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the folder with others' traces and recordings")
    parser.add_argument("--live", action="store_true", help="some of them through servers that listen")
    parser.add_argument("--record", action="store_true", help="write the record")
    parser.add_argument("--only", default="", metavar="BEGINNING", help="of the traces' names")
    parser.add_argument("--lines", type=Path, help="keep each trace's verdicts in this folder, for diff")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    known = dict(line.split() for line in RECORD.read_text().splitlines()) if RECORD.exists() else {}
    every = live_cases(args.data) if args.live else ((name, partial(judged, make)) for name, make in cases(args.data))
    chosen = {name: work for name, work in every if name.startswith(args.only)}
    found: dict[str, str] = {}
    with ProcessPoolExecutor(args.workers) as pool:
        waiting = {pool.submit(work): name for name, work in chosen.items()}
        console = Console(stderr=True)
        for done in track(as_completed(waiting), "judging", len(waiting), console=console):
            name = waiting[done]
            if (error := done.exception()) is not None:  # the others are still worth knowing
                found[name] = "-"
                console.print(f"{name}: {error!r}")
                continue
            found[name] = digest(done.result())
            if args.lines is not None:
                file = args.lines / f"{name.replace('/', '-')}.jsonl"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text("\n".join(done.result()) + "\n")
    if args.record:
        RECORD.write_text("".join(f"{name} {one}\n" for name, one in sorted({**known, **found}.items())))
        return 0
    compared = found.keys() & known.keys()
    differing = sorted(name for name in compared if known[name] != found[name])
    sys.stdout.write("".join(f"{name}\n" for name in differing))
    sys.stdout.write(f"{len(differing)} of {len(compared)} differ; {len(found) - len(compared)} have no record\n")
    return min(len(differing), 1)


if __name__ == "__main__":
    sys.exit(main())
