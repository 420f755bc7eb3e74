from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eagle_eye.server import auth
from eagle_eye.server.records import Job, Node
from eagle_eye.server.store import Change
from tests.server.builders import NOW, action, body, event, frame, incident, running, subscription

WITHIN_S = 900.0
EXAMPLES = 5  # of each endpoint, beside what the coverage of each parameter asks for
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
    "unsupported_method",
    "ignored_auth",
)
FREE: dict[str, Any] = {
    f"limits__{name}_{kind}": 1_000_000 for name, kind in (("token", "burst"), ("address", "burst"))
}


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with running(tmp_path_factory.mktemp("data")) as server:
        found: dict[str, Any] = server.client.get("/openapi.json").json()
        return found


def operations(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [(path, method, one) for path, methods in document["paths"].items() for method, one in methods.items()]


def test_every_endpoint_says_who_may_ask_and_which_problems_it_answers(document: dict[str, Any]) -> None:
    for path, method, operation in operations(document):
        statuses = set(operation["responses"])
        assert "422" not in statuses
        if path in ("/healthz", "/readyz"):
            assert "security" not in operation
            continue
        assert operation["security"] == [{"token": []}]
        assert statuses >= {"401", "403", "429", "503"}, (path, method)
        for status in statuses - {"200", "201", "202", "204"}:
            assert list(operation["responses"][status]["content"]) == ["application/problem+json"]


def test_no_reference_leads_nowhere(document: dict[str, Any]) -> None:
    def references(part: Any) -> set[str]:
        if isinstance(part, dict):
            mine = {part["$ref"]} if isinstance(part.get("$ref"), str) else set()
            return mine.union(*(references(inner) for inner in part.values()))
        return set().union(*(references(inner) for inner in part)) if isinstance(part, list) else set()

    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert references(document["paths"]) <= known


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


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("schemathesis") is None, reason="schemathesis is not installed (make test-full)"
)
def test_generated_requests_get_what_the_description_says(tmp_path: Path) -> None:
    text, token = auth.mint("admin", None, NOW, None)
    with running(tmp_path, **FREE) as server:
        server.front.services.store.commit(
            Change(
                tokens=(token,),
                incidents=(incident(),),
                actions=(action(),),
                subscriptions=(subscription(url="http://127.0.0.1:9/"),),
                events=(event(),),
                nodes=(Node(node="n1", state="in_service", reason="", updated_s=NOW),),
                jobs=(Job(job="job", attempt=0, state="running", ranks=[], restart_owner="", updated_s=NOW),),
            )
        )
        server.send(body(frame()), authorization=f"Bearer {text}")
        # Otherwise nearly all paths lead to records that are not there.
        known = {"incident": "inc_1", "action": "act_1", "node": "n1", "job": "job", "subscription": "sub-1"}
        lines = [f'"path.{name}" = "{value}"\n' for name, value in known.items()]
        (tmp_path / "schemathesis.toml").write_text("[parameters]\n" + "".join(lines))
        words = ["--header", f"Authorization: Bearer {text}", "--exclude-path", "/api/v1/events"]  # which never ends
        words += ["--checks", ",".join(CHECKS), "--phases", "coverage,fuzzing", "--max-examples", str(EXAMPLES)]
        words += ["--seed", "1", "--no-shrink", "--continue-on-failure", "--request-timeout", "30"]
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=WITHIN_S, cwd=tmp_path, check=False)
        assert done.returncode == 0, done.stdout[-20_000:]
        assert server.metric("internal_errors_total", place="api") == 0
