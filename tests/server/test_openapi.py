from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from eagle_eye.server.api.answers import ANSWERS
from eagle_eye.server.api.description import CONTENT_TYPES
from eagle_eye.server.model.records import Delivery, DriverError, EvidenceRequest, Gpu, Job, Node, NodeCheck, Ticket
from eagle_eye.server.store.store import Change
from tests.server.builders import NOW, Running, action, body, event, frame, incident, running, silence, subscription
from tests.server.described import check_answer

TIMES: dict[str, Any] = {"created_s": NOW, "updated_s": NOW, "expires_s": NOW + 60}
DELIVERY = Delivery(
    id="d-1", event_id="evt-1", subscription_id="sub-1", type="eagle_eye.ping", state="failed", attempts=4, due_s=NOW
)
EVIDENCE = EvidenceRequest(
    id="ev_1",
    incident_id="inc_1",
    node="n1",
    job="job",
    attempt=0,
    kind="evidence",
    state="asked",
    within_seconds=3.0,
    asked_by="policy",
    **TIMES,
)
CHECK = NodeCheck(
    id="chk_1",
    node="n1",
    purpose="look",
    fault="",
    state="asked",
    asked_by="local",
    reason="",
    checks=["memory"],
    deadline_seconds=600.0,
    **TIMES,
)
GPU = Gpu(uuid="GPU-1", node="n1", device=0, model="H100", since_s=NOW, first_seen_s=NOW, seen_s=NOW)
TICKET = Ticket(id="t-1", node="n1", opened_s=NOW, closed_s=None, text="fan", imported_s=NOW)
ERROR = DriverError(
    id="err-1", node="n1", device=0, uuid="GPU-1", kind="xid", code=79, count=1, first_s=NOW, last_s=NOW
)
# Otherwise nearly all paths lead to records that are not there.
KNOWN = {"incident": "inc_1", "action": "act_1", "node": "n1", "job": "job", "subscription": "sub-1"}
KNOWN |= {"evidence": "ev_1", "check": "chk_1", "gpu_uuid": "GPU-1", "delivery": "d-1"}
KNOWN |= {"silence": "sil-1", "cell": "default"}


def one_of_each(server: Running) -> None:
    server.dispatcher.services.store.commit(
        Change(
            incidents=(incident(),),
            actions=(action(),),
            subscriptions=(subscription(url="http://127.0.0.1:9/"),),
            events=(event(),),
            nodes=(Node(node="n1", state="in_service", reason="", updated_s=NOW),),
            jobs=(Job(job="job", attempt=0, state="running", ranks=[], restart_owner="", updated_s=NOW),),
            deliveries=(DELIVERY,),
            evidence=(EVIDENCE,),
            node_checks=(CHECK,),
            gpus=(GPU,),
            driver_errors=(ERROR,),
            tickets=(TICKET,),
            silences=(silence(),),
        )
    )


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with running(tmp_path_factory.mktemp("data")) as server:
        found: dict[str, Any] = server.client.get("/openapi.json").json()
        return found


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("data")) as server:
        server.send(body(frame()))
        one_of_each(server)
        yield server


def operations(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    found = [(path, method, one) for path, methods in document["paths"].items() for method, one in methods.items()]
    assert found
    return found


def test_every_endpoint_says_who_may_ask_and_which_problems_it_answers(document: dict[str, Any]) -> None:
    for path, method, operation in operations(document):
        statuses = set(operation["responses"])
        assert "422" not in statuses
        if path in ("/healthz", "/leadz", "/readyz"):
            assert "security" not in operation
            continue
        assert operation["security"] == [{"token": []}]
        assert statuses >= {"401", "403", "429", "503"}, (path, method)
        for status in statuses - {"200", "201", "202", "204"}:
            assert list(operation["responses"][status]["content"]) == ["application/problem+json"]


def test_every_answer_in_json_has_a_schema(document: dict[str, Any]) -> None:
    for path, method, operation in operations(document):
        for status, answered in operation["responses"].items():
            if status.startswith("2") and status != "204" and path not in CONTENT_TYPES:
                assert (method, path) in ANSWERS, f"say in api/answers.py what {method} {path} answers"
                assert answered["content"]["application/json"]["schema"]
    assert {(method, path) for path, method, _ in operations(document)} >= set(ANSWERS)


def test_no_reference_leads_nowhere(document: dict[str, Any]) -> None:
    def references(part: Any) -> set[str]:
        if isinstance(part, dict):
            mine = {part["$ref"]} if isinstance(part.get("$ref"), str) else set()
            return mine.union(*(references(inner) for inner in part.values()))
        return set().union(*(references(inner) for inner in part)) if isinstance(part, list) else set()

    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert references(document) <= known


def test_no_other_origin_may_read_the_api(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        asked = {"origin": "https://elsewhere.example", "access-control-request-method": "GET"}
        for answer in (
            server.client.options("/api/v1/nodes", headers=asked),
            server.client.get("/api/v1/nodes", headers=asked),
            server.client.get("/", headers=asked),
        ):
            assert [name for name in answer.headers if name.startswith("access-control-")] == []
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert "unsafe" not in answer.headers["content-security-policy"]
            assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
            assert answer.headers["referrer-policy"] == "no-referrer"
            assert "strict-transport-security" not in answer.headers


@pytest.mark.parametrize(
    "path", [path for method, path in ANSWERS if method == "get" and path not in ("/api/v1/query_range", "/readyz")]
)
def test_every_list_and_record_is_answered_as_described(filled: Running, path: str) -> None:
    """The client holds the answer against the description."""
    assert filled.client.get(path.format(**KNOWN)).status_code == 200


def test_an_answer_with_a_field_that_nobody_described_is_told(filled: Running) -> None:
    known = filled.client.get("/api/v1/gpus/GPU-1")
    for other in ({**known.json(), "new": 1}, {**known.json(), "seen": "yesterday"}, {"uuid": "GPU-1"}):
        answered = httpx.Response(200, json=other, request=known.request)
        with pytest.raises(AssertionError, match="is not answered as described"):
            check_answer(answered)
