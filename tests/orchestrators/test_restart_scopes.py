"""Restarts that keep processes, on real ones: gloo on the CPU, checkpoints in memory."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.orchestrators.builders import stub_server
from tests.orchestrators.test_launch import Launched, eventually, launched, running, send_action

pytest.importorskip("torch", reason="torch is not installed: pip install 'eagle-eye[ml]'")

from eagle_eye.checkpoint.store_client import end_store

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("restartable_training.py")
NODES = ("n1", "n2", "n3", "n4")
STEPS = 100
ENDS_WITHIN_S = 300.0  # on a machine that has other work as well


@pytest.fixture
def memory() -> Iterator[Path]:
    """A place for the nodes' stores, none of which is left behind."""
    folder = Path(tempfile.mkdtemp(prefix="eagle-eye-test-", dir="/dev/shm"))
    try:
        yield folder
    finally:
        for node in NODES:
            end_store(folder / node)
        shutil.rmtree(folder, ignore_errors=True)


def words(memory: Path, *more: str) -> tuple[str, ...]:
    env = {
        "EAGLE_EYE_CHECKPOINT_STORE": f"{memory}/{{node}}",
        "EAGLE_EYE_HOOK_SOCKET": f"{memory}/nobody-listens",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    imports = "torch.nn.parallel,eagle_eye.agent.hook,eagle_eye.checkpoint.checkpointer"
    standby = ("--standby", "on", "--standby-import", imports)
    variables = [word for name, value in env.items() for word in ("--env", f"{name}={value}")]
    return ("--nnodes", "3", *variables, *standby, *more)


def losses(folder: Path) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """What each rank said of each step, in the order in which it came."""
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for rank in range(3):
        for line in (folder / "checkpoints" / f"losses-{rank}.jsonl").read_text().splitlines():
            said = json.loads(line)
            found.setdefault((rank, said["step"]), []).append(said)
    return found


def came_to(launcher: Launched, attempt: int, step: int) -> None:
    def is_there() -> bool:
        path = launcher.folder / "checkpoints" / "losses-0.jsonl"
        lines = path.read_text().splitlines()[-1:] if path.exists() else []
        return any((said := json.loads(line))["attempt"] == attempt and said["step"] >= step for line in lines)

    eventually(is_there)


def pids(event: dict[str, Any]) -> dict[int, int]:
    return {rank["rank"]: rank["pid"] for rank in event["ranks"]}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], str]:
    """The losses of a run to which nothing happens."""
    folder = tmp_path_factory.mktemp("undisturbed")
    memory = Path(tempfile.mkdtemp(prefix="eagle-eye-test-", dir="/dev/shm"))
    try:
        with launched(folder, "n1,n2,n3", *words(memory), "--without-server", steps=STEPS, script=SCRIPT) as launcher:
            assert launcher.ends(ENDS_WITHIN_S) == 0
        return {key: said[-1]["loss"] for key, said in losses(folder).items()}
    finally:
        for node in NODES:
            end_store(memory / node)
        shutil.rmtree(memory, ignore_errors=True)


def assert_same_course(folder: Path, undisturbed: dict[tuple[int, int], str]) -> None:
    """Every rank made every step, and each as often as it was made with the loss of the undisturbed run."""
    found = losses(folder)
    assert found.keys() == undisturbed.keys()
    assert {key: {one["loss"] for one in said} for key, said in found.items()} == {
        key: {loss} for key, loss in undisturbed.items()
    }


def test_after_a_killed_rank_the_others_stay_and_the_course_of_training_is_that_of_an_undisturbed_run(
    tmp_path: Path, memory: Path, undisturbed: dict[tuple[int, int], str]
) -> None:
    with launched(tmp_path, "n1,n2,n3", *words(memory), "--without-server", steps=STEPS, script=SCRIPT) as launcher:
        first = launcher.wait("running", 1)
        launcher.wait("verified", 1)
        came_to(launcher, 1, 20)
        os.kill(pids(first)[1], signal.SIGKILL)
        stopping = launcher.wait("stopping", 2)
        assert (stopping["scope"], stopping["stay"]) == ("process_group", ["n1", "n3"])
        second = launcher.wait("running", 2)
        assert second["kept"] == ["n1", "n3"], launcher.events
        assert [pids(second)[rank] == pids(first)[rank] for rank in range(3)] == [True, False, True]
        assert launcher.ends(ENDS_WITHIN_S) == 0
    assert [one for one in launcher.events if one["event"] == "widened"] == []
    assert_same_course(tmp_path, undisturbed)
    assert {one["pid"] for (rank, _), said in losses(tmp_path).items() if rank == 0 for one in said} == {pids(first)[0]}


def test_of_a_hang_the_culprit_ends_and_the_others_go_on_with_a_spare(
    tmp_path: Path, memory: Path, undisturbed: dict[tuple[int, int], str]
) -> None:
    with (
        stub_server() as server,
        launched(
            tmp_path, ",".join(NODES), *words(memory), "--server", server.url, steps=STEPS, script=SCRIPT
        ) as launcher,
    ):
        first = launcher.wait("running", 1)
        launcher.wait("verified", 1)
        came_to(launcher, 1, 20)
        os.kill(pids(first)[1], signal.SIGSTOP)
        send_action(server, launcher, restart_scope="rank")
        second = launcher.wait("running", 2)
        assert second["nodes"] == ["n1", "n4", "n3"]
        assert second["kept"] == ["n1", "n3"], launcher.events
        assert pids(second)[0] == pids(first)[0]
        assert not running(pids(first)[1])
        assert launcher.ends(ENDS_WITHIN_S) == 0
    assert_same_course(tmp_path, undisturbed)


def test_where_those_that_stay_make_no_step_in_time_every_process_is_new(
    tmp_path: Path, memory: Path, undisturbed: dict[tuple[int, int], str]
) -> None:
    more = ("--regroup-wait", "8", "--env", "STAYS_AWAY=1")
    with launched(
        tmp_path, "n1,n2,n3", *words(memory, *more), "--without-server", steps=STEPS, script=SCRIPT
    ) as launcher:
        first = launcher.wait("running", 1)
        launcher.wait("verified", 1)
        came_to(launcher, 1, 20)
        os.kill(pids(first)[1], signal.SIGKILL)
        third = launcher.wait("running", 3)
        assert [event["to"] for event in launcher.events if event["event"] == "widened"][-1:] == ["job"]
        assert third["kept"] == []
        assert set(pids(third).values()).isdisjoint(pids(first).values())
        assert launcher.ends(ENDS_WITHIN_S) == 0
    assert_same_course(tmp_path, undisturbed)
