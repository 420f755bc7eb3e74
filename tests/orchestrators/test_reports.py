from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any, Self

import pytest

from eagle_eye.orchestrators.ledger import Ledger
from eagle_eye.orchestrators.server_client import KEEP_AFTER_EXPIRY_S, Reporter, ServerClient, origin
from eagle_eye.orchestrators.subscription import SubscriptionKeeper, WantedSubscription
from eagle_eye.schema.action import JobUpdate, MemberRank
from eagle_eye.schema.backoff import Backoff
from tests.orchestrators.builders import StubServer, action, stub_server

REPORTS = "/api/v1/actions/act-1/reports"


def quick() -> Backoff:
    return Backoff(0.01, 0.02, random.Random(1).random)


def wait_for(what: Any, within_s: float = 5.0) -> None:
    until_s = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < until_s
        time.sleep(0.01)


class Reporting:
    def __init__(self, server: StubServer, folder: Path, clock: Any = time.time) -> None:
        self.client = ServerClient(server.url, "secret-token")
        self.ledger = Ledger(folder / "ledger.sqlite")
        self.reporter = Reporter(self.client, self.ledger, clock, quick())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.reporter.stop(5.0)
        self.ledger.close()
        self.client.close()


def test_reports_arrive_in_order_with_the_token(tmp_path: Path) -> None:
    with stub_server() as server, Reporting(server, tmp_path) as parts:
        parts.reporter.start()
        wanted = action(time.time(), report_to=server.url + REPORTS)
        parts.reporter(wanted, "accepted", "")
        parts.reporter(wanted, "running", "")
        parts.reporter(wanted, "done", "attempt 2 runs")
        reported = server.wait("POST", REPORTS, 3)
        assert [one["state"] for one in reported] == ["accepted", "running", "done"]
        assert reported[2]["detail"] == "attempt 2 runs"
        assert set(server.tokens) == {"Bearer secret-token"}


def test_failures_are_retried_in_order_and_a_clear_no_is_not(tmp_path: Path) -> None:
    answers = [503, 429, 401, 200, 409, 200]
    with stub_server() as server, Reporting(server, tmp_path) as parts:
        server.answer = lambda *_: (answers.pop(0), {"detail": "because"})
        wanted = action(time.time(), report_to=server.url + REPORTS)
        for state in ("accepted", "running", "done"):
            parts.reporter(wanted, state, "")
        parts.reporter.start()
        reported = server.wait("POST", REPORTS, 6)
        assert [one["state"] for one in reported] == ["accepted"] * 4 + ["running", "done"]
        wait_for(lambda: parts.ledger.owed() == [])


def test_reports_outlive_the_process_that_made_them(tmp_path: Path) -> None:
    with stub_server() as server:
        with Reporting(server, tmp_path) as first:
            first.reporter(action(time.time(), report_to=server.url + REPORTS), "accepted", "")
        assert server.reported("POST", REPORTS) == []
        with Reporting(server, tmp_path) as second:
            second.reporter.start()
            assert server.wait("POST", REPORTS, 1)[0]["state"] == "accepted"


def test_a_report_that_nobody_needs_any_more_is_not_sent(tmp_path: Path) -> None:
    now_s = [1_000_000.0]
    with stub_server() as server, Reporting(server, tmp_path, lambda: now_s[0]) as parts:
        parts.reporter(action(now_s[0], report_to=server.url + REPORTS), "accepted", "")
        now_s[0] += 60 + KEEP_AFTER_EXPIRY_S + 1
        parts.reporter.start()
        wait_for(lambda: parts.ledger.owed() == [])
        assert server.requests == []


@pytest.mark.parametrize(
    "elsewhere",
    [
        "http://169.254.169.254/latest/meta-data",
        "https://127.0.0.1:{port}" + REPORTS,
        "http://127.0.0.1:{port}@evil.example/x",
        "http://[bad",
        "file:///etc/passwd",
        "",
    ],
)
def test_only_the_configured_server_is_called_whatever_a_signed_action_says(tmp_path: Path, elsewhere: str) -> None:
    with stub_server() as server, Reporting(server, tmp_path) as parts:
        port = server.url.rpartition(":")[2]
        parts.reporter(action(time.time(), report_to=elsewhere.replace("{port}", port)), "accepted", "")
        parts.reporter.start()
        assert server.wait("POST", REPORTS, 1)
        assert {path for _, path, _ in server.requests} == {REPORTS}


def test_origins() -> None:
    assert origin("http://A.example/x") == origin("http://a.example:80")
    assert origin("https://a.example") == ("https", "a.example", 443)
    for bad in ("ftp://a", "http://", "http://u:p@a", "http://a:99999", "a.example", "http://[::1"):
        assert origin(bad) is None


class Subscribing:
    def __init__(self, server: StubServer, folder: Path) -> None:
        self.client = ServerClient(server.url, "")
        self.changes: list[tuple[str, float]] = []
        wanted = WantedSubscription("http://127.0.0.1:9/", ("j",))
        self.subscription = SubscriptionKeeper(
            self.client,
            wanted,
            folder / "subscription.json",
            0.05,
            quick(),
            lambda reason, away_s: self.changes.append((reason, away_s)),
        )

    def __enter__(self) -> SubscriptionKeeper:
        self.subscription.start()
        return self.subscription

    def __exit__(self, *_: object) -> None:
        self.subscription.stop()
        self.client.close()


def test_a_subscription_is_made_for_the_job_and_removed_at_the_end(tmp_path: Path) -> None:
    with stub_server() as server:
        with Subscribing(server, tmp_path) as subscription:
            (body,) = server.wait("POST", "/api/v1/subscriptions", 1)
            assert (body["url"], body["jobs"]) == ("http://127.0.0.1:9/", ["j"])
            assert "eagle_eye.action.requested" in body["types"]
            wait_for(lambda: subscription.in_touch)
            assert body["secret"] in subscription.secrets()
            assert (tmp_path / "subscription.json").stat().st_mode & 0o077 == 0
        assert len(server.reported("DELETE", "/api/v1/subscriptions/sub-1")) == 1
        assert not (tmp_path / "subscription.json").exists()


@pytest.mark.parametrize("gone", [(404, {"detail": "no"}), (200, {"active": False})])
def test_a_server_that_lost_the_subscription_gets_it_and_the_job_again(tmp_path: Path, gone: tuple[int, Any]) -> None:
    lost = [False]

    def answer(method: str, path: str) -> tuple[int, Any]:
        if lost[0] and method == "GET":
            lost[0] = False
            return gone
        return StubServer.agreeable(method, path)

    with stub_server() as server, Subscribing(server, tmp_path) as subscription:
        server.answer = answer
        subscription.report_job("j", JobUpdate(1, "running", [MemberRank(0, "n1", 0)], "eagle-eye"))
        server.wait("PUT", "/api/v1/jobs/j", 1)
        server.wait("POST", "/api/v1/subscriptions", 1)
        lost[0] = True
        server.wait("POST", "/api/v1/subscriptions", 2)
        assert server.wait("PUT", "/api/v1/jobs/j", 2)[1]["ranks"] == [
            {"rank": 0, "node": "n1", "device": 0, "role": ""}
        ]


def test_a_server_that_goes_away_is_reported_once_and_so_is_its_return(tmp_path: Path) -> None:
    with stub_server() as server:
        subscribing = Subscribing(server, tmp_path)
        with subscribing as subscription:
            wait_for(lambda: subscription.in_touch)
            assert (subscribing.changes, subscription.out_of_touch_s) == ([], 0.0)
            server.answer = lambda *_: (503, None)
            wait_for(lambda: bool(subscribing.changes))
            asked = len(server.requests)
            wait_for(lambda: len(server.requests) > asked + 3)
            ((reason, away_s),) = subscribing.changes
            assert "503" in reason
            assert away_s == 0.0
            assert subscription.out_of_touch_s > 0.0
            server.answer = StubServer.agreeable
            wait_for(lambda: len(subscribing.changes) == 2)
            assert subscribing.changes[1][0] == ""
            assert subscribing.changes[1][1] > 0.0
            assert subscription.out_of_touch_s == 0.0


def test_the_latest_word_on_a_job_arrives_once_the_server_is_back(tmp_path: Path) -> None:
    with stub_server() as server, Subscribing(server, tmp_path) as subscription:
        server.answer = lambda *_: (503, None)
        subscription.report_job("j", JobUpdate(1, "running"))
        server.wait("PUT", "/api/v1/jobs/j", 2)
        wait_for(lambda: not subscription.in_touch)
        subscription.report_job("j", JobUpdate(2, "running"))
        server.answer = StubServer.agreeable
        assert subscription.flush(5.0)
        assert server.reported("PUT", "/api/v1/jobs/j")[-1]["attempt"] == 2


UNFIT = "/api/v1/nodes/n%2F2/exclude?reason=gemm%3A%20gpu%203%20%26%204"


def test_a_node_that_is_unfit_is_reported_once_the_server_is_back(tmp_path: Path) -> None:
    with stub_server() as server, Subscribing(server, tmp_path) as subscription:
        server.answer = lambda *_: (503, None)
        subscription.take_out("n/2", "gemm: gpu 3 & 4")
        server.wait("POST", UNFIT, 2)
        server.answer = StubServer.agreeable
        assert subscription.flush(5.0)
        reported = len(server.reported("POST", UNFIT))
        server.wait("GET", "/api/v1/subscriptions/sub-1", 2)
        assert len(server.reported("POST", UNFIT)) == reported


def test_a_node_that_the_server_does_not_know_keeps_nothing_else_from_it(tmp_path: Path) -> None:
    def answer(method: str, path: str) -> tuple[int, Any]:
        return (404, {"detail": "no node"}) if path == UNFIT else StubServer.agreeable(method, path)

    with stub_server() as server, Subscribing(server, tmp_path) as subscription:
        server.answer = answer
        subscription.take_out("n/2", "gemm: gpu 3 & 4")
        assert subscription.flush(5.0)
        wait_for(lambda: subscription.in_touch)
        assert len(server.reported("POST", UNFIT)) == 1


def test_a_leftover_of_an_earlier_process_is_removed(tmp_path: Path) -> None:
    (tmp_path / "subscription.json").write_text('{"id": "old", "secret": "s"}')
    with stub_server() as server, Subscribing(server, tmp_path):
        server.wait("DELETE", "/api/v1/subscriptions/old", 1)
        server.wait("POST", "/api/v1/subscriptions", 1)


def test_the_attempt_that_the_server_knows(tmp_path: Path) -> None:
    with stub_server() as server, Subscribing(server, tmp_path) as subscription:
        assert subscription.attempt_of("j") == 0
        server.answer = lambda *_: (200, {"attempt": 7})
        assert subscription.attempt_of("j") == 7
        server.answer = StubServer.agreeable


class Lasting(Subscribing):
    """As ``eagle-eye orchestrate`` subscribes: for longer than its process lives."""

    def __init__(self, server: StubServer, folder: Path, url: str = "http://127.0.0.1:9/") -> None:
        self.client = ServerClient(server.url, "")
        wanted = WantedSubscription(url, ("llm-*",), lasting=True)
        self.subscription = SubscriptionKeeper(self.client, wanted, folder / "subscription.json", 0.05, quick())


def as_the_server_has_it(server: StubServer, **changed: object) -> None:
    """Answer for the subscription that was made last, changed as said."""

    def answer(method: str, path: str) -> tuple[int, Any]:
        if method == "GET" and path == "/api/v1/subscriptions/sub-1":
            return 200, {
                **server.reported("POST", "/api/v1/subscriptions")[-1],
                "id": "sub-1",
                "active": True,
                **changed,
            }
        return server.agreeable(method, path)

    server.answer = answer


def test_a_lasting_subscription_is_left_and_taken_up_again_with_its_secret(tmp_path: Path) -> None:
    with stub_server() as server:
        with Lasting(server, tmp_path) as first:
            server.wait("POST", "/api/v1/subscriptions", 1)
            wait_for(lambda: first.in_touch)
            secrets = list(first.secrets())
        as_the_server_has_it(server)
        with Lasting(server, tmp_path) as second:
            wait_for(lambda: second.in_touch)
            assert second.secrets()[0] == secrets[0]
        assert len(server.reported("POST", "/api/v1/subscriptions")) == 1
        assert server.reported("DELETE", "/api/v1/subscriptions/sub-1") == []
        assert server.reported("PATCH", "/api/v1/subscriptions/sub-1") == []


def test_a_lasting_subscription_moves_with_its_receiver(tmp_path: Path) -> None:
    with stub_server() as server:
        with Lasting(server, tmp_path) as first:
            wait_for(lambda: first.in_touch)
        as_the_server_has_it(server)
        with Lasting(server, tmp_path, "http://127.0.0.1:10/"):
            changed = server.wait("PATCH", "/api/v1/subscriptions/sub-1", 1)[0]
        assert changed == {"url": "http://127.0.0.1:10/"}


def test_a_request_whose_answer_was_lost_is_repeated_with_the_same_secret(tmp_path: Path) -> None:
    with stub_server() as server:
        server.answer = lambda method, path: (500, {}) if method == "POST" else server.agreeable(method, path)
        with Lasting(server, tmp_path):
            server.wait("POST", "/api/v1/subscriptions", 1)
        server.answer = server.agreeable
        with Lasting(server, tmp_path) as second:
            wait_for(lambda: second.in_touch)
        assert len({body["secret"] for body in server.reported("POST", "/api/v1/subscriptions")}) == 1


def test_a_subscription_that_somebody_paused_is_left_alone(tmp_path: Path) -> None:
    with stub_server() as server:
        with Lasting(server, tmp_path) as first:
            wait_for(lambda: first.in_touch)
            as_the_server_has_it(server, active=False, ended_reason="paused")
            wait_for(lambda: not first.in_touch)
        assert len(server.reported("POST", "/api/v1/subscriptions")) == 1
