"""Jobs and nodes of any legal name are found under it: a slash, encoded, is part of the name."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.schema.names import NAME_CHARS_MAX
from eagle_eye.server.model.records import Node
from eagle_eye.server.store.store import Change
from eagle_eye.server.transport.raw_http import routed
from tests.server.builders import NOW, Running, running

NAMES = st.text(st.characters(exclude_categories=["C"]), min_size=1, max_size=NAME_CHARS_MAX).filter(str.isprintable)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("data")) as found:
        yield found


def segments(raw: str) -> list[str]:
    """Return what routes see of a path, with the slashes that are a name's own as a star."""
    path: str = routed({"path": "", "raw_path": raw.encode()})["path"]
    return path.replace("\uffff", "*").split("/")


@given(NAMES)
def test_a_name_is_one_segment_whatever_is_in_it(name: str) -> None:
    raw = f"/api/v1/jobs/{quote(name, safe='')}/course"
    found = routed({"path": f"/api/v1/jobs/{name}/course", "raw_path": raw.encode()})["path"].split("/")
    assert [found[4].replace("\uffff", "/"), *found[5:]] == [name, "course"]


@pytest.mark.parametrize(
    "name", ["team/run", "a/b/c", "/", "%2F", "a%2Fb/c?d#e", "über/läuft", "run/course", "..", "a b+c"]
)
def test_a_job_is_reported_and_found_under_its_name(server: Running, name: str) -> None:
    address = f"/api/v1/jobs/{quote(name, safe='')}"
    # ".." as it stands is another address for every client, so it is sent encoded.
    address = address.replace("..", "%2E%2E")
    assert server.client.put(address, json={"attempt": 1, "state": "running"}).json()["job"] == name
    assert server.client.get(address).json()["job"] == name
    assert server.client.get(f"{address}/course").json()["job"] == name
    assert server.client.get(f"{address}/timeline").status_code == 200
    recording = server.client.get(f"{address}/recording")
    assert recording.status_code != 404, recording.text


def test_a_node_with_a_slash_is_excluded_and_comes_back(server: Running) -> None:
    name = "rack1/n1"
    server.dispatcher.services.store.commit(
        Change(nodes=(Node(node=name, state="in_service", reason="", updated_s=NOW),))
    )
    address = "/api/v1/nodes/rack1%2fn1"
    assert server.client.post(f"{address}/exclude").json()["state"] == "excluded"
    assert server.client.post(f"{address}/readmit?force=true").json()["state"] == "in_service"
    assert server.client.get(f"{address}/history").json()["node"] == name
    assert server.client.get(f"{address}/checks").status_code == 200


def test_a_plain_slash_still_parts_segments(server: Running) -> None:
    server.client.put("/api/v1/jobs/team%2Fcourse", json={"attempt": 1, "state": "running"})
    for path, said in (("team/course", "none of the jobs is called 'team'"), ("team/run", "nothing is here")):
        assert server.client.get(f"/api/v1/jobs/{path}").json()["detail"].startswith(said)


@pytest.mark.parametrize(
    ("raw", "seen"),
    [
        ("/api/v1/jobs/a%2Fb/course", ["", "api", "v1", "jobs", "a*b", "course"]),
        ("/api/v1/jobs/a/course%2Fb", ["", "api", "v1", "jobs", "a", "course", "b"]),
        ("/api/v1/jobs/%252F", [""]),
        ("/api/v1%2Fjobs/a", [""]),
        ("/api/v1/incidents/a%2Fb", [""]),
        ("/api/v1/jobs%2Fa", [""]),
        ("/%2Fapi/v1/jobs/a", [""]),
    ],
)
def test_only_the_name_keeps_its_slashes(raw: str, seen: list[str]) -> None:
    assert segments(raw) == seen


def test_dots_in_a_name_lead_nowhere_else(server: Running) -> None:
    assert server.client.get("/api/v1/jobs/..%2F..%2F..%2Fmetrics").status_code == 404
