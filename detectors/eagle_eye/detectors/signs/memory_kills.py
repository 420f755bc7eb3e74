"""Classifies the kernel's OOM kills: those that hit the training, and those of other processes of the host."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from eagle_eye.detectors.signs.exits import Exit
from eagle_eye.detectors.signs.gpu_errors import BEFORE_START_S
from eagle_eye.detectors.types import Evidence, Window
from eagle_eye.schema.attributes import text

# Kernel names (the first 15 characters) of training processes and their helpers.
TRAINING_PROCESS = re.compile(r"python|^pt_|torch|deepspeed|megatron|accelerate|^ray|train|worker|jax", re.IGNORECASE)
RANK_NEAR_S = 10.0  # between the kernel's kill and a SIGKILL on its node that are the same event
HELPER_NEAR_S = 60.0  # a rank whose data loader or other helper was killed ends within this time


@dataclass(frozen=True, slots=True)
class MemoryKill:
    """One OOM kill; ``process`` is "" if the log named none."""

    time_s: float
    node: str
    process: str

    @property
    def of_training(self) -> bool:
        """Whether the process may have been part of the training, by its name."""
        return not self.process or TRAINING_PROCESS.search(self.process) is not None

    @property
    def evidence(self) -> Evidence:
        """Return the kill as evidence."""
        return Evidence("oom_kill", self.node, None, self.process or "a process")


def memory_kills(window: Window) -> list[MemoryKill]:
    """Return the kernel's OOM kills on the job's nodes in this attempt, oldest first."""
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
    """Whether the kill ended the rank: by the kernel's own signal, or by killing a helper that it needs."""
    if kill.node != end.node:
        return False
    if end.exit_code == -signal.SIGKILL:
        return abs(end.time_s - kill.time_s) <= RANK_NEAR_S
    helper = kill.of_training and kill.process and -RANK_NEAR_S <= end.time_s - kill.time_s <= HELPER_NEAR_S
    return bool(helper) and (end.exit_code is None or end.exit_code >= 0) and (end.cause or not end.error)
