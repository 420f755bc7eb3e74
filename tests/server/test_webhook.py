from __future__ import annotations

import asyncio
import base64
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import standardwebhooks
from cloudevents.core.bindings.http import HTTPMessage, from_structured_event

from eagle_eye.server.notifiers import webhook
from eagle_eye.server.notifiers.guard import Guard
from eagle_eye.server.notifiers.receipts import Outcome, Receipt
from eagle_eye.server.records import OutboundEvent, Subscription
from tests.server.builders import NOW, event, subscription

SOURCE = "http://eagle.example"


@dataclass
class Receiver:
    """A target on loopback: answers with ``status`` after ``delay_s`` and keeps what it got."""

    url: str = ""
    status: int = 200
    delay_s: float = 0.0
    headers: dict[str, str] = field(default_factory=dict)
    got: list[tuple[dict[str, str], bytes]] = field(default_factory=list)


@contextmanager
def receiver() -> Iterator[Receiver]:
    state = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            state.got.append(({name.lower(): value for name, value in self.headers.items()}, content))
            time.sleep(state.delay_s)
            self.send_response(state.status)
            for name, value in state.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            pass  # the client gave up; that is what some tests are about

    with Server(("127.0.0.1", 0), Handler) as server:
        state.url = f"http://127.0.0.1:{server.server_port}/hook?x=1"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield state
        server.shutdown()
        thread.join()


async def no_names(_host: str, _port: int) -> list[str]:
    raise OSError("no such name")


def deliver(target: Subscription, what: OutboundEvent, now_s: float = NOW, timeout_s: float = 5.0) -> Receipt:
    async def once() -> Receipt:
        notifier = webhook.Webhook(Guard(True, no_names), SOURCE)
        try:
            return await notifier.deliver(target, what, now_s, timeout_s)
        finally:
            await notifier.close()

    return asyncio.run(once())


def test_a_delivery_is_a_signed_cloudevent() -> None:
    now_s = time.time()
    what = event(data={"fault": "hang", "summary": "n1 \u00e4"}, time_s=now_s)
    with receiver() as target:
        receipt = deliver(subscription(url=target.url), what, now_s)
    assert receipt == Receipt(Outcome.DELIVERED, 200)
    ((headers, content),) = target.got
    assert headers["webhook-id"] == "evt-1"
    assert headers["host"] == target.url.removeprefix("http://").partition("/")[0]
    standardwebhooks.Webhook(subscription().secrets[0]).verify(content, headers)
    parsed = from_structured_event(HTTPMessage(headers, content))
    assert parsed.get_id() == "evt-1"
    assert parsed.get_type() == "eagle_eye.incident.opened"
    assert parsed.get_source() == SOURCE
    assert parsed.get_subject() == "inc_1"
    assert parsed.get_specversion() == "1.0"
    moment = parsed.get_time()
    assert moment is not None
    assert moment.timestamp() == pytest.approx(now_s, abs=0.001)
    assert parsed.get_data() == what.data


def test_every_secret_signs_so_that_a_receiver_may_lag_a_rotation() -> None:
    now_s = time.time()
    new, old = webhook.new_secret(), webhook.new_secret()
    with receiver() as target:
        deliver(subscription(url=target.url, secrets=[new, old]), event(), now_s)
    ((headers, content),) = target.got
    for secret in (new, old):
        standardwebhooks.Webhook(secret).verify(content, headers)
    with pytest.raises(standardwebhooks.WebhookVerificationError):
        standardwebhooks.Webhook(webhook.new_secret()).verify(content, headers)


def test_attempts_keep_id_and_body_and_have_a_fresh_timestamp() -> None:
    with receiver() as target:
        for now_s in (NOW, NOW + 77.7):
            deliver(subscription(url=target.url), event(), now_s)
    (first, one), (second, two) = target.got
    assert one == two
    assert first["webhook-id"] == second["webhook-id"]
    assert (first["webhook-timestamp"], second["webhook-timestamp"]) == (str(int(NOW)), str(int(NOW + 77.7)))


def test_a_secret_is_whsec_and_32_random_bytes() -> None:
    secret = webhook.new_secret()
    assert secret.startswith("whsec_")
    assert len(base64.b64decode(secret.removeprefix("whsec_"))) == 32
    assert secret != webhook.new_secret()
    webhook.check_secret(secret)


@pytest.mark.parametrize("bad", ["", "secret", "whsec_", "whsec_c2hvcnQ=", "whsec_%%%", "whsec_" + "A" * 100])
def test_other_secrets_are_refused_without_being_repeated(bad: str) -> None:
    with pytest.raises(ValueError, match="24 to 64") as caught:
        webhook.check_secret(bad)
    assert bad in ("", "secret", "whsec_") or bad not in str(caught.value)


def expected(status: int) -> Outcome:
    if 200 <= status < 300:
        return Outcome.DELIVERED
    if status == 410:
        return Outcome.GONE
    if 400 <= status < 500 and status not in (408, 429):
        return Outcome.REJECTED
    return Outcome.RETRY


def test_every_status_has_its_meaning() -> None:
    for status in range(200, 600):
        receipt = webhook.receipt(status, None, NOW)
        assert receipt.outcome is expected(status), status
        assert receipt.status == status
        assert bool(receipt.error) is (receipt.outcome is not Outcome.DELIVERED)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("0", 0.0),
        ("120", 120.0),
        ("999999999999", 86_400.0),
        (formatdate(NOW + 90, usegmt=True), 90.0),
        (formatdate(NOW - 90, usegmt=True), 0.0),
        ("soon", None),
        ("-5", None),
        ("", None),
        ("\u0661", None),
    ],
)
def test_retry_after_is_read_as_seconds_or_date(header: str | None, seconds: float | None) -> None:
    assert webhook.retry_after_s(header, NOW) == seconds


def test_the_targets_status_and_retry_after_come_back() -> None:
    with receiver() as target:
        target.status, target.headers = 503, {"Retry-After": "7"}
        receipt = deliver(subscription(url=target.url), event())
    assert (receipt.outcome, receipt.status, receipt.retry_after_s) == (Outcome.RETRY, 503, 7.0)


def test_redirects_are_not_followed() -> None:
    with receiver() as other, receiver() as target:
        target.status, target.headers = 302, {"Location": other.url}
        receipt = deliver(subscription(url=target.url), event())
        assert other.got == []
    assert receipt.outcome is Outcome.RETRY
    assert "redirects are not followed" in receipt.error


def test_a_target_that_does_not_answer_in_time_is_tried_again() -> None:
    with receiver() as target:
        target.delay_s = 0.5
        receipt = deliver(subscription(url=target.url), event(), timeout_s=0.1)
    assert (receipt.outcome, receipt.status) == (Outcome.RETRY, None)
    assert "0.1 s" in receipt.error


def test_a_target_that_is_not_there_is_tried_again_and_the_error_does_not_name_it() -> None:
    receipt = deliver(subscription(url="http://127.0.0.1:1/secret-path"), event())
    assert receipt == Receipt(Outcome.RETRY, None, "ConnectError")
    receipt = deliver(subscription(url="http://nowhere.example/secret-path"), event())
    assert receipt == Receipt(Outcome.RETRY, None, "OSError")


def test_the_checked_address_is_the_one_connected_to_and_the_name_stays_in_host() -> None:
    asked = []

    async def rebinding(host: str, _port: int) -> list[str]:
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else ["192.0.2.1"]

    async def once(target: Receiver) -> Receipt:
        notifier = webhook.Webhook(Guard(True, rebinding), SOURCE)
        try:
            url = target.url.replace("127.0.0.1", "hook.example")
            return await notifier.deliver(subscription(url=url), event(), NOW, 5.0)
        finally:
            await notifier.close()

    with receiver() as target:
        assert asyncio.run(once(target)).outcome is Outcome.DELIVERED
    assert asked == ["hook.example"]
    assert target.got[0][0]["host"].startswith("hook.example:")


def test_a_target_that_became_private_is_a_final_failure() -> None:
    async def once() -> Receipt:
        async def private(_host: str, _port: int) -> list[str]:
            return ["10.0.0.1"]

        notifier = webhook.Webhook(Guard(False, private), SOURCE)
        try:
            return await notifier.deliver(subscription(), event(), NOW, 5.0)
        finally:
            await notifier.close()

    receipt = asyncio.run(once())
    assert receipt.outcome is Outcome.REJECTED
    assert "allow_private" in receipt.error


def test_numbers_that_json_lacks_become_null() -> None:
    content = webhook.envelope(event(data={"value": float("nan")}), SOURCE)
    assert json.loads(content)["data"] == {"value": None}
