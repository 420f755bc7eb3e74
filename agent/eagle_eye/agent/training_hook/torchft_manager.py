"""Observes how far a rank is in the collectives of torchft's replica groups, and in which quorum.

Wraps three methods of torchft's ``Manager``; never imports torchft, never waits, and passes on what they return or
raise. All reductions of one step count as one collective, numbered by its step, so that the numbers of different
replica groups can be compared.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

MODULE = "torchft.manager"
REDUCTION = "allreduce"  # a rank has arrived once it calls this, and...
COMMIT = "should_commit"  # ...has completed the step's reductions when this has returned
QUORUM_WAIT = "wait_quorum"  # other replica groups are waited for in this, too
NEEDED = ("current_step", REDUCTION, COMMIT, QUORUM_WAIT)


class CollectivePosition(NamedTuple):
    """The newest collective begun and completed, and the quorum that they are in; -1: not observed."""

    sequence: int
    completed: int
    quorum: int


class ReplicaCollectives:
    """The hooks on torchft's ``Manager`` class; ``remove`` removes them."""

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._manager: type[Any] | None = None
        self._put: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}  # by method: torchft's own, ours
        self._last: weakref.ref[Any] | None = None  # the manager that was called last
        self._reached = (-1, -1)  # begun, completed; replaced as a whole, since another thread reads it

    def attach(self, modules: Mapping[str, object]) -> None:
        """Wrap the methods if the program has imported torchft; ``modules`` is ``sys.modules``.

        Raises AttributeError, and wraps nothing, where this version of torchft lacks one of them.
        """
        module = modules.get(MODULE)
        if module is None:
            return
        manager: Any = getattr(module, "Manager", None)
        lacking = [name for name in NEEDED if not callable(getattr(manager, name, None))]
        if lacking:
            raise AttributeError(f"torchft's Manager has no {', '.join(lacking)}: its collectives are not reported")
        self._manager = manager
        for name, wrap in ((REDUCTION, self._reduction), (COMMIT, self._commit), (QUORUM_WAIT, self._quorum_wait)):
            own = getattr(manager, name)
            self._put[name] = own, functools.wraps(own)(wrap(own))
        for name, (_, ours) in self._put.items():
            setattr(manager, name, ours)

    def remove(self) -> None:
        """Give torchft its methods back, except those that somebody has wrapped since."""
        for name, (own, ours) in self._put.items():
            if getattr(self._manager, name, None) is ours:
                setattr(self._manager, name, own)
        self._put.clear()
        self._last = None

    def position(self) -> CollectivePosition | None:
        """Return the position of the manager that was called last; None before any call, and once it is gone."""
        manager = self._last() if self._last is not None else None
        if manager is None:
            return None
        quorum = getattr(manager, "_quorum_id", -1)  # torchft shows it nowhere else
        return CollectivePosition(*self._reached, quorum if type(quorum) is int and quorum >= 0 else -1)

    def _reduction(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def reduce(manager: Any, *args: Any, **more: Any) -> Any:
            self._begin(manager)
            return own(manager, *args, **more)

        return reduce

    def _commit(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def commit(manager: Any, *args: Any, **more: Any) -> Any:
            try:
                return own(manager, *args, **more)
            finally:
                self._complete(manager)

        return commit

    def _quorum_wait(self, own: Callable[..., Any]) -> Callable[..., Any]:
        def wait(manager: Any, *args: Any, **more: Any) -> Any:
            before = self._reached
            self._begin(manager)
            try:
                return own(manager, *args, **more)
            finally:
                if before[0] <= before[1]:  # not within a reduction
                    self._complete(manager)

        return wait

    def _begin(self, manager: Any) -> None:
        try:
            step = manager.current_step()
            if self._last is None or self._last() is not manager:
                self._last = weakref.ref(manager)
            self._reached = step + 1, step
        except Exception as error:  # noqa: BLE001 - training must go on without us
            self._failed(error)

    def _complete(self, manager: Any) -> None:
        try:
            step = manager.current_step()
            self._reached = step, step
        except Exception as error:  # noqa: BLE001 - training must go on without us
            self._failed(error)
