"""Two servers on one PostgreSQL, each behind two relays: one to the database, one for all who ask it.

Touches: processes, loopback ports, the folder, the database.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.failover.relay import Relay
from benchmarks.failover.said import Term
from benchmarks.ingest.processes import free_port
from benchmarks.soak.site import Process, until
from eagle_eye.server.model.records import Token
from eagle_eye.server.security.auth import sha256
from eagle_eye.server.store.settings import RecordsSettings
from eagle_eye.server.store.sql_store import open_records
from eagle_eye.server.store.store import Change
from tests.server.postgresql_server import USER, PostgresqlServer, replica_of, serving

ADMIN = "ee_admin"
LOOK_EVERY_S = 0.1
LOOK_S = 0.5
READY_S = 60.0

# Faults come far more often than on a site: the limits on what is done about them are out of the way, and the second
# crash of a node does not take it out.
CONFIG = """
listen = "127.0.0.1:{port}"
data_dir = "{data}"
public_url = "{url}"

[records]
url = "{records_url}"
lease_s = {lease_s}
server_url = "{url}"

[policy]
mode = "act"
expires_s = 120.0
restarts_per_job = 1000
restarts_fleet = 1000
breaker_actions = 100000
lost_work_s = 10.0
restart_s = 10.0
queue_s = 1.0
repeat_window_s = 1.0
verdict_gone_s = 5.0
watch_s = 5.0
reopen_s = 1.0

[webhooks]
allow_private = true
heartbeat_s = 0.0
"""


@dataclass
class Member:
    """One of the servers. ``direct`` is where it listens, ``url`` what everybody else calls."""

    name: str
    process: Process
    direct: str
    asked: Relay
    database: Relay
    leads: bool = False
    epoch: int = 0  # as it says; 0 while it does not answer

    @property
    def url(self) -> str:
        """Where agents, the subscriber and the other server reach it."""
        return f"http://127.0.0.1:{self.asked.port}"

    def signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self.process.pid is not None:
            os.kill(self.process.pid, number)


class Database:
    """The PostgreSQL that servers reach: ``primary``, and after it failed over what was its replica."""

    def __init__(self, primary: PostgresqlServer) -> None:
        self.primary = primary
        self._names = itertools.count()
        self._replica: PostgresqlServer | None = None
        self._running, self._before = ExitStack(), ExitStack()  # the replica, which may lead by now; the one before it

    def new(self) -> str:
        """Make an empty database, and return its name."""
        name = f"failover_{next(self._names)}"
        self.primary.execute(f"CREATE DATABASE {name}")
        return name

    @property
    def socket(self) -> str:
        """Where the primary listens."""
        return f"{self.primary.folder}/.s.PGSQL.{self.primary.port}"

    def prepare_replica(self) -> None:
        """A streaming replica is there."""
        self._before, self._running = self._running, ExitStack()
        self._replica = self._running.enter_context(replica_of(self.primary))

    def fail_over(self) -> None:
        """The primary has crashed, and its replica is the primary."""
        if self._replica is None:
            raise RuntimeError("prepare_replica() was not called")
        self.primary.control("stop", "--mode=immediate")
        self._replica.control("promote", "--wait")
        self.primary, self._replica = self._replica, None
        self._before.close()

    def close(self) -> None:
        """No replica runs any more."""
        self._before.close()
        self._running.close()


@contextmanager
def database(bin_: Path) -> Iterator[Database]:
    """Run a PostgreSQL while the block runs."""
    with serving(bin_) as primary, contextlib.closing(Database(primary)) as found:
        yield found


class Pair:
    """The servers below ``folder``; ``terms`` are who was seen to lead, and since when."""

    def __init__(self, database: Database, folder: Path, lease_s: float) -> None:
        self._database = database
        self._folder = folder
        self._lease_s = lease_s
        self._records = database.new()
        self.members: list[Member] = []
        self.terms: list[Term] = []
        self._looking: list[asyncio.Task[None]] = []
        headers = {"authorization": f"Bearer {ADMIN}"}
        self.client = httpx.AsyncClient(timeout=10.0, trust_env=False, headers=headers)

    async def start(self, nodes: Sequence[str]) -> None:
        """One leads, the other stands by; nodes have tokens, ``ee_NODE``. Raises RuntimeError."""
        self._make_tokens(nodes)
        for name in ("a", "b"):
            member = self._member(name)
            self.members.append(member)
            self._looking.append(asyncio.create_task(self._look_at(member)))
            member.process.start()
            await self.answers(member)
            await self.wait_for_leader()

    async def answers(self, member: Member) -> None:
        """Wait until a server answers. Raises RuntimeError."""
        end_s = time.monotonic() + READY_S
        while time.monotonic() < end_s:
            with contextlib.suppress(httpx.TransportError):
                if (await self.client.get(f"{member.direct}/healthz", timeout=LOOK_S)).is_success:
                    return
            await asyncio.sleep(LOOK_EVERY_S)
        raise RuntimeError(f"server {member.name} does not answer within {READY_S:g} s; see {self._folder}")

    async def wait_for_leader(self) -> Member:
        """Return who leads. Raises RuntimeError."""
        if not await until(lambda: self.leader() is not None, READY_S):
            raise RuntimeError(f"no server leads within {READY_S:g} s; see {self._folder}")
        leader = self.leader()
        assert leader is not None
        return leader

    def leader(self) -> Member | None:
        """Return who said last that it leads, with the highest epoch; None for nobody."""
        return max((one for one in self.members if one.leads), key=lambda one: one.epoch, default=None)

    def agree(self) -> bool:
        """Return whether one leads, and the other knows its epoch."""
        leader = self.leader()
        return leader is not None and all(one.epoch == leader.epoch for one in self.members)

    def led_for_s(self) -> float:
        """Return how long ago the newest leader was seen first."""
        return time.time() - self.terms[-1].since_s if self.terms else 0.0

    async def close(self) -> None:
        """Nothing runs any more."""
        for looking in self._looking:
            looking.cancel()
        await asyncio.gather(*self._looking, return_exceptions=True)
        for member in self.members:
            member.process.kill()
            await member.asked.close()
            await member.database.close()
        await self.client.aclose()

    def _make_tokens(self, nodes: Sequence[str]) -> None:
        now_s = time.time()
        of_nodes = [
            Token(id=node, sha256=sha256(f"ee_{node}"), scope="agent", node=node, created_s=now_s) for node in nodes
        ]
        admin = Token(id="admin", sha256=sha256(ADMIN), scope="admin", node=None, created_s=now_s)
        url = self._database.primary.url(self._records)
        with contextlib.closing(open_records(RecordsSettings(url), self._folder)) as store:
            store.commit(Change(tokens=(*of_nodes, admin)))

    def _member(self, name: str) -> Member:
        port = free_port()
        asked = Relay(lambda: asyncio.open_connection("127.0.0.1", port))
        database = Relay(lambda: asyncio.open_unix_connection(self._database.socket))
        config = self._folder / f"{name}.toml"
        config.write_text(
            CONFIG.format(
                port=port,
                data=self._folder / name,
                url=f"http://127.0.0.1:{asked.port}",
                records_url=f"postgresql+psycopg://{USER}@127.0.0.1:{database.port}/{self._records}?connect_timeout=5",
                lease_s=self._lease_s,
            ),
            encoding="utf-8",
        )
        command = [sys.executable, "-m", "eagle_eye.cli.main", "server", "--config", str(config)]
        process = Process(command, self._folder / f"{name}.log")
        return Member(name, process, f"http://127.0.0.1:{port}", asked, database)

    async def _look_at(self, member: Member) -> None:
        """Ask it again and again whether it leads; one that does not answer is not said to."""
        async with httpx.AsyncClient(timeout=LOOK_S, trust_env=False) as client:
            while True:
                leads, epoch = False, 0
                # Between standing by and leading the answer may come from neither.
                with contextlib.suppress(httpx.TransportError, ValueError, KeyError):
                    answer = await client.get(f"{member.direct}/leadz")
                    epoch = answer.json()["epoch"]
                    leads = answer.status_code == 200
                if leads and epoch > max((term.epoch for term in self.terms), default=0):
                    self.terms.append(Term(epoch, time.time(), member.name))
                member.leads, member.epoch = leads, epoch
                await asyncio.sleep(LOOK_EVERY_S)
