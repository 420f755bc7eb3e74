"""The training hook as a callback of Hugging Face's Trainer.

    from eagle_eye.agent.hook_transformers import EagleEyeCallback

    trainer = Trainer(..., callbacks=[EagleEyeCallback()])

``transformers`` is not needed to import this module: the class is created on first access.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from eagle_eye.agent.hook_callback import TrainingReport, never_raises, tokens_in
from eagle_eye.agent.training_hook.torch_module import Inert


class TransformersReport:
    """The callback's methods, without its base class.

    A step is an optimizer step, and its number the trainer's ``global_step``. Its loss is what this rank's model
    returned, the mean over micro-batches: the trainer's own log is a mean over all ranks, hides non-finite values
    (``logging_nan_inf_filter``) and appears only every ``logging_steps``. Where the model returns no loss, the logged
    one is used, with the step after it; so is the gradient norm, which only the log has. Tokens are the sizes of
    ``input_ids``. The trainer does not announce evaluation or saving: both are inferred from what it has planned at the
    end of a step, so that a plan made by a later callback is noticed late (evaluation) or not at all (checkpoint).
    """

    def __init__(self, **options: Any) -> None:
        """``options`` are ``attach``'s ``socket`` and ``heartbeat_s``."""
        super().__init__()
        self.report = TrainingReport(**options)
        self._handle: Any = None
        self._model_tells_loss = False
        self._processes = 1  # the divisor by which the model's loss is too small
        self._logged_loss: float | None = None
        self._logged_norm: float | None = None
        self._forget()

    def _forget(self) -> None:
        """Reset for the next step."""
        self._loss: Any = None
        self._losses = 0
        self._shared_divisor = False
        self._tokens: float | None = None

    @never_raises
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the report; a checkpoint is already loaded."""
        self._take_off()
        self._forget()
        self._model_tells_loss = False
        self._logged_loss = self._logged_norm = None
        across = getattr(args, "average_tokens_across_devices", False)
        self._processes = max(1, int(getattr(args, "world_size", 1))) if across else 1
        model, optimizer = kwargs.get("model"), kwargs.get("optimizer")
        optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate's wrapper does not support hooks
        self.report.begin(model, optimizer, int(state.global_step))
        if model is not None:
            inert = Inert(self._forward, self.report.failed, sys.modules.get("torch"))
            self._handle = model.register_forward_hook(inert, with_kwargs=True)

    def _forward(self, model: Any, _args: Any, inputs: Mapping[str, Any], output: Any) -> None:
        """Keep the model's loss and count its tokens, when it is being trained."""
        if self.report.training is None or self.report.phase or not model.training:
            return
        count = tokens_in(inputs)
        if count is not None:
            self._tokens = (self._tokens or 0.0) + count
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if loss is not None:
            self._model_tells_loss = True
            self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()
            self._losses += 1
            self._shared_divisor = inputs.get("num_items_in_batch") is not None

    @never_raises
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step begins: the trainer's work between steps is over."""
        self.report.leave()

    @never_raises
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step ended; the trainer may log, evaluate and save now."""
        training = self.report.training
        if training is None:
            return
        training.step(
            step=int(state.global_step),
            loss=self._mean_loss() if self._model_tells_loss else self._logged_loss,
            grad_norm=self._logged_norm,
            tokens=self._tokens,
        )
        self._logged_loss = self._logged_norm = None
        self._forget()
        self._enter_planned(control)

    def _mean_loss(self) -> Any:
        if self._loss is None:
            return None
        if self._shared_divisor:  # each part was divided by the tokens of the whole step, on all ranks
            return self._loss * self._processes if self._processes > 1 else self._loss
        return self._loss / self._losses if self._losses > 1 else self._loss

    @never_raises
    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An epoch ended; the trainer may evaluate and save now."""
        self._enter_planned(control)

    def _enter_planned(self, control: Any) -> None:
        if control.should_evaluate:
            self.report.enter("eval")
        elif control.should_save:
            self.report.enter("checkpoint")

    @never_raises
    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A batch was evaluated."""
        self.report.enter("eval")

    @never_raises
    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An evaluation ended; a checkpoint may follow."""
        self.report.leave()
        if control.should_save:
            self.report.enter("checkpoint")

    @never_raises
    def on_predict(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A prediction ended."""
        self.report.leave()

    @never_raises
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A checkpoint was written."""
        self.report.leave()

    @never_raises
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """The trainer reports means since its last log."""
        logs = logs or {}
        self._logged_loss = logs.get("loss", self._logged_loss)
        self._logged_norm = logs.get("grad_norm", self._logged_norm)

    @never_raises
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Training ended."""
        self._take_off()
        self.report.end()

    def _take_off(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()


if TYPE_CHECKING:
    EagleEyeCallback = TransformersReport


def __getattr__(name: str) -> Any:
    """Return ``EagleEyeCallback``, created on first use. Raises ImportError where transformers is not installed."""
    if name != "EagleEyeCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        base = import_module("transformers").TrainerCallback
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise  # it is installed but broken: its own error says more
        raise ImportError(
            "EagleEyeCallback is a callback of Hugging Face's Trainer, which is not installed: "
            "pip install transformers accelerate"
        ) from None
    made = type(name, (TransformersReport, base), {"__module__": __name__, "__doc__": TransformersReport.__doc__})
    globals()[name] = made
    return made
