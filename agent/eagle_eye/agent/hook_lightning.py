"""The training hook as a callback of PyTorch Lightning.

    from eagle_eye.agent.hook_lightning import EagleEyeCallback

    trainer = Trainer(callbacks=[EagleEyeCallback()])

Works with ``lightning.pytorch`` and with ``pytorch_lightning``. Neither is needed to import this module: the class is
created on first access, as a callback of whichever of the two the program imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from eagle_eye.agent.hook_callback import TrainingReport, never_raises, tokens_in

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


class LightningReport:
    """The callback's methods, without its base class.

    A step is an optimizer step: accumulated micro-batches are one step, whose loss is their mean. Its number is the
    trainer's ``global_step``, which continues from a checkpoint. Validation is the phase "eval". A checkpoint lasts
    from when its content is gathered until training continues; a weights-only one is not announced by Lightning, and is
    part of the step in which it happens.
    """

    def __init__(
        self,
        *,
        tokens: Callable[[Any], float | None] = tokens_in,
        grad_norm: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> None:
        """``tokens`` returns a batch's token count; by default the size of its ``input_ids``, if any.

        ``grad_norm`` returns the gradient norm of the last step, given the LightningModule; Lightning keeps none.
        ``options`` are ``attach``'s ``socket`` and ``heartbeat_s``.
        """
        super().__init__()
        self.report = TrainingReport(**options)
        self._tokens = tokens
        self._grad_norm = grad_norm
        self._global_step = 0
        self._forget()

    def _forget(self) -> None:
        """Reset for the next step."""
        self._loss: Any = None
        self._losses = 0
        self._tokens_seen: float | None = None

    @never_raises
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start the report: the model is wrapped, a checkpoint is loaded, the sanity check is over."""
        optimizers = trainer.optimizers
        self._forget()
        self._global_step = int(trainer.global_step)
        self.report.begin(trainer.strategy.model or pl_module, optimizers[0] if optimizers else None, self._global_step)

    @never_raises
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """A micro-batch has arrived: Lightning's work between batches is over."""
        self.report.leave()

    @never_raises
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """A micro-batch is done, and maybe a step with it."""
        training = self.report.training
        if training is None:
            return
        self._add_loss(outputs, pl_module, trainer)
        count = self._tokens(batch)
        if count is not None:
            self._tokens_seen = (self._tokens_seen or 0.0) + count
        step = int(trainer.global_step)
        if step == self._global_step:
            return
        self._global_step = step
        norm = None if self._grad_norm is None else self._grad_norm(pl_module)
        loss = self._loss / self._losses if self._losses > 1 else self._loss
        training.step(step=step, loss=loss, tokens=self._tokens_seen, grad_norm=norm)
        self._forget()

    def _add_loss(self, outputs: Any, pl_module: Any, trainer: Any) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is None:
            return
        if pl_module.automatic_optimization and trainer.accumulate_grad_batches > 1:
            loss = loss * trainer.accumulate_grad_batches  # Lightning divided it
        if hasattr(loss, "detach"):
            loss = loss.detach()
        self._loss = loss if self._loss is None else self._loss + loss
        self._losses += 1

    @never_raises
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Validation begins, within training."""
        self.report.enter("eval")

    @never_raises
    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Validation ended."""
        self.report.leave()

    @never_raises
    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        """A checkpoint is gathered and then written."""
        self.report.enter("checkpoint")

    @never_raises
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Report that training failed."""
        self.report.end(exception)

    @never_raises
    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """End the report: training is done, the last checkpoint included."""
        self.report.end()

    @never_raises
    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """End whatever was running."""
        self.report.end()


if TYPE_CHECKING:
    EagleEyeCallback = LightningReport


def __getattr__(name: str) -> Any:
    """Return ``EagleEyeCallback``, created on first use. Raises ImportError where Lightning is not installed."""
    if name != "EagleEyeCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = type(name, (LightningReport, *_bases()), {"__module__": __name__, "__doc__": LightningReport.__doc__})
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
        "EagleEyeCallback is a callback of PyTorch Lightning, which is not installed: pip install lightning"
    )
