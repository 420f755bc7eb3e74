"""Faults beside a clock that is set: found within their usual time, on the right node, and begun when they began."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle_eye.detectors.types import Verdict
from tests.server.clock_site import STEPPED, Site

YEAR_2099_S = 73 * 365 * 86_400.0
STEPS_S = [10.0, 30.0, 90.0, 6 * 3600.0]
BOTH_WAYS = [*STEPS_S, *(-step_s for step_s in STEPS_S), YEAR_2099_S]
LATER_S = 2.0  # than without a step, at most
WARM_S, FAULT_AFTER_S, WATCHED_S = 25, 10, 30

Fault = Callable[[Site], None]


class Found(NamedTuple):
    """What was said first of a fault: how long after it began, and by how much later it is said to have begun."""

    after_s: float
    onset_after_s: float
    verdict: Verdict
    before: list[Verdict]  # said of anybody before it began


def xid(site: Site, node: str = STEPPED) -> None:
    site.happens(node, "xid", code=79)
    event = site.events[-1][1]
    assert event.time_s == site.now_s


def throttle(site: Site) -> None:
    site.throttled = True


def slow_other(site: Site) -> None:
    site.compute_s["n2"] = 0.95


def silent_other(site: Site) -> None:
    site.mute.add("n2")
    site.stopped = True


def boot(site: Site, ahead_s: float) -> list[Verdict]:
    """The clock is wrong at boot and set right after a while."""
    site.ahead_s = ahead_s
    judged = site.at(WARM_S, site.set_clock(0.0))
    return [verdict for one in judged for verdict in one.verdicts]


def mid_run(site: Site, ahead_s: float) -> list[Verdict]:
    """The clock is right and is set wrong."""
    judged = site.at(WARM_S, site.set_clock(ahead_s))
    return [verdict for one in judged for verdict in one.verdicts]


def there_and_back(site: Site, ahead_s: float) -> list[Verdict]:
    """The clock is wrong for ten seconds in the middle of a run."""
    judged = site.at(WARM_S - 10, site.set_clock(ahead_s)) + site.at(10, site.set_clock(0.0))
    return [verdict for one in judged for verdict in one.verdicts]


STORIES = [boot, mid_run, there_and_back]


def found(
    fault: Fault,
    story: Callable[[Site, float], list[Verdict]],
    ahead_s: float,
    says: bool,
    after_s: int = FAULT_AFTER_S,
) -> Found:
    site = Site(says)
    before = story(site, ahead_s)
    before += [verdict for one in site.run(after_s) for verdict in one.verdicts]
    fault(site)
    began_s = site.now_s
    for _ in range(WATCHED_S):
        for judgement in site.run(1):
            if judgement.verdicts:
                first = judgement.verdicts[0]
                return Found(site.now_s - began_s, first.onset_s - began_s, first, before)
    raise AssertionError("nothing was found")


@cache
def usually(fault: Fault) -> Found:
    """Return what is found of it while no clock is set."""
    return found(fault, boot, 0.0, says=True)


def compare(seen: Found, usual: Found) -> None:
    """Pass if a fault was found as it usually is."""
    assert seen.before == []
    assert seen.after_s <= usual.after_s + LATER_S
    assert (seen.verdict.fault, seen.verdict.node) == (usual.verdict.fault, usual.verdict.node)
    assert abs(seen.onset_after_s - usual.onset_after_s) <= LATER_S


@pytest.mark.parametrize("says", [True, False], ids=["says", "silent"])
@pytest.mark.parametrize("story", STORIES)
@pytest.mark.parametrize("ahead_s", BOTH_WAYS)
def test_an_error_of_the_node_is_an_incident_in_its_usual_time(
    ahead_s: float, story: Callable[[Site, float], list[Verdict]], says: bool
) -> None:
    compare(found(xid, story, ahead_s, says), usually(xid))


@pytest.mark.parametrize("says", [True, False], ids=["says", "silent"])
@pytest.mark.parametrize("ahead_s", [30.0, 90.0, -90.0, 6 * 3600.0, -6 * 3600.0, YEAR_2099_S])
def test_a_throttle_of_the_node_is_named_on_it(ahead_s: float, says: bool) -> None:
    usual = usually(throttle)
    assert (usual.verdict.fault, usual.verdict.node) == ("power_throttle", STEPPED)
    compare(found(throttle, boot, ahead_s, says), usual)


@pytest.mark.parametrize("fault", [slow_other, silent_other])
@pytest.mark.parametrize("ahead_s", [60.0, -60.0, 6 * 3600.0])
def test_the_faults_of_others_are_neither_late_nor_hidden(ahead_s: float, fault: Fault) -> None:
    usual = usually(fault)
    assert usual.verdict.node == "n2"
    for story in STORIES:
        compare(found(fault, story, ahead_s, says=False), usual)


@pytest.mark.parametrize("says", [True, False], ids=["says", "silent"])
def test_an_error_in_the_second_in_which_the_clock_is_set_is_found(says: bool) -> None:
    for ahead_s in (90.0, -90.0, 6 * 3600.0, -6 * 3600.0):
        compare(found(xid, boot, ahead_s, says, after_s=0), usually(xid))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(1, 15), st.floats(-1e5, 1e5)), min_size=1, max_size=5), st.booleans())
def test_no_clock_that_is_set_accuses_anybody(story: list[tuple[int, float]], says: bool) -> None:
    site = Site(says)
    judged = site.run(20)
    for seconds, ahead_s in story:
        judged += site.at(seconds, site.set_clock(ahead_s))
    judged += site.run(20)
    assert {one.verdicts for one in judged} == {()}
