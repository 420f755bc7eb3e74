"""Nodes that never were, by a remote-write token that may name any: they lift no limit, take no place, and can go."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from eagle_eye.server.model.records import Scope
from eagle_eye.server.security.auth import mint
from eagle_eye.server.store.sql_store import RECORDS_FILE, open_file
from eagle_eye.server.store.store import Change
from tests.server.builders import body, frame
from tests.server.own_process import OwnProcess, serving
from tests.server.remote_write.requests import V1_HEADERS, series, snappy, v1

NODES = 20_000
# What all of them cost the server at once, in what the same samples cost it once it knows them, on whatever machine.
TIMES_KNOWN = 3.0
CAPPED_CPU_S = 3.0


class Attack:
    """A server with tokens of each kind, whose own processor time can be read."""

    def __init__(self, server: OwnProcess, tokens: dict[str, str]) -> None:
        self.server = server
        self.tokens = tokens

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.server.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100

    def headers(self, scope: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.tokens[scope]}"}

    def write(self, prefix: str) -> tuple[httpx.Response, float]:
        now_s, before_s = time.time(), self.cpu_s()
        written = [
            series("DCGM_FI_DEV_GPU_TEMP", 50.0, now_s, gpu="0", Hostname=f"{prefix}{at}") for at in range(NODES)
        ]
        headers = {**V1_HEADERS, **self.headers("remote_write")}
        answer = self.server.client.post("/api/v1/write", content=snappy(v1(*written)), headers=headers)
        return answer, self.cpu_s() - before_s

    def gauge(self, name: str) -> float:
        text = self.server.client.get("/metrics", headers=self.headers("admin")).text
        return float(next(line.split()[1] for line in text.splitlines() if line.startswith(f"eagle_eye_{name} ")))

    def enrol_and_speak(self, node: str) -> None:
        enrolled = self.server.client.post("/api/v1/enrol", json={"node": node}, headers=self.headers("join"))
        assert enrolled.status_code == 201, enrolled.text
        content = body(frame(node=node, time_s=time.time()), sent_s=time.time())
        headers = {
            "authorization": f"Bearer {enrolled.json()['token']}",
            "content-type": "application/x-eagle-eye-frames",
        }
        assert self.server.client.post("/api/v1/frames", content=content, headers=headers).status_code == 200


def attacked(folder: Path, configuration: str) -> Iterator[Attack]:
    data = folder / "data"
    data.mkdir()
    (folder / "server.toml").write_text(configuration)
    store = open_file(data / RECORDS_FILE)
    tokens: dict[str, str] = {}
    scopes: tuple[Scope, ...] = ("remote_write", "join", "admin")
    for scope in scopes:
        tokens[scope], made = mint(scope, None, time.time(), 3_600.0, ("*",) if scope == "remote_write" else ())
        tokens[f"{scope} id"] = made.id
        store.commit(Change(tokens=(made,)))
    store.close()
    with serving(data, "--config", str(folder / "server.toml")) as server:
        yield Attack(server, tokens)


@pytest.fixture
def usual(tmp_path: Path) -> Iterator[Attack]:
    yield from attacked(tmp_path, "")


@pytest.fixture
def raised(tmp_path: Path) -> Iterator[Attack]:
    yield from attacked(tmp_path, "[remote_write]\ntoken_nodes_max = 20000\n")


def test_nodes_beyond_the_cap_are_answered_fast_and_lift_nothing(usual: Attack) -> None:
    usual.enrol_and_speak("real-1")
    answer, cpu_s = usual.write("made-up-")
    assert (answer.status_code, answer.json()["reason"]) == (400, "too_many_new_nodes")
    assert cpu_s < CAPPED_CPU_S
    assert usual.gauge("nodes_known") == 4_096 + 1
    assert usual.gauge("nodes_vouched") == 1
    answer, _ = usual.write("made-up-")  # those that are known go on
    assert answer.status_code == 400
    usual.enrol_and_speak("real-2")
    assert usual.gauge("nodes_vouched") == 2


def test_a_raised_cap_takes_all_at_once_enrolment_goes_on_and_all_can_be_forgotten(raised: Attack) -> None:
    answer, cpu_s = raised.write("made-up-")
    assert answer.status_code == 204, answer.text
    assert raised.gauge("nodes_known") == NODES
    answer, known_cpu_s = raised.write("made-up-")
    assert answer.status_code == 204, answer.text
    assert cpu_s < TIMES_KNOWN * known_cpu_s
    assert raised.gauge("nodes_vouched") == 0
    raised.enrol_and_speak("real-1")
    asked = {"introduced_by": raised.tokens["remote_write id"], "force": True}
    reported = raised.server.client.post("/api/v1/nodes/forget", json=asked, headers=raised.headers("admin"))
    assert (reported.status_code, len(reported.json()["forgotten"])) == (200, NODES)
    assert raised.gauge("nodes_known") == 1
    listed = raised.server.client.get("/api/v1/nodes", headers=raised.headers("admin")).json()["items"]
    assert [node["node"] for node in listed] == ["real-1"]
