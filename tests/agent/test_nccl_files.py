"""What a training process's environment tells of the files of NCCL and PyTorch, and where they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.agent.processes.process_files import (
    ENVIRON_BYTES_MAX,
    ENVIRONMENTS_MAX,
    Environments,
    ProcessFiles,
    root_of,
)
from tests.agent.nccl_fakes import FakeProc, process

OWN = os.geteuid()


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path)


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
    proc.contains(1000, tmp_path)
    (found,) = Environments(proc.path).of([process()]).values()
    root = proc.path / "1000/root"
    assert found.path("/tmp/x") == root / "tmp/x"
    assert found.path("x") == root / "work/x"
    assert root_of(found.path("x"), found) == root
    assert root_of(Path("/configured/x"), found) == Path("/")


def test_a_process_with_mounts_of_its_own_is_not_taken_for_one_that_sees_the_hosts(proc: FakeProc) -> None:
    proc.runs(1000)
    (proc.path / "1000/ns").unlink()
    (proc.path / "1000/ns").mkdir()
    (proc.path / "1000/ns/mnt").touch()
    (found,) = Environments(proc.path).of([process()]).values()
    assert found.path("/tmp/x") == proc.path / "1000/root/tmp/x"


def test_an_environment_that_may_not_be_read_is_a_problem_with_a_remedy(
    proc: FakeProc, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_files: ProcessFiles, _pid: int) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(ProcessFiles, "environment", refused)  # root may read every file
    proc.runs(1000)
    environments = Environments(proc.path)
    assert environments.of([process()]) == {}
    said = "environment of process 1000: Permission denied; run the agent as root or as the job's user"
    assert environments.problem() == said


def test_an_environment_beyond_the_limit_is_named(proc: FakeProc) -> None:
    proc.runs(1000)
    (proc.path / "1000/environ").write_bytes(b"HOME=/root\0X=" + b"x" * ENVIRON_BYTES_MAX)
    environments = Environments(proc.path)
    assert environments.of([process()]) == {}
    assert environments.problem() == f"environment of process 1000: more than {ENVIRON_BYTES_MAX} bytes"


def test_a_program_that_runs_with_roots_rights_is_its_users(proc: FakeProc) -> None:
    proc.runs(1000)
    (proc.path / "1000/status").write_text("Name:\ta\rUid:\t0\nUid:\t4711\t0\t0\t0\nNSpid:\t1000\t7\n")
    (found,) = Environments(proc.path).of([process()]).values()
    assert (found.uid, found.own_pid) == (4711, 7)


def test_a_process_that_has_ended_is_no_problem(proc: FakeProc) -> None:
    environments = Environments(proc.path)
    assert environments.of([process()]) == {}
    assert environments.problem() == ""


def test_the_number_of_processes_that_are_looked_at_is_bounded(proc: FakeProc) -> None:
    ranks = range(ENVIRONMENTS_MAX + 1)
    for rank in ranks:
        proc.runs(1000 + rank)
    environments = Environments(proc.path)
    assert len(environments.of([process(rank) for rank in ranks])) == ENVIRONMENTS_MAX
    assert f"more than {ENVIRONMENTS_MAX}" in environments.problem()


@given(st.binary())
def test_any_environment_is_survived(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    proc = FakeProc(tmp_path_factory.mktemp("proc"))
    proc.runs(1000)
    (proc.path / "1000/environ").write_bytes(raw)
    assert len(Environments(proc.path).of([process()])) == 1
