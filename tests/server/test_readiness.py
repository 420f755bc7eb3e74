"""What /readyz says of nodes that nobody judges."""

from __future__ import annotations

from typing import cast

from eagle_eye.server.ingest.fleet import RECENT_S, Fleet
from eagle_eye.server.monitor.readiness import coverage_note
from eagle_eye.server.monitor.watcher import Outlook
from tests.server.accounts.past import course
from tests.server.builders import NOW, FakeClock, FakeWatcher, frame

FRESH_S = 10.0


def note(heard_s: dict[str, float]) -> str:
    """Return the note where nodes were last heard at these times before NOW and n1 and n2 have a job."""
    fleet = Fleet(nodes_max=100)
    for node, age_s in heard_s.items():
        fleet.heard(frame(node=node, time_s=NOW - age_s), NOW - age_s)
    outlook = cast("Outlook", FakeWatcher(FakeClock(), course=[course()]))
    return coverage_note(fleet, outlook, NOW, FRESH_S)


def test_nodes_that_report_and_have_a_job_are_judged() -> None:
    assert note({"n1": 0, "n2": 1}) == ""


def test_silent_nodes_are_not_judged() -> None:
    assert note({"n1": 0, "n2": 100}) == "not judged: 1 of 2 nodes are silent"


def test_nodes_without_a_job_are_not_judged() -> None:
    assert note({"n1": 0, "n2": 0, "n3": 0}).startswith("not judged: 1 of 3 nodes that report belong to no job")


def test_nodes_that_left_the_fleet_are_not_missed() -> None:
    assert note({"n1": 0, "n2": 0, "n3": RECENT_S + 1}) == ""
