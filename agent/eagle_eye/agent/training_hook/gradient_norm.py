"""Computes the norm of a rank's own gradients, before the reduction mixes them with other ranks'."""

from __future__ import annotations

import math
from collections.abc import Callable
from time import perf_counter
from typing import Any

from eagle_eye.agent.training_hook.sampling_share import Share

COST_RATIO_MAX = 0.001  # of a step's time
EVERY_MAX = 256
CALL_S = 2e-6  # the autograd engine's cost of calling one hook, besides the hook's own work


class LocalNorm:
    """The norm of one step's gradients before the reduction, from each parameter's own norm.

    Its hooks are registered on the parameters only during sampled steps.
    """

    def __init__(self, parameters: list[Any], hook: Callable[[Callable[..., None]], Any]) -> None:
        """``hook`` wraps a function so that it can be registered on a parameter."""
        self._parameters = parameters
        self._hook = hook(self._add)
        self._handles: list[Any] = []
        self.share = Share(COST_RATIO_MAX, EVERY_MAX)
        self._squares = 0.0
        self._gradients = 0
        self._partial = False
        self._cost_s = 0.0

    def forward(self) -> None:
        """Register the hooks: the model is called for training in a sampled step."""
        if not self._handles:
            begin_s = perf_counter()
            self._handles = [each.register_hook(self._hook) for each in self._parameters if each.requires_grad]
            self._cost_s += perf_counter() - begin_s

    def finish(self, backwards: int, step_s: float | None) -> float | None:
        """End a sampled step; return its norm; None: not observed.

        After several backward passes the norms are per pass and say nothing about their sum.
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
        """Remove the hooks from the parameters."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _add(self, gradient: Any) -> None:
        begin_s = perf_counter()
        if gradient.is_sparse:
            self._partial = True
        else:
            flat = gradient.detach().reshape(-1)
            squares = float(flat.dot(flat))  # takes half the time of a norm
            if math.isinf(squares):
                squares = float(flat.double().norm()) ** 2  # an overflow here need not mean infinite gradients
            self._squares += squares
            self._gradients += 1
        self._cost_s += perf_counter() - begin_s + CALL_S
