"""Policy over HTTP and from the command line: why an incident was held, and when a node may come back."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from eagle_eye.cli.main import main
from eagle_eye.server.engine.policy import RULE_NAMES, weigh
from eagle_eye.server.model.records import Node, RuleWord
from eagle_eye.server.store.store import Change
from tests.server.builders import NOW, Running, action, incident, running
from tests.server.engine.situations import situation

LOST = incident(fault="gpu_lost", fact=True, hold="no action while blind: dark", hold_rule="blind")
WORDS = [RuleWord("blind", "pass", "", {"blind": ""})]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("policy")) as started:
        yield started


def test_an_incident_is_explained_rule_by_rule_with_what_was_said_when_it_was_acted_on(
    server: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EAGLE_EYE_SERVER", server.url)
    server.dispatcher.services.store.commit(Change(incidents=(LOST,), actions=(action(policy=WORDS),)))
    server.watcher.weighing = weigh(LOST, situation(blind="dark"))
    reported = server.client.get("/api/v1/incidents/inc_1/policy").json()
    assert [rule["rule"] for rule in reported["rules"]] == list(RULE_NAMES)
    assert (reported["decision"]["kind"], reported["decision"]["rule"]) == ("exclude_node", "blind")
    assert [(asked["action_id"], asked["rules"][0]["rule"]) for asked in reported["asked"]] == [("act_1", "blind")]
    assert main(["policy", "explain", "inc_1"]) == 0
    text = capsys.readouterr().out
    assert "held by blind: no action while blind: dark" in text
    assert "now: exclude_node n1 and restart the job, held by blind" in text
    assert main(["policy", "explain", "inc_1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == reported


def test_what_nobody_judges_any_more_is_said_to_be_unknown(server: Running) -> None:
    server.dispatcher.services.store.commit(Change(incidents=(incident("inc_2"),)))
    server.watcher.weighing = None
    reported = server.client.get("/api/v1/incidents/inc_2/policy").json()
    assert (reported["decision"], reported["rules"]) == (None, [])
    assert "not judged any more" in reported["detail"]


def test_an_unknown_incident_is_not_found(server: Running) -> None:
    assert server.client.get("/api/v1/incidents/none/policy").status_code == 404


def test_a_node_that_was_excluded_twice_comes_back_late_or_by_force(server: Running) -> None:
    done = [action(f"act_{name}", "done", exclude=["flappy"], updated_s=NOW) for name in ("a", "b")]
    out = Node(node="flappy", state="excluded", reason="hang: inc_1", updated_s=NOW)
    server.dispatcher.services.store.commit(Change(actions=tuple(done), nodes=(out,)))
    refused = server.client.post("/api/v1/nodes/flappy/readmit")
    assert (refused.status_code, refused.json()["reason"]) == (409, "probation")
    assert "excluded 2 times" in refused.json()["detail"]
    assert main(["nodes", "readmit", "flappy", "--force", "--server", server.url]) == 0
    assert server.client.get("/api/v1/nodes/flappy").json()["state"] == "in_service"
    assert server.client.post("/api/v1/nodes/flappy/readmit").status_code == 200


def test_what_each_rule_holds_back_is_a_metric(server: Running) -> None:
    held = [incident(f"inc_held_{number}", hold="no", hold_rule="breaker") for number in range(2)]
    server.dispatcher.services.store.commit(Change(incidents=tuple(held)))
    assert server.metric("incidents_held", rule="breaker") == 2.0
