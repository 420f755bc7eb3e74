"""Files whose paths a training process chose, read by an agent of root."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from eagle_eye.agent.evidence.source import environment, open_file_of, read, read_open
from eagle_eye.agent.foreign_files import NotTheirs
from eagle_eye.agent.processes.process_files import ENVIRON_BYTES_MAX

PID = 7


@pytest.fixture
def inside(tmp_path: Path) -> Path:
    """The root folder of process 7, which is not ours."""
    root = tmp_path / "container"
    root.mkdir()
    (tmp_path / "proc" / str(PID)).mkdir(parents=True)
    (tmp_path / "proc" / str(PID) / "root").symlink_to(root)
    user = os.geteuid()
    (tmp_path / "proc" / str(PID) / "status").write_text(f"Name:\tpython\nUid:\t{user}\t{user}\t{user}\t{user}\n")
    return root


def content(inside: Path, path: str) -> bytes:
    descriptor = open_file_of(inside.parent / "proc", PID, path)
    try:
        return read_open(descriptor, 1_000)[0]
    finally:
        os.close(descriptor)


def test_a_path_is_the_processes_own(inside: Path) -> None:
    (inside / "tmp").mkdir()
    (inside / "tmp" / "rank_0").write_bytes(b"dump")
    assert content(inside, "/tmp/rank_0") == b"dump"
    assert content(inside, "//tmp/./../tmp/rank_0") == b"dump"


def test_links_are_followed_inside_its_root_and_lead_nowhere_else(inside: Path) -> None:
    (inside / "real").mkdir()
    (inside / "real" / "rank_0").write_bytes(b"dump")
    (inside / "tmp").symlink_to("/real")
    (inside / "up").symlink_to("../../../../../real")
    assert content(inside, "/tmp/rank_0") == b"dump"
    assert content(inside, "/up/rank_0") == b"dump"
    secret = inside.parent / "secret_0"
    secret.write_bytes(b"the host's")
    (inside / "link_0").symlink_to(secret)
    with pytest.raises(FileNotFoundError):
        content(inside, "/link_0")
    with pytest.raises(FileNotFoundError):
        content(inside, "/../secret_0")


def test_links_that_grow_end(inside: Path) -> None:
    (inside / "a").symlink_to("a/" * 1_000)
    with pytest.raises(NotTheirs):
        content(inside, "/a/x")


@pytest.mark.parametrize("path", ["relative", "", "/nul\0byte"])
def test_what_is_no_absolute_path_is_refused(inside: Path, path: str) -> None:
    with pytest.raises(NotTheirs):
        content(inside, path)


def test_a_pipe_is_not_opened(inside: Path) -> None:
    os.mkfifo(inside / "rank_0")
    with pytest.raises(NotTheirs, match="not a regular file"):
        content(inside, "/rank_0")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")
def test_a_file_of_another_user_is_not_read(inside: Path) -> None:
    (inside / "rank_0").write_bytes(b"x")
    os.chown(inside / "rank_0", 12_345, 12_345)
    with pytest.raises(NotTheirs, match="belongs to user 12345"):
        content(inside, "/rank_0")


def test_a_process_that_hides_its_owner_is_its_users_all_the_same(inside: Path) -> None:
    (inside / "rank_0").write_bytes(b"x")
    status = inside.parent / "proc" / str(PID) / "status"
    status.write_text("Name:\tpython\nUid:\t4711\t0\t0\t0\n")  # its folder in /proc is root's, as ours is here
    with pytest.raises(NotTheirs, match="the process to user 4711"):
        content(inside, "/rank_0")


def test_a_process_that_has_ended_is_no_owner(inside: Path) -> None:
    (inside.parent / "proc" / str(PID) / "status").unlink()
    with pytest.raises(ProcessLookupError, match="process 7 has ended"):
        content(inside, "/rank_0")
    with pytest.raises(ProcessLookupError):
        environment(inside.parent / "proc", PID)


def test_an_environment_may_hold_anything(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "environ").write_bytes(b"A=1\0no equals sign\0=empty\0B=x=y\0\0C=\xff\0D=")
    assert environment(tmp_path, PID) == ({"A": "1", "B": "x=y", "C": "\ufffd", "D": ""}, False)


def test_a_huge_environment_is_cut(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "environ").write_bytes(b"A=1\0B=" + b"x" * (ENVIRON_BYTES_MAX + 10))
    variables, more = environment(tmp_path, PID)
    assert more
    assert variables["A"] == "1"


def test_a_file_is_read_up_to_the_limit(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"12345")
    assert read(tmp_path / "x", 5) == (b"12345", False)
    assert read(tmp_path / "x", 4) == (b"1234", True)


@pytest.mark.parametrize("bytes_max", [0, 4, 5, 6])
def test_an_open_file_is_read_up_to_the_limit(tmp_path: Path, bytes_max: int) -> None:
    (tmp_path / "x").write_bytes(b"12345")
    with (tmp_path / "x").open("rb") as file:
        assert read_open(file.fileno(), bytes_max) == (b"12345"[:bytes_max], bytes_max < 5)


def test_a_file_that_only_the_kernel_makes_up_is_not_read() -> None:
    path = Path("/proc/self/status")  # a regular file of no size, as those are that never end
    assert path.read_bytes()
    with path.open("rb") as file:
        assert read_open(file.fileno(), 1_000) == (b"", False)
