"""Samples of jobs that another cell judges: which they are, and what becomes of them where it does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import pytest

from eagle_eye.server.ingest.remote_write import wire
from eagle_eye.server.ingest.remote_write.endpoint import (
    CELL_AGAIN_S,
    CELL_QUIET_S,
    CELL_RETRIED_S,
    JOB_FRESH_S,
    OtherCells,
)
from eagle_eye.server.ingest.remote_write.intake import Taken
from eagle_eye.server.ingest.remote_write.wire import Sample, WireSeries
from eagle_eye.server.model.errors import Refusal
from tests.server.builders import FakeClock
from tests.server.remote_write.requests import series, v1

WANTED = {b"up"}
Answer = Callable[[httpx.Request], httpx.Response]


class Site:
    """Cell west judges "theirs"; node "declared" is declared a member of it."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.url = "http://west.example"
        self.requests: list[httpx.Request] = []
        self.answer: Answer = lambda _: httpx.Response(204)
        client = httpx.AsyncClient(transport=httpx.MockTransport(self._answered))
        self.cells = OtherCells(self, {"declared": "theirs"}.get, client, "/api/v1/write", self.clock)

    def _answered(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        return self.answer(request)

    def other_cell_of(self, job: str) -> str:
        return "west" if job == "theirs" else ""

    def url_of(self, cell: str) -> str:
        return self.url if cell == "west" else ""

    def bring(self, *values: float) -> Taken:
        """Bring a series with these samples to west."""
        (one,) = wire.read_v1(v1(series("up", 0.0, 1.0, instance="n1")), WANTED, 10).series
        taken = Taken(of_cells={"west": [one._replace(samples=[Sample(1, value) for value in values])]})
        asyncio.run(self.cells.bring(taken, "Bearer secret"))
        return taken

    def outage(self, for_s: float) -> None:
        """Have a sender try again every second while west has no leader."""
        self.url = ""
        for _ in range(int(for_s)):
            with pytest.raises(Refusal):
                self.bring(1.0)
            self.clock.advance(1.0)


@pytest.fixture
def site() -> Site:
    return Site()


def test_a_job_is_known_by_its_label_or_its_declared_nodes(site: Site) -> None:
    assert site.cells.cell_of("n1", "theirs") == "west"
    assert site.cells.cell_of("declared", None) == "west"
    assert (site.cells.cell_of("n2", "ours"), site.cells.cell_of("n2", None)) == ("", "")


def test_a_label_counts_for_the_nodes_other_series_for_a_while(site: Site) -> None:
    site.cells.cell_of("n1", "theirs")
    site.clock.advance(JOB_FRESH_S)
    assert site.cells.cell_of("n1", None) == "west"
    site.clock.advance(1.0)
    assert site.cells.cell_of("n1", None) == ""


def test_a_node_whose_job_is_this_cells_again_has_all_its_series_here(site: Site) -> None:
    site.cells.cell_of("n1", "theirs")
    site.cells.cell_of("n1", "ours")
    assert site.cells.cell_of("n1", None) == ""


def test_the_other_cell_gets_the_series_as_they_came_with_the_senders_token(site: Site) -> None:
    taken = site.bring(1.0, 2.0)
    (request,) = site.requests
    assert (str(request.url), request.headers["authorization"]) == ("http://west.example/api/v1/write", "Bearer secret")
    assert request.headers["eagle-eye-of-one-cell"] == "1"
    content = wire.uncompressed(request.content, wire.announced_bytes(request.content))
    (came,) = wire.read_v1(content, WANTED, 10).series
    assert (wire.labels(came.key)["instance"], came.samples) == ("n1", [Sample(1, 1.0), Sample(1, 2.0)])
    assert (taken.left_out, taken.refused) == ({}, {})


def test_what_the_other_cell_refuses_is_refused_in_its_words(site: Site) -> None:
    written = {"X-Prometheus-Remote-Write-Samples-Written": "2"}
    site.answer = lambda _: httpx.Response(400, headers=written, json={"detail": "the token speaks for m*"})
    taken = site.bring(1.0, 2.0, 3.0)
    assert (taken.refused, taken.complaint) == ({"cell": 1}, "cell west: HTTP 400 the token speaks for m*")


def unreachable(_: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("no")


@pytest.mark.parametrize("answer", [unreachable, lambda _: httpx.Response(503), lambda _: httpx.Response(429)])
def test_while_the_other_cell_does_not_answer_the_sender_is_asked_to_try_again(site: Site, answer: Answer) -> None:
    site.answer = answer
    with pytest.raises(Refusal, match="cell west judges jobs of these nodes") as refused:
        site.bring(1.0)
    assert (refused.value.status, refused.value.headers["Retry-After"]) == (503, "1")


def test_after_a_minute_samples_for_it_are_dropped_and_counted_so_that_others_go_on(site: Site) -> None:
    site.outage(CELL_RETRIED_S)
    assert site.bring(1.0, 2.0).left_out == {"cell_unreached": 2}


def test_a_cell_that_is_given_up_is_tried_now_and_then_and_counts_again_once_it_answers(site: Site) -> None:
    site.outage(CELL_RETRIED_S)
    site.url, site.answer = "http://west.example", unreachable
    for _ in range(int(2 * CELL_AGAIN_S)):
        assert site.bring(1.0).left_out == {"cell_unreached": 1}
        site.clock.advance(1.0)
    assert len(site.requests) == 2
    site.answer = lambda _: httpx.Response(204)
    assert [site.bring(1.0).left_out for _ in range(2)] == [{}, {}]


def test_an_outage_that_nobody_asked_about_for_a_while_begins_anew(site: Site) -> None:
    site.outage(1.0)
    site.clock.advance(CELL_RETRIED_S + CELL_QUIET_S)
    with pytest.raises(Refusal):
        site.bring(1.0)


def test_one_cell_that_does_not_answer_keeps_nothing_from_another(site: Site) -> None:
    series_of = WireSeries(b"\x0a\x00", "up", [Sample(1, 1.0)])
    taken = Taken(of_cells={"east": [series_of], "west": [series_of]})
    with pytest.raises(Refusal, match="cell east"):
        asyncio.run(site.cells.bring(taken, ""))
    assert len(site.requests) == 1
