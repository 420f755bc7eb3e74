"""Names that are none, at a server: what comes with them is kept, they are not, and who sends them is told."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle_eye.cli.main import main
from eagle_eye.schema.frame import Rank, block, values_of
from eagle_eye.schema.metrics import Scope
from eagle_eye.schema.rows import CONTENT_TYPE as ROWS
from eagle_eye.schema.rows import encode_row, encode_rows_request, encode_template, template_id, template_of
from eagle_eye.server.store.store import JOBS
from tests.server.builders import NOW, Running, body, frame, running

BAD = ["", "a\nb", "a\x00", "x" * 254]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path) as started:
        yield started


@pytest.mark.parametrize("name", BAD)
def test_a_frame_keeps_its_numbers_and_loses_its_job(
    server: Running, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        answer = server.send(body(frame(job=name, ranks=[Rank(name, 0, 1, 0), Rank("job", -1, 1, 0)])))
    assert (answer.status_code, answer.json()["accepted"]) == (200, 1)
    assert [reported.partition(" ")[0] for reported in answer.json()["unknown"]] == ["name", "name", "number"]
    assert server.metric("ingest_unknown_total", kind="name") == 2
    assert server.metric("ingest_unknown_total", kind="number") == 1
    assert "sends an invalid name or number" in caplog.text
    (kept, _, _) = server.watcher.frames[0]
    assert (kept.job, kept.ranks, values_of(kept.blocks[0]).tolist()) == (None, [], [101.0])
    assert server.client.get("/api/v1/nodes/n1").json()["agent"]["job"] is None
    (read,) = [one.frame for one in server.dispatcher.services.history.query([], 0.0, NOW + 1e6)]
    assert (read.job, values_of(read.blocks[0]).tolist()) == (None, [101.0])


@pytest.mark.parametrize("name", BAD)
def test_rows_keep_their_numbers_and_are_still_read_as_columns(server: Running, name: str) -> None:
    sent = frame(job=name, ranks=[Rank(name, 0, 2, 0), Rank("job", 1, 2, 1)])
    template = template_of(sent)
    raw = encode_template(template)
    for sequence in (1, 2):
        templates = [raw] if sequence == 1 else []
        rows = [encode_row(frame(sequence, job=name, ranks=sent.ranks), template, template_id(raw))]
        content = encode_rows_request(templates, rows, NOW)
        answer = server.client.post("/api/v1/frames", content=content, headers={"content-type": ROWS})
        assert (answer.status_code, answer.json()["accepted"]) == (200, 1)
    assert [(kept.job, [rank.rank for rank in kept.ranks]) for kept, _, _ in server.watcher.frames] == [(None, [1])] * 2
    assert server.metric("ingest_unknown_total", kind="name") == 2  # of each template once
    assert server.client.get("/api/v1/nodes/n1").json()["agent"]["job"] == "job"


def test_a_node_s_name_is_refused_as_before(server: Running) -> None:
    answer = server.send(body(frame(node="a\nb")))
    assert (answer.status_code, answer.json()["reason"]) == (400, "name")


def test_a_link_s_bad_name_costs_its_row(server: Running) -> None:
    rows = {"eth0": {"link_up": 1.0}, "e\nth": {"link_up": 0.0}}
    assert server.send(body(frame(blocks=[block(Scope.LINK, rows)]))).json()["accepted"] == 1
    assert [one.keys for one in server.watcher.frames[0][0].blocks] == [["eth0"]]


@pytest.mark.parametrize("name", ["a%0Ab", "%00", "x" * 254])
def test_a_job_is_declared_by_no_such_name(server: Running, name: str) -> None:
    answer = server.client.put(f"/api/v1/jobs/{name}", json={"attempt": 0, "state": "running", "ranks": []})
    assert answer.status_code in (400, 404)
    assert server.dispatcher.services.store.all(JOBS) == []


def test_a_token_for_no_name_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tokens", "create", "--scope", "agent", "--node", "a\nb", "--data", str(tmp_path)]
    assert main(words) == 2
    assert "'a\\nb' is no name" in capsys.readouterr().err
