from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from eagle_eye.orchestrators.orchestrate import settings
from eagle_eye.orchestrators.orchestrate.settings import KINDS
from eagle_eye.orchestrators.protocol import CannotCarryOutError, Exclusion, JobState, OrchestratorError, Restart
from eagle_eye.orchestrators.torchft.orchestrator import (
    Lighthouse,
    TorchftJob,
    TorchftMemory,
    TorchftOrchestrator,
    parse_status,
)
from eagle_eye.schema.action import JobUpdate
from tests.orchestrators.contract import OrchestratorContract, cause
from tests.orchestrators.lighthouse import FakeLighthouse, status_page

NOW_S = 1_800_000_000.0


class Trio:
    """Three replica groups, train_0 to train_2 on n1 to n3, which train on a played lighthouse."""

    job = "llm"
    node = "n2"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now_s = NOW_S
        self.terms = TorchftJob("llm", {}, replicas_min=1, gone_within_s=0.3, on_within_s=0.3)
        self.lighthouse = FakeLighthouse({f"train_{n}:old-{n}": f"n{n + 1}" for n in range(3)}, replaced_on="n9")
        self.lighthouse.start()
        self.open: list[TorchftOrchestrator] = []
        self.orchestrator = self.reopened()

    def reopened(self) -> TorchftOrchestrator:
        memory = TorchftMemory(self.folder / "torchft.json", self.folder / "excluded")
        lighthouse = Lighthouse(self.lighthouse.url)
        made = TorchftOrchestrator(self.terms, lighthouse, memory, lambda: self.now_s, poll_s=0.01)
        self.open.append(made)
        return made

    def runs_on(self) -> frozenset[str]:
        return frozenset(self.lighthouse.replicas.values())

    def out(self) -> frozenset[str]:
        return frozenset((self.folder / "excluded").read_text().split())

    def snapshot(self) -> tuple[object, ...]:
        return (*sorted(self.lighthouse.replicas), *sorted(self.out()))

    def close(self) -> None:
        for orchestrator in self.open:
            orchestrator.close()
        self.lighthouse.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Trio]:
    made = Trio(tmp_path)
    yield made
    made.close()


class TestTorchft(OrchestratorContract):
    counts_attempts = False
    can_stop = False


def exclusion(*nodes: str, **changes: object) -> Exclusion:
    return replace(Exclusion("llm", 0, nodes, True, replace(cause(), detected_s=NOW_S)), **changes)  # type: ignore[arg-type]


def test_the_group_on_the_node_is_killed_and_no_other(world: Trio) -> None:
    world.orchestrator.state("llm")
    said = world.orchestrator.exclude(exclusion("n2"))
    assert said == "n2 in the exclude file; killed train_1:old-1"
    assert world.lighthouse.killed == ["train_1:old-1"]
    said = world.orchestrator.restart("llm", Restart(0, None, cause(), ("n2",)))
    assert said.startswith("3 replica groups train on, step ")
    assert said.endswith("; train_1 started again")


def test_groups_over_several_nodes_stand_in_a_file(world: Trio) -> None:
    world.terms = replace(world.terms, groups={"train_2": ("n3", "n4")})
    orchestrator = world.reopened()
    assert orchestrator.state("llm") == JobState(0, frozenset({"n1", "n2", "n3", "n4"}), running=True)
    assert orchestrator.exclude(exclusion("n4")).endswith("killed train_2:old-2")


def test_what_is_started_again_on_the_node_is_not_killed_for_the_same_action(world: Trio) -> None:
    world.lighthouse.replaced_on = "n2"
    world.orchestrator.state("llm")
    world.orchestrator.exclude(exclusion("n2"))
    world.reopened().exclude(exclusion("n2"))
    assert world.lighthouse.killed == ["train_1:old-1"]


def test_a_group_that_was_replaced_since_the_fault_is_left_alone(world: Trio) -> None:
    world.orchestrator.jobs()
    world.lighthouse.kill("train_1:old-1")
    world.lighthouse.replicas["train_1:newer"] = "n2"
    world.now_s += 60.0
    world.orchestrator.jobs()
    with pytest.raises(CannotCarryOutError, match="train_1:newer joined after the fault was found"):
        world.orchestrator.exclude(exclusion("n2"))
    assert "train_1:newer" in world.lighthouse.replicas
    assert world.out() == frozenset()


def test_so_many_groups_must_be_left(world: Trio) -> None:
    world.terms = replace(world.terms, replicas_min=3)
    with pytest.raises(CannotCarryOutError, match="2 of 3 replica groups would be left; --replicas-min is 3"):
        world.reopened().exclude(exclusion("n2"))
    assert (world.lighthouse.killed, world.out()) == ([], frozenset())


def test_a_group_that_does_not_end_is_a_failure(world: Trio) -> None:
    world.lighthouse.hung.add("train_1:old-1")
    with pytest.raises(CannotCarryOutError, match=r"train_1:old-1 still takes part 0.3 s after it was killed"):
        world.orchestrator.exclude(exclusion("n2"))


def test_groups_that_stand_still_are_no_success(world: Trio) -> None:
    world.orchestrator.exclude(exclusion("n2"))
    world.lighthouse.stands_still = True
    with pytest.raises(CannotCarryOutError, match="no replica group has taken a step"):
        world.orchestrator.restart("llm", Restart(0, None, cause(), ("n2",)))


def test_a_restart_without_a_culprit_ends_nobody_where_the_others_train_on(world: Trio) -> None:
    said = world.orchestrator.restart("llm", Restart(0, None, cause()))
    assert said.startswith("3 replica groups train on, step ")
    assert said.endswith("; no group was killed")
    assert world.lighthouse.killed == []


def test_new_quorums_without_a_step_are_no_training(world: Trio) -> None:
    world.lighthouse.stands_still, world.lighthouse.flaps = True, True
    world.orchestrator.restart("llm", Restart(0, None, cause()))
    assert len(world.lighthouse.killed) == 3


def test_a_restart_without_a_culprit_ends_groups_that_all_stand_and_waits_for_new_ones(world: Trio) -> None:
    world.lighthouse.stands_still = True
    said = world.orchestrator.restart("llm", Restart(0, None, cause()))
    assert sorted(world.lighthouse.killed) == ["train_0:old-0", "train_1:old-1", "train_2:old-2"]
    assert said.startswith("3 replica groups train on")
    world.lighthouse.replaced_on, world.lighthouse.stands_still = "", True
    with pytest.raises(CannotCarryOutError, match="no replica group has taken a step"):
        world.orchestrator.restart("llm", Restart(0, None, cause("act-2")))


def test_a_spoiled_state_cannot_be_healed_from_peers(world: Trio) -> None:
    with pytest.raises(CannotCarryOutError, match="not from a checkpoint"):
        world.orchestrator.restart("llm", Restart(0, NOW_S, cause(), ("n2",)))
    assert world.lighthouse.killed == []


def test_where_the_job_is_to_be_restarted_from_is_said_as_far_as_it_is_known(world: Trio) -> None:
    with pytest.raises(CannotCarryOutError, match=r"from the last good one \(EAGLE_EYE_RESUME_FROM=memory:40\)$"):
        world.orchestrator.restart("llm", Restart(0, NOW_S, cause(), ("n2",), resume_from="memory:40"))


def test_a_node_without_a_group_is_only_written_down(world: Trio) -> None:
    assert world.orchestrator.exclude(exclusion("n7")).endswith("no replica group is on it now")
    assert world.out() == {"n7"}


def test_a_dead_group_does_not_run_though_the_last_quorum_had_it(world: Trio) -> None:
    world.lighthouse.dead = dict.fromkeys(world.lighthouse.replicas, 9.0)
    state = world.orchestrator.state("llm")
    assert state is not None
    assert not state.running


def test_the_server_hears_of_the_job_where_that_is_wanted(world: Trio) -> None:
    assert world.orchestrator.jobs() == {}
    world.terms = replace(world.terms, reported=True)
    assert world.reopened().jobs() == {"llm": JobUpdate(0, "running")}


@pytest.mark.parametrize("page", ["<html>hello</html>", "Current quorum_id: 1", '<div class="member"><b>x</b></div>'])
def test_a_page_that_is_not_understood_is_no_empty_quorum(world: Trio, page: str) -> None:
    usual = world.lighthouse.status()
    world.lighthouse.page = page if "quorum_id" not in page else usual.replace(": seen", ": last seen")
    with pytest.raises(CannotCarryOutError, match="understood"):
        world.orchestrator.state("llm")


def test_no_lighthouse_is_no_answer(world: Trio) -> None:
    gone = TorchftOrchestrator(
        world.terms, Lighthouse("http://127.0.0.1:1"), TorchftMemory(world.folder / "t", world.folder / "e")
    )
    with pytest.raises(CannotCarryOutError, match="ConnectError"):
        gone.state("llm")
    gone.close()


def test_the_page_tells_who_takes_part_how_far_they_are_and_when_they_were_heard() -> None:
    replicas = {"train_0:a-1": (115, "http://127.0.1.1:43693"), "r&d:0:b": (-1, "http://[fd00::2]:41151")}
    ages = {"train_0:a-1": 4.7e-05, "r&d:0:b": 0.25, "train_9:gone": 61.0}
    status = parse_status(status_page(3, replicas, ages))
    assert [(one.id, one.group, one.step, one.host) for one in status.replicas] == [
        ("train_0:a-1", "train_0", 115, "127.0.1.1"),
        ("r&d:0:b", "r&d:0", -1, "fd00::2"),
    ]
    assert (status.quorum_id, status.step, status.heartbeats) == (3, 115, ages)


@pytest.mark.parametrize(
    ("fine", "spoilt"), [("seen 0.5s", "seen 1.2.3s"), ("[fd00::2]", "[fd00::2"), ("Step: 115", f"Step: {'9' * 5_000}")]
)
def test_a_number_or_an_address_that_is_none_is_not_understood(fine: str, spoilt: str) -> None:
    page = status_page(3, {"train_0:a": (115, "http://[fd00::2]:43693")}, {"train_0:a": 0.5})
    assert fine in page
    with pytest.raises(CannotCarryOutError, match="/status is not understood"):
        parse_status(page.replace(fine, spoilt))


def test_before_the_first_quorum_nobody_takes_part() -> None:
    assert parse_status(status_page(0, {}, {"train_0:a": 0.1})).replicas == ()


def build(tmp_path: Path, *flags: str) -> TorchftOrchestrator:
    kind = next(kind for kind in KINDS if kind.name == "torchft")
    options: argparse.Namespace = settings.read(kind, ["--job", "llm", "--state-dir", str(tmp_path), *flags], {})
    made = kind.load().build(options)
    assert isinstance(made, TorchftOrchestrator)
    return made


def test_its_options(tmp_path: Path, world: Trio) -> None:
    groups = tmp_path / "groups.json"
    groups.write_text(json.dumps({"train_0": ["n1", "n7"]}))
    made = build(tmp_path, "--lighthouse", world.lighthouse.url, "--groups", str(groups))
    state = made.state("llm")
    assert state is not None
    assert "n7" in state.nodes
    made.close()
    groups.write_text("[]")
    with pytest.raises(OrchestratorError, match="--groups"):
        build(tmp_path, "--groups", str(groups))
    with pytest.raises(ValueError, match="--lighthouse is 'lighthouse:29510'"):
        build(tmp_path, "--lighthouse", "lighthouse:29510")
    (tmp_path / "torchft.json").write_text("{")
    with pytest.raises(OrchestratorError, match="repair or remove it"):
        build(tmp_path)


def test_a_kill_that_the_lighthouse_does_not_answer_in_time_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def unanswered(*_: object, **_more: object) -> httpx.Response:
        raise httpx.ReadTimeout("the manager is stopped")

    lighthouse = Lighthouse("http://127.0.0.1:1")
    monkeypatch.setattr(lighthouse._http, "post", unanswered)
    monkeypatch.setattr(lighthouse._http, "get", unanswered)
    lighthouse.kill("train_1:old-1")
    with pytest.raises(CannotCarryOutError, match="ReadTimeout"):
        lighthouse.status()
