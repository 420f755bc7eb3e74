from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_eye.server.model.errors import Refusal
from eagle_eye.server.model.records import Scope
from eagle_eye.server.security import auth
from eagle_eye.server.security.auth import LOCAL, Limits, Principal, Rates
from eagle_eye.server.security.settings import LimitSettings
from eagle_eye.server.store.store import Change
from tests.server.builders import NOW, FakeClock, body, frame, running


def limits(counted: Counter[str] | None = None, **settings: Any) -> Limits:
    found = Counter[str]() if counted is None else counted
    return Limits(LimitSettings(**settings), FakeClock(), lambda by: found.update([by]))


def agent(node: str = "n1", scope: Scope = "agent") -> Principal:
    return Principal(f"tok-{node}", scope, node)


@settings(max_examples=50)
@given(st.lists(st.floats(0.0, 3.0), max_size=30), st.integers(1, 5), st.sampled_from([0.5, 2.0, 10.0]))
def test_no_stretch_of_time_holds_more_than_the_burst_and_the_rate(
    gaps_s: list[float], burst: int, per_s: float
) -> None:
    rates, now_s, taken_s = Rates(), 0.0, list[float]()
    for gap_s in gaps_s:
        now_s += gap_s
        if rates.count_request("key", per_s, burst, now_s) == 0.0:
            taken_s.append(now_s)
    for first, begin_s in enumerate(taken_s):
        for last, end_s in enumerate(taken_s[first:], first):
            assert last - first + 1 <= burst + (end_s - begin_s) * per_s + 1e-3


@given(st.integers(1, 5), st.sampled_from([0.5, 2.0, 10.0]))
def test_who_waits_as_long_as_told_is_let_in(burst: int, per_s: float) -> None:
    rates = Rates()
    waits_s = [rates.count_request("key", per_s, burst, 0.0) for _ in range(burst + 1)]
    assert waits_s[:-1] == [0.0] * burst
    assert rates.count_request("key", per_s, burst, waits_s[-1] + 1e-9) == 0.0


def test_who_is_refused_does_not_push_its_turn_further_away() -> None:
    rates = Rates()
    assert rates.count_request("key", 1.0, 1, 0.0) == 0.0
    assert [rates.count_request("key", 1.0, 1, 0.5) for _ in range(9)] == [0.5] * 9
    assert rates.count_request("key", 1.0, 1, 1.0) == 0.0


def test_no_more_keys_are_remembered_than_allowed() -> None:
    rates = Rates(keys_max=2)
    for key in ("a", "b", "a", "c"):
        rates.count_request(key, 1.0, 2, 0.0)
    assert rates.count_request("a", 1.0, 2, 0.0) > 0.0  # it was heard after "b", which was forgotten
    assert rates.count_request("b", 1.0, 2, 0.0) == 0.0
    assert rates.count_request("b", 1.0, 2, 0.0) == 0.0


def test_a_refusal_names_who_the_limit_and_the_setting_and_says_when_to_come_back() -> None:
    counted: Counter[str] = Counter()
    limited = limits(counted, agent_requests_per_s=0.25, agent_burst=1)
    limited.check_token(agent())
    with pytest.raises(Refusal) as caught:
        limited.check_token(agent())
    refusal = caught.value
    assert (refusal.status, refusal.reason, refusal.headers) == (429, "rate", {"Retry-After": "4"})
    assert "tok-n1" in refusal.detail
    assert "0.25" in refusal.detail
    assert "limits.agent_requests_per_s" in refusal.detail
    assert counted == {"token": 1}
    limited.check_token(agent("n2"))


@pytest.mark.parametrize("principal", [Principal(LOCAL, "admin"), agent(scope="join")])
def test_neither_this_machine_nor_a_fleets_join_token_is_limited(principal: Principal) -> None:
    limited = limits(token_burst=1, agent_burst=1)
    for _ in range(3):
        limited.check_token(principal)


def test_whoever_may_send_any_nodes_frames_may_send_many() -> None:
    limited = limits(token_burst=1)
    for _ in range(3):
        limited.check_frames(agent(scope="admin"))


def test_the_addresses_of_one_ipv6_host_count_as_one() -> None:
    limited = limits(address_burst=1)
    limited.check_address("2001:db8::1")
    with pytest.raises(Refusal):
        limited.check_address("2001:db8::ffff:1:2:3")
    limited.check_address("2001:db8:0:1::1")
    limited.check_address("192.0.2.1")
    with pytest.raises(Refusal):
        limited.check_address("::ffff:192.0.2.1")
    limited.check_address("not an address")


def test_a_change_of_the_settings_counts_at_once() -> None:
    limited = limits(token_burst=1)
    limited.check_token(agent(scope="read"))
    limited.use(LimitSettings(token_burst=3))
    limited.check_token(agent(scope="read"))


def test_too_many_requests_are_answered_429_and_counted_but_for_probes(tmp_path: Path) -> None:
    text, token = auth.mint("read", None, NOW, None)
    other, second = auth.mint("agent", "n1", NOW, None)
    with running(tmp_path, limits__token_burst=2, limits__agent_burst=1, limits__address_burst=5) as server:
        server.dispatcher.services.store.commit(Change(tokens=(token, second)))

        def get(path: str) -> httpx.Response:
            return server.client.get(path, headers={"authorization": f"Bearer {text}"})

        assert [get("/api/v1/nodes").status_code for _ in range(3)] == [200, 200, 429]
        assert server.metric("rate_limited_total", by="token") == 1
        assert server.send(body(frame(1)), authorization=f"Bearer {other}").status_code == 200
        refused = server.send(body(frame(2)), authorization=f"Bearer {other}")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert server.metric("ingest_rejected_total", reason="rate") == 1
        assert [get("/").status_code for _ in range(3)] == [200, 200, 429]
        refused = get("/api/v1/nodes")
        assert (refused.status_code, refused.json()["reason"]) == (429, "rate")
        assert refused.headers["content-type"] == "application/problem+json"
        assert server.metric("rate_limited_total", by="address") == 2
        assert get("/healthz").status_code == 200


def writer() -> Principal:
    return Principal("tok-prometheus", "remote_write")


def test_who_writes_samples_too_often_is_told_to_come_back_and_loses_none() -> None:
    """Prometheus repeats what is answered 503 and throws away what is answered 429."""
    limited = limits(remote_write_requests_per_s=0.5, remote_write_burst=2)
    for _ in range(2):
        limited.check_remote_write(writer())
    with pytest.raises(Refusal) as caught:
        limited.check_remote_write(writer())
    refusal = caught.value
    assert (refusal.status, refusal.reason, refusal.headers) == (503, "rate", {"Retry-After": "2"})
    assert "limits.remote_write_requests_per_s" in refusal.detail


def test_each_token_writes_at_its_own_rate_and_this_machine_at_any() -> None:
    limited = limits(remote_write_requests_per_s=0.5, remote_write_burst=1)
    limited.check_remote_write(writer())
    limited.check_remote_write(Principal("tok-other", "remote_write"))
    for _ in range(9):
        limited.check_remote_write(Principal(LOCAL, "admin"))


def test_remote_writes_beyond_the_rate_are_counted_and_taken_when_their_time_has_come(tmp_path: Path) -> None:
    text, token = auth.mint("admin", None, NOW, None)
    clock = FakeClock()
    rare: dict[str, Any] = {"limits__remote_write_requests_per_s": 0.5, "limits__remote_write_burst": 1}
    headers = {
        "authorization": f"Bearer {text}",
        "content-type": "application/x-protobuf",
        "content-encoding": "snappy",
    }
    with running(tmp_path, clock, **rare) as server:
        server.dispatcher.services.store.commit(Change(tokens=(token,)))

        def write() -> httpx.Response:
            return server.client.post("/api/v1/write", content=b"\x00", headers=headers)

        assert write().status_code == 204
        refused = write()
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
        assert server.metric("remote_write_rejected_total", reason="rate") == 1
        assert server.metric("rate_limited_total", by="token") == 1
        clock.advance(2.0)
        assert write().status_code == 204
