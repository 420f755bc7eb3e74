"""Keeps NVML open: opened when possible, reopened when its handles become stale."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NoReturn

import pynvml

from eagle_eye.agent.loop.collector import CollectFailed, Unsupported
from eagle_eye.agent.nvml.codes import NvmlFailure
from eagle_eye.agent.nvml.guard import GuardedCalls
from eagle_eye.agent.nvml.library import Library
from eagle_eye.agent.nvml.pci_presence import Bus

LIBRARY = -1  # the key of guarded calls that open and close
GPUS = -1_000_000  # the key of the call that opens the first in NVML's list; the others follow
# The longest the first collection is delayed, and only the first; opening then continues in the background. Without the
# persistence daemon the driver takes a second or two per GPU. Together less than a single frame waits.
OPEN_S = 9.0
OPEN_GPUS_S = 4.0
OPENING = "opening NVML"  # what fails, for people
OPEN_AGAIN_S = 10.0  # opening may start a helper of the driver, so it is not tried every second
# While some GPUs answer: reopening seldom helps the others, and could cost those rows. Doubled each time.
REOPEN_S = 60.0
REOPEN_S_MAX = 3_600.0
BOUND_EVERY_S = 5.0


class _NoGpu(Exception):
    pass


class NvmlConnection:
    """The library as currently open. Calls into it are guarded: opening and closing may hang like any other."""

    def __init__(self, calls: GuardedCalls[object], bus: Bus, monotonic_s: Callable[[], float]) -> None:
        self._calls = calls
        self._bus = bus
        self._monotonic_s = monotonic_s
        self._rows: dict[str, int] = {}
        self._library: Library | None = None  # set in the guarded call, however late it returns
        self._opening_s: float | None = None  # since when; None: not opening
        self._open_due_s = 0.0
        self._refused = ""
        self.refused_with: tuple[NvmlFailure, ...] = ()  # NVML's code, while it cannot be opened
        self._stale = False
        self._stale_due_s = 0.0
        self._reopen_s = REOPEN_S
        self._bound: frozenset[str] = frozenset()
        self._bound_due_s = 0.0

    @property
    def rows(self) -> dict[str, int]:
        """The rows of all GPUs seen so far, by UUID."""
        return self._rows

    def library(self, now_s: float) -> Library:
        """Return the library with the GPUs opened so far; the others are retried.

        Raises Unsupported where it does not exist, CollectFailed while it cannot be opened.
        """
        if self._library is None or self._must_open_anew(now_s):
            self._open(now_s)
        library = self._library
        if library is None:
            raise CollectFailed(f"{OPENING}: no answer for {self._monotonic_s() - (self._opening_s or now_s):.0f} s")
        self._opening_s = None
        if library.pending:
            places = {GPUS + place: partial(self._open_gpu, library, place) for place in set(library.pending)}
            self._calls.run(places, OPEN_GPUS_S)  # returns at once while earlier calls have not returned
        return library

    def note(self, now_s: float, *, stale: bool, answered: bool) -> None:
        """Record a collection: whether a GPU that should have a row has none, and whether any had one.

        ``stale`` excludes GPUs that do not answer at all.
        """
        if not stale:
            self._reopen_s = REOPEN_S
        elif not self._stale:
            self._stale_due_s = now_s + (self._reopen_s if answered else OPEN_AGAIN_S)
            self._reopen_s = min(2.0 * self._reopen_s, REOPEN_S_MAX)
        self._stale = stale

    def close(self) -> None:
        """Close the library, unless a call into it hangs: closing would hang too."""
        if not self._calls.busy():
            self._calls.run({LIBRARY: self._close_library}, OPEN_S)

    def _must_open_anew(self, now_s: float) -> bool:
        changed = False
        if now_s >= self._bound_due_s:
            self._bound_due_s = now_s + BOUND_EVERY_S
            changed = self._bus.bound() != self._bound
        return (changed or (self._stale and now_s >= self._stale_due_s)) and not self._calls.busy()

    def _open(self, now_s: float) -> None:
        if now_s < self._open_due_s:
            raise CollectFailed(self._refused)
        if self._opening_s is None:
            self._opening_s = now_s
        self._stale = False
        failure = self._calls.run({LIBRARY: self._open_library}, OPEN_S).get(LIBRARY)
        if isinstance(failure, Exception):
            self._opening_s = None
            self._refuse(failure, now_s)

    def _refuse(self, failure: Exception, now_s: float) -> NoReturn:
        if isinstance(failure, (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_FunctionNotFound)):
            raise Unsupported(f"no usable libnvidia-ml.so.1: {failure}") from None
        self._open_due_s = now_s + OPEN_AGAIN_S
        code = getattr(failure, "value", None) if isinstance(failure, pynvml.NVMLError) else None
        self.refused_with = () if code is None else (NvmlFailure(OPENING, int(code)),)
        said = failure if isinstance(failure, (pynvml.NVMLError, _NoGpu)) else repr(failure)
        self._refused = f"{OPENING}: {said}; tried again every {OPEN_AGAIN_S:.0f} s"
        raise CollectFailed(self._refused) from None

    def _open_library(self) -> None:
        self._close_library()
        self._bound = self._bus.bound()
        library = Library(self._rows, self._monotonic_s)
        if not library.pending:
            library.close()
            raise _NoGpu("no GPU is listed")
        self._library = library
        self.refused_with = ()

    def _open_gpu(self, library: Library, place: int) -> None:
        device = library.open_gpu(place)
        if device is not None:
            self._bus.answers(device.bus_id)  # so that its absence can be detected later

    def _close_library(self) -> None:
        library, self._library = self._library, None
        if library is not None:
            library.close()
