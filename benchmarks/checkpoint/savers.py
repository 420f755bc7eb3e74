"""The ways to save that are compared, each as its own documentation has it used, on CPUs and over gloo."""

from __future__ import annotations

import functools
import importlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.utils._pytree import tree_map

from benchmarks.checkpoint.peers import NONE
from benchmarks.checkpoint.reference_job import Job
from benchmarks.checkpoint.site import await_that
from eagle_eye.checkpoint import MemoryCheckpointer

KEPT = 2
SETTLED_WITHIN_S = 60.0


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

    def settle(self) -> None:
        """Nothing of it is under way."""

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

    def settle(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class InMemory:
    """Ours: each rank's half captured, and copied to the other node."""

    survives = "a process, a node"
    saves = True

    def __init__(self, job: Job, disk: Path) -> None:
        self._checkpointer = MemoryCheckpointer(job.state, disk / "checkpoints", job="peers")
        self._checkpointer.restore()
        self._step, self._captured = 0, 0.0

    def ready(self) -> bool:
        """Capture never waits."""
        return True

    def save(self, step: int) -> None:
        """Capture."""
        self._step = step
        self._checkpointer.capture(step)

    def newest(self) -> int:
        """What is whole on both nodes."""
        return self._checkpointer.whole_step or 0

    def settle(self) -> None:
        """The newest is whole."""
        if self._captured < self._checkpointer.counts["captured"]:
            await_that(lambda: self.newest() >= self._step, SETTLED_WITHIN_S, f"step {self._step} whole")
        self._captured = self._checkpointer.counts["captured"]

    def close(self) -> None:
        """The training has ended."""
        self._checkpointer.close()


class AsyncSave:
    """torch.distributed.checkpoint's own, to the disk; its default staging, or one that keeps its buffers."""

    survives = "a process, a node if the disk is shared"
    saves = True

    def __init__(self, job: Job, disk: Path, *, cached: bool = False) -> None:
        self._job = job
        self._folder = disk / ("async_save_cached" if cached else "async_save")
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
        self._running = (step, async_save(state, checkpoint_id=path, process_group=self._group, **more))

    def newest(self) -> int:
        """The newest that is complete on the disk."""
        self.ready()
        return self._done[-1] if self._done else 0

    def settle(self) -> None:
        """Wait for what is under way."""
        if self._running is not None:
            self._running[1].result()

    def close(self) -> None:
        """Its buffers are gone."""
        if self._stager is not None:
            self._stager.close()


class NvrxLocal:
    """nvidia-resiliency-ext's local checkpoints, into shared memory.

    Its own state dict takes tensors of GPUs only; as its documents allow, one of ours takes those of CPUs.
    """

    survives = "a process"
    saves = True

    def __init__(self, job: Job, disk: Path, *, replicated: bool = False) -> None:
        del disk
        local = "nvidia_resiliency_ext.checkpointing.local"
        manager: Any = importlib.import_module(f"{local}.ckpt_managers.local_manager").LocalCheckpointManager
        strategies: Any = importlib.import_module(f"{local}.replication.strategies")
        self._job = job
        self._folder = Path(tempfile.mkdtemp(prefix="eagle-eye-benchmark-", dir="/dev/shm"))
        strategy = strategies.CliqueReplicationStrategy.from_replication_params(1, 2) if replicated else None
        if replicated:
            self.survives = "a process, a node"
        self._manager = manager(self._folder, repl_strategy=strategy)
        self._newest = 0
        self._wrapped: Any = importlib.import_module("benchmarks.checkpoint.nvrx_state").OnCpu

    def ready(self) -> bool:
        """It saves before it returns."""
        return True

    def save(self, step: int) -> None:
        """Save."""
        self._manager.save(self._state(), step)
        self._newest = step

    def newest(self) -> int:
        """The one that was saved last."""
        return self._newest

    def settle(self) -> None:
        """It is saved."""

    def close(self) -> None:
        """Its files are gone."""
        shutil.rmtree(self._folder)

    def _state(self) -> Any:
        state = {"model": self._job.model.state_dict(), "optimizer": self._job.optimizer.state_dict()}
        return self._wrapped(tree_map(lambda value: value, state))  # it changes the dicts that it is given


class NvrxInBackground(NvrxLocal):
    """The same, written by a process that is forked for each save: the state of CPUs stays in it as it is then."""

    def __init__(self, job: Job, disk: Path) -> None:
        super().__init__(job, disk)
        core: Any = importlib.import_module("nvidia_resiliency_ext.checkpointing.async_ckpt.core")
        self._caller: Any = core.TemporalAsyncCaller()
        self._request: Any = None
        self._step = 0

    def ready(self) -> bool:
        """Whether the one before is written."""
        process = self._caller.process
        if process is None or not process.is_alive():
            self._newest = self._step
        return self._newest == self._step

    def save(self, step: int) -> None:
        """Begin to save; the one before, written on both ranks by now, is done with."""
        self.settle()
        self._request = self._manager.save(self._state(), step, is_async=True).freeze()
        self._caller.schedule_async_call(self._request._replace(call_idx=step, finalize_fns=[]))
        self._step = step

    def newest(self) -> int:
        """The newest that is written."""
        self.ready()
        return self._newest

    def settle(self) -> None:
        """What is under way is written, on both ranks."""
        if self._request is not None:
            self._caller.close()
            self._request.execute_finalize_fns(validate_matching_call_idx=False)
            self._request = None
            self.ready()

    def close(self) -> None:
        """Its files are gone."""
        self._caller.close()
        super().close()


class Flash:
    """DLRover's flash checkpoint into shared memory: each node has the whole state of a DistributedDataParallel job."""

    survives = "a process; a node, as each has the whole state"
    saves = True

    def __init__(self, job: Job, disk: Path) -> None:
        rank = dist.get_rank()
        self._run = f"eagle-eye-benchmark-{os.getpid()}"
        reported = {"GROUP_RANK": rank, "GROUP_WORLD_SIZE": 2, "NODE_RANK": rank, "NODE_NUM": 2}
        os.environ.update({name: str(value) for name, value in reported.items()})
        os.environ["TORCHELASTIC_RUN_ID"] = self._run
        flash = "dlrover.trainer.torch.flash_checkpoint"
        self._memory: Any = importlib.import_module(f"{flash}.checkpointer").StorageType.MEMORY
        made: Any = importlib.import_module(f"{flash}.ddp").DdpCheckpointer
        self._checkpointer = made(str(disk / "flash"))
        self._job = job

    def ready(self) -> bool:
        """It saves before it returns."""
        return True

    def save(self, step: int) -> None:
        """Save into memory."""
        state = {"model": self._job.model.state_dict(), "optimizer": self._job.optimizer.state_dict()}
        self._checkpointer.save_checkpoint(step, state, storage_type=self._memory)

    def newest(self) -> int:
        """The one that is in memory."""
        return max(0, int(self._checkpointer._engine._cached_step))

    def settle(self) -> None:
        """It is saved."""

    def close(self) -> None:
        """Its saver and its memory are gone."""
        engine = self._checkpointer._engine
        if engine.saver_proc is not None:
            engine.saver_proc.kill()
        shutil.rmtree(Path("/tmp/ckpt_sock") / self._run, ignore_errors=True)
        for path in Path("/dev/shm").glob(f"{self._run}*"):
            path.unlink()


class Gemini:
    """lm-resiliency's in-memory checkpoints: in the rank's own memory, and by gloo in that of its peer."""

    survives = "a rank, while its peer's process lives"
    saves = True

    def __init__(self, job: Job, disk: Path) -> None:
        config: Any = importlib.import_module("lm_resiliency").InMemoryCkptConfig
        made: Any = importlib.import_module("lm_resiliency.experimental").InMemoryCheckpointManager
        folder = str(disk / "lm-resiliency")
        reported = config(
            interval=1, replication_jump=1, disk_flush_interval=0, disk_folder=folder, run_id="peers", pin_memory=False
        )
        self._manager = made(reported)
        self._job = job
        self._saved = 0
        self._newest = 0

    def ready(self) -> bool:
        """Whether the one before is at the peer."""
        manager = self._manager
        worker = manager._completion_thread
        busy = (worker is not None and worker.is_alive()) or manager._replicator.in_flight
        if not busy:
            self._newest = self._saved
        return not busy

    def save(self, step: int) -> None:
        """Copy, and have it sent. It must be copied before the state changes, so that is waited for as well."""
        state = {"model": self._job.model.state_dict(), "optimizer": self._job.optimizer.state_dict()}
        self._manager.save(state, step)
        self._manager.maybe_wait()
        self._saved = step

    def newest(self) -> int:
        """The newest that is at the peer."""
        self.ready()
        return self._newest

    def settle(self) -> None:
        """What is under way is at its end."""
        await_that(self.ready, SETTLED_WITHIN_S, "replicated")

    def close(self) -> None:
        """Its memory is gone."""
        self._manager.finalize_replication()
        self._manager.close()


SAVERS: dict[str, Callable[[Job, Path], Saver]] = {
    NONE: Nothing,
    "Eagle Eye": InMemory,
    "torch DCP async_save": AsyncSave,
    "torch DCP async_save, cached staging": functools.partial(AsyncSave, cached=True),
    "nvidia-resiliency-ext 0.4.1 local": NvrxLocal,
    "nvidia-resiliency-ext 0.4.1 local, async": NvrxInBackground,
    "nvidia-resiliency-ext 0.4.1 local, replicated": functools.partial(NvrxLocal, replicated=True),
    "dlrover 0.6.1 flash checkpoint": Flash,
    "lm-resiliency 0.2.0": Gemini,
}
