"""The server is killed ten times while agents stream and nodes break: nothing is lost, nothing done twice."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.soak.plan import Plan, plan
from benchmarks.soak.report import report
from benchmarks.soak.soak import Soak

KILLS, SECONDS, NODES, GPUS = 10, 110.0, 32, 2
FACTS = ("gpu_lost", "gpu_memory_error", "process_crash")  # which need no course of minutes that a kill interrupts


def killed_ten_times(seed: int) -> Plan:
    """Kills at moments drawn from the seed, faults all the while, and a subscriber that is away now and then."""
    chance = random.Random(seed)
    made = plan(SECONDS, NODES, GPUS, seed)
    times_s = [10.0 + 9.0 * (number + chance.random()) for number in range(KILLS)]
    return replace(
        made,
        calm_s=5.0,
        kinds=FACTS,
        every_s={**made.every_s, "fault": 9.0},
        server_restarts=tuple((at_s, "kill") for at_s in times_s),
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    soak = Soak(killed_ten_times(seed=1), tmp_path_factory.mktemp("killed"))
    asyncio.run(soak.run(lambda: None))
    return report(soak)


def test_the_server_was_killed_ten_times_while_frames_and_faults_came(found: dict[str, Any]) -> None:
    assert found["server_starts"] == KILLS
    assert found["frames_acknowledged"] > NODES * SECONDS / 2
    assert sum(kind["faults"] for kind in found["faults"].values()) >= 4


@pytest.mark.parametrize(
    "claim",
    [
        "nothing acknowledged is missing",
        "nothing is stored twice",
        "no frame is refused",
        "one incident and one action for each fault",
        "webhooks are signed, in order and not repeated",
        "what was delivered is what was received",
        "nothing else is wrong",
    ],
)
def test_it_holds_all_the_same(found: dict[str, Any], claim: str) -> None:
    assert found["claims"][claim]["held"], [found["claims"][claim]["found"], *found["wrong"]]


def test_no_incident_names_what_did_not_happen(found: dict[str, Any]) -> None:
    assert found["incidents_without_fault"] == {}
