"""Silences: whose news they withhold, what goes on all the same, and what is sent once they are over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from eagle_eye.server.delivery.attempts import WebhookSettings
from eagle_eye.server.delivery.events import (
    action_requested,
    action_withdrawn,
    incident_opened,
    incident_resolved,
    incident_updated,
    node_readmitted,
)
from eagle_eye.server.delivery.outbox import ACTIVE_MAX
from eagle_eye.server.model.event_filters import covering
from eagle_eye.server.model.records import Delivery, Incident, Node, OutboundEvent, Subscription
from eagle_eye.server.security.auth import mint
from eagle_eye.server.store.sql_store import open_file
from eagle_eye.server.store.store import DELIVERIES, EVENTS, SILENCES, Change
from tests.server.builders import NOW, FakeClock, Running, action, incident, running, silence, subscription
from tests.server.test_outbox import BUSY, Bench, bench_of
from tests.server.test_stream import reading

HALF_HOUR_S = 1_800.0
OPENED, UPDATED = "eagle_eye.incident.opened", "eagle_eye.incident.updated"


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """One subscription to everything, and a silence of node n1 for half an hour."""
    store = open_file(tmp_path / "r.db")
    store.commit(Change(subscriptions=(subscription(),), silences=(silence(),)))
    yield bench_of(store, WebhookSettings(), FakeClock())
    store.close()


def deliveries(bench: Bench, incident_id: str = "inc_1") -> list[Delivery]:
    return bench.store.page(DELIVERIES, {"group": incident_id}).items[::-1]


def happens(bench: Bench, *events: OutboundEvent, **records: Any) -> None:
    """Commit the events and let the subscription be served."""
    bench.store.commit(Change(events=events, **records))
    bench.serve()


def opens(bench: Bench, found: Incident) -> None:
    happens(bench, incident_opened(found, bench.clock.now_s()), incidents=(found,))


def changes(bench: Bench, new: Incident, old: Incident) -> None:
    new = replace(new, updated_s=bench.clock.now_s())
    happens(bench, incident_updated(new, old, bench.clock.now_s()), incidents=(new,))


def recovers(bench: Bench, found: Incident) -> None:
    over = replace(found, state="recovered", ended_s=bench.clock.now_s())
    happens(bench, incident_resolved(over, bench.clock.now_s()), incidents=(over,))


def silences_again(bench: Bench) -> None:
    """Have the silence begin only now."""
    bench.store.commit(Change(silences=(silence(until_s=bench.clock.now_s() + HALF_HOUR_S),)))


def later(bench: Bench, seconds: float) -> None:
    bench.clock.advance(seconds)
    bench.outbox.housekeeping()
    bench.serve()


def sent(bench: Bench) -> list[str]:
    """Return the types of what the subscriber was sent."""
    found = [bench.store.get(EVENTS, event_id) for _, event_id, _ in bench.notifier.got]
    return [event.type for event in found if event is not None]


@pytest.mark.parametrize(
    ("scope", "covered"),
    [
        ({"nodes": ["n1"]}, True),
        ({"nodes": ["n*"]}, True),
        ({"nodes": ["n2"]}, False),
        ({"faults": ["hang"], "nodes": []}, True),
        ({"faults": ["straggler"]}, False),
        ({"jobs": ["job"], "nodes": []}, True),
        ({"jobs": ["job"], "faults": ["hang"]}, True),
        ({"jobs": ["other"]}, False),
    ],
)
def test_a_silence_covers_where_all_holds_that_it_names(scope: dict[str, Any], covered: bool) -> None:
    assert (covering([silence(**scope)], "hang", "job", ["n1"]) is not None) is covered


def test_a_silence_of_a_node_leaves_the_trouble_of_another_and_of_no_node_to_be_told() -> None:
    assert covering([silence()], "hang", "job", ["n1", "n2"]) is None
    assert covering([silence(nodes=["*"])], "hang", "job", []) is None


def test_a_name_with_brackets_is_silenced_as_it_is_written() -> None:
    assert covering([silence(jobs=["array[1]"], nodes=[])], "hang", "array[1]", []) is not None


def test_of_several_the_silence_counts_that_ends_last() -> None:
    found = covering([silence("b"), silence("a", until_s=NOW + 2 * HALF_HOUR_S), silence("c")], "hang", "job", ["n1"])
    assert found is not None
    assert found.id == "a"


def test_news_of_a_silenced_incident_is_withheld_and_counted_and_says_by_whom(bench: Bench) -> None:
    opens(bench, incident())
    assert bench.notifier.got == []
    (delivery,) = deliveries(bench)
    assert (delivery.state, delivery.attempts) == ("silenced", 0)
    assert delivery.last_error == "sil-1 of alice until 2023-11-14T22:43:20.000Z: its fan is being replaced"
    count = bench.telemetry.registry.get_sample_value
    assert count("eagle_eye_webhook_deliveries_total", {"state": "silenced"}) == 1
    assert count("eagle_eye_webhook_failures_total", {"reason": ""}) is None


def test_news_of_others_goes_on(bench: Bench) -> None:
    opens(bench, incident("inc_2", nodes=["n2"], node="n2"))
    assert sent(bench) == [OPENED]


@pytest.mark.parametrize("form", ["cloudevents", "alertmanager", "alertmanager_api"])
def test_all_formats_withhold_it(bench: Bench, form: Any) -> None:
    bench.store.commit(Change(subscriptions=(subscription(format=form),)))
    opens(bench, incident())
    assert (sent(bench), [one.state for one in deliveries(bench)]) == ([], ["silenced"])


def test_what_asks_for_actions_and_takes_them_back_is_never_silenced(bench: Bench) -> None:
    opens(bench, incident())
    bench.store.commit(Change(silences=(silence("sil-2", nodes=[], jobs=["job"]), silence("sil-3", faults=["hang"]))))
    url = "http://eagle.example"
    node = Node(node="n1", state="in_service", reason="", updated_s=NOW)
    happens(bench, action_requested(action(), url, NOW), actions=(action(),))
    happens(bench, action_withdrawn(action(state="withdrawn"), url, NOW), node_readmitted(node, NOW))
    assert sorted(sent(bench)) == [
        "eagle_eye.action.requested",
        "eagle_eye.action.withdrawn",
        "eagle_eye.node.readmitted",
    ]


def test_what_waits_for_another_attempt_is_withheld_too(bench: Bench) -> None:
    bench.store.commit(Change(silences=(silence(until_s=NOW - 1, state="ended"),)))
    bench.notifier.answers["sub-1"] = [BUSY]
    opens(bench, incident())
    silences_again(bench)
    later(bench, 60.0)
    assert [one.state for one in deliveries(bench)] == ["silenced"]


def test_an_end_reaches_who_was_told_of_the_beginning(bench: Bench) -> None:
    bench.store.commit(Change(silences=(silence(state="ended", until_s=NOW),)))
    opens(bench, incident())
    silences_again(bench)
    recovers(bench, incident())
    assert sent(bench) == [OPENED, "eagle_eye.incident.resolved"]


def test_the_end_of_what_was_never_told_is_withheld(bench: Bench) -> None:
    opens(bench, incident())
    recovers(bench, incident())
    later(bench, HALF_HOUR_S)
    assert sent(bench) == []
    assert [one.state for one in deliveries(bench)] == ["silenced", "silenced"]


def test_what_still_goes_on_when_a_silence_ends_is_announced_as_it_is_then(bench: Bench) -> None:
    opens(bench, incident())
    changes(bench, incident(fault="gpu_lost"), incident())
    later(bench, HALF_HOUR_S - 1.0)
    assert sent(bench) == []
    later(bench, 1.0)
    assert sent(bench) == [OPENED]
    told = bench.store.get(EVENTS, bench.notifier.got[0][1])
    assert told is not None
    assert (told.data["fault"], told.data["incident_id"]) == ("gpu_lost", "inc_1")
    assert "was" not in told.data


def test_what_changed_meanwhile_is_announced_with_what_was_known_before(bench: Bench) -> None:
    bench.store.commit(Change(silences=(silence(state="ended", until_s=NOW),)))
    first, second, third = incident(), incident(fault="straggler"), incident(fault="gpu_lost")
    opens(bench, first)
    silences_again(bench)
    bench.clock.advance(1.0)
    changes(bench, second, first)
    bench.clock.advance(1.0)
    changes(bench, third, second)
    later(bench, HALF_HOUR_S)
    assert sent(bench) == [OPENED, UPDATED]
    told = bench.store.get(EVENTS, bench.notifier.got[-1][1])
    assert told is not None
    assert (told.data["fault"], told.data["was"]["fault"]) == ("gpu_lost", "hang")


def test_a_silence_ends_by_itself_and_the_audit_trail_says_so(bench: Bench) -> None:
    later(bench, HALF_HOUR_S)
    ended = bench.store.get(SILENCES, "sil-1")
    assert ended is not None
    assert ended.state == "ended"
    assert [(one.who, one.verb, one.subject) for one in bench.store.audit().items] == [
        ("server", "end silence", "sil-1")
    ]


def test_nothing_is_announced_when_another_silence_goes_on(bench: Bench) -> None:
    opens(bench, incident())
    bench.store.commit(Change(silences=(silence("sil-2", until_s=NOW + 2 * HALF_HOUR_S),)))
    later(bench, HALF_HOUR_S)
    assert (sent(bench), len(deliveries(bench))) == ([], 1)
    later(bench, HALF_HOUR_S)
    assert sent(bench) == [OPENED]


def test_an_incident_of_which_all_was_told_is_not_announced_again(bench: Bench) -> None:
    bench.store.commit(Change(silences=(silence(state="ended", until_s=NOW),)))
    opens(bench, incident())
    silences_again(bench)
    later(bench, HALF_HOUR_S)
    assert sent(bench) == [OPENED]


def test_what_one_silence_withheld_is_announced_once(bench: Bench) -> None:
    opens(bench, incident())
    later(bench, HALF_HOUR_S)
    silences_again(bench)
    later(bench, HALF_HOUR_S)
    assert sent(bench) == [OPENED]


def alertmanager(bench: Bench) -> Subscription:
    target = subscription(format="alertmanager_api")
    bench.store.commit(Change(subscriptions=(target,)))
    return target


def test_an_alertmanager_is_not_sent_again_what_it_was_not_told(bench: Bench) -> None:
    target = alertmanager(bench)
    opens(bench, incident())
    assert bench.refresh.firing(target, ()) == {}
    later(bench, HALF_HOUR_S)
    assert list(bench.refresh.firing(target, ())) == ["inc_1"]


def test_an_alert_that_fires_already_goes_on_as_it_was_told(bench: Bench) -> None:
    target = alertmanager(bench)
    bench.store.commit(Change(silences=(silence(state="ended", until_s=NOW),)))
    opens(bench, incident())
    silences_again(bench)
    bench.clock.advance(1.0)
    changes(bench, incident(fault="gpu_lost"), incident())
    ((alert,),) = bench.refresh.firing(target, ()).values()
    assert (alert.labels["fault"], alert.ends) == ("hang", None)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path) as started:
        yield started


def make(server: Running, **more: Any) -> httpx.Response:
    return server.client.post("/api/v1/silences", json={"nodes": ["n1"], "seconds": 600, "reason": "new fan", **more})


def commit(server: Running, **records: Any) -> None:
    server.dispatcher.services.store.commit(Change(**records))


def test_a_silence_is_made_with_its_time_its_maker_and_what_it_silences(server: Running) -> None:
    commit(server, incidents=(incident(), incident("inc_2", nodes=["n2"], node="n2")))
    made = make(server, faults=["hang"]).json()
    assert (made["state"], made["by"], made["reason"]) == ("active", "local", "new fan")
    assert (made["faults"], made["jobs"], made["nodes"]) == (["hang"], [], ["n1"])
    assert (made["created"], made["until"]) == ("2023-11-14T22:13:20.000Z", "2023-11-14T22:23:20.000Z")
    assert made["incidents"] == ["inc_1"]
    assert server.client.get(f"/api/v1/silences/{made['id']}").json() == made
    assert server.metric("silences") == 1


@pytest.mark.parametrize(
    ("more", "reason", "said"),
    [
        ({"seconds": 59}, "seconds", "expected 60 to 2592000"),
        ({"seconds": 2_592_001}, "seconds", "expected 60 to 2592000"),
        ({"reason": "  "}, "reason", "1 to 1000 characters"),
        ({"reason": "x" * 1_001}, "reason", "1 to 1000 characters"),
        ({"nodes": []}, "scope", "nothing is named"),
        ({"nodes": [""]}, "nodes", "1 to 253 characters"),
        ({"jobs": ["j"] * 101}, "jobs", "may hold at most 100 entries"),
        ({"faults": ["hng"]}, "faults", "hang"),
        ({"until": "tomorrow"}, "body", "unknown field"),
    ],
)
def test_what_cannot_be_meant_is_refused(server: Running, more: dict[str, Any], reason: str, said: str) -> None:
    answer = make(server, **more)
    assert (answer.status_code, answer.json()["reason"]) == (400, reason)
    assert said in answer.json()["detail"]
    assert server.client.get("/api/v1/silences").json()["items"] == []


def test_a_silence_is_no_longer_than_what_it_withholds_is_kept(tmp_path: Path) -> None:
    with running(tmp_path, history__records_retention_s=3_600.0) as server:
        assert make(server, seconds=3_600).status_code == 201
        answer = make(server, seconds=3_601)
        assert (answer.status_code, answer.json()["reason"]) == (400, "seconds")
        assert "history.records_retention_s" in answer.json()["detail"]


def test_there_is_a_most_of_silences_in_force(server: Running) -> None:
    commit(server, silences=tuple(silence(f"sil-{number}") for number in range(ACTIVE_MAX)))
    assert (make(server).status_code, make(server).json()["reason"]) == (409, "limit")
    assert server.client.post("/api/v1/silences/sil-0/end").status_code == 200
    assert make(server).status_code == 201


def test_a_silence_is_ended_once_by_whoever_ends_it_first(server: Running) -> None:
    name = make(server).json()["id"]
    ended = server.client.post(f"/api/v1/silences/{name}/end").json()
    assert (ended["state"], ended["ended_by"], ended["until"]) == ("ended", "local", "2023-11-14T22:13:20.000Z")
    assert server.client.post(f"/api/v1/silences/{name}/end").json() == ended
    trail = [one for one in server.client.get("/api/v1/audit").json()["items"] if one["subject"] == name]
    assert [(one["who"], one["verb"], one["detail"]) for one in reversed(trail)] == [
        ("local", "silence", "nodes n1 until 2023-11-14T22:23:20.000Z: new fan"),
        ("local", "end silence", ""),
    ]
    assert server.client.post("/api/v1/silences/sil-none/end").status_code == 404


def test_silences_are_listed_by_state_and_by_what_they_name(server: Running) -> None:
    commit(
        server,
        silences=(
            silence("over", until_s=NOW - 1),
            silence("node"),
            silence("job", nodes=[], jobs=["llm-*"]),
            silence("fault", nodes=[], faults=["hang"]),
        ),
    )

    def listed(**filters: str) -> list[str]:
        return [one["id"] for one in server.client.get("/api/v1/silences", params=filters).json()["items"]]

    assert listed() == ["fault", "job", "node", "over"]
    assert listed(state="active") == ["fault", "job", "node"]
    assert listed(state="ended") == ["over"]
    assert listed(node="n1", state="active") == ["node"]
    assert listed(job="llm-70b") == ["job"]


def test_an_incident_says_who_silences_it_until_when_and_why(server: Running) -> None:
    commit(server, incidents=(incident(), incident("inc_2", state="closed")), silences=(silence(),))
    for path in ("/api/v1/incidents/inc_1", "/api/v1/incidents/inc_1/dossier"):
        found = server.client.get(path).json()["silence"]
        assert (found["id"], found["by"], found["reason"]) == ("sil-1", "alice", "its fan is being replaced")
        assert found["until"] == "2023-11-14T22:43:20.000Z"
    assert server.client.get("/api/v1/incidents/inc_2").json()["silence"] is None


def test_who_may_only_read_cannot_silence(server: Running) -> None:
    text, token = mint("read", None, NOW, None)
    commit(server, tokens=(token,), silences=(silence(),))
    asking = {"authorization": f"Bearer {text}"}
    assert server.client.get("/api/v1/silences", headers=asking).status_code == 200
    for path in ("/api/v1/silences", "/api/v1/silences/sil-1/end"):
        assert server.client.post(path, headers=asking).status_code == 403


def test_a_reader_of_events_learns_of_silences(server: Running) -> None:
    commit(server, incidents=(incident(),))
    with reading(server) as reported:
        commit(server, silences=(silence(),))
        _, kind, record = next(reported)
    assert (kind, record["id"], record["incidents"]) == ("silence", "sil-1", ["inc_1"])
