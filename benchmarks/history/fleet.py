"""What compacting a fleet's frames costs, minutes included: CPU a million samples, and bytes a sample.

``python -m benchmarks.history.fleet --nodes 1024 --minutes 10 --runs 3 --out FILE``. The frames are those of
``eagle-eye loadtest``: rows of eight GPUs and 30 metrics at 1 Hz, which vary like real ones. They come in stretches of
five minutes, which the compactor turns into segments with their minutes: a process, as the server starts it, whose CPU
time is that of the system's accounts. What it costs it to start, and to do almost nothing, is measured too and taken
off: a fleet of 12,500 nodes starts it once for 50 groups of 256 nodes. ``--beside FOLDER`` has that of another checkout
take turns with ours. Medians of all runs, with the least and the greatest.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from eagle_eye.schema.rows import encode_template, template_id, template_of
from eagle_eye.server.history.journal import Journal
from eagle_eye.server.history.processes import environment
from eagle_eye.server.history.segment_tables import MINUTES_FOLDER, RAW_FOLDER, Sealed
from eagle_eye.server.history.settings import HistorySettings
from eagle_eye.server.model.batch import Batch, StreamRef
from eagle_eye.server.model.clock import SystemClock
from eagle_eye.simulator.load.fleet import METRICS, FleetRows, FleetValues, Load, SimulatedFleet

STRETCH_S = 300
COMMITS_PER_S = 10
BEGIN_S = 1_760_000_400 // 3_600 * 3_600.0
FLEET_SAMPLES_PER_S = 3e6
FOREVER_S = 4e9
FIRST_FOLDER = "first"  # of what little the program does when its start is measured
PARTS = ("server", "schema")


class _Program(NamedTuple):
    """The processes of one checkout, and the folder in which they write."""

    name: str
    path: str
    folder: Path

    def run(self, module: str, *arguments: str) -> tuple[float, list[bytes]]:
        """Run one to its end; return its CPU seconds, and its lines."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-m", f"eagle_eye.server.history.{module}", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env={**(environment() if self.path == "" else os.environ), "PYTHONPATH": self.path},
            check=True,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return cpu_s, done.stdout.splitlines()


def main() -> None:
    """Measure, print and keep the figures."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.history.fleet", description=__doc__)
    parser.add_argument("--nodes", type=int, default=256)
    parser.add_argument("--minutes", type=int, default=15)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--beside", type=Path, help="another checkout")
    parser.add_argument("--folder", type=Path, help="where data goes (a temporary folder)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        figures = _measure(Path(folder), args.nodes, args.minutes, args.runs, args.beside)
    reported = {"nodes": args.nodes, "minutes": args.minutes, "runs": args.runs, **figures}
    text = msgspec.json.format(msgspec.json.encode(reported), indent=1)
    sys.stdout.buffer.write(text + b"\n")
    if args.out:
        args.out.write_bytes(text + b"\n")


def _measure(folder: Path, nodes: int, minutes: int, runs: int, beside: Path | None) -> dict[str, Any]:
    programs = [_Program("ours", "", folder / "ours")]
    if beside is not None:
        path = os.pathsep.join(str(beside.resolve() / part) for part in PARTS)
        programs.append(_Program("beside", path, folder / "beside"))
    spent: dict[str, dict[str, list[float]]] = {one.name: defaultdict(list) for one in programs}
    stretches = _journal(folder, nodes, minutes)
    journal = folder / "history.db"
    connection = sqlite3.connect(journal, isolation_level=None)
    segments: dict[str, list[str]] = defaultdict(list)
    before = 0
    for number, through in enumerate(stretches):
        for _ in range(runs):
            for one in programs:
                for name in segments.pop(f"{one.name} {number}", []):
                    for folder_ in (RAW_FOLDER, MINUTES_FOLDER):
                        shutil.rmtree(one.folder / folder_ / name, ignore_errors=True)
                names = _compact(one, journal, number, before + 1, through, spent[one.name])
                segments[f"{one.name} {number}"] = names
        before = through
        connection.execute(
            "INSERT OR REPLACE INTO shards (shard, sealed_id) SELECT DISTINCT shard, ? FROM nodes", (through,)
        )
    connection.close()
    found: dict[str, Any] = {"samples": nodes * 8 * len(METRICS) * minutes * 60}
    for one in programs:
        found[one.name] = _reported(one, spent[one.name], found["samples"])
    found["load_average"] = os.getloadavg()[0]
    return found


def _compact(
    program: _Program, journal: Path, number: int, first: int, through: int, spent: dict[str, list[float]]
) -> list[str]:
    """Have a stretch compacted, and before that its first chunk alone; return the segments' names."""
    raw = program.folder / RAW_FOLDER
    raw.mkdir(parents=True, exist_ok=True)
    alone = program.folder / FIRST_FOLDER / RAW_FOLDER
    shutil.rmtree(alone, ignore_errors=True)
    alone.mkdir(parents=True)
    start_s, _ = program.run("compactor", str(journal), str(alone), str(first))
    cpu_s, lines = program.run("compactor", str(journal), str(raw), str(through))
    spent["compactor_start"].append(start_s)
    spent[f"compaction {number}"].append(cpu_s - start_s)
    return _names(lines)


def _names(lines: list[bytes]) -> list[str]:
    return [facts.name for line in lines for facts in msgspec.json.decode(line, type=Sealed).segments]


def _journal(folder: Path, nodes: int, minutes: int) -> list[int]:
    """Make the journal as the server makes it of such a fleet; return the last chunk of each stretch."""
    load = Load(nodes=nodes, duration_s=minutes * 60.0)
    fleet = SimulatedFleet(load, "stream")
    rows = FleetRows(fleet.frames)
    templates = []
    refs = [StreamRef(name, "stream") for name in fleet.names]
    for frame in fleet.frames:
        raw = encode_template(template_of(frame))
        templates.append((template_id(raw), raw))
    values = FleetValues(fleet.jobs, load.gpus, load.interval_s, load.step_s, BEGIN_S)
    stretches: list[int] = []
    settings = HistorySettings(retention_s=FOREVER_S, retention_bytes=1 << 40)  # the time of the frames is not now
    journal = Journal(folder / "history.db", settings, 1 << 30, SystemClock(), FOREVER_S)
    try:
        for second in range(minutes * 60):
            raws = rows.encode(0, second + 1, BEGIN_S + second, values.read(0, nodes, BEGIN_S + second))
            each = -(-nodes // COMMITS_PER_S)
            for first in range(0, nodes, each):
                received_s = BEGIN_S + second + first / nodes
                some = range(first, min(first + each, nodes))
                lines = (
                    (refs[at], second + 1, BEGIN_S + second + at / nodes, received_s, 0.0004, raws[at]) for at in some
                )
                journal.submit(Batch.of(lines, dict(templates[at] for at in some) if second == 0 else {})).result()
            if (second + 1) % STRETCH_S == 0 or second + 1 == minutes * 60:
                ((through,),) = journal.reader.read("SELECT max(id) FROM chunks", ())
                stretches.append(through)
    finally:
        journal.close()
    return stretches


def _reported(program: _Program, spent: dict[str, list[float]], samples: int) -> dict[str, Any]:
    million = samples / 1e6
    reported: dict[str, Any] = {"compactor_start": statistics.median(spent["compactor_start"])}
    stretches = [values for name, values in spent.items() if name.startswith("compaction ")]
    values = [sum(each) for each in zip(*stretches, strict=True)]
    reported["cpu_s_per_million_samples"] = statistics.median(values) / million
    reported["cpu_s_per_million_samples_range"] = [min(values) / million, max(values) / million]
    reported["fleet_share_of_a_core"] = reported["cpu_s_per_million_samples"] * FLEET_SAMPLES_PER_S / 1e6
    for folder in (RAW_FOLDER, MINUTES_FOLDER):
        size = sum(path.stat().st_size for path in (program.folder / folder).rglob("*") if path.is_file())
        reported[f"{folder}_bytes_per_sample"] = size / samples
    return reported


if __name__ == "__main__":
    main()
