"""The ways to save that are compared, each as its own documentation has it used, on CPUs and over gloo."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

from benchmarks.checkpoint.job import Job
from benchmarks.checkpoint.peers import NONE
from eagle_eye.checkpoint import MemoryCheckpointer

KEPT = 2


class Saver(Protocol):
    """One way. ``survives`` is what its checkpoints outlive; ``saves`` is False for the one that has none."""

    survives: str
    saves: bool

    def ready(self) -> bool:
        """Whether a save may begin now without waiting for an earlier one."""

    def save(self, step: int) -> None:
        """Save the job's state, or begin to."""

    def newest(self) -> int:
        """Return the newest step that a restart would find now, 0 before the first."""

    def close(self) -> None:
        """Let go of what is needed no more."""


class Nothing:
    """No checkpoints."""

    survives = "nothing"
    saves = False

    def __init__(self, job: Job, disk: Path) -> None:
        del job, disk

    def ready(self) -> bool:
        """Always."""
        return True

    def save(self, step: int) -> None:
        """Nothing."""

    def newest(self) -> int:
        """None."""
        return 0

    def close(self) -> None:
        """Nothing."""


class InMemory:
    """Ours: each rank's half captured, and copied to the other node."""

    survives = "a process, a node"
    saves = True

    def __init__(self, job: Job, disk: Path) -> None:
        self._checkpointer = MemoryCheckpointer(job.state, disk / "checkpoints", job="peers")
        self._checkpointer.restore()

    def ready(self) -> bool:
        """Capture never waits."""
        return True

    def save(self, step: int) -> None:
        """Capture."""
        self._checkpointer.capture(step)

    def newest(self) -> int:
        """What is whole on both nodes."""
        return self._checkpointer.whole_step or 0

    def close(self) -> None:
        """The training has ended."""
        self._checkpointer.close()


class AsyncSave:
    """torch.distributed.checkpoint's own, to the disk; its default staging, or one that keeps its buffers."""

    survives = "a process, a node if the disk is shared"
    saves = True

    def __init__(self, job: Job, disk: Path, *, cached: bool = False) -> None:
        self._job = job
        self._folder = disk / "async_save"
        self._group = dist.new_group(backend="gloo")
        staging: Any = importlib.import_module("torch.distributed.checkpoint.staging")
        self._stager = staging.DefaultStager(staging.StagingOptions(False, False, False, False)) if cached else None
        self._running: tuple[int, Any] | None = None
        self._done: list[int] = []

    def ready(self) -> bool:
        """Whether the one before is on the disk."""
        if self._running is not None and self._running[1].done():
            step, future = self._running
            future.result()
            self._running = None
            self._done.append(step)
            if len(self._done) > KEPT and dist.get_rank() == 0:
                shutil.rmtree(self._folder / str(self._done[-KEPT - 1]))
        return self._running is None

    def save(self, step: int) -> None:
        """Begin to save."""
        model, optimizer = self._job.model, self._job.optimizer
        state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
        more: dict[str, Any] = {} if self._stager is None else {"async_stager": self._stager}
        path = self._folder / str(step)
        self._running = (step, dcp.async_save(state, checkpoint_id=path, process_group=self._group, **more))

    def newest(self) -> int:
        """The newest that is complete on the disk."""
        self.ready()
        return self._done[-1] if self._done else 0

    def close(self) -> None:
        """Wait for what is under way."""
        if self._running is not None:
            self._running[1].result()
        if self._stager is not None:
            self._stager.close()


def _cached(job: Job, disk: Path) -> AsyncSave:
    return AsyncSave(job, disk, cached=True)


SAVERS: dict[str, Callable[[Job, Path], Saver]] = {
    NONE: Nothing,
    "Eagle Eye": InMemory,
    "torch DCP async_save": AsyncSave,
    "torch DCP async_save, cached staging": _cached,
}
