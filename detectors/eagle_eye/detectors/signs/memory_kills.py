"""The kernel's OOM kills: which of them hit the training, and which some other process of the host."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from eagle_eye.detectors.signs.attributes import text
from eagle_eye.detectors.signs.exits import Exit
from eagle_eye.detectors.signs.gpu_errors import BEFORE_START_S
from eagle_eye.detectors.types import Evidence, Window

# Names that the kernel shows for training processes and their helpers (the first 15 characters).
TRAINING_PROCESS = re.compile(r"python|^pt_|torch|deepspeed|megatron|accelerate|^ray|train|worker|jax", re.IGNORECASE)
RANK_NEAR_S = 10.0  # a SIGKILL this near to the kernel's kill on its node is the same
HELPER_NEAR_S = 60.0  # a rank whose data loader or other helper was killed notices, and ends, within this


@dataclass(frozen=True, slots=True)
class MemoryKill:
    """One kill for memory; ``process`` is "" where the log named none."""

    time_s: float
    node: str
    process: str

    @property
    def of_training(self) -> bool:
        """Whether the process can have been part of the training, by its name."""
        return not self.process or TRAINING_PROCESS.search(self.process) is not None

    @property
    def evidence(self) -> Evidence:
        """Return the kill as evidence."""
        return Evidence("oom_kill", self.node, None, self.process or "a process")


def memory_kills(window: Window) -> list[MemoryKill]:
    """Return the kernel's kills for memory on the job's nodes in this attempt, oldest first."""
    return sorted(
        (
            MemoryKill(event.time_s, event.node, text(event.attributes, "process"))
            for event in window.events
            if event.kind == "oom_kill"
            and event.node in window.nodes
            and event.time_s >= window.started_s - BEFORE_START_S
        ),
        key=lambda kill: (kill.time_s, kill.node),
    )


def killed_rank(kill: MemoryKill, end: Exit) -> bool:
    """Whether the kill ended the rank: by the kernel's own signal, or by taking a helper that it cannot do without."""
    if kill.node != end.node:
        return False
    if end.exit_code == -signal.SIGKILL:
        return abs(end.time_s - kill.time_s) <= RANK_NEAR_S
    helper = kill.of_training and kill.process and -RANK_NEAR_S <= end.time_s - kill.time_s <= HELPER_NEAR_S
    return bool(helper) and (end.exit_code is None or end.exit_code >= 0) and (end.cause or not end.error)
