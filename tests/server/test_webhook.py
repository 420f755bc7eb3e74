from __future__ import annotations

import asyncio
import base64
import json
import time
from email.utils import formatdate

import pytest
import standardwebhooks
from cloudevents.core.bindings.http import HTTPMessage, from_structured_event

from eagle_eye.server.delivery import message_formats, webhook
from eagle_eye.server.delivery.attempts import Outcome, Receipt, WebhookSettings
from eagle_eye.server.delivery.message_formats import formats
from eagle_eye.server.delivery.webhook import Guard
from eagle_eye.server.model.records import OutboundEvent, Retiring, Subscription
from tests.server.builders import NOW, event, subscription
from tests.server.receiver import Receiver, receiver

SOURCE = "http://eagle.example"
FORMATS = formats(SOURCE, WebhookSettings()).by_name()


async def no_names(_host: str, _port: int) -> list[str]:
    raise OSError("no such name")


def deliver(target: Subscription, what: OutboundEvent, now_s: float = NOW, timeout_s: float = 5.0) -> Receipt:
    async def once() -> Receipt:
        notifier = webhook.Webhook(Guard(True, no_names), FORMATS)
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


def test_a_replaced_secret_signs_until_its_time_so_that_a_receiver_may_lag_a_rotation() -> None:
    now_s = time.time()
    new, old = webhook.new_secret(), webhook.new_secret()
    with receiver() as target:
        deliver(subscription(url=target.url, secrets=[new], retiring=[Retiring(old, now_s + 1)]), event(), now_s)
        deliver(subscription(url=target.url, secrets=[new], retiring=[Retiring(old, now_s)]), event(), now_s)
    (headers, content), (later, _) = target.got
    for secret in (new, old):
        standardwebhooks.Webhook(secret).verify(content, headers)
    standardwebhooks.Webhook(new).verify(content, later)
    for secret, received in ((webhook.new_secret(), headers), (old, later)):
        with pytest.raises(standardwebhooks.WebhookVerificationError):
            standardwebhooks.Webhook(secret).verify(content, received)


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


def test_a_refusal_with_the_epoch_that_was_seen_is_repeated() -> None:
    receipt = webhook.receipt(409, None, NOW, "7")
    assert (receipt.outcome, receipt.status, receipt.epoch_seen) == (Outcome.RETRY, 409, 7)


@pytest.mark.parametrize(
    ("status", "header"), [(409, text) for text in ("", "0", "-7", "7.0", "²", str(1 << 70))] + [(400, "7")]
)
def test_what_is_no_refusal_for_an_epoch_stays_final(status: int, header: str) -> None:
    receipt = webhook.receipt(status, None, NOW, header)
    assert (receipt.outcome, receipt.epoch_seen) == (Outcome.REJECTED, None)


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
        notifier = webhook.Webhook(Guard(True, rebinding), FORMATS)
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

        notifier = webhook.Webhook(Guard(False, private), FORMATS)
        try:
            return await notifier.deliver(subscription(), event(), NOW, 5.0)
        finally:
            await notifier.close()

    receipt = asyncio.run(once())
    assert receipt.outcome is Outcome.REJECTED
    assert "allow_private" in receipt.error


def test_numbers_that_json_lacks_become_null() -> None:
    content = message_formats.envelope(event(data={"value": float("nan")}), SOURCE)
    assert json.loads(content)["data"] == {"value": None}


def test_an_event_carries_the_epoch_of_who_leads_and_none_of_a_server_alone() -> None:
    led = message_formats.CloudEvents(SOURCE, lambda: 7, 5.0).message(subscription(), event(), NOW)
    alone = message_formats.CloudEvents(SOURCE).message(subscription(), event(), NOW)
    assert json.loads(led.body)["data"] == {**event().data, "epoch": 7, "lease_seconds": 5.0}
    assert json.loads(alone.body)["data"] == event().data
