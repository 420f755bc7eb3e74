"""What is made of an API server's answers: statuses, refusals, nonsense, silence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from eagle_eye.orchestrators.kubernetes import api as module
from eagle_eye.orchestrators.kubernetes.api import Api, Conflict, Eviction
from eagle_eye.orchestrators.protocol import CannotCarryOutError
from tests.orchestrators.kubernetes.builders import pod
from tests.orchestrators.kubernetes.recording import Answer, api_at, serving

POD = pod("train-0", "n1")
EVICTION = "/api/v1/namespaces/ml/pods/train-0/eviction"


class Script:
    """Answers by path, the last one for ever; remembers what was asked."""

    def __init__(self, **answers: list[tuple[int, Any]]) -> None:
        self.answers = answers
        self.asked: list[tuple[str, str, Any]] = []

    def __call__(self, method: str, path: str, body: Any) -> Answer:
        self.asked.append((method, path, body))
        plain = path.partition("?")[0]
        last = "eviction" if plain.endswith("eviction") else "discovery" if plain == "/api/v1/" else "other"
        left = self.answers.get(last, [(404, {"message": "nothing"})])
        return Answer(*(left.pop(0) if len(left) > 1 else left[0]))


@contextmanager
def talking_to(script: Script) -> Iterator[Api]:
    with serving(script) as url:
        api = api_at(url)
        try:
            yield api
        finally:
            api.close()


def resources(version: str) -> list[tuple[int, Any]]:
    return [(200, {"resources": [{"name": "pods"}, {"name": "pods/eviction", "group": "policy", "version": version}]})]


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
def test_evictions_are_asked_for_in_the_version_that_the_server_knows(version: str) -> None:
    script = Script(discovery=resources(version), eviction=[(201, {})])
    with talking_to(script) as api:
        assert api.evict(POD) == api.evict(POD) == Eviction(True)
    assert [path for _, path, _ in script.asked] == ["/api/v1/", EVICTION, EVICTION]
    body = script.asked[1][2]
    assert body["apiVersion"] == f"policy/{version}"
    assert body["deleteOptions"] == {"preconditions": {"uid": "uid-train-0"}}


@pytest.mark.parametrize("status", [404, 409])
def test_a_pod_that_is_gone_or_another_one_by_now_is_gone(status: int) -> None:
    with talking_to(Script(discovery=resources("v1"), eviction=[(status, {"message": "x"})])) as api:
        assert api.evict(POD) == Eviction(True)


def test_a_budget_keeps_a_pod_and_is_quoted() -> None:
    causes = [{"reason": "DisruptionBudget", "message": "needs 3"}]
    said = {"message": "Cannot evict pod.", "details": {"causes": causes}}
    script = Script(discovery=resources("v1"), eviction=[(429, said)])
    with talking_to(script) as api:
        assert api.evict(POD) == Eviction(False, "Cannot evict pod. (needs 3)")
    assert len(script.asked) == 2


def test_two_budgets_on_one_pod_are_an_error_of_the_servers_that_stays() -> None:
    said = {"message": "This pod has more than one PodDisruptionBudget"}
    script = Script(discovery=resources("v1"), eviction=[(500, said)])
    with talking_to(script) as api, pytest.raises(CannotCarryOutError, match=r"500: This pod has more than one Pod"):
        api.evict(POD)
    assert len(script.asked) == 2 + len(module.RETRY_AFTER_S)


@pytest.mark.parametrize("status", [429, 500, 503, 504])
def test_a_busy_server_is_asked_again(status: int) -> None:
    script = Script(other=[(status, {}), (status, {}), (200, {"metadata": {"name": "n1"}})])
    with talking_to(script) as api:
        found = api.node("n1")
    assert found is not None
    assert (found.metadata.name, len(script.asked)) == ("n1", 3)


def test_a_node_that_is_not_there_is_none() -> None:
    with talking_to(Script()) as api:
        assert api.node("n9") is None


def test_a_node_that_has_changed_is_a_conflict() -> None:
    with talking_to(Script(other=[(409, {"message": "the object has been modified"})])) as api, pytest.raises(Conflict):
        api.mark("n1", {})


def test_a_text_is_put_under_its_key_of_a_config_map_and_taken_away() -> None:
    script = Script(other=[(200, {})])
    with talking_to(script) as api:
        assert api.set_config_map_key("resume", "ml", "train", "memory:40")
        assert api.set_config_map_key("resume", "ml", "train", None)
    path = "/api/v1/namespaces/ml/configmaps/resume?fieldManager=eagle-eye"
    assert script.asked == [
        ("PATCH", path, {"data": {"train": "memory:40"}}),
        ("PATCH", path, {"data": {"train": None}}),
    ]


def test_a_config_map_that_is_not_there_is_none() -> None:
    with talking_to(Script()) as api:
        assert not api.set_config_map_key("resume", "ml", "train", "memory:40")


@pytest.mark.parametrize("status", [401, 403])
def test_a_missing_right_says_where_rights_are_explained(status: int) -> None:
    script = Script(other=[(status, {"message": 'nodes "n1" is forbidden'})])
    where = r"n1\" is forbidden; see docs/how-to/kubernetes"
    with talking_to(script) as api, pytest.raises(CannotCarryOutError, match=where):
        api.node("n1")
    assert len(script.asked) == 1


@pytest.mark.parametrize(
    "body",
    ["", "<html>", "[]", '{"metadata": 1}', '{"metadata": {"creationTimestamp": "soon"}}', "[" * 100_000],
)
def test_nonsense_is_no_node(body: str) -> None:
    with talking_to(Script(other=[(200, body)])) as api, pytest.raises(CannotCarryOutError, match="is not understood"):
        api.node("n1")


def test_what_is_no_error_of_kubernetes_is_quoted_in_part() -> None:
    script = Script(other=[(418, "x" * 9_000)])
    with talking_to(script) as api, pytest.raises(CannotCarryOutError) as failed:
        api.node("n1")
    assert len(str(failed.value)) < 300


def test_a_redirect_is_not_followed() -> None:
    script = Script(other=[(302, {"message": "elsewhere"})])
    with talking_to(script) as api, pytest.raises(CannotCarryOutError, match="302"):
        api.node("n1")
    assert len(script.asked) == 1


def test_a_server_that_is_not_there_is_reported_after_some_tries() -> None:
    pauses: list[float] = []
    api = api_at("http://127.0.0.1:9", pauses.append)
    with pytest.raises(CannotCarryOutError, match=r"^list pods: the API server does not answer \(NewC"):
        api.pods(())
    assert tuple(pauses) == module.RETRY_AFTER_S


def test_lists_come_in_pages() -> None:
    pages = [
        (200, {"items": [{"metadata": {"name": "n1"}}], "metadata": {"continue": "c1"}}),
        (200, {"items": [{"metadata": {"name": "n2"}}], "metadata": {}}),
    ]
    script = Script(other=pages)
    with talking_to(script) as api:
        assert api.node_names() == {"n1", "n2"}
    assert [path for _, path, _ in script.asked] == ["/api/v1/nodes?limit=500", "/api/v1/nodes?continue=c1&limit=500"]


def test_a_list_without_an_end_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAGES_MAX", 3)
    script = Script(other=[(200, {"items": [], "metadata": {"continue": "more"}})])
    with talking_to(script) as api, pytest.raises(CannotCarryOutError, match="more than 1500 objects"):
        api.node_names()


def test_pods_are_asked_for_in_each_namespace_and_in_all_where_none_is_named() -> None:
    script = Script(other=[(200, {"items": []})])
    with talking_to(script) as api:
        api.pods(("ml", "dev"), label="job-name=train")
        api.pods((), node="n1", cached=True)
    assert [path for _, path, _ in script.asked] == [
        "/api/v1/namespaces/ml/pods?labelSelector=job-name%3Dtrain&limit=500",
        "/api/v1/namespaces/dev/pods?labelSelector=job-name%3Dtrain&limit=500",
        "/api/v1/pods?fieldSelector=spec.nodeName%3Dn1&resourceVersion=0",
    ]
