"""Kubernetes: pods as jobs, and a list and watch against a server that speaks the API server's protocol."""

from __future__ import annotations

import asyncio
import json
import queue
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from eagle_eye.server.jobs import kubernetes
from eagle_eye.server.jobs.kubernetes import Kubernetes
from eagle_eye.server.jobs.pods import KubernetesNode, Pod, jobs_of, node_of
from eagle_eye.server.jobs.source import KubernetesSettings, ScheduledJob, Snapshot, SourceFailed
from tests.server.builders import NOW, FakeClock
from tests.server.job_sources.fake_http import Answer, Asked, serving

SETTINGS = KubernetesSettings()
BEFORE, AFTER = "2026-01-01T00:00:10Z", "2026-01-01T00:01:00Z"


def pod(name: str = "p0", node: str = "n0", phase: str = "Running", version: int = 1, **more: Any) -> dict[str, Any]:
    """Return a pod as JSON; ``metadata`` and ``status`` add to its own."""
    labels = {"jobset.sigs.k8s.io/jobset-name": "llama", "jobset.sigs.k8s.io/restart-attempt": "1"}
    metadata = {"name": name, "namespace": "ml", "uid": f"uid-{name}", "labels": more.get("labels", labels)}
    return {
        "metadata": {**metadata, "resourceVersion": str(version), **more.get("metadata", {})},
        "spec": {"nodeName": node, "containers": [{"name": "x" * 100}]},
        "status": {"phase": phase, "startTime": BEFORE, **more.get("status", {})},
    }


def ended(exit_code: int, at: str = BEFORE) -> dict[str, Any]:
    return {"containerStatuses": [{"state": {"terminated": {"exitCode": exit_code, "finishedAt": at}}}]}


def disrupted(reason: str) -> dict[str, Any]:
    return {"conditions": [{"type": "DisruptionTarget", "status": "True", "reason": reason}]}


DELETED = {"deletionTimestamp": AFTER, "deletionGracePeriodSeconds": 30}  # asked for at 00:00:30


def jobs(*pods: dict[str, Any]) -> list[ScheduledJob]:
    decoded = msgspec.json.decode(json.dumps(pods), type=list[Pod])
    return list(jobs_of(decoded, SETTINGS, Counter()))


def test_pods_of_one_label_are_one_job_with_their_nodes_and_attempt() -> None:
    (job,) = jobs(pod("a", "n2"), pod("b", "n1"), pod("c", "n9", labels={"app": "web"}))
    assert (job.id, job.name, job.attempt, job.nodes, job.state) == ("ml/llama", "llama", 1, ("n1", "n2"), "running")


def test_only_the_latest_attempt_counts() -> None:
    old = {"jobset.sigs.k8s.io/jobset-name": "llama", "jobset.sigs.k8s.io/restart-attempt": "0"}
    (job,) = jobs(pod("a", "n1", "Failed", labels=old), pod("b", "n2"))
    assert (job.attempt, job.nodes, job.state) == (1, ("n2",), "running")


def owned(name: str, owner: str) -> dict[str, Any]:
    return pod(name, metadata={"annotations": {"eagle_eye_owner": owner}})


def test_a_job_is_whose_its_pods_say_and_nobodys_where_they_differ() -> None:
    assert [job.owner for job in jobs(owned("a", "ada"), owned("b", "ada"), pod("c"))] == ["ada"]
    assert [job.owner for job in jobs(owned("a", "ada"), owned("b", "bob"))] == [""]
    assert [job.owner for job in jobs(owned("a", "a\nb"))] == [""]


def test_a_pod_that_was_replaced_is_not_the_jobs_state() -> None:
    labels = {"job-name": "llama", "batch.kubernetes.io/job-completion-index": "0"}
    failed = pod("a", phase="Failed", labels=labels, metadata={"creationTimestamp": BEFORE})
    (job,) = jobs(pod("b", labels=labels, metadata={"creationTimestamp": AFTER}), failed)
    assert job.state == "running"


@pytest.mark.parametrize(
    ("state", "what"),
    [
        ("pending", {"phase": "Pending"}),
        ("finished", {"phase": "Succeeded", "status": ended(0)}),
        ("failed", {"phase": "Failed"}),
        ("failed", {"status": ended(1)}),
        ("cancelled", {"metadata": DELETED}),
        ("cancelled", {"metadata": DELETED, "phase": "Failed", "status": ended(137, AFTER)}),
        ("failed", {"metadata": DELETED, "phase": "Failed", "status": ended(1, BEFORE)}),
        ("preempted", {"metadata": DELETED, "status": disrupted("PreemptionByScheduler")}),
        ("preempted", {"status": {**disrupted("EvictionByEvictionAPI"), **ended(143)}}),
        ("preempted", {"phase": "Failed", "status": {"reason": "Evicted"} | disrupted("TerminationByKubelet")}),
        ("failed", {"metadata": DELETED, "status": disrupted("DeletionByTaintManager")}),
        ("timeout", {"phase": "Failed", "status": {"reason": "DeadlineExceeded"}}),
    ],
)
def test_the_state_says_whether_somebody_stopped_the_pod(state: str, what: dict[str, Any]) -> None:
    (job,) = jobs(pod("a", **what), pod("b", phase="Succeeded" if state == "finished" else "Pending"))
    assert job.state == state


def test_a_cordon_is_a_drain_and_ours_where_it_bears_our_mark() -> None:
    def said(**node: Any) -> tuple[str, str]:
        found = node_of(
            msgspec.convert({"metadata": {"name": "n1", **node.pop("metadata", {})}, "spec": node}, KubernetesNode)
        )
        return found.state, found.reason

    assert said() == ("in_service", "")
    assert said(unschedulable=True) == ("draining", "cordoned")
    assert said(unschedulable=True, metadata={"annotations": {"eagle-eye/incident": "inc_1"}})[1].startswith(
        "eagle-eye"
    )
    assert said(taints=[{"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}]) == ("in_service", "")


class ApiServer:
    """Lists in pages of two and watches; what is put into ``events`` is sent, a callable cuts or refuses."""

    def __init__(self, *pods: dict[str, Any]) -> None:
        self.pods = list(pods)
        self.version = 10
        self.events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.asked: list[Asked] = []
        self.refuse: Callable[[Asked], Answer] = lambda _: None

    def __call__(self, asked: Asked) -> Answer:
        self.asked.append(asked)
        refused = self.refuse(asked)
        if refused is not None:
            return refused
        if "watch" in asked.query:
            asked.write(b"")
            while (event := self.events.get(timeout=20)) is not None:
                asked.write(json.dumps(event).encode() + b"\n")
            return None
        begin = int(asked.query.get("continue", "0"))
        more = str(begin + 2) if begin + 2 < len(self.pods) else ""
        metadata = {"resourceVersion": str(self.version), "continue": more}
        return 200, json.dumps({"items": self.pods[begin : begin + 2], "metadata": metadata}).encode()

    def lists(self) -> int:
        return sum("watch" not in asked.query and "continue" not in asked.query for asked in self.asked)


def watching(
    server: ApiServer, reported: Callable[[int, Snapshot, asyncio.Event], bool], **more: Any
) -> list[Snapshot]:
    """Follow the server until ``reported(count, snapshot, sooner)`` says that it is enough."""

    async def follow(url: str) -> list[Snapshot]:
        settings = KubernetesSettings(**{"use": "watch", "url": url, "token_file": "", "nodes": False, **more})
        found: list[Snapshot] = []
        sooner = asyncio.Event()
        snapshots = Kubernetes(settings, FakeClock(), {}).snapshots(sooner)
        try:
            async for snapshot in snapshots:
                found.append(snapshot)
                if reported(len(found), snapshot, sooner):
                    break
        finally:
            server.events.put(None)
            await snapshots.aclose()
        return found

    with serving(server) as url:
        return asyncio.run(asyncio.wait_for(follow(url), 15))


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle_eye.server.jobs.kubernetes.GATHER_S", 0.01)
    monkeypatch.setattr("eagle_eye.server.jobs.kubernetes.LISTS_S", 0.0)


def test_all_pages_are_read_and_changes_follow_from_there() -> None:
    server = ApiServer(*(pod(f"p{i}", f"n{i}") for i in range(5)))

    def reported(count: int, _: Snapshot, __: asyncio.Event) -> bool:
        if count == 1:
            server.events.put({"type": "MODIFIED", "object": pod("p1", "n1", version=11, metadata=DELETED)})
        return count == 2

    first, second = watching(server, reported, label_selector="team=llm")
    assert (first.jobs[0].nodes, first.jobs[0].state) == (("n0", "n1", "n2", "n3", "n4"), "running")
    assert (second.jobs[0].state, first.asked_s) == ("cancelled", NOW)
    (watch,) = [asked for asked in server.asked if "watch" in asked.query]
    assert watch.query["resourceVersion"] == "10"
    assert all(asked.query["labelSelector"] == "team=llm" for asked in server.asked)


def test_a_deleted_pod_is_gone_and_a_bookmark_only_moves_the_version() -> None:
    server = ApiServer(pod())

    def reported(count: int, snapshot: Snapshot, _: asyncio.Event) -> bool:
        if count == 1:
            server.events.put({"type": "BOOKMARK", "object": {"kind": "Pod", "metadata": {"resourceVersion": "12"}}})
            server.events.put({"type": "MODIFIED", "object": pod(version=11, metadata=DELETED)})  # older: known
        if count == 2:
            assert snapshot.jobs[0].state == "running"
            server.events.put({"type": "DELETED", "object": pod(version=13)})
        return not snapshot.jobs

    assert watching(server, reported)[-1].jobs == ()


@pytest.mark.parametrize("how", ["event", "status"])
def test_a_version_that_is_too_old_is_listed_anew(how: str) -> None:
    server = ApiServer(pod())

    def refuse(asked: Asked) -> Answer:
        return (410, b"") if "watch" in asked.query and server.lists() == 1 else None

    def reported(count: int, _: Snapshot, __: asyncio.Event) -> bool:
        if count == 1:
            server.pods = [pod("p7", "n7")]
            server.version = 20
            if how == "event":
                server.events.put({"type": "ERROR", "object": {"kind": "Status", "code": 410}})
        return count == 2

    if how == "status":
        server.refuse = refuse
    assert watching(server, reported)[1].jobs[0].nodes == ("n7",)


def test_watches_that_end_at_once_are_begun_anew_at_a_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle_eye.server.jobs.kubernetes.WATCHES_S", 0.1)
    server = ApiServer(pod())
    begun_s: list[float] = []

    def end(asked: Asked) -> Answer:
        if "watch" not in asked.query:
            return None
        begun_s.append(time.monotonic())
        if len(begun_s) < 3:
            return 200, b""
        server.events.put({"type": "DELETED", "object": pod(version=11)})
        return None

    server.refuse = end
    assert watching(server, lambda _, snapshot, __: not snapshot.jobs)[-1].jobs == ()
    assert begun_s[2] - begun_s[0] >= 0.19


def test_more_pods_than_are_kept_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle_eye.server.jobs.kubernetes.JOBS_MAX", 1)
    server = ApiServer(pod("a"))
    server.events.put({"type": "ADDED", "object": pod("b", version=11)})
    with pytest.raises(SourceFailed, match="more than 1 objects"):
        watching(server, lambda *_: False)


def test_when_a_fault_waits_the_pods_are_listed_anew() -> None:
    server = ApiServer(pod())

    def reported(count: int, _: Snapshot, sooner: asyncio.Event) -> bool:
        server.pods = [pod(metadata=DELETED)]
        sooner.set()
        return count == 2

    assert watching(server, reported)[1].jobs[0].state == "cancelled"
    assert server.lists() == 2


def test_cordoned_nodes_are_told_beside_the_jobs() -> None:
    def answer(asked: Asked) -> Answer:
        if asked.path != "/api/v1/nodes" or "watch" in asked.query:
            return None
        node = {"metadata": {"name": "n0"}, "spec": {"unschedulable": True}}
        return 200, json.dumps({"items": [node], "metadata": {"resourceVersion": "3"}}).encode()

    server = ApiServer(pod())
    server.refuse = answer
    server.events.put(None)
    (snapshot,) = watching(server, lambda *_: True, nodes=True)
    assert snapshot.nodes is not None
    assert [(node.name, node.state) for node in snapshot.nodes] == [("n0", "draining")]


@pytest.mark.parametrize(
    ("answer", "reason", "words"),
    [
        ((403, b""), "unauthorised", "rights to list and watch"),
        ((500, b""), "status", "answers 500"),
        ((200, b'{"items": 3}'), "malformed", "GET /api/v1/pods"),
        ((200, b'{"items": [], "metadata": {}, "pad": "' + b"x" * 4000 + b'"}'), "oversized", "more than 4000 bytes"),
    ],
)
def test_what_is_no_list_is_a_failure(answer: Answer, reason: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "PAGE_BYTES_MAX", 4000)
    server = ApiServer()
    server.refuse = lambda _: answer
    with pytest.raises(SourceFailed, match=words) as failed:
        watching(server, lambda *_: True)
    assert failed.value.reason == reason


def test_an_event_that_never_ends_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "LINE_BYTES_MAX", 1_000)
    server = ApiServer(pod())
    server.events.put({"type": "ADDED", "object": pod("x" * 5_000)})

    def endless(asked: Asked) -> Answer:
        if "watch" not in asked.query:
            return None
        for _ in range(100):
            asked.write(b"x" * 1_000)
        return None if "watch" not in asked.query else (200, b"")

    server.refuse = endless
    with pytest.raises(SourceFailed, match="an event of more than 1000 bytes"):
        watching(server, lambda *_: False)


def test_the_token_is_read_for_each_request(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("first")
    server = ApiServer(*(pod(f"p{i}") for i in range(3)))

    def renew(asked: Asked) -> Answer:
        assert asked.headers["authorization"] in ("Bearer first", "Bearer second")
        (tmp_path / "token").write_text("second")
        return None

    server.refuse = renew
    watching(server, lambda *_: True, token_file=f"{tmp_path}/token")
    tokens = [asked.headers["authorization"] for asked in server.asked]
    assert tokens[:2] == ["Bearer first", "Bearer second"]


def test_outside_of_a_pod_the_url_has_to_be_given() -> None:
    with pytest.raises(SourceFailed, match=r"job_sources\.kubernetes\.url"):
        kubernetes.KubeApi(KubernetesSettings(use="watch"), {})
