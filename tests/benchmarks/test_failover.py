"""The failover benchmark's own parts, and a few takeovers of it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.failover import said
from benchmarks.failover.figures import NONE, Outcome, figures, missed
from benchmarks.failover.keeping import keep, opened
from benchmarks.failover.plan import AWAY, KINDS, SAME_LEADER, draw
from benchmarks.failover.relay import Relay, Streams, Trap
from benchmarks.failover.said import Said, Term
from eagle_eye.demo.two_servers import postgresql_programs

TAKEOVERS = 50
SETTINGS = {"lease_s": 5.0, "away_s": 60.0, "seed": 1, "kinds": list(KINDS)}


def delivery(action: str = "act", **more: Any) -> Said:
    fields: dict[str, Any] = {"time_s": 10.0, "job": "j", "attempt": 0, "epoch": 2, "highest": 2, "outcome": "queued"}
    return Said(what="delivery", action=action, **{**fields, **more})


def restart(action: str = "act", job: str = "j", attempt: int = 0) -> Said:
    return Said(what="restart", time_s=11.0, action=action, job=job, attempt=attempt)


def outcome(**more: Any) -> Outcome:
    fields: dict[str, Any] = {"number": 0, "kind": "killed", "fault_after_s": 1.0, "led_s": 6.0, "acted_s": 9.0}
    return Outcome(**{**fields, **more})


def test_of_a_round_each_kind_comes_once_and_a_longer_plan_begins_as_the_shorter_one() -> None:
    many = len(KINDS)
    items = draw(2 * many, 1, 5.0)
    assert sorted(one.kind for one in items[:many]) == sorted(one.kind for one in items[many:]) == sorted(KINDS)
    assert draw(100, 1, 5.0)[: 2 * many] == items
    assert draw(2 * many, 2, 5.0) != items


def test_the_fault_is_within_a_lease_of_the_event_or_while_all_are_away() -> None:
    items = draw(120, 1, 2.0, away_s=60.0)
    assert all(0.0 <= one.fault_after_s <= 2.0 for one in items if one.kind not in AWAY)
    assert max(one.fault_after_s for one in items if one.kind in AWAY) > 30.0
    assert max(one.fault_after_s for one in items) <= 60.0


def test_a_leader_that_is_to_give_way_to_agents_has_led_for_as_long_as_the_plan_can_make_it() -> None:
    kinds = [one.kind for one in draw(10 * len(KINDS), 3, 1.0)]
    for place, kind in enumerate(kinds):
        if kind == "cut_from_agents":
            assert sorted(kinds[place - len(SAME_LEADER) : place]) == sorted(SAME_LEADER)


def test_a_trap_springs_once_on_the_connection_that_began_as_it_says() -> None:
    sprung: list[int] = []
    trap = Trap(b"INSERT", b"COMMIT", lambda: sprung.append(1))
    assert not trap.springs(1, b"COMMIT")
    assert not trap.springs(1, b"INSERT INTO actions")
    assert not trap.springs(2, b"COMMIT")
    assert trap.springs(1, b"COMMIT")
    trap.sprung()
    assert not trap.springs(1, b"INSERT and COMMIT")
    assert sprung == [1]


def test_a_second_restart_of_an_attempt_is_one_too_many_whichever_action_asked() -> None:
    assert said.twice([restart("a"), restart("b"), restart("c", attempt=1), restart("d", job="k")]) == 1


def test_a_restart_of_an_attempt_without_a_fault_was_for_nothing() -> None:
    assert said.for_nothing([restart(), restart("b", attempt=1)], {("j", 0)}) == 1


def test_an_action_with_a_lower_epoch_than_had_come_counts_where_it_was_carried_out() -> None:
    lower = delivery(epoch=1)
    assert said.of_a_former_leader([lower, restart()], []) == 1
    assert said.of_a_former_leader([lower], []) == 0
    assert said.of_a_former_leader([delivery(), restart()], []) == 0


def test_an_action_that_came_after_another_server_led_counts_although_that_one_had_sent_nothing() -> None:
    lines = [delivery(), restart()]
    assert said.of_a_former_leader(lines, [Term(2, 0.0, "a"), Term(3, 9.0, "b")]) == 1
    assert said.of_a_former_leader(lines, [Term(2, 0.0, "a"), Term(3, 10.5, "b")]) == 0


def test_what_was_refused_was_not_taken() -> None:
    lines = [delivery(epoch=1, outcome="lower epoch"), restart()]
    assert (said.refused(lines), said.of_a_former_leader(lines, [])) == (1, 0)


def test_an_action_that_was_never_carried_out_or_is_still_under_way_is_lost() -> None:
    found = figures([outcome(), outcome(acted_s=None), outcome(unsettled=2)])
    assert found["actions_lost"] == 2
    assert found["acted"] == {"p50_s": 9.0, "p95_s": None, "max_s": None}


def test_whatever_must_not_be_is_named_as_missed() -> None:
    well = figures([outcome(), outcome(kind="handed_over", led_s=2.0)])
    assert missed(well, 5.0) == []
    for name in NONE:
        assert missed({**well, name: 1}, 5.0) == [f"{name} is 1, asked 0"]
    late = figures([outcome(acted_s=21.0), outcome(kind="handed_over", led_s=4.0)])
    assert missed(late, 5.0) == ["acted_p95_s is 21, asked 20", "hand_over_max_s is 4, asked 3"]


def test_a_database_that_restarts_needs_no_other_leader() -> None:
    found = figures([outcome(kind="database_restarted", led_s=None), outcome(led_s=None)])
    assert found["takeovers_that_did_not_come"] == 1


def test_a_file_is_gone_on_with_by_the_same_settings_alone(tmp_path: Path) -> None:
    file = tmp_path / "failover.json"
    kept = opened(file, SETTINGS)
    kept.outcomes.append(outcome())
    keep(file, kept)
    assert opened(file, SETTINGS).outcomes == kept.outcomes
    with pytest.raises(ValueError, match="name another file"):
        opened(file, {**SETTINGS, "seed": 2})
    file.write_text("{}")
    with pytest.raises(ValueError, match="no result of this benchmark"):
        opened(file, SETTINGS)


def test_what_a_trap_has_sprung_on_waits_and_the_rest_passes() -> None:
    async def scenario() -> None:
        got: asyncio.Queue[bytes] = asyncio.Queue()

        async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while content := await reader.read(100):
                got.put_nowait(content)
            writer.close()

        server = await asyncio.start_server(keep, "127.0.0.1")
        port = server.sockets[0].getsockname()[1]
        relay = Relay(lambda: asyncio.open_connection("127.0.0.1", port))
        sprung = asyncio.Event()
        relay.trap = trap = Trap(b"held", b"held", sprung.set)
        first, second = [await asyncio.open_connection("127.0.0.1", relay.port) for _ in range(2)]
        first[1].write(b"held")
        await asyncio.wait_for(sprung.wait(), 5.0)
        second[1].write(b"other")
        assert await asyncio.wait_for(got.get(), 5.0) == b"other"
        assert got.empty()
        trap.let_go.set()
        assert await asyncio.wait_for(got.get(), 5.0) == b"held"
        for _, writer in (first, second):
            writer.transport.abort()
        await relay.close()
        server.close()

    asyncio.run(scenario())


def test_a_relay_that_is_cut_takes_no_connection_and_passes_nothing_until_it_is_mended() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while content := await reader.read(100):
            writer.write(content)
        writer.close()

    async def said_back(streams: Streams) -> bytes:
        streams[1].write(b"x")
        try:
            return await asyncio.wait_for(streams[0].read(1), 0.5)
        except TimeoutError:
            return b""

    async def scenario() -> None:
        server = await asyncio.start_server(echo, "127.0.0.1")
        port = server.sockets[0].getsockname()[1]
        relay = Relay(lambda: asyncio.open_connection("127.0.0.1", port))
        before = await asyncio.open_connection("127.0.0.1", relay.port)
        assert await said_back(before) == b"x"
        relay.cut()
        assert await said_back(before) == b""
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.open_connection("127.0.0.1", relay.port), 0.5)
        relay.mend()
        after = await asyncio.open_connection("127.0.0.1", relay.port)
        assert await said_back(after) == b"x"
        for _, writer in (before, after):
            writer.transport.abort()
        await relay.close()
        server.close()

    asyncio.run(scenario())


@pytest.mark.slow  # two servers that take over from each other for minutes
@pytest.mark.skipif(postgresql_programs() is None, reason="PostgreSQL is not installed (apt-get install postgresql-15)")
def test_in_fifty_takeovers_nothing_is_lost_done_twice_or_done_for_a_former_leader(tmp_path: Path) -> None:
    words = ["--takeovers", str(TAKEOVERS), "--lease", "1", "--away", "5", "--json", "--folder", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.failover", *words], capture_output=True, timeout=3_000, check=False
    )
    *lines, last = done.stdout.splitlines()
    found = msgspec.json.decode(last)["figures"]
    assert {name: found[name] for name in NONE} == dict.fromkeys(NONE, 0), (lines, done.stderr)
    assert found["takeovers"] == TAKEOVERS
    assert found["by_kind"].keys() == set(KINDS)
    assert found["acknowledged_rows"] > 0
