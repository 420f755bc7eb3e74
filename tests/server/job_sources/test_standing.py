"""Whose a drain is: the administrator's is never touched, ours is ours until its reason is another."""

from __future__ import annotations

from typing import Any

import pytest

from eagle_eye.server.jobs.reconcile import standing
from eagle_eye.server.jobs.source import ScheduledNode
from eagle_eye.server.model.identity import NodeNames
from eagle_eye.server.model.records import Node

NAMES = NodeNames(["n1"])


def after(said: ScheduledNode, **known: Any) -> Node | None:
    """Return what becomes of n1, None: nothing."""
    record = Node(**{"node": "n1", "state": "in_service", "reason": "", "updated_s": 0.0, **known})
    changed = standing("slurm", [said], {"n1": record}, NAMES, 9.0)
    return changed[0] if changed else None


def drained(reason: str = "bad fan") -> ScheduledNode:
    return ScheduledNode("n1", "excluded", reason, drained=True)


DOWN = ScheduledNode("n1", "excluded", "Not responding")
OURS = {"state": "excluded", "by": "server", "fault": "gpu_lost", "reason": "gpu_lost: incident inc_1"}


def test_an_administrators_drain_takes_the_node_out_in_his_name() -> None:
    node = after(drained())
    assert node is not None
    assert (node.state, node.by, node.reason, node.updated_s) == ("excluded", "slurm", "bad fan", 9.0)


def test_it_comes_back_on_his_word() -> None:
    node = after(ScheduledNode("n1", "in_service"), state="excluded", by="slurm", reason="bad fan")
    assert node is not None
    assert node.state == "in_service"


@pytest.mark.parametrize("known", [{}, {"state": "excluded", "by": "slurm", "reason": "bad fan"}])
def test_a_node_of_which_the_scheduler_cannot_tell_stays_as_it_is(known: dict[str, str]) -> None:
    assert after(ScheduledNode("n1", ""), **known) is None


def test_another_reason_is_written_down() -> None:
    node = after(drained("replaced fan, burn-in"), state="excluded", by="slurm", reason="bad fan")
    assert node is not None
    assert node.reason == "replaced fan, burn-in"


def test_a_drain_of_ours_is_not_the_schedulers() -> None:
    assert after(drained("eagle-eye: inc_1 gpu_lost"), **OURS) is None
    assert after(drained("eagle-eye: inc_1 gpu_lost")) is None


def test_a_drain_of_ours_whose_reason_has_changed_is_no_longer_ours() -> None:
    node = after(drained("sent to the vendor"), **OURS)
    assert node is not None
    assert (node.by, node.reason) == ("slurm", "sent to the vendor")


def test_a_node_of_ours_that_goes_down_meanwhile_stays_ours() -> None:
    assert after(DOWN, **OURS) is None


def test_what_we_or_a_person_took_out_does_not_come_back_because_slurm_has_it_in_service() -> None:
    assert after(ScheduledNode("n1", "in_service"), **OURS) is None
    assert after(ScheduledNode("n1", "in_service"), state="excluded", by="tok_alice", reason="mine") is None


def test_what_a_person_took_out_stays_his() -> None:
    assert after(drained(), state="draining", by="tok_alice", reason="mine") is None


def test_a_node_that_nobody_heard_of_is_left_alone() -> None:
    assert standing("slurm", [drained()], {}, NAMES, 9.0) == ()
