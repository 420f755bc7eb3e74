"""The norm of a rank's own gradients, before the reduction hides whose they were."""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter
from typing import Any

from eagle_eye.agent.training_hook.sampling_share import Share

COST_RATIO_MAX = 0.001  # of a step's time
EVERY_MAX = 256
CALL_S = 2e-6  # what the autograd engine spends on calling one hook, beside what the hook does


class LocalNorm:
    """The norm of one step's gradients before the reduction, from each parameter's own norm.

    Its hooks hang on the parameters only during the steps that are looked at.
    """

    def __init__(self, parameters: list[Any], hook: Callable[[Callable[..., None]], Any]) -> None:
        """``hook`` makes of a function what may hang on a parameter."""
        self._parameters = parameters
        self._hook = hook(self._add)
        self._handles: list[Any] = []
        self.share = Share(COST_RATIO_MAX, EVERY_MAX)
        self._squares = 0.0
        self._gradients = 0
        self._partial = False
        self._cost_s = 0.0

    def forward(self) -> None:
        """The model is called for training in a step that is looked at: hang the hooks."""
        if not self._handles:
            begin_s = perf_counter()
            self._handles = [each.register_hook(self._hook) for each in self._parameters if each.requires_grad]
            self._cost_s += perf_counter() - begin_s

    def finish(self, backwards: int, step_s: float | None) -> float | None:
        """A step that is looked at ended: return its norm; None: not observed.

        After several backward passes the norms are those of the parts and say nothing of their sum.
        """
        whole = self._gradients and backwards == 1 and not self._partial
        norm = math.sqrt(self._squares) if whole else None
        begin_s = perf_counter()
        self.remove()
        self._cost_s += perf_counter() - begin_s
        if backwards > 1:
            self.share.seldom()
        elif step_s:
            self.share.looked(self._cost_s, step_s)
        self._squares = self._cost_s = 0.0
        self._partial = False
        self._gradients = 0
        return norm

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _add(self, gradient: Any) -> None:
        begin_s = perf_counter()
        if gradient.is_sparse:
            self._partial = True
        else:
            flat = gradient.detach().reshape(-1)
            squares = float(flat.dot(flat))  # in half the time of a norm
            if math.isinf(squares):
                squares = float(flat.double().norm()) ** 2  # what overflows here need not be infinite
            self._squares += squares
            self._gradients += 1
        self._cost_s += perf_counter() - begin_s + CALL_S
