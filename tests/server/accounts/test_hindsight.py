"""What would have been done against what happened: each proof, each way of being wrong, and what cannot be told."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.server.accounts.trust import Afterwards, is_judged, look_back, precision, wilson
from eagle_eye.server.model.records import AuditEntry, NodeCheck, NodeCheckState, Ticket
from tests.server.accounts.past import attempt
from tests.server.builders import NOW, action, incident

WINDOW = 1_000.0
SLOW: dict[str, Any] = {"fault": "straggler", "kind": "exclude_node", "node": "n1"}
RAN_ON = attempt(0, -500, last_step=900.0, last_step_s=1_500, seen_s=1_500)


def standing(after: Afterwards, now: float = 2_000, **more: Any) -> tuple[str, str]:
    """Return how an exclusion of n1 for slowness stands, made at NOW."""
    claim = action(state="would_act", **{**SLOW, **more})
    outcome = look_back(claim, after, NOW + now, WINDOW)
    return outcome.standing, outcome.why


def ended(**more: Any) -> Any:
    """Return the incident behind the action, over soon after it."""
    fields = {
        "fault": "straggler",
        "state": "recovered",
        "seen_s": NOW + 10,
        "updated_s": NOW + 10,
        "ended_s": NOW + 20,
    }
    return incident(**{**fields, **more})


def test_a_job_that_ran_on_with_the_node_proves_it_wrong() -> None:
    assert standing(Afterwards(ended(), attempts=[RAN_ON])) == ("wrong", "ran_on")


def test_while_the_time_is_not_over_nothing_is_said() -> None:
    assert standing(Afterwards(ended(), attempts=[RAN_ON]), now=500) == ("pending", "waiting")


def test_a_persons_word_goes_before_every_proof() -> None:
    after = Afterwards(ended(state="false"), tickets=[ticket(at=5)])
    assert standing(after) == ("wrong", "marked_false")


def later(**more: Any) -> Any:
    fields = {"fault": "gpu_lost", "fact": True, "detected_s": NOW + 100}
    return incident("inc_2", **{**fields, **more})


def entry(verb: str = "drain", subject: str = "n1", at: float = 100) -> AuditEntry:
    return AuditEntry(time_s=NOW + at, who="tok_1", verb=verb, subject=subject)


def ticket(node: str = "n1", at: float = 100) -> Ticket:
    return Ticket(id="T-1", node=node, opened_s=NOW + at, closed_s=None, text="", imported_s=NOW)


def check(state: NodeCheckState = "sick", node: str = "n1", at: float = 100) -> NodeCheck:
    return NodeCheck(
        id="chk_1",
        node=node,
        purpose="look",
        fault="",
        state=state,
        asked_by="tok_1",
        reason="",
        checks=[],
        deadline_seconds=60.0,
        created_s=NOW + at,
        updated_s=NOW + at,
        expires_s=NOW + 900,
    )


@pytest.mark.parametrize("verb", ["drain", "exclude", "draining"])
def test_an_operator_who_takes_the_node_out_proves_nothing(verb: str) -> None:
    after = Afterwards(ended(), attempts=[RAN_ON], verbs=[entry(verb)])
    assert standing(after, now=500) == ("pending", "waiting")
    assert standing(after) == ("cannot_tell", "taken_out")


def test_a_check_proves_an_operators_exclusion_right() -> None:
    after = Afterwards(ended(), attempts=[RAN_ON], verbs=[entry()], checks=[check(at=300)])
    assert standing(after) == ("right", "checked_sick")


@pytest.mark.parametrize(
    ("proof", "why"),
    [
        ({"incidents": [later()]}, "node_failed"),
        ({"checks": [check()]}, "checked_sick"),
        ({"tickets": [ticket()]}, "ticket"),
    ],
)
def test_what_happens_to_the_node_afterwards_proves_it_right(proof: dict[str, Any], why: str) -> None:
    assert standing(Afterwards(ended(), attempts=[RAN_ON], **proof)) == ("right", why)


@pytest.mark.parametrize(
    "chance",
    [
        {"incidents": [later(fact=False)]},
        {"incidents": [later(node="n2")]},
        {"incidents": [later(state="false")]},
        {"incidents": [later(detected_s=NOW + WINDOW + 1)]},
        {"incidents": [later(detected_s=NOW - 1)]},
        {"checks": [check("healthy")]},
        {"checks": [check(node="n2")]},
        {"checks": [check(at=-1)]},
        {"verbs": [entry("readmit")]},
        {"verbs": [entry(subject="n2")]},
        {"tickets": [ticket("n2")]},
        {"tickets": [ticket(at=-1)]},
        {"tickets": [ticket(at=WINDOW + 1)]},
    ],
)
def test_what_is_about_others_or_other_times_proves_nothing(chance: dict[str, Any]) -> None:
    assert standing(Afterwards(ended(), attempts=[RAN_ON], **chance)) == ("wrong", "ran_on")


def test_the_first_proof_is_the_one_that_is_told() -> None:
    claim = action(state="would_act", **SLOW)
    after = Afterwards(ended(), checks=[check(at=200)], tickets=[ticket(at=100)])
    outcome = look_back(claim, after, NOW + 2_000, WINDOW)
    assert (outcome.why, outcome.time_s) == ("ticket", NOW + 100)


def test_an_attempt_without_the_node_proves_nothing_and_one_with_it_does() -> None:
    first = attempt(0, -500, 300, last_step=9.0, last_step_s=290)
    second = attempt(1, 310, last_step=90.0, last_step_s=1_500, seen_s=1_500)
    reported = [first, second]
    assert standing(Afterwards(ended(), attempts=reported, members={"att_1": ["n2", "n3"]})) == (
        "cannot_tell",
        "left_out",
    )
    assert standing(Afterwards(ended(), attempts=reported, members={"att_1": ["n1", "n2"]})) == ("wrong", "ran_on")
    assert standing(Afterwards(ended(), attempts=reported)) == ("cannot_tell", "out_of_sight")


def test_a_job_that_was_over_before_tells_nothing() -> None:
    over = attempt(0, -500, 300, end="finished", last_step=9.0, last_step_s=290)
    assert standing(Afterwards(ended(), attempts=[over])) == ("cannot_tell", "job_ended")


def test_trouble_that_lasted_all_the_time_is_no_false_alarm() -> None:
    lasting = incident(fault="straggler", state="confirmed", seen_s=NOW + 1_900, ended_s=None)
    assert standing(Afterwards(lasting, attempts=[RAN_ON])) == ("cannot_tell", "persisted")


def test_without_the_jobs_past_nobody_can_tell() -> None:
    assert standing(Afterwards(None)) == ("cannot_tell", "out_of_sight")


STOP: dict[str, Any] = {"fault": "hang", "kind": "restart_job", "exclude": [], "node": None}


def test_a_job_that_was_called_stopped_and_made_steps_went_on() -> None:
    assert standing(Afterwards(ended(), attempts=[RAN_ON]), now=100, **STOP) == ("wrong", "went_on")


def test_a_job_that_was_called_stopped_and_ended_without_a_step_had_stopped() -> None:
    dead = attempt(0, -500, 300, last_step=9.0, last_step_s=-10)
    assert standing(Afterwards(ended(), attempts=[dead]), now=400, **STOP) == ("right", "job_stopped")
    still = attempt(0, -500, last_step=9.0, last_step_s=-10, seen_s=200)
    assert standing(Afterwards(ended(), attempts=[still]), now=200, **STOP) == ("pending", "waiting")


def test_only_what_was_not_carried_out_is_judged() -> None:
    assert [is_judged(action(state=s)) for s in ("would_act", "rejected", "expired", "done", "withdrawn")] == [
        True,
        True,
        True,
        False,
        False,
    ]
    assert not is_judged(action(state="would_act", kind="notify"))
    assert not is_judged(action(state="would_act", kind="exclude_node", preliminary=True))


def test_precision_leaves_out_what_could_not_be_judged() -> None:
    right = look_back(action(state="would_act", **SLOW), Afterwards(None, tickets=[ticket()]), NOW + 9_999, WINDOW)
    wrong = look_back(action(state="would_act", **SLOW), Afterwards(ended(), attempts=[RAN_ON]), NOW + 9_999, WINDOW)
    nobody = look_back(action(state="would_act", **SLOW), Afterwards(None), NOW + 9_999, WINDOW)
    counted = precision([right, right, right, wrong, nobody])
    assert (counted.ratio, counted.cannot_tell) == (0.75, 1)
    assert precision([nobody]).ratio is None
    assert precision([nobody]).interval is None


def test_the_interval_is_wilsons() -> None:
    # Newcombe, "Two-sided confidence intervals for the single proportion" (1998), table I: 81 of 263, 15 of 148.
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert wilson(15, 148) == pytest.approx((0.0624, 0.1605), abs=5e-5)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)


@given(trials=st.integers(1, 500), data=st.data())
def test_the_interval_holds_the_ratio_and_stays_within_bounds(trials: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(0, trials))
    found = wilson(right, trials)
    assert found is not None
    assert 0 <= found[0] <= right / trials + 1e-12
    assert right / trials - 1e-12 <= found[1] <= 1
