"""Changes as they happen, and what becomes of them when the connection is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eagle_eye.client import Client, LimitReached, Refused, ServerEvent, Unreachable, http_client
from eagle_eye.client.http_client import EventStream, event_messages
from eagle_eye.server.model.records import Node
from eagle_eye.server.security.auth import mint
from eagle_eye.server.store import sql_store
from eagle_eye.server.store.store import Change
from tests.client.breaking_proxy import BreakingProxy, breaking
from tests.server.builders import NOW, FakeClock, Running, action, incident, running


@pytest.fixture(autouse=True)
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event that is missed ends a test, and does not have it wait for ever."""
    monkeypatch.setattr(http_client, "SILENCE_S", 3.0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path) as started:
        yield started


@pytest.fixture
def proxy(server: Running) -> Iterator[BreakingProxy]:
    with breaking(server.url) as between:
        yield between


def commit(server: Running, *ids: str) -> None:
    for one in ids:
        server.dispatcher.services.store.commit(Change(incidents=(incident(one),)))


class Reader:
    """An EventStream whose waits do ``meanwhile``, and take no time."""

    def __init__(self, url: str, after: int | None = None, patience_s: float = 60.0) -> None:
        self.clock = FakeClock()
        self.waits: list[float] = []
        self.meanwhile: Callable[[], object] = lambda: None
        self.stream = EventStream(Client(url, timeout_s=3.0), after, patience_s, self.clock.monotonic_s, self._wait)
        self.events = self.stream.follow()

    def _wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        assert len(self.waits) < 20, "an event was missed"
        self.clock.advance(seconds)
        self.meanwhile()

    def ids(self, count: int) -> list[str]:
        return [next(self.events).record["id"] for _ in range(count)]


def test_events_are_the_records_as_they_are_now(server: Running) -> None:
    events = Client(server.url).events(after=0)
    changed = Change(
        incidents=(incident(),),
        actions=(action(),),
        nodes=(Node(node="n9", state="excluded", reason="", updated_s=NOW),),
    )
    server.dispatcher.services.store.commit(changed)
    found = {event.kind: event for event in (next(events) for _ in range(3))}
    assert found.keys() == {"incident", "action", "node"}
    assert found["incident"].record["id"] == "inc_1"
    assert found["node"].record["node"] == "n9"
    assert sorted(event.id for event in found.values()) == [1, 2, 3]


def test_a_lost_connection_costs_no_event(server: Running, proxy: BreakingProxy) -> None:
    reader = Reader(proxy.url, after=0)
    commit(server, "a", "b")
    assert reader.ids(2) == ["a", "b"]
    proxy.cut()
    commit(server, "c", "d")
    assert reader.ids(2) == ["c", "d"]
    assert proxy.connections == 2
    assert len(reader.waits) == 1


def test_a_connection_lost_before_the_first_event_costs_none_either(server: Running, proxy: BreakingProxy) -> None:
    commit(server, "before")
    proxy.last_words = b"hello"
    reader = Reader(proxy.url)

    def changed() -> None:
        proxy.last_words = None
        commit(server, "meanwhile")

    reader.meanwhile = changed
    assert reader.ids(1) == ["meanwhile"]
    assert len(reader.waits) == 1


def test_a_server_that_is_away_is_tried_with_growing_waits_until_patience_ends(
    server: Running, proxy: BreakingProxy
) -> None:
    reader = Reader(proxy.url, after=0, patience_s=60.0)
    commit(server, "a")
    assert reader.ids(1) == ["a"]
    proxy.away = True
    proxy.cut()
    with pytest.raises(Unreachable, match=r"no events for 60 s \(patience_s\): .*; events\(after=1\) goes on"):
        next(reader.events)
    assert 30.0 < sum(reader.waits) <= 60.0
    assert max(reader.waits) > 5 * reader.waits[0]
    proxy.away = False
    commit(server, "b")
    assert next(Client(server.url).events(after=reader.stream.after)).record["id"] == "b"


def test_a_server_that_returns_in_time_is_followed_on(server: Running, proxy: BreakingProxy) -> None:
    reader = Reader(proxy.url, after=0)
    commit(server, "a")
    assert reader.ids(1) == ["a"]
    proxy.away = True
    proxy.cut()
    commit(server, "b")

    def returned() -> None:
        proxy.away = len(reader.waits) < 4

    reader.meanwhile = returned
    assert reader.ids(1) == ["b"]
    assert len(reader.waits) == 4


def test_who_was_away_too_long_is_told_to_read_anew(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql_store, "CHANGES_KEPT", 2)
    commit(server, "a", "b", "c", "d", "e")
    server.dispatcher.services.store.prune(NOW, 1e9)
    assert next(Client(server.url).events(after=0)) == ServerEvent(5, http_client.RESET, {})


def test_a_refusal_is_no_lost_connection(server: Running, tmp_path: Path) -> None:
    server.dispatcher.services.store.commit(Change(tokens=(mint("read", None, NOW, None)[1],)))
    reader = Reader(server.url)
    with pytest.raises(Refused) as refused:
        next(reader.events)
    assert (refused.value.status, reader.waits) == (401, [])


def test_a_server_without_room_is_asked_again_when_it_says(tmp_path: Path) -> None:
    with running(tmp_path, streams_max=1) as server, breaking(server.url) as proxy:
        reader = Reader(proxy.url, after=0)
        commit(server, "a")
        assert reader.ids(1) == ["a"]
        with pytest.raises(Refused) as refused:  # who was never connected is told at once
            next(Client(server.url).events())
        assert (refused.value.status, refused.value.reason) == (503, "busy")
        streams = server.dispatcher.services.open_streams

        def others_come_and_leave() -> None:
            streams.count = 5 if len(reader.waits) == 1 else 0

        reader.meanwhile = others_come_and_leave
        proxy.cut()
        commit(server, "b")
        assert reader.ids(1) == ["b"]
        assert reader.waits[1:] == [refused.value.retry_after_s] == [10.0]


def test_a_message_that_was_cut_off_is_none() -> None:
    whole = b'id: 7\nevent: job\ndata: {"job": "a"}\n\n'
    expected = [{"id": "7", "event": "job", "data": '{"job": "a"}'}]
    for cut in range(len(whole)):
        lines = iter((b": hello\n\n" + whole + whole[:cut]).splitlines(keepends=True))
        assert list(event_messages(lambda _most, lines=lines: next(lines, b""))) == expected  # type: ignore[misc]


def test_an_event_without_end_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle_eye.client.http_client.ANSWER_BYTES_MAX", 1 << 20)
    with pytest.raises(LimitReached, match="more than 1 MiB"):
        list(event_messages(lambda most: b"x" * most))
