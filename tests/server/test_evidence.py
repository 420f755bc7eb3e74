"""Evidence on its way: asked of a node's agent with its acknowledgement, taken from it alone, kept, handed out."""

from __future__ import annotations

import gzip
import hashlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from eagle_eye.server.engine.respond import LATE_S
from eagle_eye.server.engine.settings import EvidenceSettings
from eagle_eye.server.model.records import EvidenceRequest
from eagle_eye.server.requests.evidence import (
    EVIDENCE_FOLDER,
    PARTIAL,
    REQUESTS_PER_ANSWER_MAX,
    Bundles,
    EvidenceRequests,
)
from eagle_eye.server.security.auth import mint
from eagle_eye.server.store.sql_store import open_file
from eagle_eye.server.store.store import EVIDENCE, Change
from tests.server.builders import NOW, FakeClock, Running, body, frame, incident, running
from tests.server.test_end_to_end import eventually

BUNDLE = gzip.compress(b"what the node knew", mtime=0)
GZIP = {"content-type": "application/gzip"}


def evidence(id_: str = "ev_1", **more: Any) -> EvidenceRequest:
    fields: dict[str, Any] = {
        "id": id_,
        "incident_id": "inc_1",
        "node": "n1",
        "job": "job",
        "attempt": 0,
        "kind": "evidence",
        "state": "asked",
        "within_seconds": 3.0,
        "asked_by": "server",
        "created_s": NOW,
        "updated_s": NOW,
        "expires_s": NOW + 600,
    }
    return EvidenceRequest(**{**fields, **more})


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def server(tmp_path: Path, clock: FakeClock) -> Iterator[Running]:
    with running(tmp_path, clock, evidence__bundle_bytes_max=100_000, evidence__nodes_max=3) as started:
        yield started


def ask(server: Running, *records: EvidenceRequest) -> None:
    server.dispatcher.services.store.commit(Change(incidents=(incident(),), evidence=records))


def put(server: Running, content: bytes = BUNDLE, id_: str = "ev_1", **headers: str) -> httpx.Response:
    kind = {**GZIP, **{name.replace("_", "-"): value for name, value in headers.items()}}
    return server.client.put(f"/api/v1/evidence/{id_}", content=content, headers=kind)


def test_a_request_comes_with_the_nodes_next_acknowledgement_and_with_no_other(server: Running) -> None:
    ask(server, evidence())
    reported = server.send(body(frame(1))).json()
    assert reported["requests"] == [
        {"id": "ev_1", "kind": "evidence", "deadline_s": 3.0, "job": "job", "attempt": 0, "bytes_max": 100_000}
    ]
    assert "requests" not in server.send(body(frame(1, node="n2"))).json()


def test_a_request_is_repeated_until_its_bundle_is_here(server: Running, clock: FakeClock) -> None:
    ask(server, evidence())
    assert "requests" in server.send(body(frame(1))).json()
    assert "requests" in server.send(body(frame(2))).json()
    put(server)
    clock.advance(1.0)
    assert "requests" not in server.send(body(frame(3))).json()


def test_a_request_is_not_handed_out_after_its_time(server: Running, clock: FakeClock) -> None:
    ask(server, evidence(expires_s=NOW + 10))
    clock.advance(11.0)
    assert "requests" not in server.send(body(frame(1))).json()


def test_one_answer_asks_for_few(server: Running) -> None:
    ask(server, *(evidence(f"ev_{number}") for number in range(20)))
    assert len(server.send(body(frame(1))).json()["requests"]) == REQUESTS_PER_ANSWER_MAX


def test_a_bundle_comes_out_as_it_went_in(server: Running, tmp_path: Path) -> None:
    ask(server, evidence())
    answer = put(server)
    assert answer.status_code == 200
    shown = answer.json()
    assert (shown["state"], shown["bytes"]) == ("received", len(BUNDLE))
    assert shown["sha256"] == hashlib.sha256(BUNDLE).hexdigest()
    got = server.client.get(shown["bundle"])
    assert got.content == BUNDLE
    assert got.headers["content-type"] == "application/gzip"
    assert got.headers["content-disposition"] == 'attachment; filename="evidence-n1-ev_1.tar.gz"'
    assert [path.name for path in (tmp_path / EVIDENCE_FOLDER).iterdir()] == ["ev_1.tar.gz"]
    assert server.metric("evidence_total", state="received") == 1


def test_a_node_cannot_name_the_file_that_people_download(server: Running) -> None:
    ask(server, evidence(node='../n"1;\r\n'))
    put(server)
    shown = server.client.get("/api/v1/evidence/ev_1/bundle").headers["content-disposition"]
    assert shown == 'attachment; filename="evidence-.._n_1_-ev_1.tar.gz"'


def test_an_incident_lists_what_was_gathered_for_it(server: Running) -> None:
    ask(server, evidence(), evidence("ev_2", node="n2"), evidence("ev_3", incident_id="inc_2"))
    put(server)
    shown = server.client.get("/api/v1/incidents/inc_1").json()["gathered"]
    assert [(item["id"], item["state"]) for item in shown] == [("ev_2", "asked"), ("ev_1", "received")]
    listed = server.client.get("/api/v1/evidence", params={"incident": "inc_1", "node": "n2"}).json()["items"]
    assert [item["id"] for item in listed] == ["ev_2"]
    assert server.client.get("/api/v1/evidence/ev_3").json()["bundle"] is None


def test_an_agent_that_could_gather_nothing_says_why(server: Running) -> None:
    ask(server, evidence())
    answer = server.client.put("/api/v1/evidence/ev_1", json={"failed": "256 threads hang"})
    assert (answer.json()["state"], answer.json()["detail"]) == ("failed", "256 threads hang")
    gone = server.client.get("/api/v1/evidence/ev_1/bundle")
    assert (gone.status_code, gone.json()["reason"]) == (404, "no_bundle")


def test_what_was_answered_is_not_answered_anew(server: Running) -> None:
    ask(server, evidence())
    put(server)
    again = put(server, gzip.compress(b"something else"))
    assert again.status_code == 200
    assert again.json()["sha256"] == hashlib.sha256(BUNDLE).hexdigest()
    assert server.client.get("/api/v1/evidence/ev_1/bundle").content == BUNDLE


def test_a_late_bundle_is_welcome(server: Running) -> None:
    ask(server, evidence(state="expired"))
    assert put(server).json()["state"] == "received"


@pytest.mark.parametrize(
    ("id_", "content", "kind", "status", "reason"),
    [
        ("ev_2", BUNDLE, "application/gzip", 404, "not_found"),
        ("..%2f..%2frecords", BUNDLE, "application/gzip", 404, "not_found"),
        ("ev_1", BUNDLE, "text/html", 415, "content_type"),
        ("ev_1", b"<html>", "application/gzip", 400, "not_gzip"),
        ("ev_1", b"", "application/gzip", 400, "not_gzip"),
        ("ev_1", b"{", "application/json", 400, "body"),
        ("ev_1", b"\x1f\x8b" + b"x" * 100_000, "application/gzip", 413, "oversized"),
    ],
)
def test_what_is_no_bundle_is_refused_and_leaves_nothing(
    server: Running, tmp_path: Path, id_: str, content: bytes, kind: str, status: int, reason: str
) -> None:
    ask(server, evidence())
    answer = put(server, content, id_, content_type=kind)
    assert (answer.status_code, answer.json()["reason"]) == (status, reason)
    folder = tmp_path / EVIDENCE_FOLDER
    assert not folder.exists() or list(folder.iterdir()) == []
    assert server.client.get("/api/v1/evidence/ev_1").json()["state"] == "asked"


def test_a_body_that_does_not_say_how_long_it_is_ends_at_the_limit(server: Running, tmp_path: Path) -> None:
    ask(server, evidence())

    def endless() -> Iterator[bytes]:
        yield b"\x1f\x8b"
        for _ in range(100):
            yield b"x" * 10_000

    answer = server.client.put("/api/v1/evidence/ev_1", content=endless(), headers=GZIP)
    assert answer.status_code == 413
    assert list((tmp_path / EVIDENCE_FOLDER).iterdir()) == []


def test_an_upload_that_breaks_off_leaves_nothing_and_can_be_repeated(server: Running, tmp_path: Path) -> None:
    ask(server, evidence())
    host, _, port = server.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(
            b"PUT /api/v1/evidence/ev_1 HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/gzip\r\n"
            b"content-length: 5000\r\n\r\n\x1f\x8bxx"
        )
    assert put(server).json()["state"] == "received"
    eventually(lambda: [path.name for path in (tmp_path / EVIDENCE_FOLDER).iterdir()] == ["ev_1.tar.gz"])


def tokens(server: Running) -> dict[str, str]:
    """Make a token of each kind; return what says so in a request."""
    made = {
        "own": mint("agent", "n1", NOW, None),
        "other": mint("agent", "n2", NOW, None),
        "read": mint("read", None, NOW, None),
        "operate": mint("operate", None, NOW, None),
    }
    server.dispatcher.services.store.commit(Change(tokens=tuple(token for _, token in made.values())))
    return {name: f"Bearer {text}" for name, (text, _) in made.items()}


def test_only_the_nodes_own_agent_answers(server: Running) -> None:
    ask(server, evidence())
    bearer = tokens(server)
    assert put(server).status_code == 401
    assert put(server, authorization=bearer["other"]).status_code == 403
    assert put(server, authorization=bearer["operate"]).status_code == 403
    assert put(server, authorization=bearer["own"]).status_code == 200


def test_agents_read_nothing_and_readers_ask_for_nothing(server: Running) -> None:
    ask(server, evidence())
    bearer = tokens(server)

    def status(method: str, path: str, who: str) -> int:
        return server.client.request(method, path, headers={"authorization": bearer[who]}).status_code

    assert status("GET", "/api/v1/evidence/ev_1/bundle", "own") == 403
    assert status("GET", "/api/v1/evidence", "own") == 403
    assert status("GET", "/api/v1/evidence", "read") == 200
    assert status("POST", "/api/v1/incidents/inc_1/evidence", "read") == 403
    assert status("POST", "/api/v1/incidents/inc_1/evidence", "operate") == 404  # allowed, but n1 was never heard


def test_a_person_asks_by_hand_and_is_on_record(server: Running, clock: FakeClock) -> None:
    server.send(body(frame(1)))
    ask(server)
    answer = server.client.post("/api/v1/incidents/inc_1/evidence", json={"bug_report": True})
    assert answer.status_code == 202
    items = answer.json()["items"]
    assert [(item["node"], item["kind"], item["asked_by"]) for item in items] == [
        ("n1", "bug_report", "local"),
        ("n1", "evidence", "local"),
    ]
    clock.advance(1.0)
    reported = server.send(body(frame(2))).json()["requests"]
    assert {(request["kind"], request["deadline_s"]) for request in reported} == {
        ("evidence", 3.0),
        ("bug_report", 600.0),
    }
    trail = server.client.get("/api/v1/audit").json()["items"]
    assert (trail[0]["verb"], trail[0]["subject"]) == ("evidence", "inc_1")


def test_who_was_asked_and_has_not_answered_is_not_asked_twice(server: Running) -> None:
    server.send(body(frame(1)))
    ask(server)
    for _ in range(2):
        items = server.client.post("/api/v1/incidents/inc_1/evidence").json()["items"]
    assert len(items) == 1


@pytest.mark.parametrize(("nodes", "status"), [(["nobody"], 404), (["n1", "n1", "n1", "n1"], 400), (["../n1"], 404)])
def test_nodes_that_were_never_heard_and_too_many_are_refused(server: Running, nodes: list[str], status: int) -> None:
    server.send(body(frame(1)))
    ask(server)
    answer = server.client.post("/api/v1/incidents/inc_1/evidence", json={"nodes": nodes})
    assert (answer.status_code, answer.json()["reason"]) == (status, "nodes")


def test_an_incident_without_nodes_asks_those_of_its_job(server: Running) -> None:
    for node in ("n1", "n2"):
        server.send(body(frame(1, node=node)))
    server.dispatcher.services.store.commit(Change(incidents=(incident(nodes=[], node=None),)))
    items = server.client.post("/api/v1/incidents/inc_1/evidence").json()["items"]
    assert sorted(item["node"] for item in items) == ["n1", "n2"]


class Office:
    """Requests over a real store and folder, without a server."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.clock = FakeClock()
        self.store = open_file(folder / "records.db")
        self.bundles = Bundles(folder / "evidence")
        self.evidence_requests = EvidenceRequests(self.store, self.bundles, EvidenceSettings(**settings), self.clock)

    def keep(self, id_: str, size: int, created_s: float = NOW) -> None:
        self.store.commit(Change(evidence=(evidence(id_, created_s=created_s),)))
        incoming = self.bundles.begin(id_)
        incoming.write(b"\x1f\x8b" + b"x" * (size - 2))
        self.evidence_requests.received(id_, incoming)

    def states(self) -> dict[str, str]:
        return {record.id: record.state for record in self.store.all(EVIDENCE)}


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, ["a", "b", "c"]),
        ({"bundles_max": 2}, ["b", "c"]),
        ({"folder_bytes_max": 1 << 20}, ["c"]),
        ({"retention_s": 100.0}, ["b", "c"]),
    ],
)
def test_the_oldest_bundles_go_when_a_limit_is_reached(
    tmp_path: Path, settings: dict[str, Any], kept: list[str]
) -> None:
    office = Office(tmp_path, **settings)
    for id_, created_s in (("a", NOW - 200), ("b", NOW), ("c", NOW)):
        office.keep(id_, 600_000, created_s)
    office.evidence_requests.sweep()
    assert sorted(path.name for path in (tmp_path / "evidence").iterdir()) == [f"{id_}.tar.gz" for id_ in kept]
    assert [id_ for id_, state in office.states().items() if state == "received"] == kept
    office.store.close()


def test_a_bundle_that_cannot_be_deleted_stays_on_record_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    office = Office(tmp_path, bundles_max=1)
    office.keep("a", 1_000, NOW - 200)
    office.keep("b", 1_000)

    def refused(_: str) -> None:
        raise PermissionError("the folder is read-only")

    with monkeypatch.context() as patch:
        patch.setattr(office.bundles, "delete", refused)
        office.evidence_requests.sweep()
    assert office.states() == {"a": "received", "b": "received"}
    office.evidence_requests.sweep()
    assert office.states() == {"a": "deleted", "b": "received"}
    office.store.close()


def test_a_bundle_that_comes_while_its_request_expires_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    office = Office(tmp_path)
    office.store.commit(Change(evidence=(evidence(),)))
    incoming = office.bundles.begin("ev_1")
    incoming.write(BUNDLE)
    coming = threading.Thread(target=office.evidence_requests.received, args=("ev_1", incoming))
    delete = office.bundles.delete

    def delete_late(id_: str) -> None:
        coming.start()
        coming.join(0.2)  # it has to wait for the sweep
        delete(id_)

    monkeypatch.setattr(office.bundles, "delete", delete_late)
    office.clock.advance(600)
    office.evidence_requests.sweep()
    coming.join()
    assert office.states() == {"ev_1": "received"}
    assert office.bundles.path("ev_1").read_bytes() == BUNDLE
    office.store.close()


def test_of_two_bundles_that_arrive_at_once_the_record_is_of_the_one_that_is_kept(tmp_path: Path) -> None:
    office = Office(tmp_path)
    office.store.commit(Change(evidence=(evidence(),)))
    incoming = [office.bundles.begin("ev_1") for _ in range(2)]
    for number, each in enumerate(incoming):
        each.write(gzip.compress(b"%d" % number, mtime=0))
    first, second = [office.evidence_requests.received("ev_1", each) for each in incoming]
    incoming[1].discard()
    assert first == second
    (kept,) = (tmp_path / "evidence").iterdir()
    assert hashlib.sha256(kept.read_bytes()).hexdigest() == first.sha256
    office.store.close()


def test_a_request_that_nobody_answers_expires(tmp_path: Path) -> None:
    office = Office(tmp_path)
    office.store.commit(Change(evidence=(evidence(expires_s=NOW + LATE_S),)))
    office.evidence_requests.sweep()
    assert office.states() == {"ev_1": "asked"}
    office.clock.advance(LATE_S)
    office.evidence_requests.sweep()
    assert office.states() == {"ev_1": "expired"}
    office.store.close()


def test_a_disk_that_is_nearly_full_is_left_to_frames_and_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle_eye.server.requests.evidence.FREE_BYTES_MIN", 1 << 62)
    with pytest.raises(OSError, match="bytes are free"):
        Bundles(tmp_path / "evidence").begin("ev_1")


def test_what_a_killed_server_had_begun_is_removed(tmp_path: Path) -> None:
    (tmp_path / f"ev_1.tar.gz.0{PARTIAL}").write_bytes(b"half")
    (tmp_path / "ev_2.tar.gz").write_bytes(BUNDLE)
    Bundles(tmp_path).sweep_partial()
    assert [path.name for path in tmp_path.iterdir()] == ["ev_2.tar.gz"]
