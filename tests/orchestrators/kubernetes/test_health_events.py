"""What a site's own system receives about a node, and that nothing waits for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent

from eagle_eye.orchestrators.kubernetes.orchestrator import HealthEvents, KubernetesOrchestrator, Settings, health_event
from eagle_eye.orchestrators.protocol import Exclusion
from tests.orchestrators.kubernetes.builders import Cluster, cause
from tests.orchestrators.kubernetes.recording import Answer, serving

NOW = "2027-01-15T08:00:00Z"


def test_an_event_is_a_cloudevent_to_its_authors_own_library() -> None:
    content = health_event("n2", "excluded", cause(), "prod", NOW)
    read = JSONFormat().read(CloudEvent, json.dumps(content))
    assert read.get_type() == "eagle_eye.node.health"
    assert read.get_source() == "/eagle-eye/prod/nodes"
    assert read.get_subject() == "n2"


def test_a_fault_is_reported_in_nvsentinels_words() -> None:
    reported = health_event("n2", "excluded", cause(), "prod", NOW)["data"]["healthEvent"]
    assert reported == {
        "version": 1,
        "agent": "eagle-eye",
        "componentClass": "GPU",
        "checkName": "gpu_lost",
        "isFatal": True,
        "isHealthy": False,
        "message": "gpu_lost: XID 79 on GPU 3",
        "recommendedAction": "RESTART_BM",
        "errorCode": ["gpu_lost"],
        "entitiesImpacted": [{"entityType": "Node", "entityValue": "n2"}],
        "metadata": {"incident_id": "inc-1", "action_id": "act-1"},
        "generatedTimestamp": NOW,
        "nodeName": "n2",
        "processingStrategy": "STORE_ONLY",
    }


def test_a_readmitted_node_is_healthy() -> None:
    reported = health_event("n2", "readmitted", None, "prod", NOW)["data"]["healthEvent"]
    assert (reported["isHealthy"], reported["isFatal"], reported["recommendedAction"]) == (True, False, "NONE")


def test_the_same_action_on_the_same_node_has_the_same_id() -> None:
    ids = {health_event("n2", "excluded", cause(), "prod", when)["id"] for when in (NOW, "2027-01-15T09:00:00Z")}
    assert ids == {"act-1/n2/excluded"}


@pytest.mark.parametrize(
    ("statuses", "why", "tries"),
    [
        ([204], "", 1),
        ([503, 200], "", 2),
        ([429, 500, 502], "HTTP 502", 3),
        ([400], "HTTP 400", 1),
        ([301], "HTTP 301", 1),
    ],
)
def test_a_sink_is_asked_again_only_where_that_helps(statuses: list[int], why: str, tries: int) -> None:
    asked: list[Any] = []

    def answer(method: str, path: str, body: Any) -> Answer:
        asked.append(body)
        return Answer(statuses[len(asked) - 1], "")

    with serving(answer) as url:
        sink = HealthEvents(url, "prod", pause=lambda _: None)
        assert sink.send(health_event("n2", "excluded", cause(), "prod", NOW)) == why
        sink.close()
    assert len(asked) == tries


def test_a_node_is_excluded_although_nobody_takes_the_event() -> None:
    cluster = Cluster()
    sink = HealthEvents("http://127.0.0.1:9", "prod", pause=lambda _: None)
    made = KubernetesOrchestrator(cluster, Settings(), sink, cluster.clock, cluster.pause)  # type: ignore[arg-type]
    said = made.exclude(Exclusion("train", 0, ("n2",), True, cause()))
    made.close()
    assert said.endswith(" (health event not delivered: ConnectError)")
    assert cluster.nodes["n2"]["spec"]["unschedulable"] is True


def test_exclusion_and_readmission_are_both_reported() -> None:
    reported: list[Any] = []

    def answer(method: str, path: str, body: Any) -> Answer:
        reported.append(body["id"].rpartition("/")[2])
        return Answer(202, "")

    cluster = Cluster()
    with serving(answer) as url:
        sink = HealthEvents(url, "prod")
        made = KubernetesOrchestrator(cluster, Settings(), sink, cluster.clock, cluster.pause)  # type: ignore[arg-type]
        made.exclude(Exclusion("train", 0, ("n2",), True, cause()))
        made.readmit(["n2", "n3"])
        made.close()
    assert reported == ["excluded", "readmitted"]


def test_a_token_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    sink = HealthEvents("http://127.0.0.1:9", "prod", tmp_path / "none", pause=lambda _: None)
    assert sink.send({"id": "x"}) == "--health-events-token-file: FileNotFoundError"
    sink.close()
