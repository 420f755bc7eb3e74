"""Two cells in processes of their own on one PostgreSQL, each of which judges its own jobs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from eagle_eye.agent.loop.clock import SystemClock
from eagle_eye.agent.loop.drops import Drops
from eagle_eye.agent.transport.servers import Servers
from eagle_eye.agent.transport.spool import Spool
from eagle_eye.agent.transport.uplink import Destination, Uplink
from eagle_eye.schema.action import PING
from eagle_eye.schema.frame import Event, Rank, block, encode_frame
from eagle_eye.schema.metrics import Scope
from tests.server.builders import frame
from tests.server.own_process import OwnProcess, serving, wait_until
from tests.server.postgresql_server import PostgresqlServer
from tests.server.receiver import Receiver, receiver

pytestmark = pytest.mark.slow  # servers in processes of their own

LEASE_S = 1.0


@dataclass
class Site:
    """The database, and what starts servers on it."""

    url: str
    folder: Path

    @contextmanager
    def server(self, name: str, cell: str) -> Iterator[OwnProcess]:
        file = self.folder / f"{name}.toml"
        file.write_text(
            f'[records]\nurl = "{self.url}"\nlease_s = {LEASE_S}\ncell = "{cell}"\n'
            '[policy]\nmode = "act"\n[webhooks]\nallow_private = true\nheartbeat_s = 0.0\n[detection]\ntick_s = 0.2\n',
            encoding="utf-8",
        )
        with serving(self.folder / name, "--config", str(file), "--listen", "127.0.0.1:0") as process:
            yield process


@dataclass
class Agent:
    """The spool and the uplink of one node's agent; its frames say a training step each."""

    folder: Path
    node: str
    servers: Servers
    step: int = 0
    spool: Spool = field(init=False)
    uplink: Uplink = field(init=False)

    def __post_init__(self) -> None:
        self.spool = Spool(self.folder / self.node, self.node, Drops())
        self.uplink = Uplink(Destination(self.servers, backoff_s_max=0.5), self.spool, Drops(), SystemClock())
        self.uplink.start()

    def say(self, job: str, *events: Event) -> None:
        """Send a frame of a node that has a rank of the job; "" for none."""
        values = {0: {"train_step": float(self.step)}}
        self.step += 1
        more: dict[str, Any] = {"job": None, "blocks": [block(Scope.DEVICE, values)], "events": list(events)}
        ranks = [Rank(job, int(self.node[1:]), 1, 0)] if job else []
        self.spool.append(
            lambda stream, number: encode_frame(
                frame(number, self.node, time.time(), stream=stream, ranks=ranks, **more)
            )
        )
        self.uplink.notify(urgent=True)

    def close(self) -> None:
        self.uplink.stop(0.0)
        self.spool.close()


def leads(server: OwnProcess) -> bool:
    try:
        return server.client.get("/leadz").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture
def site(postgresql: PostgresqlServer, tmp_path: Path) -> Site:
    return Site(postgresql.new_database(), tmp_path)


@pytest.fixture
def cells(site: Site) -> Iterator[tuple[OwnProcess, OwnProcess]]:
    """The leaders of the default cell and of another one."""
    with ExitStack() as stack:
        servers = [stack.enter_context(site.server(name, name)) for name in ("default", "b")]
        wait_until(lambda: all(map(leads, servers)))
        wait_until(lambda: all("cells" in one.client.get("/readyz").json()["checks"] for one in servers))
        yield servers[0], servers[1]


@contextmanager
def agents(folder: Path, names: str, servers: list[str]) -> Iterator[dict[str, Agent]]:
    with ExitStack() as stack:
        made = {name: Agent(folder, name, Servers(servers)) for name in names.split()}
        for one in made.values():
            stack.callback(one.close)
        yield made


def cell_of(site: Site, job: str) -> str:
    with psycopg.connect(site.url.replace("+psycopg", "")) as connection:
        found = connection.execute("SELECT cell FROM job_cells WHERE job = %s", (job,)).fetchone()
    return "" if found is None else str(found[0])


def events(target: Receiver) -> list[tuple[str, dict[str, Any]]]:
    """Return the type and the data of each event that came."""
    found = [json.loads(content) for _, content in target.got]
    return [(one["type"], one["data"]) for one in found]


def judged(server: OwnProcess) -> set[str]:
    """Return the jobs that the server judges."""
    lines = server.client.get("/metrics").text.splitlines()
    return {line.partition('job="')[2].partition('"')[0] for line in lines if line.startswith("eagle_eye_job_nodes{")}


def test_jobs_are_spread_and_their_nodes_find_the_cell_that_judges_them(
    site: Site, cells: tuple[OwnProcess, OwnProcess], tmp_path: Path
) -> None:
    urls = [f"http://{one.listen}" for one in cells]
    with agents(tmp_path, "n1 n2 n3 n4", urls) as fleet:
        jobs = {"n1": "one", "n2": "one", "n3": "two", "n4": "two"}

        def spread() -> bool:
            for name, job in jobs.items():
                fleet[name].say(job)
            time.sleep(0.1)
            return judged(cells[0]) == {"one"} and judged(cells[1]) == {"two"}

        wait_until(spread)
        assert (cell_of(site, "one"), cell_of(site, "two")) == ("default", "b")
        assert [fleet[name].uplink.live._server for name in sorted(fleet)] == [urls[0], urls[0], urls[1], urls[1]]
        assert all(one.spool.has_backlog() is False for one in fleet.values())


def test_a_fault_that_the_other_cell_finds_is_delivered_under_the_default_cells_epoch(
    cells: tuple[OwnProcess, OwnProcess], tmp_path: Path
) -> None:
    default, other = cells
    urls = [f"http://{one.listen}" for one in cells]
    with receiver() as target, agents(tmp_path, "n1 n2 n3 n4", urls) as fleet:
        default.client.post("/api/v1/subscriptions", json={"url": target.url})
        jobs = {"n1": "one", "n2": "one", "n3": "two", "n4": "two"}

        def spread() -> bool:
            for name, job in jobs.items():
                fleet[name].say(job)
            time.sleep(0.1)
            return judged(default) == {"one"} and judged(other) == {"two"}

        wait_until(spread)
        fleet["n3"].say("two", Event(time.time(), "xid", 0, {"code": 79}))

        def told() -> bool:
            fleet["n4"].say("two")
            time.sleep(0.1)
            return any(data.get("job") == "two" for _, data in events(target))

        wait_until(told)
        epochs = {data["epoch"] for kind, data in events(target) if kind != PING}
        assert epochs == {default.client.get("/api/v1/leader").json()["epoch"]}
