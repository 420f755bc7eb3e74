"""Figures of the fleet on /metrics: how fast and how often right, budgets, how racks and switches stand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle_eye.server.accounts.archive import RESPONSE_FRESH_S
from eagle_eye.server.engine.settings import PolicySettings
from eagle_eye.server.model.records import Node
from eagle_eye.server.store.store import Change
from tests.server.builders import NOW, FakeClock, Running, action, body, frame, incident, running


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def server(tmp_path: Path, clock: FakeClock) -> Iterator[Running]:
    places = {"rack_of_node": {"n1": "r1", "n2": "r1", "n3": "r2"}, "switch_of_node": {"n1": "leaf1"}}
    (tmp_path / "topology.json").write_text(json.dumps(places), encoding="utf-8")
    with running(tmp_path / "data", clock, topology_file=str(tmp_path / "topology.json")) as started:
        yield started


def commit(server: Running, change: Change) -> None:
    server.dispatcher.services.store.commit(change)


def there(server: Running, name: str) -> bool:
    """Return whether /metrics has a value of this name."""
    return any(line.startswith(f"eagle_eye_{name}") for line in server.client.get("/metrics").text.splitlines())


def test_times_to_detect_and_to_recover_are_those_of_real_incidents(server: Running) -> None:
    lasted = (60.0, 120.0, 600.0)
    real = [
        incident(f"inc_{at}", onset_s=NOW - seconds, detected_s=NOW - seconds / 2, ended_s=NOW, state="closed")
        for at, seconds in enumerate(lasted)
    ]
    false = incident("inc_f", onset_s=NOW - 9_000, detected_s=NOW - 1, ended_s=NOW, state="false")
    merged = incident("inc_m", onset_s=NOW - 9_000, detected_s=NOW - 1, ended_s=NOW, merged_into="inc_0")
    going = incident("inc_g", onset_s=NOW - 10, detected_s=NOW - 9, fault="gpu_lost")
    old = incident("inc_o", onset_s=NOW - 9e6, detected_s=NOW - 8e6, ended_s=NOW - 7e6, state="closed")
    commit(server, Change(incidents=(old, *real, false, merged, going)))
    assert server.metric("time_to_detect_seconds", fault="hang", quantile="0.5") == 60.0
    assert server.metric("time_to_recover_seconds", fault="hang", quantile="0.5") == 120.0
    assert server.metric("time_to_recover_seconds", fault="hang", quantile="0.95") == 600.0
    assert server.metric("time_to_detect_seconds", fault="gpu_lost", quantile="0.5") == 1.0
    assert not there(server, 'time_to_recover_seconds{fault="gpu_lost"')


def test_the_ledgers_decisions_are_counted_and_an_unknown_precision_is_not_there(
    server: Running, clock: FakeClock
) -> None:
    commit(server, Change(actions=(action("act_1", "would_act"),), incidents=(incident(),)))
    assert server.metric("ledger_decisions", fault="hang", standing="pending") == 1.0
    assert not there(server, "ledger_precision_low_ratio{")
    commit(server, Change(incidents=(incident(state="false"),)))
    clock.advance(RESPONSE_FRESH_S)
    assert server.metric("ledger_decisions", fault="hang", standing="wrong") == 1.0
    assert server.metric("ledger_precision_low_ratio", fault="hang") == 0.0
    assert there(server, "ledger_precision_low_ratio{")


@pytest.mark.parametrize(("mode", "used"), [("act", 2.0), ("observe", 3.0)])
def test_budgets_are_counted_as_policy_counts_them(server: Running, mode: str, used: float) -> None:
    server.watcher.use_policy(PolicySettings(mode=mode, exclusions_fleet_floor=4))  # type: ignore[arg-type]
    asked = (
        action("act_1", "done", exclude=["n1", "n2"]),
        action("act_2", "would_act", exclude=["n3"], restart=False),
        action("act_3", "rejected", exclude=["n4"]),
        action("act_4", "done", created_s=NOW - 90_000),
    )
    commit(server, Change(actions=asked))
    assert server.metric("fleet_budget_used", budget="exclusions") == used
    assert server.metric("fleet_budget_limit", budget="exclusions") == 4.0
    assert server.metric("fleet_budget_used", budget="restarts") == 1.0
    assert server.metric("fleet_budget_limit", budget="restarts") == 50.0


def test_racks_and_switches_show_how_their_nodes_stand(server: Running) -> None:
    for node in ("n1", "n2", "n3", "nowhere"):
        server.send(body(frame(node=node)))
    out = Node(node="n2", state="excluded", reason="", updated_s=NOW)
    commit(server, Change(incidents=(incident(state="confirmed"),), nodes=(out,)))
    assert server.metric("rack_nodes", rack="r1", standing="accused") == 1.0
    assert server.metric("rack_nodes", rack="r1", standing="excluded") == 1.0
    assert server.metric("rack_nodes", rack="r2", standing="in_service") == 1.0
    assert server.metric("switch_nodes", switch="leaf1", standing="accused") == 1.0
    assert server.client.get("/metrics").text.count("eagle_eye_rack_nodes{") == 3


def test_without_topology_no_rack_is_spoken_of(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        server.send(body(frame()))
        assert not there(server, "rack_nodes")
