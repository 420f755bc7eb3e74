from __future__ import annotations

import ctypes
import errno
import gc
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.agent.collector import CollectFailed, Unsupported
from eagle_eye.agent.collectors import clock_offset
from eagle_eye.agent.collectors.clock_offset import (
    ASK_EVERY_S,
    ClockOffsetCollector,
    KernelClock,
    _Timex,
    chrony_offset_s,
    kernel_clock,
)
from eagle_eye.agent.external_tool import ToolResult, run
from tests.agent.fakes import FakeClock, until

TRACKING = "7F000001,127.0.0.1,2,1795290388.145,{offset},0.0,0.0,0.169,0.025,0.868,0.00008,0.00002,1.0,{leap}\n"
SLOW = TRACKING.format(offset="0.500029683", leap="Normal")
UNSYNCHRONISED = "00000000,,0,0.0,0.000000000,0.0,0.0,0.0,0.0,0.0,1.0,1.0,0.0,Not synchronised\n"


class Keepers:
    """Who keeps the clock: what chronyc and the kernel say."""

    def __init__(self, clock: FakeClock) -> None:
        self.clock = clock
        self.chrony: ToolResult | OSError = FileNotFoundError(2, "No such file")
        self.kernel: KernelClock | OSError = KernelClock(synchronised=False, disciplined=False, offset_s=0.0)
        self.asked = 0
        self.collector = ClockOffsetCollector(self._kernel, self._ask, clock.monotonic_s)

    def _kernel(self) -> KernelClock:
        if isinstance(self.kernel, OSError):
            raise self.kernel
        return self.kernel

    def _ask(self, arguments: Sequence[str]) -> ToolResult:
        self.asked += 1
        assert arguments[-1] == "tracking"
        if isinstance(self.chrony, OSError):
            raise self.chrony
        return self.chrony

    def offset_s(self, after_s: float = 0.0) -> float:
        self.clock.advance(after_s)
        return self.collector.collect(self.clock.now_s()).node["node_clock_offset_seconds"]


@pytest.fixture
def keepers(clock: FakeClock) -> Keepers:
    return Keepers(clock)


def said(text: str, status: int | None = 0) -> ToolResult:
    return ToolResult(status, text.encode(), "", cut=False)


def test_a_clock_that_the_kernel_disciplines_has_the_kernel_s_offset(keepers: Keepers) -> None:
    keepers.kernel = KernelClock(synchronised=True, disciplined=True, offset_s=0.002)  # still to be added: it is slow
    assert keepers.offset_s() == -0.002


def test_an_unsynchronised_clock_is_not_observed(keepers: Keepers) -> None:
    with pytest.raises(CollectFailed, match="the clock is not synchronised"):
        keepers.offset_s()


def test_a_kernel_that_is_not_told_the_offset_is_not_believed(keepers: Keepers) -> None:
    keepers.kernel = KernelClock(synchronised=True, disciplined=False, offset_s=0.0)
    with pytest.raises(CollectFailed, match="does not tell the kernel the offset"):
        keepers.offset_s()


def test_chrony_s_word_counts_before_the_kernel_s(keepers: Keepers) -> None:
    keepers.kernel = KernelClock(synchronised=False, disciplined=False, offset_s=0.0)  # chrony without rtcsync
    keepers.chrony = said(SLOW)
    assert keepers.offset_s() == -0.500029683


def test_a_chrony_without_a_source_is_not_observed_and_says_why(keepers: Keepers) -> None:
    keepers.chrony = said(UNSYNCHRONISED)
    with pytest.raises(CollectFailed, match="no source that it trusts"):
        keepers.offset_s()


def test_a_chrony_that_is_not_running_leaves_the_word_to_the_kernel(keepers: Keepers) -> None:
    keepers.chrony = said("506 Cannot talk to daemon\n", status=1)
    keepers.kernel = KernelClock(synchronised=True, disciplined=True, offset_s=-0.001)
    assert keepers.offset_s() == 0.001


def test_a_chronyc_that_hangs_is_reported(keepers: Keepers) -> None:
    keepers.chrony = said("", status=None)
    with pytest.raises(CollectFailed, match="no answer within 2 s"):
        keepers.offset_s()


def test_chrony_is_asked_once_a_minute(keepers: Keepers) -> None:
    keepers.chrony = said(SLOW)
    for _ in range(int(ASK_EVERY_S)):
        keepers.offset_s(1.0)
    assert keepers.asked == 1
    keepers.chrony = said(UNSYNCHRONISED)
    with pytest.raises(CollectFailed):
        keepers.offset_s(1.0)


def test_a_sandbox_without_adjtimex_fails_and_a_system_without_it_is_unsupported(keepers: Keepers) -> None:
    keepers.kernel = PermissionError(1, "Operation not permitted")
    with pytest.raises(CollectFailed, match="adjtimex: Operation not permitted"):
        keepers.offset_s()

    def missing() -> KernelClock:
        raise AttributeError("adjtimex")

    with pytest.raises(Unsupported, match="no adjtimex"):
        ClockOffsetCollector(missing, keepers._ask, keepers.clock.monotonic_s).collect(1.0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "a,b",
        SLOW.replace("0.500029683", "nan"),
        SLOW.replace("0.500029683", "1e30"),
        SLOW.replace(",2,", ","),
        SLOW.replace("7F000001", "7F7F0101"),
    ],
)
def test_what_is_no_offset_is_none(text: str) -> None:
    assert chrony_offset_s(text) is None


@given(st.text(max_size=300))
def test_any_answer_is_an_offset_or_none(text: str) -> None:
    offset_s = chrony_offset_s(text)
    assert offset_s is None or abs(offset_s) < 1e9


def test_this_kernel_answers_and_its_record_is_no_longer_than_ours() -> None:
    clock = kernel_clock()
    assert abs(clock.offset_s) < 1.0
    assert ctypes.sizeof(_Timex) >= 208  # sizeof(struct timex) where a long has 64 bits


PLL, UNSYNC, NANO = 0x0001, 0x0040, 0x2000  # linux/timex.h
OK, ERROR = 0, 5


@pytest.mark.parametrize(
    ("state", "status", "offset", "expected"),
    [
        (OK, PLL, 1_500, KernelClock(True, True, 1.5e-3)),
        (OK, PLL | NANO, -1_500, KernelClock(True, True, -1.5e-6)),
        (OK, NANO, 0, KernelClock(True, False, 0.0)),
        (OK, PLL | UNSYNC, 0, KernelClock(False, True, 0.0)),
        (ERROR, PLL, 0, KernelClock(False, True, 0.0)),
    ],
)
def test_the_kernels_record_is_read_as_it_documents_it(
    monkeypatch: pytest.MonkeyPatch, state: int, status: int, offset: int, expected: KernelClock
) -> None:
    class Kernel:
        def adjtimex(self, reference: Any) -> int:
            timex = reference._obj
            assert timex.modes == 0  # nothing is set
            timex.status, timex.offset = status, offset
            return state

    monkeypatch.setattr(clock_offset, "_C_LIBRARY", Kernel())
    said = kernel_clock()
    assert (said.synchronised, said.disciplined) == (expected.synchronised, expected.disciplined)
    assert said.offset_s == pytest.approx(expected.offset_s)


def test_a_kernel_that_refuses_is_an_error_with_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernel:
        def adjtimex(self, _reference: Any) -> int:
            ctypes.set_errno(errno.EPERM)
            return -1

    monkeypatch.setattr(clock_offset, "_C_LIBRARY", Kernel())
    with pytest.raises(PermissionError):
        kernel_clock()


def test_asking_the_kernel_leaves_nothing_to_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        for _ in range(10):
            kernel_clock()
        assert gc.collect() == 0
    finally:
        gc.enable()


class NtpServer:
    """A time server whose clock is ahead."""

    def __init__(self, ahead_s: float) -> None:
        self._ahead_s = ahead_s
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            question, client = self._socket.recvfrom(512)
            if not question:
                return
            head = struct.pack("!BBbbII4s", 0x24, 1, question[2], -20, 0, 1, b"GPS\0")
            times = (self._now(), question[40:48], self._now(), self._now())
            self._socket.sendto(head + b"".join(times), client)

    def _now(self) -> bytes:
        now_s = time.time() + self._ahead_s + 2_208_988_800
        return struct.pack("!II", int(now_s), int(now_s % 1 * 2**32))

    def close(self) -> None:
        self._socket.sendto(b"", ("127.0.0.1", self.port))
        self._thread.join(5)
        self._socket.close()


@pytest.fixture
def chronyd(tmp_path: Path) -> Iterator[Callable[[Sequence[str]], ToolResult]]:
    """A chronyd that keeps no clock, only compares it; what it yields asks that one."""
    program, client = shutil.which("chronyd", path="/usr/sbin:/usr/bin"), shutil.which("chronyc")
    if program is None or client is None:
        pytest.skip("chrony is not installed: apt-get install chrony")
    ntp = NtpServer(0.5)
    folder = tmp_path / "chrony"
    folder.mkdir(mode=0o700)
    (folder / "chrony.conf").write_text(
        f"server 127.0.0.1 port {ntp.port} iburst minpoll 0 maxpoll 1\nport 0\ncmdport 0\n"
        f"bindcmdaddress {folder}/sock\npidfile {folder}/pid\n"
    )
    process = subprocess.Popen(
        [program, "-x", "-d", "-u", "root", "-f", str(folder / "chrony.conf")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    yield lambda arguments: run([client, "-h", f"{folder}/sock", *arguments[1:]], time.monotonic() + 5.0, 4096)
    process.terminate()
    process.wait(10)
    ntp.close()


def test_a_real_chrony_says_that_this_clock_is_half_a_second_slow(
    chronyd: Callable[[Sequence[str]], ToolResult], clock: FakeClock
) -> None:
    collector = ClockOffsetCollector(ask=chronyd, monotonic_s=clock.monotonic_s)

    def offset_s() -> float | None:
        clock.advance(ASK_EVERY_S)
        try:
            return collector.collect(1.0).node["node_clock_offset_seconds"]
        except CollectFailed:
            return None

    until(lambda: (found := offset_s()) is not None and abs(found) > 0.1, 30.0)
    assert offset_s() == pytest.approx(-0.5, abs=0.1)
