"""A leader that agents cannot reach gives way to a standby that they reach; both reach the database."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from eagle_eye.agent.clock import SystemClock
from eagle_eye.agent.collector import Drops
from eagle_eye.agent.transport.servers import Servers
from eagle_eye.agent.transport.spool import Spool
from eagle_eye.agent.transport.uplink import Destination, Uplink
from eagle_eye.schema.frame import encode_frame
from eagle_eye.server.model.records import Token
from eagle_eye.server.security.auth import sha256
from eagle_eye.server.store.store import Change
from tests.server.builders import NOW, frame
from tests.server.cutting_relay import cutting_relay
from tests.server.own_process import OwnProcess, serving, wait_until
from tests.server.postgresql_server import PostgresqlServer
from tests.server.test_two_servers import Site, leads, metric

pytestmark = pytest.mark.slow  # two servers, and the dozen leases for which a leader leads at least

NODES = ("n1", "n2", "n3")
ADMIN = "ee_admin"


class Agent:
    """The part of a node's agent that sends."""

    def __init__(self, folder: Path, node: str, urls: list[str]) -> None:
        self.node = node
        token_file = folder / f"{node}.token"
        token_file.write_text(f"ee_{node}", encoding="utf-8")
        self.servers = Servers(urls)
        self.spool, drops = Spool(folder / node, node, Drops()), Drops()
        self.uplink = Uplink(Destination(self.servers, token_file, backoff_s_max=0.5), self.spool, drops, SystemClock())
        self.uplink.start()

    def send(self) -> None:
        self.spool.append(
            lambda stream, number: encode_frame(frame(number, node=self.node, time_s=time.time(), stream=stream))
        )
        self.uplink.notify()

    def close(self) -> None:
        self.uplink.stop(1.0)
        self.spool.close()


def while_they_send(agents: list[Agent], claim: Callable[[], bool]) -> None:
    """Have the agents send until the claim holds."""

    def held() -> bool:
        for agent in agents:
            agent.send()
        time.sleep(0.1)
        try:
            return claim()
        except httpx.TransportError:
            return False

    wait_until(held)


def test_a_leader_that_its_agents_cannot_reach_steps_down_for_the_standby_that_they_reach(
    postgresql: PostgresqlServer, tmp_path: Path
) -> None:
    site = Site(postgresql.new_database(), tmp_path)
    tokens = [Token(id=node, sha256=sha256(f"ee_{node}"), scope="agent", node=node, created_s=NOW) for node in NODES]
    admin = Token(id="admin", sha256=sha256(ADMIN), scope="admin", node=None, created_s=NOW)
    site.commit(Change(tokens=(*tokens, admin)))
    with ExitStack() as stack:

        def server(name: str, url: str = "") -> OwnProcess:
            file = tmp_path / f"{name}.toml"
            records = f'[records]\nurl = "{site.url}"\nlease_s = 1.0\nserver_url = "{url}"\n'
            file.write_text(records, encoding="utf-8")
            process = stack.enter_context(serving(tmp_path / name, "--config", str(file)))
            process.client.headers["authorization"] = f"Bearer {ADMIN}"
            return process

        relay = stack.enter_context(cutting_relay())
        reached = f"http://127.0.0.1:{relay.port}"
        leader = server("a", reached)
        relay.to_port = int(leader.listen.rpartition(":")[2])
        wait_until(lambda: leads(leader))
        standby = server("b")
        agents = [Agent(tmp_path, node, [reached, f"http://{standby.listen}"]) for node in NODES]
        for agent in agents:
            stack.callback(agent.close)
        while_they_send(agents, lambda: all(agent.uplink.delivered for agent in agents))
        relay.close()
        while_they_send(agents, lambda: metric(standby, "nodes_in_vain") == len(NODES))
        assert (
            "3 of the nodes that ask here do not reach it" in standby.client.get("/readyz").json()["checks"]["leader"]
        )
        while_they_send(agents, lambda: leads(standby))
        while_they_send(agents, lambda: metric(leader, "step_downs_total") == 1.0 and metric(leader, "leads") == 0.0)
        before = [agent.uplink.delivered for agent in agents]
        while_they_send(
            agents, lambda: all(agent.uplink.delivered > was for agent, was in zip(agents, before, strict=True))
        )
        (entry,) = standby.client.get("/api/v1/audit", params={"verb": "step down"}).json()["items"]
        assert entry["detail"] == f"{reached}: 3 of the nodes that asked http://{standby.listen} did not reach it"
        assert (leads(standby), metric(standby, "epoch")) == (True, 2.0)
