"""An attempt that makes no first step: reported after the start's deadline, where steps were to be seen at all."""

from __future__ import annotations

import msgspec

from eagle_eye.detectors.types import Verdict
from eagle_eye.schema.frame import Frame, block
from eagle_eye.schema.metrics import Scope
from eagle_eye.server.engine.judgement import Judgement
from tests.server.engine.frames import SETTINGS, Fleet

DEADLINE_S = 50


class Starting(Fleet):
    """A fleet whose ranks say nothing of themselves while ``starting``; agents name the processes they see."""

    def __init__(self, nodes: int = 3, gpu_tensor_active_ratio: float | None = None) -> None:
        super().__init__(nodes, msgspec.structs.replace(SETTINGS, start_deadline_s=DEADLINE_S))
        self.starting = False
        self.unseen: set[str] = set()  # nodes whose agents see no process of the job
        self.attached: set[str] = set()  # nodes whose hook has come as far as its first word
        self.tensor_ratio = gpu_tensor_active_ratio

    def frame(self, node: str) -> Frame:
        """Return the node's next frame."""
        frame = super().frame(node)
        if not self.starting:
            return frame
        gpu = {} if self.tensor_ratio is None else {"gpu_tensor_active_ratio": self.tensor_ratio}
        blocks = [block(Scope.DEVICE, {0: gpu})] if gpu else []
        blocks.append(block(Scope.NODE, {-1: {"node_cpu_utilization_ratio": 0.1}}))
        return msgspec.structs.replace(frame, blocks=blocks, ranks=[] if node in self.unseen else frame.ranks)

    def restarted(self, attempt: int = 1) -> Starting:
        """The launcher has declared the next attempt, and its ranks are starting."""
        self.starting = True
        self.stopped = True
        self.silent_s.clear()
        self.declare(attempt)
        for node in self.attached:
            self.happens(node, "phase", name="start", rank=self.nodes.index(node), job="j", attempt=attempt)
        return self

    def trained(self) -> Starting:
        """An attempt whose ranks reported their steps is behind it."""
        self.declare(0)
        self.run(20)
        return self


def hangs(judged: list[Judgement]) -> list[Verdict]:
    """Return the verdicts of a hang at the last moment."""
    return [verdict for verdict in judged[-1].verdicts if verdict.fault == "hang"]


def only(judged: list[Judgement]) -> Verdict:
    (verdict,) = hangs(judged)
    return verdict


def test_a_restart_of_which_nobody_hears_anything_is_a_hang_after_the_deadline_and_cannot_be_told_before() -> None:
    fleet = Starting().trained().restarted()
    before = fleet.run(DEADLINE_S - 1)
    assert {one.verdicts for one in before} == {()}
    assert "hang" in before[-1].blind
    verdict = only(fleet.run(3))
    assert (verdict.node, verdict.asks, set(verdict.kinds)) == (None, None, {"standstill"})
    assert "first step" in verdict.summary


def test_a_job_that_never_reported_a_step_stays_cannot_tell() -> None:
    fleet = Starting().restarted(0)
    judged = fleet.run(2 * DEADLINE_S)
    assert {one.verdicts for one in judged} == {()}
    assert "hang" in judged[-1].blind


def test_a_restart_whose_gpus_compute_has_lost_its_hook_and_does_not_hang() -> None:
    fleet = Starting(gpu_tensor_active_ratio=0.4).trained().restarted()
    assert {one.verdicts for one in fleet.run(2 * DEADLINE_S)} == {()}


def test_a_restart_whose_gpus_do_not_compute_hangs_however_steadily_they_idle() -> None:
    fleet = Starting(gpu_tensor_active_ratio=0.0).trained().restarted()
    assert only(fleet.run(DEADLINE_S + 2)).node is None


def test_the_one_node_whose_process_no_agent_has_seen_is_restarted_with_first() -> None:
    fleet = Starting()
    fleet.trained().unseen = {"n1"}
    verdict = only(fleet.restarted().run(DEADLINE_S + 2))
    assert (verdict.node, verdict.asks) == ("n1", "restart_job")
    assert verdict.kinds == {"standstill", "rank_missing"}
    assert "of its ranks 1 nothing was heard" in verdict.summary


def test_a_rank_that_never_spoke_where_others_did_is_named_also_in_a_first_attempt() -> None:
    fleet = Starting()
    fleet.attached = {"n0", "n2"}
    verdict = only(fleet.restarted(0).run(DEADLINE_S + 2))
    assert (verdict.node, verdict.asks) == ("n1", "restart_job")


def test_a_rank_that_spoke_and_stopped_is_the_culprit_by_two_kinds_of_evidence() -> None:
    fleet = Starting()
    fleet.attached = set(fleet.nodes)
    fleet.restarted(0).run(30)
    for second in range(DEADLINE_S - 28):
        fleet.silent_s["n2"] = 20.0 + second
        judged = fleet.run(1)
    verdict = only(judged)
    assert (verdict.node, verdict.asks) == ("n2", None)
    assert verdict.kinds == {"standstill", "rank_silence"}


def test_many_that_are_not_heard_accuse_nobody() -> None:
    fleet = Starting(4)
    fleet.trained().unseen = {"n1", "n3"}
    assert only(fleet.restarted().run(DEADLINE_S + 2)).node is None


def test_a_second_mute_start_in_a_row_is_only_reported() -> None:
    fleet = Starting().trained().restarted()
    fleet.run(DEADLINE_S + 2)
    verdict = only(fleet.restarted(2).run(DEADLINE_S + 2))
    assert (verdict.node, verdict.asks) == (None, "notify")


def test_a_node_that_fell_silent_during_the_start_is_unreachable_once_the_start_is_overdue() -> None:
    fleet = Starting(4).trained().restarted()
    fleet.run(20)
    fleet.mute = {"n1"}
    judged = fleet.run(DEADLINE_S - 18)
    (verdict,) = (one for one in judged[-1].verdicts if one.fault == "node_unreachable")
    assert (verdict.node, set(verdict.kinds)) == ("n1", {"silence", "standstill"})


def test_the_launchers_word_on_who_holds_a_start_up_is_reported_at_once_and_restarts() -> None:
    fleet = Starting().trained().restarted()
    assert hangs(fleet.run(10)) == []
    fleet.declare(1, held_up_by=[2])
    verdict = only(fleet.run(1))
    assert (verdict.node, verdict.asks) == ("n2", "restart_job")
    assert "its launcher says that ranks 2" in verdict.summary
    assert hangs(fleet.restarted(2).run(10)) == []


def test_ranks_are_looked_up_among_the_members_that_the_launcher_named_last() -> None:
    fleet = Starting(4).trained().restarted()
    fleet.run(2)
    fleet.declare(1, nodes=["n0", "n2", "n3"])  # it does without n1, before any rank starts
    fleet.run(2)
    fleet.declare(1, held_up_by=[1])
    assert only(fleet.run(1)).node == "n2"


def test_a_node_that_the_launcher_does_without_is_no_member() -> None:
    fleet = Starting(4).trained().restarted()
    fleet.run(2)
    fleet.declare(1, nodes=["n0", "n2", "n3"])
    fleet.run(2)
    (track,) = fleet.engine.tracks()
    assert track.nodes == ("n0", "n2", "n3")


def test_what_was_seen_of_members_that_stay_is_kept() -> None:
    fleet = Starting(4).trained().restarted()
    for node in ("n1", "n2"):
        fleet.happens(node, "xid", code=79)
    fleet.run(2)
    fleet.declare(1, nodes=["n0", "n2", "n3"])
    (track,) = fleet.engine.tracks()
    assert [event.node for event in track.events if event.kind == "xid"] == ["n2"]


def test_members_named_otherwise_once_steps_were_made_change_nothing() -> None:
    fleet = Starting(4).trained()
    fleet.declare(0, nodes=["n0", "n2", "n3"])
    (track,) = fleet.engine.tracks()
    assert len(track.nodes) == 4
    assert track.last_step is not None


def test_several_nodes_that_hold_a_start_up_accuse_none_and_the_job_restarts() -> None:
    fleet = Starting(4).trained().restarted()
    fleet.run(10)
    fleet.declare(1, held_up_by=[1, 3])
    verdict = only(fleet.run(1))
    assert (verdict.node, verdict.asks) == (None, None)


def test_an_observer_who_came_late_waits_for_a_whole_deadline() -> None:
    fleet = Starting().trained().restarted()
    fleet.run(DEADLINE_S - 10)
    fleet.engine.resume_watching(fleet.now_s)
    assert hangs(fleet.run(DEADLINE_S - 2)) == []
    assert hangs(fleet.run(4)) != []


def test_a_start_that_ends_before_its_deadline_is_nothing() -> None:
    fleet = Starting().trained().restarted()
    fleet.run(DEADLINE_S - 5)
    fleet.starting = fleet.stopped = False
    assert {one.verdicts for one in fleet.run(30)} == {()}
