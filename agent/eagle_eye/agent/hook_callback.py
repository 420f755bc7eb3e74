"""Shared base of the training frameworks' callbacks: one report per training run; never raises.

Touches: the same as ``hook.attach``.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, ParamSpec

from eagle_eye.agent.hook import Training, attach

_log = logging.getLogger("eagle_eye.hook")
_P = ParamSpec("_P")


class TrainingReport:
    """The report of the framework's current training run, if there is one."""

    def __init__(self, **options: Any) -> None:
        """``options`` are those of ``attach``."""
        self.training: Training | None = None
        self.phase = ""  # the open phase; empty: training
        self.failures = 0
        self._options = options
        self._phase = ExitStack()

    def __getstate__(self) -> dict[str, Any]:
        """Drop the report: frameworks copy and pickle callbacks; a copy reports only once its own training begins."""
        return {**self.__dict__, "training": None, "phase": "", "_phase": ExitStack()}

    def begin(self, model: Any, optimizer: Any, step: int) -> None:
        """Start reporting training after ``step``; an earlier report ends."""
        self.leave()
        self.training = attach(model, optimizer, step=step, **self._options)

    def enter(self, name: str) -> None:
        """Enter the phase ``name``; another open phase ends."""
        if self.training is not None and self.phase != name:
            self.leave()
            self._phase.enter_context(self.training.phase(name))
            self.phase = name

    def leave(self) -> None:
        """Return to training."""
        self.phase = ""
        self._phase.close()

    def end(self, error: BaseException | None = None) -> None:
        """End the report, with ``error`` if there was one."""
        training, self.training = self.training, None
        if training is None:
            return
        if error is not None:
            training.error(error)
        self.leave()
        training.detach()

    def failed(self, error: BaseException) -> None:
        """Count an internal error, and log the first."""
        if self.failures == 0:
            _log.warning("the training callback failed and goes on (further failures are only counted): %r", error)
        self.failures += 1


def never_raises(method: Callable[_P, None]) -> Callable[_P, None]:
    """Wrap the callback's method so that its exceptions are counted by its ``report`` instead of raised."""

    @functools.wraps(method)
    def safe(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            method(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 - training must go on without us
            args[0].report.failed(error)  # type: ignore[attr-defined]  # the callback itself

    return safe


def tokens_in(batch: Any) -> int | None:
    """Return how many tokens a language model's batch holds, padding included; None: unknown."""
    tokens = batch.get("input_ids") if isinstance(batch, Mapping) else None
    count = getattr(tokens, "numel", None)
    return None if count is None else int(count())
