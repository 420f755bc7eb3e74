"""How busy others keep this machine: beyond a limit no demo of a minute can promise anything, and it declines.

What counts is how many processes want a processor at this moment: the ranks will compete with them. The machine's load
average says the same of the last minute: it still counts a build that has just ended, and hardly one that has just
begun. It is only told, beside what was measured.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

PER_CORE_MAX = 2.0
PER_CORE_TOLD = 1.0  # above, it is said at the start: what follows takes longer
LOOK_EVERY_S, LOOKS = 0.05, 40  # two seconds of looks make one measurement...
WITHIN_S = 6.0  # ...and so long a burst may take to pass
LOADAVG = Path("/proc/loadavg")  # "0.20 0.18 0.12 1/80 11206": three averages, runnable and existing threads, last pid


class TooBusy(Exception):
    """Others keep this machine too busy for the demo; the message says how busy, the limit and the remedy."""


class MachineLoad(NamedTuple):
    """How many processes of others want one of ``cores`` processors, and the machine's load average of a minute."""

    runnable: float
    cores: int
    average: float

    @property
    def per_core(self) -> float:
        """How many of them want each processor."""
        return self.runnable / self.cores

    def __str__(self) -> str:
        """Return the load for people, as in "3.1 processes of others want this machine's 2 processors"."""
        return (
            f"{self.runnable:.1f} processes of others want this machine's {self.cores} processors"
            f" (load average {self.average:.1f})"
        )


def measured_load(
    per_core_max: float = PER_CORE_MAX,
    read: Callable[[], str] = LOADAVG.read_text,
    cores: int = os.cpu_count() or 1,
    sleep: Callable[[float], None] = time.sleep,
) -> MachineLoad:
    """Return how busy others keep this machine, before anything of the demo runs.

    Raises TooBusy where no two seconds of the next ``WITHIN_S`` are quiet enough.
    """
    looks: deque[int] = deque(maxlen=LOOKS)
    for _ in range(round(WITHIN_S / LOOK_EVERY_S)):
        average, runnable = _parsed(read())
        looks.append(max(runnable - 1, 0))  # this process, which reads, is one of them
        load = MachineLoad(sum(looks) / len(looks), cores, average)
        if len(looks) == LOOKS and load.per_core <= per_core_max:
            return load
        sleep(LOOK_EVERY_S)
    raise TooBusy(
        f"{load}; the demo shows what it promises up to {per_core_max * cores:g}, {per_core_max:g} a processor."
        " Wait, end some of them, or try all the same with --load-max N (processes a processor)"
    )


def load_average(read: Callable[[], str] = LOADAVG.read_text) -> float:
    """Return the machine's load average of the last minute, in which the demo's own processes count."""
    return _parsed(read())[0]


def _parsed(text: str) -> tuple[float, int]:
    average, _, _, threads, _ = text.split()
    return float(average), int(threads.split("/")[0])
