"""In-memory checkpoints for Hugging Face's Trainer.

    from eagle_eye.checkpoint.callback_transformers import keep_in_memory

    trainer = Trainer(...)
    keep_in_memory(trainer, "/shared/checkpoints", persist_every=500)
    trainer.train()

A Trainer callback cannot set where training resumes: the number of epochs and batches to skip is decided before the
first callback. So this wraps the trainer's own methods, for any trainer class: ``_prepare_for_training``,
``_run_epoch``, ``_load_rng_state``, ``_maybe_log_save_evaluate`` and ``_finalize_training``, which transformers has
since version 5.3. It does not import transformers.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Mapping
from typing import Any

from eagle_eye.checkpoint.checkpointer import MemoryCheckpointer
from eagle_eye.checkpoint.state import RandomState

FROM_MEMORY = "memory"  # passed to the trainer as the checkpoint it resumes from
LOGS_KEPT = 200  # an unbounded history would be copied at each step
PROGRESS = (
    "global_step",
    "epoch",
    "num_input_tokens_seen",
    "total_flos",
    "best_metric",
    "best_global_step",
    "best_model_checkpoint",
)
EPOCH_ARGUMENTS = {
    "epoch",
    "num_update_steps_per_epoch",
    "resume_from_checkpoint",
    "epochs_trained",
    "steps_trained_in_current_epoch",
}


def keep_in_memory(
    trainer: Any, directory: str | os.PathLike[str], persist_every: int = 0, **options: Any
) -> TransformersCheckpoints:
    """Make ``trainer.train()`` resume after the newest step that is kept, and keep its own. Call on all ranks before.

    ``options`` are those of ``MemoryCheckpointer``: ``replicas``, ``keep``, ``job``, ``node``, ``topology``. Raises
    TypeError for a trainer that shards parameters or optimizers in its own way (DeepSpeed, FSDP 1, XLA, Megatron) or
    lacks these methods, and ValueError with ``auto_find_batch_size``.
    """
    return TransformersCheckpoints(trainer, directory, persist_every, **options)


class TransformersCheckpoints:
    """The wrappers of a trainer's methods. ``checkpointer`` is set once training begins.

    A step is an optimizer step, and its number ``global_step``. It is captured after its log, evaluation and
    checkpoint; the last one of an epoch after those of the epoch.
    """

    def __init__(self, trainer: Any, directory: str | os.PathLike[str], persist_every: int = 0, **options: Any) -> None:
        """As ``keep_in_memory``."""
        _refuse(trainer)
        self.checkpointer: MemoryCheckpointer | None = None
        self._trainer = trainer
        self._arguments = (directory, persist_every)
        self._options = options
        self._progress = _Progress(trainer)
        self._resumed = self._captured = 0
        self._steps_in_epoch = 1
        for method in (
            self._prepare_for_training,
            self._run_epoch,
            self._load_rng_state,
            self._maybe_log_save_evaluate,
            self._finalize_training,
        ):
            wrapped = getattr(trainer, method.__name__)
            setattr(trainer, method.__name__, functools.wraps(wrapped)(functools.partial(method, wrapped)))

    def _prepare_for_training(self, wrapped: Any, max_steps: Any, train_dataloader: Any, resume_from: Any) -> Any:
        """Restore model, optimizer, schedule and progress, once the model is placed and wrapped for training."""
        if resume_from is not None:
            raise ValueError(
                f"train(resume_from_checkpoint={str(resume_from)!r}) and checkpoints in memory each say where to go on:"
                " leave it out, and load weights to begin with by from_pretrained"
            )
        made = wrapped(max_steps, train_dataloader, resume_from)
        optimizer = self._trainer.optimizer
        optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper has it
        state = {"model": self._trainer.model, "optimizer": optimizer, "training": self._progress}
        self.checkpointer = MemoryCheckpointer(state, *self._arguments, **self._options)
        self._resumed = self._captured = self.checkpointer.restore()
        return made

    def _run_epoch(self, wrapped: Any, **arguments: Any) -> None:
        """Run an epoch from its resume position; skip one that is already over."""
        self._steps_in_epoch = arguments["num_update_steps_per_epoch"]
        if self._resumed:
            epochs, steps = divmod(self._resumed, self._steps_in_epoch)
            if arguments["epoch"] < epochs:
                return
            settings = self._trainer.args
            batches = 0 if settings.ignore_data_skip else steps * settings.gradient_accumulation_steps
            arguments.update(
                resume_from_checkpoint=FROM_MEMORY, epochs_trained=epochs, steps_trained_in_current_epoch=batches
            )
        wrapped(**arguments)
        self._capture()

    def _load_rng_state(self, wrapped: Any, checkpoint: Any) -> None:
        """Set the random state after the step that training resumes from."""
        if checkpoint == FROM_MEMORY:
            self._progress.set_random_numbers()
        else:
            wrapped(checkpoint)

    def _maybe_log_save_evaluate(self, wrapped: Any, *arguments: Any, **named: Any) -> None:
        """A step's log, evaluation and checkpoint are over."""
        wrapped(*arguments, **named)
        if self._trainer.state.global_step % self._steps_in_epoch:
            self._capture()

    def _finalize_training(self, wrapped: Any, *arguments: Any, **named: Any) -> Any:
        """Training ended normally: free the memory."""
        made = wrapped(*arguments, **named)
        if self.checkpointer is not None:
            self.checkpointer.close()
        return made

    def _capture(self) -> None:
        step = int(self._trainer.state.global_step)
        if step > self._captured and self.checkpointer is not None:
            self._captured = step
            self.checkpointer.capture(step)


class _Progress:
    """The training state beside weights and their optimizer."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._random = RandomState()
        self._restored: Mapping[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two steps."""
        trainer = self._trainer
        scaler = getattr(trainer.accelerator, "scaler", None)
        return {
            "progress": {name: getattr(trainer.state, name) for name in PROGRESS},
            "logs": trainer.state.log_history[-LOGS_KEPT:],
            "scheduler": trainer.lr_scheduler.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
            "callbacks": [one.state()["attributes"] for one in self._callbacks()],
            "random": self._random.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore everything but the random numbers, which follow once the data is in position."""
        trainer = self._trainer
        for name, value in state["progress"].items():
            setattr(trainer.state, name, value)
        trainer.state.log_history = list(state["logs"])
        trainer.lr_scheduler.load_state_dict(state["scheduler"])
        if state["scaler"] is not None and trainer.accelerator.scaler is not None:
            trainer.accelerator.scaler.load_state_dict(state["scaler"])
        for one, attributes in zip(self._callbacks(), state["callbacks"], strict=True):
            for name, value in attributes.items():
                setattr(one, name, value)
        self._restored = state

    def set_random_numbers(self) -> None:
        """Set the restored random state."""
        if self._restored is not None:
            self._random.load_state_dict(self._restored["random"])

    def _callbacks(self) -> list[Any]:
        """Return the callbacks whose state is also in the trainer's own checkpoints."""
        return [one for one in self._trainer.callback_handler.callbacks if hasattr(one, "state")]


def _refuse(trainer: Any) -> None:
    """Raise TypeError for an unsupported trainer, ValueError for a setting."""
    run_epoch = getattr(trainer, "_run_epoch", None)
    taken = set() if run_epoch is None else set(inspect.signature(run_epoch).parameters)
    if missing := EPOCH_ARGUMENTS - taken:
        raise TypeError(
            f"{type(trainer).__name__}._run_epoch does not take {', '.join(sorted(missing))}: this is for the Trainer"
            " of transformers 5.3 and later"
        )
    accelerator = trainer.accelerator
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind == "FSDP" and getattr(accelerator.state.fsdp_plugin, "fsdp_version", 1) != 2:
        raise TypeError("checkpoints in memory know FSDP 2, and not FSDP 1: set fsdp_version to 2")
    if kind != "FSDP" and kind != "NO" and not kind.startswith("MULTI_"):
        raise TypeError(f"checkpoints in memory know one process, DDP and FSDP 2, and not {kind}")
    if trainer.args.auto_find_batch_size:
        raise ValueError("auto_find_batch_size=True begins training anew, and checkpoints in memory know one beginning")
