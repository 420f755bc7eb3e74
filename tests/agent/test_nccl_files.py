"""The files that training processes name: whose they are, how they grow, and what the environment tells of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.agent.nccl.owned_file import NotOwned, open_owned, open_owned_pipe
from eagle_eye.agent.nccl.process_environment import PROCESSES_MAX, Environments
from eagle_eye.agent.nccl.tail import Tail
from tests.agent.nccl_fakes import FakeProc, process

OWN = os.geteuid()
SOMEBODY = OWN + 1


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path)


def test_a_file_of_the_processes_own_user_is_opened(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"abc")
    descriptor = open_owned(tmp_path / "log", OWN)
    assert os.read(descriptor, 9) == b"abc"
    os.close(descriptor)


def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"abc")
    with pytest.raises(NotOwned, match=f"belongs to user {OWN}, the process to user {SOMEBODY}"):
        open_owned(tmp_path / "log", SOMEBODY)


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "log"
    if kind == "link":
        (tmp_path / "secret").write_bytes(b"s")
        path.symlink_to(tmp_path / "secret")
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    with pytest.raises(NotOwned, match="not a regular file"):
        open_owned(path, OWN)


def test_only_a_pipe_is_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"keep")
    with pytest.raises(NotOwned, match="not a named pipe"):
        open_owned_pipe(tmp_path / "file", OWN)
    assert (tmp_path / "file").read_bytes() == b"keep"


def test_each_line_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\nthr")
    tail = Tail(path, OWN, 100)
    assert tail.read() == b"one\ntwo\n"
    with path.open("ab") as file:
        file.write(b"ee\n")
    assert tail.read() == b"three\n"
    assert tail.read() == b""


def test_a_file_that_was_cut_short_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\ntwo\n")
    tail = Tail(path, OWN, 100)
    tail.read()
    path.write_bytes(b"a\n")
    assert tail.read() == b"a\n"


def test_a_file_that_was_exchanged_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"one\n")
    tail = Tail(path, OWN, 100)
    tail.read()
    (tmp_path / "next").write_bytes(b"much longer than before\n")
    (tmp_path / "next").rename(path)
    assert tail.read() == b"much longer than before\n"


def test_where_too_much_has_come_the_newest_is_read_and_the_rest_counted(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"".join(b"%08d\n" % number for number in range(100)))
    tail = Tail(path, OWN, 20)
    assert tail.read() == b"00000098\n00000099\n"
    assert tail.skipped_bytes == 98 * 9
    assert tail.read() == b""
    assert tail.skipped_bytes == 0


def test_a_line_longer_than_is_read_is_passed_over_at_a_bounded_cost(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * 10_000_000)
    tail = Tail(path, OWN, 1000)
    assert tail.read() == b""
    with path.open("ab") as file:
        file.write(b"yyy\nnext\n")
    assert tail.read() == b"next\n"
    assert tail.read() == b""


def test_a_file_that_vanishes_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Tail(tmp_path / "log", OWN, 100).read()


@given(st.lists(st.binary(max_size=40), max_size=8), st.integers(1, 30))
def test_however_a_file_grows_only_whole_lines_of_it_are_returned(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes], most: int
) -> None:
    path = tmp_path_factory.mktemp("tail") / "log"
    path.write_bytes(b"")
    tail, everything = Tail(path, OWN, most), b""
    lines: list[bytes] = []
    for piece in pieces:
        with path.open("ab") as file:
            file.write(piece)
        everything += piece
        raw = tail.read()
        assert len(raw) <= most
        assert not raw or raw.endswith(b"\n")
        lines += raw.split(b"\n")[:-1]
    whole = everything.split(b"\n")
    for line in lines:  # in order, each once
        assert line in whole
        whole = whole[whole.index(line) + 1 :]


def test_only_what_concerns_nccl_is_kept_of_an_environment(proc: FakeProc) -> None:
    proc.runs(1000, {"NCCL_RAS_ADDR": "localhost:3", "WANDB_API_KEY": "secret", "HOME": "/root"}, own_pid=17)
    (found,) = Environments(proc.path).of([process()]).values()
    assert found.values == {"NCCL_RAS_ADDR": "localhost:3", "HOME": "/root"}
    assert (found.own_pid, found.uid) == (17, OWN)


def test_paths_are_found_as_the_process_means_them(proc: FakeProc) -> None:
    proc.runs(1000)
    (found,) = Environments(proc.path).of([process()]).values()
    assert found.path("dumps/x") == proc.folder / "dumps/x"
    assert found.path("/tmp/x") == Path("/tmp/x")


def test_paths_in_a_container_are_found_through_its_process(proc: FakeProc, tmp_path: Path) -> None:
    proc.runs(1000)
    (proc.path / "1000/root").unlink()
    (proc.path / "1000/root").symlink_to(tmp_path)
    (found,) = Environments(proc.path).of([process()]).values()
    assert found.path("/tmp/x") == proc.path / "1000/root/tmp/x"
    assert found.path("x") == proc.path / "1000/cwd/x"


def test_an_environment_that_may_not_be_read_is_a_problem_with_a_remedy(proc: FakeProc) -> None:
    proc.runs(1000)
    (proc.path / "1000/environ").unlink()
    (proc.path / "1000/environ").mkdir()  # root may read every file
    environments = Environments(proc.path)
    assert environments.of([process()]) == {}
    assert environments.problem().startswith("environment of process 1000: Is a directory; run the agent as root")


def test_a_process_that_has_ended_is_no_problem(proc: FakeProc) -> None:
    environments = Environments(proc.path)
    assert environments.of([process()]) == {}
    assert environments.problem() == ""


def test_the_number_of_processes_that_are_looked_at_is_bounded(proc: FakeProc) -> None:
    ranks = range(PROCESSES_MAX + 1)
    for rank in ranks:
        proc.runs(1000 + rank)
    environments = Environments(proc.path)
    assert len(environments.of([process(rank) for rank in ranks])) == PROCESSES_MAX
    assert f"more than {PROCESSES_MAX}" in environments.problem()


@given(st.binary())
def test_any_environment_is_survived(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    proc = FakeProc(tmp_path_factory.mktemp("proc"))
    proc.runs(1000)
    (proc.path / "1000/environ").write_bytes(raw)
    assert len(Environments(proc.path).of([process()])) == 1
