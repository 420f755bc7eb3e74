"""In-memory checkpoints as a callback of PyTorch Lightning.

    from eagle_eye.checkpoint.callback_lightning import MemoryCheckpointCallback

    trainer = Trainer(callbacks=[MemoryCheckpointCallback("/shared/checkpoints", persist_every=500)])

Works with ``lightning.pytorch`` and with ``pytorch_lightning``. Neither is needed to import this module: the class is
created on first access, as a callback of whichever of the two the program imported.

Lightning has no public way to set where in an epoch a fit resumes, nor to see what follows a batch. This relies on
``fit_loop.state_dict`` and ``load_state_dict``, as Lightning's own checkpoints do, and on these private names:
``fit_loop._data_fetcher`` and its ``fetched`` and ``batches``, ``fit_loop._combined_loader._state_dicts``,
``epoch_loop._should_check_val_fx`` and ``_is_training_done``.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from eagle_eye.checkpoint.checkpointer import MemoryCheckpointer
from eagle_eye.checkpoint.state import RandomState

_log = logging.getLogger(__name__)

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy")


class LightningCheckpoints:
    """The callback's methods, without its base class.

    A fit resumes after the newest step that is kept: weights, optimizers, schedulers, loops (``global_step``, epoch,
    batch), states of callbacks, of the datamodule, of mixed precision and of random number generators. Stateful data
    loaders get their state back; for others the batches that the epoch has already had are read and dropped.

    A step is an optimizer step, and its number the trainer's ``global_step``. It is captured after its batch, or after
    validation if that follows; the last one of an epoch at the start of the next. So resuming after a step loses
    nothing that belongs to it.
    """

    def __init__(self, directory: str | os.PathLike[str], persist_every: int = 0, **options: Any) -> None:
        """``options`` are those of ``MemoryCheckpointer``: ``replicas``, ``keep``, ``job``, ``node``, ``topology``."""
        super().__init__()
        self.checkpointer: MemoryCheckpointer | None = None
        self._arguments = (directory, persist_every)
        self._options = options
        self._fit: _Fit | None = None
        self._step = 0  # the last one that was captured, or will be
        self._due = ""  # when: after the "validation", or at the start of the next "epoch"
        self._failed = False

    def __getstate__(self) -> dict[str, Any]:
        """Drop the state: Lightning copies and pickles callbacks; a copy keeps nothing until its own fit begins."""
        return {**self.__dict__, "checkpointer": None, "_fit": None, "_due": ""}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Move this callback to the end, so that the other callbacks' changes belong to the step."""
        if stage == "fit":
            _refuse(trainer)
            _warn_of_hooks(trainer, pl_module)
            trainer.callbacks = [*(one for one in trainer.callbacks if one is not self), self]  # not the list in use

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore everything but the data, once the model is placed and wrapped for training."""
        self._fit = _Fit(trainer)
        state = {"model": pl_module, "fit": self._fit}
        for number, optimizer in enumerate(trainer.optimizers):
            state[f"optimizer_{number}" if number else "optimizer"] = optimizer
        self.checkpointer = MemoryCheckpointer(state, *self._arguments, **self._options)
        self._step = self.checkpointer.restore()
        self._due = ""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore the data position, once the data exists. Raises ValueError if a file was loaded as well."""
        if trainer.ckpt_path is not None:
            raise ValueError(
                f"fit(ckpt_path={str(trainer.ckpt_path)!r}) loads a file over what is restored from memory: leave it"
                " out, and load weights to begin with by load_from_checkpoint"
            )
        if self._fit is not None:
            self._fit.data_goes_on()

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """An epoch begins; all that belonged to the one before is over."""
        if self._fit is not None:
            self._fit.epoch_begins()
            self._capture_due("epoch")

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """What belonged to the step before is over; if it was to be captured after a validation, there was none."""
        self._due = ""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """A micro-batch is done, and maybe a step with it. Never raises."""
        if self._fit is None or self.checkpointer is None:
            return
        due = ""
        try:
            self._fit.batch_ends()
            loop = trainer.fit_loop.epoch_loop
            if loop._is_training_done:
                due = "epoch"
            elif loop._should_check_val_fx(trainer.fit_loop._data_fetcher):
                due = "validation"
        except Exception as error:  # noqa: BLE001 - training must go on whatever happens to its checkpoints
            if not self._failed:
                _log.warning("what follows a step is not known: steps are captured before it from now on: %r", error)
            self._failed = True
        step = int(trainer.global_step)
        if step == self._step:
            return
        self._step, self._due = step, due
        if not due:
            self.checkpointer.capture(step)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Validation is over, and its measurements are known. Never raises."""
        self._capture_due("validation")
        if self._fit is not None and trainer.fit_loop.restarting and not trainer.sanity_checking:
            trainer.fit_loop.restarting = False  # otherwise metric-based schedulers skip the end of this epoch

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The last epoch is over. Never raises."""
        self._capture_due(self._due)

    def _capture_due(self, moment: str) -> None:
        if self._due and self._due == moment and self.checkpointer is not None:
            self._due = ""
            self.checkpointer.capture(self._step)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """The fit ended normally: free the memory."""
        if self.checkpointer is not None:
            self.checkpointer.close()


class _Fit:
    """A fit's state beside weights and optimizers, and its position in the data."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._random = RandomState()
        self._random_of_epoch = self._random.state_dict()  # as the iterator of its batches is made
        self._iterates = False  # over an epoch that has not been announced yet
        self._begins = False  # an epoch of which it has had no batches
        self._restored: Mapping[str, Any] | None = None
        # The states of the loaders and after how many batches they were so, the last two: Lightning reads a batch ahead
        # where it does not know how many there are.
        self._loaders: list[tuple[int, list[Any]]] = []

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two batches."""
        trainer = self._trainer
        loops = trainer.fit_loop.state_dict()
        seen = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        batches, loaders = next(((at, states) for at, states in reversed(self._loaders) if at <= seen), (0, []))
        loops["state_dict"]["combined_loader"] = loaders
        return {
            "loops": loops,
            "loaders_at": batches,
            "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            "precision": trainer.precision_plugin.state_dict(),
            "callbacks": {one.state_key: state for one in trainer.callbacks if (state := one.state_dict())},
            "datamodule": trainer.datamodule.state_dict() if trainer.datamodule is not None else {},
            "random": self._random.state_dict(),
            "random_of_epoch": self._random_of_epoch,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore everything but data and random numbers, which follow once the data exists."""
        trainer = self._trainer
        trainer.fit_loop.load_state_dict(state["loops"])
        for config, scheduler in zip(trainer.lr_scheduler_configs, state["schedulers"], strict=True):
            config.scheduler.load_state_dict(scheduler)
        if state["precision"]:
            trainer.precision_plugin.load_state_dict(state["precision"])
        for callback in trainer.callbacks:
            if callback.state_key in state["callbacks"]:
                callback.load_state_dict(state["callbacks"][callback.state_key])
        if trainer.datamodule is not None and state["datamodule"]:
            trainer.datamodule.load_state_dict(state["datamodule"])
        self._restored = state

    def data_goes_on(self) -> None:
        """Position the data at the batch after those that the epoch has had.

        Raises TypeError for data whose position is unknown.

        The order of batches may depend on the random state at the epoch's start. So Lightning's iterator is recreated
        with that state, and the current random state is set once it has reached its position.
        """
        fetcher, has_state = self._trainer.fit_loop._data_fetcher, self._loaders_have_state()
        if not has_state and not hasattr(fetcher, "batches"):
            raise TypeError("training_step(dataloader_iter) needs a data loader with state_dict and load_state_dict")
        if self._restored is None:
            self._iterates = True
            self._note_loaders(0)
            return
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        seen, random = progress.current.ready, self._restored["random"]
        if progress.is_last_batch or seen >= self._trainer.num_training_batches:
            self._trainer.fit_loop.restarting = False  # no epoch is to be finished: the next one begins
            self._begins = True
            return
        for loader in self._trainer.fit_loop._combined_loader.flattened:
            _set_epoch(loader, self._trainer.current_epoch)  # Lightning does so, but later
        self._random_of_epoch = self._restored["random_of_epoch"]
        self._random.load_state_dict(self._random_of_epoch)
        if has_state:
            states = self._restored["loops"]["state_dict"]["combined_loader"]
            self._trainer.fit_loop._combined_loader._load_state_dicts(states)
        iter(fetcher)
        dropped = seen - self._restored["loaders_at"]
        for _ in range(dropped):
            next(fetcher)
        fetcher.fetched -= dropped  # Lightning adds those it has seen
        self._random.load_state_dict(random)
        self._note_loaders(seen)

    def epoch_begins(self) -> None:
        """The iterator of its batches is made next; that of the first one of a fit exists already."""
        if self._iterates:
            self._iterates = False
            return
        fit_loop = self._trainer.fit_loop
        if not self._begins or self._restored is None:
            self._random_of_epoch = self._random.state_dict()
            self._loaders = [(0, fit_loop._combined_loader._state_dicts())]
            return
        self._begins = False
        self._random_of_epoch = self._restored["random"]
        self._random.load_state_dict(self._random_of_epoch)
        if not getattr(fit_loop._data_fetcher, "batches", ()) or not self._loaders_have_state():
            iter(fit_loop._data_fetcher)
        self._note_loaders(0)

    def batch_ends(self) -> None:
        """Record the loaders' position after each batch."""
        self._note_loaders(self._trainer.fit_loop.epoch_loop.batch_progress.current.ready)

    def _note_loaders(self, seen: int) -> None:
        fit_loop = self._trainer.fit_loop
        states = fit_loop._combined_loader._state_dicts()
        if states:
            ahead = len(getattr(fit_loop._data_fetcher, "batches", ()))
            self._loaders = [*self._loaders[-1:], (seen + ahead, states)]

    def _loaders_have_state(self) -> bool:
        loaders = self._trainer.fit_loop._combined_loader.flattened
        having = [hasattr(one, "state_dict") and hasattr(one, "load_state_dict") for one in loaders]
        if any(having) and not all(having):
            raise TypeError(
                "some data loaders have state_dict and load_state_dict, and some have not: give all of them"
            )
        return all(having)


def _set_epoch(loader: Any, epoch: int) -> None:
    """Set the epoch of samplers that shuffle by it."""
    batches: Any = getattr(loader, "batch_sampler", None)
    samplers: tuple[Any, ...] = (getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    for sampler in samplers:
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)


def _refuse(trainer: Any) -> None:
    """Raise TypeError for a strategy that stores parameters or optimizers differently, or an old Lightning."""
    if not hasattr(trainer.fit_loop, "is_resuming"):
        raise TypeError("checkpoints in memory need Lightning 2.5.5 or later: older ones go on with another batch")
    name = type(trainer.strategy).__name__
    if name not in STRATEGIES:
        hint = ": use ModelParallelStrategy (FSDP2)" if name == "FSDPStrategy" else ""
        raise TypeError(f"checkpoints in memory know {', '.join(STRATEGIES)}, and not {name}{hint}")


def _warn_of_hooks(trainer: Any, pl_module: Any) -> None:
    """Warn about modules whose ``on_load_checkpoint`` will not be called: at each step it would cost too much."""
    for one in (pl_module, trainer.datamodule, *trainer.callbacks):
        hook = getattr(type(one), "on_load_checkpoint", None)
        if hook is not None and not hook.__module__.endswith(
            (".core.hooks", ".core.datamodule", ".callbacks.callback")
        ):
            _log.warning(
                "%s adds to Lightning's checkpoints (on_save_checkpoint): that is not kept in memory, what its"
                " state_dict has is",
                type(one).__name__,
            )


if TYPE_CHECKING:
    MemoryCheckpointCallback = LightningCheckpoints


def __getattr__(name: str) -> Any:
    """Return ``MemoryCheckpointCallback``, created on first use. Raises ImportError without Lightning."""
    if name != "MemoryCheckpointCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = type(
        name, (LightningCheckpoints, *_bases()), {"__module__": __name__, "__doc__": LightningCheckpoints.__doc__}
    )
    globals()[name] = made
    return made


def _bases() -> list[type]:
    """Return the callback classes of the imported Lightning packages, else of the first one installed."""
    imported = [module for package in PACKAGES if (module := sys.modules.get(package)) is not None]
    if imported:
        return [package.Callback for package in imported]
    for package in PACKAGES:
        try:
            return [import_module(package).Callback]
        except ModuleNotFoundError as error:
            if error.name not in {package, package.partition(".")[0]}:
                raise  # it is installed but broken: its own error says more
    raise ImportError(
        "MemoryCheckpointCallback is a callback of PyTorch Lightning, which is not installed: pip install lightning"
    )
