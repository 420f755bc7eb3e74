"""Two servers on a PostgreSQL that Patroni keeps: its primary's host dies, and it is switched over on purpose."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from eagle_eye.agent.transport.servers import Servers
from eagle_eye.demo.two_servers import postgresql_programs
from eagle_eye.schema.action import INCIDENT_OPENED
from eagle_eye.schema.events import Event
from eagle_eye.server.store.leadership import LEAP
from tests.server.own_process import OwnProcess, wait_until
from tests.server.patroni_cluster import TTL_S, PatroniCluster, missing, patroni
from tests.server.receiver import receiver
from tests.server.test_cells import Agent, events
from tests.server.test_two_servers import LEASE_S, Site, leads, pair

pytestmark = pytest.mark.slow  # a cluster, a pair of servers, and the time that Patroni waits
NODES = ("n1", "n2")


@dataclass
class Watched:
    """A job of two nodes, whose agents send to two servers on the cluster."""

    cluster: PatroniCluster
    servers: tuple[OwnProcess, OwnProcess]
    agents: dict[str, Agent]

    def leader(self) -> OwnProcess | None:
        """Return the server that leads and can decide, None if none does."""
        for one in self.servers:
            if leads(one) and not one.client.get("/api/v1/leader").json()["problem"]:
                return one
        return None

    def epoch(self) -> int:
        leader = self.leader()
        assert leader is not None
        epoch: int = leader.client.get("/api/v1/leader").json()["epoch"]
        return epoch

    def until(self, claim: Callable[[], bool]) -> None:
        """Have both agents say a step now and then until it holds."""

        def held() -> bool:
            for agent in self.agents.values():
                agent.say("job")
            time.sleep(0.2)
            return claim()

        wait_until(held)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    bin_, lacking = postgresql_programs(), missing()
    if bin_ is None or lacking:
        pytest.skip(lacking or "PostgreSQL is not installed (apt-get install postgresql-15)")
    with ExitStack() as stack:
        cluster = stack.enter_context(patroni(bin_))
        servers = stack.enter_context(pair(Site(cluster.url, tmp_path), LEASE_S))
        urls = [f"http://{one.listen}" for one in servers]
        agents = {name: Agent(tmp_path / "agents", name, Servers(urls)) for name in NODES}
        for one in agents.values():
            stack.callback(one.close)
        made = Watched(cluster, servers, agents)
        made.until(lambda: made.leader() is not None)
        yield made


def test_what_happens_while_the_primary_is_dead_is_told_once_under_a_higher_epoch(watched: Watched) -> None:
    before = watched.epoch()
    with receiver() as target:
        body = {"url": target.url, "types": [INCIDENT_OPENED]}
        assert watched.servers[0].client.post("/api/v1/subscriptions", json=body).status_code == 201
        dead = watched.cluster.kill_primary()
        began_s = time.monotonic()
        watched.agents["n1"].say("job", Event(time.time(), "xid", 0, {"code": 79}))
        watched.until(lambda: watched.agents["n1"].spool.waiting() == 0)
        assert time.monotonic() - began_s < TTL_S / 2, "frames are taken while the database is away"
        assert watched.cluster.primary == ""
        watched.until(lambda: bool(events(target)))
        assert watched.cluster.primary not in ("", dead)
        for _ in range(20):
            watched.until(lambda: True)
        opened = [data for kind, data in events(target) if kind == INCIDENT_OPENED]
    assert [(one["node"], one["epoch"] >= before + LEAP) for one in opened] == [("n1", True)]


def test_a_switchover_costs_no_frame_and_somebody_leads_under_a_higher_epoch(watched: Watched) -> None:
    before = watched.epoch()
    watched.cluster.switch_over()
    watched.until(lambda: watched.leader() is not None and watched.epoch() >= before + LEAP)
    watched.until(lambda: all(one.spool.waiting() == 0 for one in watched.agents.values()))
