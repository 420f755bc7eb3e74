"""Computes the norm of a rank's own gradients, before the reduction mixes them with other ranks'."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from time import perf_counter
from typing import Any

from eagle_eye.agent.training_hook.sampling_share import Share

COST_RATIO_MAX = 0.001  # of a step's time
EVERY_MAX = 256
CALL_S = 2e-6  # the autograd engine's cost of calling one hook, besides the hook's own work
SENTINEL_ELEMENTS_MAX = 4_096  # of the parameter whose gradient is checked in every step: in some microseconds


class LocalNorm:
    """The norm of one step's gradients before the reduction, from each parameter's own norm.

    Its hooks are registered on the parameters only during sampled steps. One small parameter, near the model's input,
    has a hook of its own in every step: a gradient that is not finite makes those of all layers before it so, and the
    step in which that happens on one rank alone is followed by steps in which all ranks are alike.
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
        self._broken = False
        small = (each for each in parameters if each.requires_grad and each.numel() <= SENTINEL_ELEMENTS_MAX)
        self._sentinels = [each.register_hook(hook(self._look)) for each in itertools.islice(small, 1)]

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
        norm = self.broken() or (math.sqrt(self._squares) if whole else None)
        begin_s = perf_counter()
        self._remove_hooks()
        self._cost_s += perf_counter() - begin_s
        if backwards > 1:
            self.share.seldom()
        elif step_s:
            self.share.looked(self._cost_s, step_s)
        self._squares = self._cost_s = 0.0
        self._partial = False
        self._gradients = 0
        return norm

    def broken(self) -> float | None:
        """End a step; return infinity where a gradient was seen that is not finite, None elsewhere."""
        broken, self._broken = self._broken, False
        return math.inf if broken else None

    def remove(self) -> None:
        """Remove the hooks from the parameters."""
        self._remove_hooks()
        for handle in self._sentinels:
            handle.remove()
        self._sentinels = []

    def _remove_hooks(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _look(self, gradient: Any) -> None:
        if not gradient.is_sparse and not bool(gradient.isfinite().all()):
            self._broken = True

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
