"""The load on each cell: a generator of its own, whose jobs are the cell's."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.ingest.processes import GENERATOR_CORE, on_core

JOB_NODES_MAX = 128
DRAIN_S = 30


def job_nodes(nodes: int, cells: Sequence[int]) -> int:
    """Return how many nodes each job has: the same jobs can be given to each number of cells in equal parts."""
    each = math.gcd(*(nodes // count for count in cells))
    return max(size for size in range(1, min(each, JOB_NODES_MAX) + 1) if each % size == 0)


class Fleet(NamedTuple):
    """The nodes that report to a cell."""

    cell: str
    nodes: int
    gpus: int
    job_nodes: int

    def jobs(self) -> dict[str, int]:
        """Return how many nodes each job has, by the names that the generator gives them."""
        whole, rest = divmod(self.nodes, self.job_nodes)
        sizes = [self.job_nodes] * whole + ([rest] if rest else [])
        return {f"{self.cell}-job-{number:03d}": size for number, size in enumerate(sizes)}


@dataclass
class Loading:
    """Generators at work."""

    processes: list[subprocess.Popen[bytes]]

    def results(self) -> list[dict[str, Any]]:
        """Wait for all, and return what each says of itself."""
        found = []
        for process in self.processes:
            said, _ = process.communicate()
            if not said:
                raise RuntimeError(f"a load test failed with {process.returncode}")
            found.append(json.loads(said))
            if not found[-1]["samples_acknowledged"]:
                raise RuntimeError(f"nothing was acknowledged: {found[-1]}")
        return found


@contextmanager
def loading(fleets: Sequence[Fleet], addresses: dict[str, str], seconds: float, warm_s: float) -> Iterator[Loading]:
    """Have all cells' nodes report while the block runs."""
    processes = []
    for fleet in fleets:
        of = ["--nodes", str(fleet.nodes), "--gpus", str(fleet.gpus), "--job-nodes", str(fleet.job_nodes)]
        of += ["--prefix", fleet.cell, "--duration", str(seconds), "--warm-up", str(warm_s), "--drain", str(DRAIN_S)]
        words = [sys.executable, "-m", "eagle_eye.cli.main", "loadtest", "--json", *of]
        command = [*on_core(GENERATOR_CORE), *words, "--server", f"http://{addresses[fleet.cell]}"]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE))
    try:
        yield Loading(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
