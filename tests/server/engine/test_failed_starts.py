"""Starts that fail at one node alone: a restart with the same nodes is asked for once, then the node goes."""

from __future__ import annotations

import msgspec

from tests.detectors.test_failed_start import FRAMES, GLOO
from tests.server.engine.test_respond import Office
from tests.server.engine.test_start_hang import Starting


def fails(office: Office, fleet: Starting, attempt: int, node: str) -> None:
    """The attempt's start fails at the node; what is asked for is carried out."""
    fleet.restarted(attempt)
    office.take(fleet.run(4))
    who = {"rank": fleet.nodes.index(node), "job": "j", "attempt": attempt}
    fleet.happens(node, "training_error", text=FRAMES + GLOO, **who)
    fleet.happens(node, "process_exit", exit_code=1, pid=7, goodbye=False, **who)
    office.take(fleet.run(5))
    for action in office.actions.values():
        if action.state == "requested":
            office.actions[action.id] = msgspec.structs.replace(action, state="done")


def asked(office: Office) -> list[tuple[int, str, list[str]]]:
    return [(action.attempt, action.kind, action.exclude) for action in office.actions.values()]


def test_within_seconds_of_the_second_failed_start_its_node_is_excluded() -> None:
    office, fleet = Office(), Starting().trained()
    fails(office, fleet, 1, "n1")
    fails(office, fleet, 2, "n1")
    assert asked(office) == [(1, "restart_job", []), (2, "exclude_node", ["n1"])]
    assert {action.fault for action in office.actions.values()} == {"network_hang"}


def test_a_job_that_never_made_a_step_is_judged_alike() -> None:
    office, fleet = Office(), Starting()
    fails(office, fleet, 0, "n1")
    fails(office, fleet, 1, "n1")
    assert asked(office)[-1] == (1, "exclude_node", ["n1"])


def test_starts_that_fail_at_different_nodes_exclude_none() -> None:
    office, fleet = Office(), Starting().trained()
    for attempt, node in enumerate(("n1", "n2", "n1", "n2"), start=1):
        fails(office, fleet, attempt, node)
    assert {(kind, tuple(exclude)) for _, kind, exclude in asked(office)} == {("restart_job", ())}


def test_an_attempt_that_made_steps_ends_the_row() -> None:
    office, fleet = Office(), Starting().trained()
    fails(office, fleet, 1, "n2")
    fleet.starting = fleet.stopped = False
    fleet.declare(2)
    office.take(fleet.run(20))
    fails(office, fleet, 3, "n1")
    assert asked(office)[-1] == (3, "restart_job", [])
    assert list(office.incidents.values())[-1].node == "n1"
