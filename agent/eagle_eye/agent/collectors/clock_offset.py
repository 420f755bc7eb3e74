"""Measures the node's clock offset. Touches: adjtimex(2), and ``chronyc`` where chrony steers the clock."""

from __future__ import annotations

import ctypes
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from eagle_eye.agent import external_tool as tool
from eagle_eye.agent.collector import CollectFailed, Observed, Unsupported

ASK_EVERY_S = 60.0  # chrony itself measures every minute or less often; asking costs a few milliseconds
ANSWER_S = 2.0
ANSWER_BYTES_MAX = 4_096
OFFSET_S_MAX = 1e9  # larger values are not offsets

# linux/timex.h
_STA_PLL = 0x0001
_STA_FLL = 0x0008
_STA_UNSYNC = 0x0040
_STA_NANO = 0x2000
_TIME_ERROR = 5

_TRACKING_FIELDS = 14  # of chronyc's tracking report
_NOT_SYNCHRONISED = "Not synchronised"
_LOCAL = "7F7F0101"  # chrony follows its own clock

_C_LIBRARY = ctypes.CDLL(None, use_errno=True)  # opened once: each open leaves a class in a reference cycle


class KernelClock(NamedTuple):
    """The kernel's clock state: whether a program disciplines it, whether by the kernel's own loop, and its offset.

    ``offset_s`` is what the loop still has to add to the clock; it is meaningless unless ``disciplined``.
    """

    synchronised: bool
    disciplined: bool
    offset_s: float


class _Timeval(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("microseconds", ctypes.c_long))


class _Timex(ctypes.Structure):
    """adjtimex(2)'s record."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("frequency", ctypes.c_long),
        ("maximum_error", ctypes.c_long),
        ("estimated_error", ctypes.c_long),
        ("status", ctypes.c_int),
        ("constant", ctypes.c_long),
        ("precision", ctypes.c_long),
        ("tolerance", ctypes.c_long),
        ("time", _Timeval),
        ("rest", ctypes.c_byte * 256),  # tick, pulse per second, and room for what kernels add
    )


def kernel_clock() -> KernelClock:
    """Return the kernel's clock state; changes nothing. Raises OSError."""
    timex = _Timex()
    state = _C_LIBRARY.adjtimex(ctypes.byref(timex))
    if state < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    unit_s = 1e-9 if timex.status & _STA_NANO else 1e-6
    return KernelClock(
        synchronised=state != _TIME_ERROR and not timex.status & _STA_UNSYNC,
        disciplined=bool(timex.status & (_STA_PLL | _STA_FLL)),
        offset_s=timex.offset * unit_s,
    )


def chrony_offset_s(text: str) -> float | None:
    """Return the clock minus true time from ``chronyc -c tracking``; None where chrony does not know it."""
    fields = text.partition("\n")[0].strip().split(",")
    if len(fields) < _TRACKING_FIELDS or fields[0] == _LOCAL or fields[_TRACKING_FIELDS - 1] == _NOT_SYNCHRONISED:
        return None
    try:
        correction_s = float(fields[4])  # to be added to the clock: positive when it is slow
    except ValueError:
        return None
    return -correction_s if math.isfinite(correction_s) and abs(correction_s) < OFFSET_S_MAX else None


def _ask(arguments: Sequence[str]) -> tool.ToolResult:
    return tool.run(arguments, time.monotonic() + ANSWER_S, ANSWER_BYTES_MAX)


class ClockOffsetCollector:
    """The clock offset, from chrony where it runs, else from the kernel, which ntpd and timesyncd use.

    chrony and phc2sys steer the clock's frequency and leave the kernel's offset at 0; that 0 is not reported as an
    offset. An undisciplined clock has no row, rather than 0. An agent whose sandbox forbids adjtimex asks only chrony.
    """

    name = "clock_offset"

    def __init__(
        self,
        kernel: Callable[[], KernelClock] = kernel_clock,
        ask: Callable[[Sequence[str]], tool.ToolResult] = _ask,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kernel = kernel
        self._ask = ask
        self._monotonic_s = monotonic_s
        self._due_s = -math.inf
        self._chrony_s: float | None = None
        self._chrony_said = ""

    def collect(self, now_s: float) -> Observed:  # noqa: ARG002 - the offset is of now
        """Return the node's row. Raises Unsupported off Linux, CollectFailed where no source knows the offset."""
        monotonic_s = self._monotonic_s()
        if monotonic_s >= self._due_s:
            self._due_s = monotonic_s + ASK_EVERY_S
            self._chrony_s = self._by_chrony()
        offset_s = self._chrony_s if self._chrony_s is not None else self._by_kernel()
        return Observed(node={"node_clock_offset_seconds": offset_s})

    def close(self) -> None:
        """Do nothing: no resource is held."""

    def _by_chrony(self) -> float | None:
        self._chrony_said = ""
        try:
            ran = self._ask(("chronyc", "-n", "-c", "tracking"))
        except OSError:  # not installed
            return None
        if ran.status is None:
            self._chrony_said = f"; chronyc gave no answer within {ANSWER_S:g} s"
            return None
        if ran.status != 0:  # no chronyd runs
            return None
        offset_s = chrony_offset_s(ran.output.decode("ascii", "replace"))
        if offset_s is None:
            self._chrony_said = "; chrony has no source that it trusts (chronyc sources)"
        return offset_s

    def _by_kernel(self) -> float:
        try:
            clock = self._kernel()
        except AttributeError:
            raise Unsupported("this system has no adjtimex") from None
        except OSError as error:
            raise CollectFailed(f"adjtimex: {error.strerror or error}{self._chrony_said}") from None
        if not clock.synchronised:
            raise CollectFailed(
                "the clock is not synchronised, says the kernel; start chronyd, ntpd or systemd-timesyncd"
                f"{self._chrony_said}"
            )
        if not clock.disciplined:
            raise CollectFailed(
                "the clock is kept by a program that does not tell the kernel the offset (phc2sys, or chrony without"
                f" chronyc){self._chrony_said}"
            )
        return -clock.offset_s
