"""What is tried again, and for how long; what never is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from eagle_eye.server.history.remote_history import Access, http_client
from eagle_eye.server.history.remote_sender import Brought, IntervalSamples, Post, Unwanted

MOMENT = IntervalSamples([b"head"] * 64, [b"sample"] * 64)


def brought(
    answers: Callable[[int], httpx.Response], moment: IntervalSamples = MOMENT
) -> tuple[Brought, list[float], list[tuple[str, str]]]:
    """Return what became of a moment, for how long it was waited, and which troubles were told."""
    waits: list[float] = []
    reported: list[tuple[str, str]] = []
    requests = 0

    def answer(_request: httpx.Request) -> httpx.Response:
        nonlocal requests
        requests += 1
        return answers(requests)

    with httpx.Client(transport=httpx.MockTransport(answer)) as http:
        post = Post(http, "http://store/write", waits.append, lambda *trouble: reported.append(trouble), lambda: 1.0)
        return post.bring(moment), waits, reported


def unreachable(number: int) -> httpx.Response:
    if number < 9:
        raise httpx.ConnectError("refused")
    return httpx.Response(204)


def test_a_store_that_cannot_be_reached_is_waited_for_ever_longer() -> None:
    found, waits, reported = brought(unreachable)
    assert found.taken == 64
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0]
    assert [reason for reason, _ in reported] == ["unreachable"] * 8 + [""]


@pytest.mark.parametrize(("after", "waited_s"), [("7", 7.0), ("90000", 300.0), ("soon", 0.5), ("-3", 0.5)])
def test_retry_after_is_kept_to_within_limits(after: str, waited_s: float) -> None:
    _, waits, reported = brought(lambda n: httpx.Response(429 if n == 1 else 204, headers={"Retry-After": after}))
    assert waits == [waited_s]
    assert reported[0][0] == "busy"


@pytest.mark.parametrize("status", [301, 401, 403, 404, 405, 415])
def test_what_an_operator_can_mend_loses_nothing(status: int) -> None:
    found, waits, reported = brought(lambda n: httpx.Response(status if n == 1 else 200, text="no"))
    assert (found.taken, len(waits), reported[0]) == (64, 1, ("configuration", f"the store answered HTTP {status}: no"))


@pytest.mark.parametrize(
    ("said", "reason"),
    [("out of bounds", "too_old"), ("duplicate sample for timestamp", "duplicate"), ("go away", "refused")],
)
def test_samples_that_are_all_refused_are_given_up_after_a_few_requests(said: str, reason: str) -> None:
    requests: list[int] = []

    def answer(number: int) -> httpx.Response:
        requests.append(number)
        return httpx.Response(400, text=said)

    found, waits, _ = brought(answer)
    assert (found.taken, found.refused, waits) == (0, {reason: 64}, [])
    assert len(requests) < 32


def test_a_request_that_is_too_large_is_divided() -> None:
    found, _, _ = brought(lambda n: httpx.Response(413 if n < 4 else 200))
    assert (found.taken, found.refused.total()) == (64, 0)


def test_nobody_waits_for_a_store_when_nobody_wants_it_any_more() -> None:
    def no_more(_seconds: float) -> None:
        raise Unwanted("the server has ended")

    with httpx.Client(transport=httpx.MockTransport(lambda _: httpx.Response(500))) as http, pytest.raises(Unwanted):
        Post(http, "http://store/write", no_more, lambda *_: None).bring(MOMENT)


def test_a_token_is_read_anew_for_each_request(tmp_path: Path) -> None:
    file = tmp_path / "token"
    sent: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request.headers["authorization"])
        return httpx.Response(204)

    with http_client(Access(bearer_token_file=str(file)), 1.0) as http:
        http._transport = httpx.MockTransport(answer)
        for text in ("one", "two\n"):
            file.write_text(text, encoding="utf-8")
            http.post("http://store/write")
    assert sent == ["Bearer one", "Bearer two"]
