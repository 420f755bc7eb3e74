"""Many GPUs are lost in one moment, in mode act: all of it is told, and no more is asked for than is allowed."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle_eye.schema.events import Event
from eagle_eye.schema.frame import WIRE_VERSION, Frame, Rank, block
from eagle_eye.schema.metrics import Scope
from tests.server.own_process import OwnProcess, serving, wait_until

JOBS, NODES_PER_JOB, FAULTY = 12, 4, 12
FLOOR, BREAKER = 3, 2
LIVES_S = 15.0  # of the jobs before anything happens, and how long is waited for more than is allowed


@pytest.fixture
def policy(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OwnProcess]:
    file = tmp_path / "server.toml"
    file.write_text(f'[policy]\nmode = "act"\n{request.param}\n[evidence]\nask = false\n')
    with serving(tmp_path / "data", "--config", str(file)) as server:
        yield server


class Fleet:
    """Nodes of small jobs that report once a second; ``lost`` ones tell of XID 79 once, and their jobs stand still."""

    def __init__(self, server: OwnProcess) -> None:
        self._server = server
        self._sequence = 0
        self.nodes = {
            f"job-{job}-n{rank}": (f"job-{job}", rank) for job in range(JOBS) for rank in range(NODES_PER_JOB)
        }
        self._stopped_at: dict[str, int] = {}

    def report(self, seconds: float, lost: frozenset[str] = frozenset()) -> None:
        """Send a frame of each node and second."""
        for _ in range(int(seconds)):
            begun_s = time.monotonic()
            self._sequence += 1
            for node in lost:
                self._stopped_at.setdefault(self.nodes[node][0], self._sequence)
            for node in self.nodes:
                assert self._server.send(self._frame(node, reported=node in lost)).status_code == 200
            lost = frozenset()
            time.sleep(max(1.0 - (time.monotonic() - begun_s), 0.0))

    def _frame(self, node: str, *, reported: bool) -> Frame:
        job, rank = self.nodes[node]
        now_s = time.time()
        row = {"train_step": float(self._stopped_at.get(job, self._sequence)), "train_step_seconds": 1.0}
        events = [Event(now_s, "xid", 0, {"code": 79, "text": "GPU has fallen off the bus."})] if reported else []
        return Frame(
            version=WIRE_VERSION,
            node=node,
            boot_id="b",
            stream=f"s-{node}",
            sequence=self._sequence,
            time_s=now_s,
            interval_s=1.0,
            agent_version="0",
            job=job,
            ranks=[Rank(job, rank, NODES_PER_JOB, 0)],
            blocks=[block(Scope.DEVICE, {0: row})],
            events=events,
        )


def items(server: OwnProcess, what: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.client.get(f"/api/v1/{what}?limit=500").json()["items"]
    return found


def struck(server: OwnProcess) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Let GPUs of as many jobs fail at once; return the incidents and the actions that came of it."""
    fleet = Fleet(server)
    fleet.report(LIVES_S)
    chance = random.Random(1)
    lost = frozenset(f"job-{job}-n{chance.randrange(NODES_PER_JOB)}" for job in range(FAULTY))
    fleet.report(2, lost)

    def reported() -> bool:
        fleet.report(1)
        return len(items(server, "incidents")) >= FAULTY

    wait_until(reported)
    fleet.report(LIVES_S)
    incidents = items(server, "incidents")
    assert {incident["node"] for incident in incidents} == lost
    assert len(incidents) == FAULTY
    return incidents, items(server, "actions")


@pytest.mark.parametrize("policy", [f"exclusions_fleet_floor = {FLOOR}"], indirect=True)
def test_the_fleets_budget_holds_what_goes_beyond_it(policy: OwnProcess) -> None:
    incidents, actions = struck(policy)
    assert Counter(action["kind"] for action in actions) == {"exclude_node": FLOOR}
    held = Counter(incident["hold_rule"] for incident in incidents)
    assert held == {"": FLOOR, "fleet_exclusions": FAULTY - FLOOR}


@pytest.mark.parametrize(
    "policy",
    [f"exclusions_fleet_ratio = 1.0\nbreaker_actions = {BREAKER}"],
    indirect=True,
)
def test_the_breaker_holds_what_is_no_single_fault(policy: OwnProcess) -> None:
    incidents, actions = struck(policy)
    assert Counter(action["kind"] for action in actions) == {"exclude_node": BREAKER}
    held = Counter(incident["hold_rule"] for incident in incidents)
    assert held == {"": BREAKER, "breaker": FAULTY - BREAKER}
