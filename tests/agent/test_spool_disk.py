"""The spool on disks that are full, read-only, damaged or do not answer; real ones where this machine permits it."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eagle_eye.agent.collector import Drops
from eagle_eye.agent.transport import spool as spool_module
from eagle_eye.agent.transport.spool import STREAM_FRAMES_MAX, WRITE_WAIT_S, Spool
from eagle_eye.agent.transport.spool_disk import ASIDE
from tests.agent.fakes import until
from tests.agent.test_spool import drained, newest, put

THAW_S = 20.0  # when a file system is thawed that a killed test left frozen


@pytest.fixture(autouse=True)
def _soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle_eye.agent.transport.spool_disk.RETRY_S", 0.05)


@pytest.fixture
def drops() -> Drops:
    return Drops()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of our own of 4 MiB, in a file."""
    if os.geteuid() != 0 or not shutil.which("mkfs.ext4"):
        pytest.skip("mkfs.ext4: needs root and the package e2fsprogs, to mount a file system that can be broken")
    image, place = tmp_path / "image", tmp_path / "disk"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(4 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", image], check=True, timeout=10)
    if subprocess.run(["mount", "-o", "loop", image, place], capture_output=True, timeout=10, check=False).returncode:
        pytest.skip("mount: a loop device cannot be mounted here; run in a machine or container that may")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True, timeout=10)


@contextlib.contextmanager
def frozen(place: Path) -> Iterator[Callable[[], None]]:
    """A disk that does not answer: whoever writes to it waits in the kernel, deaf to signals."""
    watchdog = subprocess.Popen(["sh", "-c", f"sleep {THAW_S}; fsfreeze -u {place}"])
    subprocess.run(["fsfreeze", "-f", place], check=True, timeout=10)

    def thaw() -> None:
        subprocess.run(["fsfreeze", "-u", place], check=False, timeout=10, capture_output=True)

    try:
        yield thaw
    finally:
        thaw()
        watchdog.kill()
        watchdog.wait()


def timed(action: Callable[[], object]) -> float:
    begin_s = time.monotonic()
    action()
    return time.monotonic() - begin_s


def test_a_disk_that_hangs_delays_the_loop_once_and_no_frame(disk: Path, drops: Drops) -> None:
    spool = Spool(disk / "spool", "n1", drops)
    put(spool, 1)
    with frozen(disk) as thaw:
        assert timed(lambda: put(spool, 1)) < WRITE_WAIT_S + 0.2
        assert timed(lambda: put(spool, 98)) < 0.2
        assert newest(spool) == list(range(1, STREAM_FRAMES_MAX + 1))  # they can be sent as ever
        assert spool.in_memory
        assert drops.snapshot() == {"spool_stalled": 1}
        thaw()
        until(lambda: put(spool, 1) != [] and not spool.in_memory)
    waiting = spool.waiting()
    spool.close()
    again = Spool(disk / "spool", "n1", drops)
    assert again.waiting() == waiting >= 101
    again.close()


def test_an_agent_starts_and_stops_on_a_disk_that_hangs(
    disk: Path, drops: Drops, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_module, "OPEN_WAIT_S", 0.2)
    monkeypatch.setattr(spool_module, "CLOSE_WAIT_S", 0.2)
    with frozen(disk):
        spool = Spool(disk / "spool", "n1", drops)
        put(spool, 3)
        assert newest(spool) == [1, 2, 3]
        assert timed(spool.close) < 1.0
    until(lambda: not spool._disk._thread.is_alive())


def test_a_disk_that_hangs_for_a_day_costs_bounded_memory(
    disk: Path, drops: Drops, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool_module, "MEMORY_BYTES_MAX", 1 << 20)
    spool = Spool(disk / "spool", "n1", drops)
    with frozen(disk):
        put(spool, 3000, size=1000)
        assert 500_000 < spool.waiting_bytes() <= 1 << 20
        assert drops.snapshot()["spool_full"] == 3000 - spool.waiting()
        assert newest(spool)[-1] >= 1
    spool.close()


def test_on_a_full_disk_frames_wait_in_memory_and_are_written_when_there_is_space(disk: Path, drops: Drops) -> None:
    spool = Spool(disk / "spool", "n1", drops)
    put(spool, 1)
    with (disk / "hog").open("wb") as hog, contextlib.suppress(OSError):
        while True:
            hog.write(bytes(4096))
            hog.flush()
    assert timed(lambda: put(spool, 200, size=4000)) < 1.0
    until(lambda: spool.in_memory)
    assert drops.snapshot() == {"spool_in_memory": 1}
    assert newest(spool, 3) == [1, 2, 3]
    (disk / "hog").unlink()
    until(lambda: not spool.in_memory)
    spool.close()
    again = Spool(disk / "spool", "n1", drops)
    assert again.waiting() == 201
    assert drops.snapshot() == {"spool_in_memory": 1}
    again.close()


def test_on_a_read_only_disk_frames_wait_in_memory_until_it_can_be_written(disk: Path, drops: Drops) -> None:
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True, timeout=10)
    spool = Spool(disk / "spool", "n1", drops)
    put(spool, 3)
    assert spool.in_memory
    assert newest(spool) == [1, 2, 3]
    subprocess.run(["mount", "-o", "remount,rw", disk], check=True, timeout=10)
    until(lambda: not spool.in_memory)
    until(lambda: any((disk / "spool").glob("*.frames")))
    assert drops.snapshot() == {"spool_in_memory": 1}
    spool.close()


def test_a_limit_on_the_size_of_files_leads_to_memory(tmp_path: Path, drops: Drops) -> None:
    spool = Spool(tmp_path, "n1", drops)
    put(spool, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        put(spool, 2, size=2000)
        until(lambda: spool.in_memory)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert newest(spool) == [1, 2, 3]
    until(lambda: not spool.in_memory)
    spool.close()


def test_a_folder_that_cannot_be_had_leads_to_memory(tmp_path: Path, drops: Drops) -> None:
    (tmp_path / "file").write_text("")
    spool = Spool(tmp_path / "file" / "spool", "n1", drops)
    put(spool, 2)
    assert newest(spool) == [1, 2]
    assert drops.snapshot() == {"spool_in_memory": 1}
    spool.close()


def test_a_folder_that_comes_late_is_taken_with_what_waits_in_it(tmp_path: Path, drops: Drops) -> None:
    earlier = Spool(tmp_path / "spool", "n1", drops)
    put(earlier, 3)
    earlier.close()
    (tmp_path / "spool").rename(tmp_path / "away")
    (tmp_path / "spool").write_text("")
    spool = Spool(tmp_path / "spool", "n1", drops)
    put(spool, 1)
    (tmp_path / "spool").unlink()
    (tmp_path / "away").rename(tmp_path / "spool")
    until(lambda: not spool.in_memory)
    assert [sequences for _, sequences in drained(spool)] == [[1], [1, 2, 3]]
    spool.close()


def test_a_file_that_is_none_of_ours_is_set_aside(tmp_path: Path, drops: Drops) -> None:
    (tmp_path / "0000000007.frames").write_bytes(b"this is no spool file " * 1000)
    spool = Spool(tmp_path, "n1", drops)
    put(spool, 1)
    assert newest(spool) == [1]
    assert drops.snapshot() == {"spool_damaged": 1}
    assert (tmp_path / ASIDE).exists()
    spool.close()


def test_damage_costs_what_follows_it_in_its_file_alone(
    tmp_path: Path, drops: Drops, caplog: pytest.LogCaptureFixture
) -> None:
    first = Spool(tmp_path, "n1", drops)
    put(first, 5 * STREAM_FRAMES_MAX, size=1000)
    first.close()
    file = min(tmp_path.glob("*.frames"))
    with file.open("r+b") as damaged:
        damaged.seek(10_000)
        damaged.write(b"\xa5" * 4096)
    second = Spool(tmp_path, "n1", drops)
    counts = [len(sequences) for _, sequences in drained(second)]
    assert sorted(counts) == [9, 64, 64, 64, 64]
    assert drops.snapshot() == {"spool_damaged": 1}
    assert "its last" in caplog.text
    second.close()


@pytest.mark.parametrize("trouble", ["gone", "damaged", "another"])
def test_a_file_that_cannot_be_read_back_is_counted_and_the_next_is_sent(
    tmp_path: Path, drops: Drops, trouble: str
) -> None:
    spool = Spool(tmp_path, "n1", drops)
    put(spool, 4 * STREAM_FRAMES_MAX + 1)
    until(lambda: not any(stream.loaded for stream in spool._backlog))
    first, second, *_ = sorted(tmp_path.glob("*.frames"))
    if trouble == "gone":
        first.unlink()
    else:
        first.write_bytes(b"\xa5" * 1000 if trouble == "damaged" else second.read_bytes())
    assert len(drained(spool)) == 4
    assert drops.snapshot() == {"spool_damaged": STREAM_FRAMES_MAX}
    spool.close()


def test_a_folder_that_was_taken_away_leads_to_memory(tmp_path: Path, drops: Drops) -> None:
    spool = Spool(tmp_path / "spool", "n1", drops)
    put(spool, 1)
    shutil.rmtree(tmp_path / "spool")
    put(spool, 2 * STREAM_FRAMES_MAX)
    until(lambda: spool.in_memory)
    assert spool.waiting() == 2 * STREAM_FRAMES_MAX + 1
    assert drops.snapshot() == {"spool_in_memory": 1}
    spool.close()


def test_a_sync_that_fails_is_counted_and_ends_nothing(
    tmp_path: Path, drops: Drops, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_descriptor: int) -> None:
        raise OSError("Input/output error")

    monkeypatch.setattr("eagle_eye.agent.transport.spool_disk.SYNC_S", 0.01)
    monkeypatch.setattr(os, "fsync", broken)
    spool = Spool(tmp_path, "n1", drops)
    put(spool, 1)
    until(lambda: spool.in_memory)
    assert drops.snapshot() == {"spool_in_memory": 1}
    monkeypatch.undo()
    threading.Event().wait(0.05)
    assert put(spool, 1) == [2]
    spool.close()
