"""torchft's collectives as the hook sees them, on a Manager that is played."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eagle_eye.agent.hook import attach
from eagle_eye.agent.training_hook.torchft_manager import MODULE, CollectivePosition, ReplicaCollectives


class Manager:
    """Its methods call ``inside``, as somebody else would look meanwhile."""

    def __init__(self, step: int = 7) -> None:
        self._step, self._quorum_id = step, 3
        self.commits = True
        self.inside: Callable[[], object] = lambda: None

    def current_step(self) -> int:
        return self._step

    def wait_quorum(self) -> None:
        self.inside()

    def allreduce(self, tensor: str) -> str:
        self.wait_quorum()
        return f"{tensor} reduced"

    def should_commit(self) -> bool:
        self._step += self.commits
        return self.commits


class Watched:
    """A Manager class of its own, and what is seen of it."""

    def __init__(self) -> None:
        self.failed: list[BaseException] = []
        self.collectives = ReplicaCollectives(self.failed.append)
        self.kind = type("Manager", (Manager,), {**Manager.__dict__})
        self.collectives.attach({MODULE: SimpleNamespace(Manager=self.kind)})
        self.manager: Any = self.kind()

    def seen(self) -> CollectivePosition | None:
        return self.collectives.position()


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_before_the_first_call_nothing_is_observed(watched: Watched) -> None:
    assert watched.seen() is None


def test_a_rank_is_in_the_step_s_collective_from_its_first_reduction_to_its_commit(watched: Watched) -> None:
    assert watched.manager.allreduce("gradients") == "gradients reduced"
    assert watched.seen() == CollectivePosition(8, 7, 3)
    assert watched.manager.should_commit() is True
    assert watched.seen() == CollectivePosition(8, 8, 3)


def test_a_step_that_is_tried_again_is_the_same_collective(watched: Watched) -> None:
    watched.manager.commits = False
    watched.manager.allreduce("gradients")
    assert watched.manager.should_commit() is False
    assert watched.seen() == CollectivePosition(7, 7, 3)
    watched.manager.allreduce("gradients")
    assert watched.seen() == CollectivePosition(8, 7, 3)


def test_who_waits_for_the_quorum_waits_for_the_others(watched: Watched) -> None:
    during: list[CollectivePosition | None] = []
    watched.manager.inside = lambda: during.append(watched.seen())
    watched.manager.wait_quorum()
    assert during == [CollectivePosition(8, 7, 3)]
    assert watched.seen() == CollectivePosition(7, 7, 3)


def test_an_error_of_torchft_reaches_the_program(watched: Watched) -> None:
    def fail() -> None:
        raise TimeoutError("no quorum")

    watched.manager.inside = fail
    with pytest.raises(TimeoutError, match="no quorum"):
        watched.manager.wait_quorum()
    assert watched.seen() == CollectivePosition(7, 7, 3)


def test_an_error_of_ours_does_not_reach_the_program(watched: Watched) -> None:
    del watched.manager._step
    assert watched.manager.allreduce("gradients") == "gradients reduced"
    assert [type(error) for error in watched.failed] == [AttributeError] * 3


def test_a_quorum_that_torchft_does_not_show_is_not_observed(watched: Watched) -> None:
    del watched.manager._quorum_id
    watched.manager.allreduce("gradients")
    assert watched.seen() == CollectivePosition(8, 7, -1)


def test_a_manager_that_is_gone_is_not_observed(watched: Watched) -> None:
    watched.manager.allreduce("gradients")
    watched.manager = None
    assert watched.seen() is None


def test_torchft_has_its_methods_back_afterwards(watched: Watched) -> None:
    watched.collectives.remove()
    assert watched.kind.__dict__["allreduce"] is Manager.allreduce
    watched.manager.allreduce("gradients")
    assert watched.seen() is None


def test_another_version_is_left_alone_and_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = type("Manager", (), {"current_step": Manager.current_step, "allreduce": Manager.allreduce})
    monkeypatch.setitem(sys.modules, MODULE, SimpleNamespace(Manager=other))
    training = attach(socket=tmp_path / "nobody.sock")
    try:
        assert training.failures == 1
        assert other.__dict__["allreduce"] is Manager.allreduce
    finally:
        training.detach()


def test_the_hook_reports_them_as_its_collectives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kind: Any = type("Manager", (Manager,), {**Manager.__dict__})
    monkeypatch.setitem(sys.modules, MODULE, SimpleNamespace(Manager=kind))
    training = attach(socket=tmp_path / "nobody.sock")
    try:
        manager = kind()
        manager.allreduce("gradients")
        assert training._sequences() == (8, 7)
        assert training._state.quorum == 3
    finally:
        training.detach()
