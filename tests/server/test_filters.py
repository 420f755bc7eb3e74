from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.schema.action import EVENT_TYPES
from eagle_eye.server.model.event_filters import ALERT_TYPES, Matcher, parse_matcher, wants
from eagle_eye.server.model.records import OutboundEvent
from tests.server.builders import event, subscription

HANG = {"fault": "hang", "nodes": ["rack7-n1", "rack7-n2"], "action": "exclude_node", "state": "confirmed"}


def hang(**more: Any) -> OutboundEvent:
    return event(job="llm-70b", data=HANG, **more)


@pytest.mark.parametrize(
    ("filters", "passes"),
    [
        ({}, True),
        ({"types": ["eagle_eye.incident.opened"]}, True),
        ({"types": ["eagle_eye.incident.resolved"]}, False),
        ({"jobs": ["llm-70b"]}, True),
        ({"jobs": ["llm-*"]}, True),
        ({"jobs": ["vision", "llm-7?b"]}, True),
        ({"jobs": ["LLM-*"]}, False),
        ({"jobs": ["llm"]}, False),
        ({"faults": ["hang"]}, True),
        ({"faults": ["*_hang", "straggler"]}, False),
        ({"faults": ["*hang"]}, True),
        ({"matchers": ["severity=critical"]}, True),
        ({"matchers": ["severity!=critical"]}, False),
        ({"matchers": ["severity=warning"]}, False),
        ({"matchers": ["node=rack7-*"]}, True),
        ({"matchers": ["node=rack7-n2"]}, True),
        ({"matchers": ["node!=rack7-n2"]}, False),
        ({"matchers": ["node!=rack8-*"]}, True),
        ({"matchers": ["action=exclude_node", "state=confirmed"]}, True),
        ({"matchers": ["action=exclude_node", "state=suspected"]}, False),
        ({"matchers": ['fault="hang"']}, True),
        ({"jobs": ["llm-*"], "faults": ["straggler"]}, False),
    ],
)
def test_all_filters_must_let_an_event_pass(filters: dict[str, Any], passes: bool) -> None:
    assert wants(subscription(**filters), hang()) is passes


def test_who_was_reported_an_incident_is_reported_its_end_whatever_it_is_by_then() -> None:
    critical = subscription(matchers=["severity=critical"], faults=["hang"])
    milder = event(data={**HANG, "fault": "straggler", "action": "notify"})
    assert not wants(critical, milder)
    assert wants(critical, milder, reported=True)
    assert not wants(subscription(jobs=["other"]), hang(), reported=True)


def test_a_filter_judges_only_what_an_event_has() -> None:
    strict = subscription(
        types=list(EVENT_TYPES), jobs=["x"], faults=["hang"], matchers=["severity=critical", "state!=y"]
    )
    assert wants(strict, event(type="eagle_eye.heartbeat", job="", data={"interval_seconds": 60.0}))
    assert wants(strict, event(type="eagle_eye.node.readmitted", job="", data={"node": "n1", "state": "in_service"}))


def test_an_array_jobs_brackets_are_a_name_and_not_a_pattern_alone() -> None:
    assert wants(subscription(jobs=["sweep_[3]"]), event(job="sweep_[3]"))


def test_heartbeats_go_to_who_names_them_and_pings_to_whom_they_are_for() -> None:
    beat = event(type="eagle_eye.heartbeat", job="", data={})
    assert not wants(subscription(), beat)
    assert wants(subscription(types=["eagle_eye.heartbeat"]), beat)
    ping = event(type="eagle_eye.ping", subject="sub-1", job="", data={})
    assert wants(subscription("sub-1", types=["eagle_eye.heartbeat"]), ping)
    assert not wants(subscription("sub-2"), ping)


@pytest.mark.parametrize("form", ["alertmanager", "alertmanager_api"])
def test_alerts_stand_for_incidents_and_not_for_requests(form: str) -> None:
    target = subscription(format=form)
    wanted = {name for name in EVENT_TYPES if wants(target, event(type=name, data={}, subject="sub-1"))}
    assert wanted == set(ALERT_TYPES) - {"eagle_eye.heartbeat"}


def test_an_alert_that_begins_ends_whatever_types_are_named() -> None:
    named: dict[str, Any] = {"types": ["eagle_eye.incident.opened", "eagle_eye.heartbeat"]}
    resolved = event(type="eagle_eye.incident.resolved", data=HANG)
    assert wants(subscription(format="alertmanager_api", **named), resolved)
    assert not wants(subscription(**named), resolved)
    assert not wants(subscription(format="alertmanager_api", types=["eagle_eye.heartbeat"]), resolved)


@pytest.mark.parametrize(
    ("text", "matcher"),
    [
        ("fault=hang", Matcher("fault", False, "hang")),
        (' node != "rack 7=*" ', Matcher("node", True, "rack 7=*")),
        ("job==", Matcher("job", False, "=")),
    ],
)
def test_a_matcher_is_a_label_an_operator_and_a_glob(text: str, matcher: Matcher) -> None:
    assert parse_matcher(text) == matcher


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("severity", "label=glob"),
        ("", "label=glob"),
        ("severty=critical", "expected one of job, fault"),
        ("job=~llm.*", "write a glob"),
        ("job!~x", "write a glob"),
        ("job=", "matches nothing"),
        ('job!=""', "matches nothing"),
    ],
)
def test_a_bad_matcher_is_named_with_what_was_expected(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_matcher(text)


@given(st.text(max_size=200))
def test_a_text_is_a_matcher_or_refused(text: str) -> None:
    try:
        matcher = parse_matcher(text)
    except ValueError:
        return
    wants(subscription(matchers=[text]), hang())
    assert matcher.pattern


def test_a_cruel_pattern_costs_no_time() -> None:
    cruel = subscription(matchers=["job=" + "*a" * 200 + "b"])
    before_s = time.process_time()
    assert not wants(cruel, event(job="a" * 256, data=HANG))
    assert time.process_time() - before_s < 0.5
