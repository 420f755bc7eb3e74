"""NVML, kept open: calls that may hang, handles that become stale, XIDs from its events."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from ctypes import byref, c_void_p, cast
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar

import pynvml

from eagle_eye.agent.collector import CollectFailed, Unsupported
from eagle_eye.agent.kernel_messages import KernelMessage, NewMessage, Repeats
from eagle_eye.agent.nvml.device import Device
from eagle_eye.agent.nvml.fields import NEVER, NvmlFailure
from eagle_eye.agent.nvml.pci_presence import Bus
from eagle_eye.schema.frame import KEYS_MAX

STALL_S = 0.1  # calls still waiting after this get another thread; a healthy GPU answers everything within 10 ms
THREADS_MAX = 64  # each runs its own call; no host has more GPUs than this

T = TypeVar("T")


class _Batch(Generic[T]):
    """Pending calls by key, and the answers so far."""

    def __init__(self, calls: Mapping[int, Callable[[], T]]) -> None:
        self.waiting = deque(calls.items())
        self.answers: dict[int, T | Exception] = {}
        self.ended: queue.SimpleQueue[None] = queue.SimpleQueue()  # a token whenever a thread found no call left


class _Worker(Generic[T]):
    """One thread: its batch, and the key of its current call. Both None: it is idle."""

    def __init__(self) -> None:
        self.batches: queue.SimpleQueue[_Batch[T] | None] = queue.SimpleQueue()
        self.batch: _Batch[T] | None = None
        self.key: int | None = None


class GuardedCalls(Generic[T]):
    """Runs calls one after the other in one thread while they return; for a single caller thread.

    A hung driver call cannot be cancelled. It keeps its thread until it returns, the others continue in another thread,
    and no call with the same key is made meanwhile: there are never more threads than keys plus one idle.
    """

    def __init__(self, name: str, stall_s: float = STALL_S, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._stall_s = stall_s
        self._monotonic_s = monotonic_s
        self._lock = threading.Lock()
        self._workers: list[_Worker[T]] = []

    def busy(self) -> set[int]:
        """Return the keys of the calls that have not returned."""
        with self._lock:
            return {worker.key for worker in self._workers if worker.key is not None}

    def run(self, calls: Mapping[int, Callable[[], T]], limit_s: float) -> dict[int, T | Exception]:
        """Return the calls' results or exceptions within ``limit_s``, by key.

        A key is missing when its call did not return in time, or was not made: an earlier one is still pending, or time
        was up. Late results are discarded.
        """
        busy = self.busy()
        batch = _Batch({key: call for key, call in calls.items() if key not in busy})
        expected = len(batch.waiting)
        deadline_s = self._monotonic_s() + limit_s
        if expected:
            self._add_worker(batch)
        while len(batch.answers) < expected:
            left_s = deadline_s - self._monotonic_s()
            if left_s <= 0.0:
                break
            try:
                batch.ended.get(timeout=min(self._stall_s, left_s))
            except queue.Empty:
                if batch.waiting:
                    self._add_worker(batch)
        with self._lock:
            batch.waiting.clear()
            return dict(batch.answers)

    def close(self) -> None:
        """End the threads; a hung one ends when its call returns."""
        for worker in self._workers:
            worker.batches.put(None)
        self._workers = []

    def _add_worker(self, batch: _Batch[T]) -> None:
        with self._lock:
            worker = next((worker for worker in self._workers if worker.batch is None), None)
            if worker is None:
                if len(self._workers) >= THREADS_MAX:
                    return
                worker = _Worker()
                self._workers.append(worker)
                threading.Thread(target=self._work, args=(worker,), name=self._name, daemon=True).start()
            worker.batch = batch
        worker.batches.put(batch)

    def _work(self, worker: _Worker[T]) -> None:
        while (batch := worker.batches.get()) is not None:
            while self._make_next_call(worker, batch):
                pass
            batch.ended.put(None)

    def _make_next_call(self, worker: _Worker[T], batch: _Batch[T]) -> bool:
        """Make the batch's next call; return whether there was one. With none left the thread becomes idle."""
        with self._lock:
            if not batch.waiting:
                worker.batch = worker.key = None
                return False
            worker.key, call = batch.waiting.popleft()
            key = worker.key
        answer: T | Exception
        try:
            answer = call()
        except Exception as error:  # noqa: BLE001 - it is the answer; whoever asked judges it
            answer = error
        with self._lock:
            batch.answers[key] = answer
        return True


# XIDs from NVML's event API, for hosts whose kernel log cannot be read.
#
# Source: NVML API Reference, Event Handling Methods. Of its other events, ECC errors are read every second as
# counters, which say more.
XIDS_MAX = 256  # per poll; the driver keeps the rest
CODE_MAX = 99_999  # the largest that the kernel log could hold
TEXT = "reported by NVML; the kernel log would say more, and could not be read"


class Xids:
    """The XIDs of all GPUs since each was watched, deduplicated like those of the kernel log.

    ``poll`` runs where driver calls may hang; ``take_xids`` never waits.
    """

    def __init__(self, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        """Register with the driver; where that fails, there are no XIDs."""
        self._monotonic_s = monotonic_s
        self._buses: dict[int, str] = {}  # PCI addresses by handle
        self._found: deque[tuple[int, int, float]] = deque(maxlen=XIDS_MAX)  # address of the handle, code, time
        self._repeats = Repeats()
        self._wait: Callable[..., int] | None = getattr(pynvml.nvmlLib, "nvmlEventSetWait_v2", None)
        self._event = pynvml.c_nvmlEventData_t()
        self._set: Any = None
        try:
            self._set = pynvml.nvmlEventSetCreate()
        except pynvml.NVMLError as error:
            _log.info("NVML tells no XIDs: %s", error)

    def watch(self, device: Device) -> None:
        """Subscribe to this GPU's XIDs, where the driver supports it."""
        if self._set is None:
            return
        self._buses[_address(device.handle)] = device.bus_id
        try:
            pynvml.nvmlDeviceRegisterEvents(device.handle, pynvml.nvmlEventTypeXidCriticalError, self._set)
        except pynvml.NVMLError as error:
            _log.info("NVML tells no XIDs of %s: %s", device.bus_id, error)

    def poll(self) -> NvmlFailure | None:
        """Fetch pending events without waiting for more; return the failure, if any."""
        if self._set is None or self._wait is None:
            return None
        for _ in range(XIDS_MAX):
            code = self._wait(self._set, byref(self._event), 0)
            if code == pynvml.NVML_ERROR_TIMEOUT:
                return None
            if code != pynvml.NVML_SUCCESS:
                if code in NEVER:
                    self._wait = None
                return NvmlFailure("XIDs", code)
            event = self._event
            if event.eventType == pynvml.nvmlEventTypeXidCriticalError and 0 < event.eventData <= CODE_MAX:
                self._found.append((_address(event.device), int(event.eventData), self._monotonic_s()))
        return None

    def take_xids(self) -> list[NewMessage]:
        """Return the XIDs to report now, each with its GPU's PCI address as NVML writes it."""
        news: list[NewMessage] = []
        while self._found:
            address, code, at_s = self._found.popleft()
            said = KernelMessage("xid", str(code), TEXT, code, self._buses.get(address, ""))
            news += self._repeats.add(said, at_s)
        return news + self._repeats.due(self._monotonic_s())

    def close(self) -> None:
        """Unregister from the driver. Raises NVMLError."""
        if self._set is not None:
            pynvml.nvmlEventSetFree(self._set)
            self._set = None


def _address(handle: Any) -> int:
    return cast(handle, c_void_p).value or 0


SIMULATED_MARK = "eagle_eye_simulated"  # a symbol that the simulated library has and NVIDIA's does not

_log = logging.getLogger("eagle_eye.agent")


class Library:
    """NVML while open: its GPUs, those that it lists but does not let us open, and its XIDs.

    ``pending`` are the places in NVML's list whose GPUs have not been opened yet.
    """

    def __init__(self, rows: dict[str, int], monotonic_s: Callable[[], float] = time.monotonic) -> None:
        """Open it, without its GPUs. Raises NVMLError.

        ``rows`` are those of the GPUs seen before, by UUID. A GPU keeps its row when others vanish from the list and
        the library is reopened; new ones are added.
        """
        pynvml.nvmlInit()
        self.begun_s = monotonic_s()
        self.devices: tuple[Device, ...] = ()  # by row
        self.unopened: tuple[NvmlFailure, ...] = ()
        self._rows = rows
        self._monotonic_s = monotonic_s
        self._lock = threading.Lock()  # GPUs are opened in several threads where one is slow
        try:
            self.pending = set(range(min(pynvml.nvmlDeviceGetCount(), KEYS_MAX)))
            self.xids = Xids(monotonic_s)
            self._driver = str(pynvml.nvmlSystemGetDriverVersion())
        except pynvml.NVMLError:
            pynvml.nvmlShutdown()
            raise

    @property
    def simulated(self) -> bool:
        """Whether this is the library of ``simulation.py``, which measures nothing."""
        return hasattr(pynvml.nvmlLib, SIMULATED_MARK)

    def open_gpu(self, place: int) -> Device | None:
        """Open the GPU at a place in NVML's list; return it, None where opening fails."""
        try:
            device = Device(place, pynvml.nvmlDeviceGetHandleByIndex(place), self._monotonic_s)
        except (pynvml.NVMLError, UnicodeDecodeError) as error:
            code = getattr(error, "value", pynvml.NVML_ERROR_UNKNOWN)
            with self._lock:
                self.unopened += (NvmlFailure(f"gpu {place}", code),)
                self.pending.discard(place)
            return None
        self.xids.watch(device)
        with self._lock:
            if device.uuid not in self._rows:
                taken = set(self._rows.values())
                free = (row for row in (place, *range(KEYS_MAX)) if row not in taken)
                self._rows[device.uuid] = next(free, KEYS_MAX)  # rows from there on are not sent
            device.index = self._rows[device.uuid]
            self.devices = tuple(sorted((*self.devices, device), key=lambda opened: opened.index))
            self.pending.discard(place)
        return device

    def close(self) -> None:
        """Release everything; errors of a library that is already gone are ignored."""
        for close in (*(device.close for device in self.devices), self.xids.close, pynvml.nvmlShutdown):
            try:
                close()
            except pynvml.NVMLError as error:
                _log.debug("closing NVML: %s", error)

    def describe(self) -> str:
        """Return a description for people: "8 GPUs (NVIDIA H100 80GB HBM3), driver 550.54.15"."""
        names = ", ".join(sorted({device.name for device in self.devices}))
        return f"{len(self.devices)} GPU{'s' * (len(self.devices) != 1)} ({names}), driver {self._driver}"


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

    def record_collection(self, now_s: float, *, stale: bool, answered: bool) -> None:
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
