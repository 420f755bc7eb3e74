"""What holds for every format, and what each says."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any, get_args

import pytest
import standardwebhooks
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from eagle_eye.schema.action import PING
from eagle_eye.schema.times import unix_seconds
from eagle_eye.server.delivery import events as outbound
from eagle_eye.server.delivery.attempts import Outcome, WebhookSettings
from eagle_eye.server.delivery.message_formats import LABEL_CHARS_MAX, TEXT_CHARS_MAX, alerts_of, formats, push_url
from eagle_eye.server.delivery.webhook import Guard, Webhook
from eagle_eye.server.model.event_filters import LABELS, labels_of, types_of
from eagle_eye.server.model.records import Node, OutboundEvent, Subscription, WebhookFormat
from tests.server.builders import NOW, SECRET, action, incident, subscription
from tests.server.receiver import receiver

SOURCE = "http://eagle.example"
SHAPES = formats(SOURCE, WebhookSettings(runbook_url="https://runbooks.example/{fault}"))
NAMES: tuple[WebhookFormat, ...] = get_args(WebhookFormat)
BODY_BYTES_MAX = 60_000  # of an incident with as much evidence as there may be in an alert


def every_event() -> list[OutboundEvent]:
    """Return one event of each type."""
    over = incident(ended_s=NOW + 5, state="recovered")
    readmitted = Node(node="n1", state="in_service", reason="", updated_s=NOW)
    return [
        outbound.incident_opened(incident(), NOW),
        outbound.incident_updated(incident(fault="gpu_hang", updated_s=NOW + 1), incident(), NOW + 1),
        outbound.incident_resolved(over, NOW + 5),
        outbound.action_requested(action(), SOURCE, NOW),
        outbound.action_expired(action(), SOURCE, NOW),
        outbound.action_withdrawn(action(), SOURCE, NOW),
        outbound.node_readmitted(readmitted, NOW),
        outbound.heartbeat(NOW, 60.0, SOURCE),
        outbound.ping(subscription(), "1", NOW),
    ]


def sayable(name: WebhookFormat) -> list[OutboundEvent]:
    """Return one event of each type that the format tells of."""
    said = [event for event in every_event() if event.type in types_of(name)]
    assert said, f"{name} tells of nothing"
    return said


def test_every_format_has_a_shape_and_every_type_an_event() -> None:
    assert set(SHAPES.by_name()) == set(NAMES)
    assert {event.type for event in every_event()} == set(types_of("cloudevents"))


@pytest.mark.parametrize("name", NAMES)
def test_a_message_has_the_events_id_and_leads_where_the_subscription_says(name: WebhookFormat) -> None:
    target = subscription(format=name, url="https://hook.example:8443/a")
    for event in sayable(name):
        message = SHAPES.by_name()[name].message(target, event, NOW)
        assert message.id == event.id
        assert message.url.startswith("https://hook.example:8443/a")
        assert message.content_type.endswith("json")
        assert SECRET not in message.body.decode()
        assert 0 < len(message.body) < BODY_BYTES_MAX
        json.loads(message.body)


@pytest.mark.parametrize("name", NAMES)
def test_the_same_event_at_the_same_moment_is_the_same_message(name: WebhookFormat) -> None:
    shape, target = SHAPES.by_name()[name], subscription(format=name)
    for event in sayable(name):
        assert shape.message(target, event, NOW) == shape.message(target, event, NOW)
        if name != "alertmanager_api":  # whose alerts last until some time from now
            assert shape.message(target, event, NOW) == shape.message(target, event, NOW + 77.0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("status", [200, 204, 301, 400, 404, 408, 410, 429, 500, 503])
def test_every_format_is_signed_and_takes_every_status_alike(name: WebhookFormat, status: int) -> None:
    meant = {408: Outcome.RETRY, 429: Outcome.RETRY, 410: Outcome.GONE}
    event = sayable(name)[0]

    async def once(target: Subscription) -> Outcome:
        webhook = Webhook(Guard(True, no_names), SHAPES.by_name())
        try:
            return (await webhook.deliver(target, event, NOW, 5.0)).outcome
        finally:
            await webhook.close()

    with receiver() as got:
        got.status = status
        outcome = asyncio.run(once(subscription(url=got.url, format=name)))
    by_class = {2: Outcome.DELIVERED, 3: Outcome.RETRY, 4: Outcome.REJECTED, 5: Outcome.RETRY}
    assert outcome is meant.get(status, by_class[status // 100])
    ((headers, content),) = got.got
    assert headers["webhook-id"] == event.id
    signed = standardwebhooks.Webhook(SECRET).sign(event.id, moment(headers), content.decode())
    assert headers["webhook-signature"] == signed


def moment(headers: dict[str, str]) -> Any:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(int(headers["webhook-timestamp"]), UTC)


async def no_names(_host: str, _port: int) -> list[str]:
    raise OSError("no such name")


@pytest.mark.parametrize(
    ("url", "pushed"),
    [
        ("http://am:9093", "http://am:9093/api/v2/alerts"),
        ("http://am:9093/", "http://am:9093/api/v2/alerts"),
        ("https://am.example/prefix/", "https://am.example/prefix/api/v2/alerts"),
        ("http://am:9093/api/v2/alerts", "http://am:9093/api/v2/alerts"),
        ("http://am:9093/x?tenant=a", "http://am:9093/x/api/v2/alerts?tenant=a"),
    ],
)
def test_alerts_are_pushed_below_the_url_of_an_alertmanager(url: str, pushed: str) -> None:
    assert push_url(url) == pushed


def test_what_fires_has_an_end_ahead_and_what_is_over_has_its_own() -> None:
    def ends(event: OutboundEvent) -> float:
        (alert,) = json.loads(SHAPES.alertmanager_api.message(subscription(), event, NOW + 100).body)
        assert unix_seconds(alert["startsAt"]) <= unix_seconds(alert["endsAt"])
        return unix_seconds(alert["endsAt"])

    assert ends(outbound.incident_opened(incident(), NOW)) == NOW + 100 + 240
    assert ends(outbound.incident_resolved(incident(ended_s=NOW + 5), NOW + 6)) == NOW + 5
    assert ends(outbound.heartbeat(NOW, 300.0, SOURCE)) == NOW + 100 + 1_200
    assert ends(outbound.ping(subscription(), "1", NOW)) == NOW + 160
    assert ends(outbound.incident_resolved(incident(onset_s=NOW, ended_s=NOW - 90), NOW)) == NOW  # a clock was set


def test_an_update_that_changes_no_label_ends_nothing() -> None:
    same = outbound.incident_updated(incident(state="acting"), incident(), NOW)
    assert len(alerts_of(same, SOURCE, "")) == 1
    other = outbound.incident_updated(incident(nodes=["n1", "n2"]), incident(), NOW)
    now, former = alerts_of(other, SOURCE, "")
    assert (now.ends, former.ends) == (None, "2023-11-14T22:13:20.000Z")
    assert ("node" in now.labels, former.labels["node"]) == (False, "n1")


def test_what_people_have_to_look_at_is_critical() -> None:
    mild = outbound.incident_opened(incident(action="notify"), NOW)
    escalated = replace(mild, data={**mild.data, "escalated": True})
    severities = [alerts_of(one, SOURCE, "")[0].labels["severity"] for one in (mild, escalated)]
    assert severities == ["warning", "critical"]


def test_an_alert_says_what_is_wrong_where_and_what_to_do() -> None:
    item = {"metric": "gpu_power_watts", "node": "n1", "device": 3, "value": 90.0, "peers_median": 400.0}
    item["unit"] = "watts"
    raw = outbound.incident_opened(incident(), NOW)
    event = replace(raw, data={**raw.data, "evidence": [item]})
    (alert,) = alerts_of(event, SOURCE, "https://runbooks.example/{fault}.md")
    assert alert.labels == {
        "alertname": "EagleEyeFault",
        "instance": "n1",
        "incident_id": "inc_1",
        "job": "job",
        "fault": "hang",
        "node": "n1",
        "severity": "critical",
    }
    assert alert.annotations == {
        "summary": "n1 hangs",
        "description": "n1 device 3: GPU power 90 W (its peers' median 400 W)",
        "nodes": "n1",
        "action": "exclude_node",
        "runbook_url": "https://runbooks.example/hang.md",
    }
    assert alert.url == "http://eagle.example/#/incidents/inc_1"


@pytest.mark.parametrize(
    ("metric", "value", "unit", "said"),
    [
        ("gpu_sm_clock_hertz", 1_050_000_000.0, "hertz", "SM clock 1.05 GHz"),
        (
            "gpu_throttle_reasons",
            "0x60",
            "bitmask",
            "Clock held down by software thermal slowdown, hardware thermal slowdown",
        ),
        ("train_loss", math.nan, "1", "Loss not finite"),
        ("xid", None, "", "XID not known"),
    ],
)
def test_an_alerts_evidence_is_written_as_people_write_it(metric: str, value: Any, unit: str, said: str) -> None:
    item = {"metric": metric, "node": "n1", "device": None, "value": value, "unit": unit}
    raw = outbound.incident_opened(incident(), NOW)
    (alert,) = alerts_of(replace(raw, data={**raw.data, "evidence": [item]}), SOURCE, "")
    assert alert.annotations["description"] == f"n1: {said}"


def test_alerts_of_different_nodes_have_different_instances() -> None:
    places = ({"nodes": ["n1"]}, {"nodes": ["n2"]}, {"nodes": ["n1", "n2"]}, {"nodes": [], "job": ""})
    events = [outbound.incident_opened(incident(**place), NOW) for place in places]
    instances = [alerts_of(event, SOURCE, "")[0].labels["instance"] for event in events]
    assert instances == ["n1", "n2", "job", "inc_1"]


@given(st.text(max_size=2_000), st.lists(st.text(max_size=300), max_size=5), st.text(max_size=20))
def test_alerts_are_bounded_and_no_label_is_empty(summary: str, nodes: list[str], job: str) -> None:
    event = outbound.incident_opened(incident(summary=summary * 4, nodes=nodes, job=job), NOW)
    (alert,) = alerts_of(event, SOURCE, "")
    assert all(0 < len(value) <= LABEL_CHARS_MAX for value in alert.labels.values())
    assert all(0 < len(value) <= TEXT_CHARS_MAX for value in alert.annotations.values())
    assert len(alert.fingerprint) == 16


def test_every_event_has_only_labels_that_a_filter_knows() -> None:
    seen = {label for event in every_event() for label in labels_of(event)}
    assert seen == set(LABELS)


def test_no_alert_stands_for_a_request_to_act() -> None:
    with pytest.raises(ValueError, match=r"no alert stands for .* eagle_eye\.action\.requested"):
        alerts_of(outbound.action_requested(action(), SOURCE, NOW), SOURCE, "")
    assert PING in types_of("alertmanager")
