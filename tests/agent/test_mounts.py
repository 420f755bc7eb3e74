from __future__ import annotations

import ctypes
import errno
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.agent.collector import CollectFailed, Observed, Unsupported
from eagle_eye.agent.collectors.mounts import (
    ANSWER_S,
    ASK_EVERY_S,
    MOUNTS_MAX,
    STARTS_MAX,
    MountsCollector,
    NetworkMount,
    network_mounts,
)
from tests.agent.fakes import FakeClock, until

LINE = "36 25 0:{n} / {path} rw,relatime shared:1 - {kind} {source} rw,vers=4.2,addr=10.0.0.1\n"


def line(n: int = 40, path: str = "/data", kind: str = "nfs4", source: str = "fs1:/export") -> str:
    return LINE.format(n=n, path=path, kind=kind, source=source)


class Node:
    """A mount table of our own, and a ``stat`` of our own that does what a script says."""

    def __init__(self, folder: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock = clock
        self.table = folder / "proc/self/mountinfo"
        self.table.parent.mkdir(parents=True)
        self.asked = folder / "asked"
        self.program = folder / "bin/stat"
        self.program.parent.mkdir()
        monkeypatch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")
        self.answers()
        self.collector = MountsCollector(0.0, folder / "proc", clock.monotonic_s)

    def mounts(self, *lines: str) -> None:
        self.table.write_text("22 27 0:21 / /proc rw,relatime - proc proc rw\n" + "".join(lines))

    def answers(self, script: str = "exit 0") -> None:
        self.program.write_text(f'#!/bin/sh\necho "$@" >> {self.asked}\n{script}\n')
        self.program.chmod(0o755)

    def questions(self) -> list[str]:
        return self.asked.read_text().splitlines() if self.asked.exists() else []

    def collect(self, after_s: float = 0.0) -> Observed:
        """Collect after a while, when the programs that end by themselves have ended."""
        self.clock.advance(after_s)
        self.collector.collect(self.clock.now_s())
        processes = [watch.process for watch in self.collector._watches.values() if watch.process is not None]
        for process in processes:
            if "sleep" not in self.program.read_text():
                process.wait(10)
        return self.collector.collect(self.clock.now_s())


@pytest.fixture
def node(tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    made = Node(tmp_path, clock, monkeypatch)
    yield made
    made.collector.close()


def test_mounts_that_answer_are_none_that_do_not(node: Node) -> None:
    node.mounts(line(40, "/data"), line(41, "/home", "lustre", "mds@o2ib:/scratch"))
    assert node.collect() == Observed(node={"node_mounts_unresponsive": 0.0})
    assert sorted(node.questions()) == ["-f -- /data", "-f -- /home"]


def test_without_a_network_filesystem_nothing_is_asked_and_nothing_said(node: Node) -> None:
    node.mounts("36 25 8:1 / / rw - ext4 /dev/sda1 rw\n")
    assert node.collect() == Observed()
    assert node.questions() == []


def test_each_is_asked_now_and_then(node: Node) -> None:
    node.mounts(line())
    for _ in range(int(ASK_EVERY_S) - 1):
        node.collect(1.0)
    assert len(node.questions()) == 1
    node.collect(ASK_EVERY_S)
    assert len(node.questions()) == 2


def test_a_mount_that_hangs_is_counted_and_named_with_the_time_since_when(node: Node) -> None:
    node.mounts(line(40, "/data"), line(41, "/home"))
    node.answers('case "$3" in /data) exec sleep 600 ;; esac')
    node.clock.wall_s = 1_700_000_000.0
    node.collect()
    until(lambda: "node_mounts_unresponsive" in node.collect().node)
    seen = node.collect(ANSWER_S)
    assert seen.node == {"node_mounts_unresponsive": 1.0}
    assert seen.problem == "/data (nfs4 from fs1:/export) has not answered since 2023-11-14T22:13:20Z"
    assert node.collect(3600.0).problem == seen.problem  # said once: the text does not change


def test_a_mount_that_hangs_is_never_asked_a_second_time(node: Node) -> None:
    node.mounts(line())
    node.answers("exec sleep 600")
    node.collect()
    until(lambda: len(node.questions()) == 1)
    for _ in range(10):
        node.collect(ASK_EVERY_S)
    assert len(node.questions()) == 1


def test_a_mount_that_answers_again_is_well_again(node: Node) -> None:
    node.mounts(line())
    node.answers("exec sleep 600")
    node.collect()
    assert node.collect(ANSWER_S).node == {"node_mounts_unresponsive": 1.0}
    (process,) = (watch.process for watch in node.collector._watches.values())
    assert process is not None
    process.kill()  # as when the server is back: the program ends
    process.wait(10)
    node.answers()
    node.collect()
    assert node.collect(ASK_EVERY_S) == Observed(node={"node_mounts_unresponsive": 0.0})


def test_a_mount_that_has_gone_is_not_asked_for_any_more(node: Node) -> None:
    node.mounts(line())
    node.answers("exec sleep 600")
    node.collect()
    assert node.collect(ANSWER_S).node == {"node_mounts_unresponsive": 1.0}
    (process,) = (watch.process for watch in node.collector._watches.values())
    node.mounts()
    assert node.collect(ASK_EVERY_S) == Observed()
    assert process is not None
    assert process.returncode is not None


@pytest.mark.parametrize("number", [errno.ESTALE, errno.ENOTCONN, errno.EIO, errno.ETIMEDOUT])
def test_an_answer_that_says_that_the_mount_is_broken_counts(node: Node, number: int) -> None:
    node.mounts(line())
    node.answers(f"echo \"stat: cannot read file system information for '/data': {os.strerror(number)}\" >&2; exit 1")
    seen = node.collect()
    assert seen.node == {"node_mounts_unresponsive": 1.0}
    assert seen.problem == f"/data (nfs4 from fs1:/export): {os.strerror(number)}"


def test_a_mount_that_may_not_be_asked_counts_neither_way(node: Node) -> None:
    node.mounts(line())
    node.answers("echo \"stat: cannot read file system information for '/data': Permission denied\" >&2; exit 1")
    seen = node.collect()
    assert seen.node == {}
    assert seen.problem == "/data (nfs4 from fs1:/export) cannot be asked: Permission denied"


def test_bind_mounts_of_one_filesystem_are_one_question(node: Node) -> None:
    node.mounts(*(line(40, f"/pods/{index}/data") for index in range(20)))
    node.collect()
    assert node.questions() == ["-f -- /pods/0/data"]


def test_what_is_watched_and_started_at_once_is_bounded_and_the_rest_is_said(node: Node) -> None:
    node.mounts(*(line(100 + index, f"/data/{index}") for index in range(MOUNTS_MAX + 5)))
    node.answers("exec sleep 600")
    node.collector.collect(node.clock.now_s())
    assert sum(watch.process is not None for watch in node.collector._watches.values()) == STARTS_MAX
    for _ in range(MOUNTS_MAX // STARTS_MAX + 2):
        seen = node.collector.collect(node.clock.now_s())
    until(lambda: len(node.questions()) == MOUNTS_MAX)
    assert seen.problem == f"5 network filesystems beyond the first {MOUNTS_MAX} are not watched"


def test_without_the_program_that_asks_it_is_unsupported(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.mounts(line())
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(Unsupported, match="coreutils"):
        node.collector.collect(1.0)


def test_a_table_that_cannot_be_read_fails_and_one_that_is_not_there_is_unsupported(node: Node) -> None:
    with pytest.raises(Unsupported, match="not Linux"):
        node.collector.collect(1.0)
    node.table.mkdir()
    with pytest.raises(CollectFailed, match="directory"):
        node.collector.collect(1.0)


def test_a_patient_collection_waits_for_the_answers(node: Node, tmp_path: Path) -> None:
    node.mounts(line())
    patient = MountsCollector(10.0, tmp_path / "proc")
    assert patient.collect(1.0).node == {"node_mounts_unresponsive": 0.0}
    patient.close()


def test_names_are_read_as_the_kernel_writes_them() -> None:
    text = line(40, "/my\\040data\\134x") + line(41, "/é\udcff", "fuse.juicefs") + line(42, "/tmp", "tmpfs")
    found = network_mounts(text + "broken\n - nfs4\n36 25 0:43 / relative rw - nfs4 s rw\n")
    assert found == {
        "0:40": NetworkMount("/my data\\x", "nfs4", "fs1:/export", "0:40"),
        "0:41": NetworkMount("/é\udcff", "fuse.juicefs", "fs1:/export", "0:41"),
    }


def test_what_cannot_be_printed_is_not_said(node: Node) -> None:
    node.mounts(line(40, "/a\\012b\\033[31m" + "x" * 4_000))
    node.answers("echo ': Input/output error' >&2; exit 1")
    said = node.collect().problem
    assert said.startswith("/a?b?[31mx")
    assert len(said) < 500


@given(
    st.text(max_size=300)
    | st.lists(st.sampled_from(["36 25 0:4 / /a rw ", "- ", "nfs4 ", "s ", "\\000", "\n"])).map("".join)
)
def test_any_table_is_read(text: str) -> None:
    for mount in network_mounts(text).values():
        assert mount.path.startswith("/")
        assert "\0" not in mount.path


@pytest.fixture
def dead_filesystem(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A FUSE filesystem whose server never answers; closing the descriptor ends the server."""
    if os.geteuid() != 0 or not Path("/dev/fuse").exists():
        pytest.skip("needs root and /dev/fuse: mounts a filesystem that never answers")
    libc = ctypes.CDLL(None, use_errno=True)
    place = tmp_path / "dead"
    place.mkdir()
    descriptor = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={descriptor},rootmode={stat.S_IFDIR:o},user_id=0,group_id=0".encode()
    if libc.mount(b"fs1:/volume", bytes(place), b"fuse.glusterfs", 0, options) != 0:
        os.close(descriptor)
        pytest.skip(f"a FUSE filesystem cannot be mounted here: {os.strerror(ctypes.get_errno())}")
    yield place, descriptor
    libc.umount2(bytes(place), 2)  # MNT_DETACH
    try:
        os.close(descriptor)
    except OSError:
        return  # the test has done so


def test_a_real_filesystem_that_hangs_and_one_whose_server_is_gone(
    dead_filesystem: tuple[Path, int], clock: FakeClock
) -> None:
    place, descriptor = dead_filesystem
    collector = MountsCollector(monotonic_s=clock.monotonic_s)
    begin_s = time.monotonic()
    collector.collect(clock.now_s())
    clock.advance(ANSWER_S)
    seen = collector.collect(clock.now_s())
    assert time.monotonic() - begin_s < 5.0
    assert seen.node["node_mounts_unresponsive"] == 1.0
    assert f"{place} (fuse.glusterfs from fs1:/volume) has not answered since" in seen.problem
    os.close(descriptor)
    until(lambda: "not connected" in collector.collect(clock.now_s()).problem)
    assert collector.collect(clock.now_s()).node["node_mounts_unresponsive"] == 1.0
    collector.close()
