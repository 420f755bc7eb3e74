"""Takeovers under load: an event takes the leader away, a process crashes meanwhile; what comes of it is looked at."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec

from benchmarks.failover import said
from benchmarks.failover.agents import GPUS, JOB_NODES, ROW, Agents
from benchmarks.failover.figures import Outcome
from benchmarks.failover.outages import Outage
from benchmarks.failover.plan import AWAY, BY_FAULT, SAME_LEADER, Item
from benchmarks.failover.relay import Relay
from benchmarks.failover.said import Said
from benchmarks.failover.servers import ADMIN, Database, Member, Pair
from benchmarks.failover.subscriber import SubscribedSite
from benchmarks.ingest.processes import free_port
from benchmarks.soak.site import Process, until
from eagle_eye.server.store.leadership import TERM_LEASES_MIN

PATIENCE_S = 90.0
READY_S = 30.0
LOOK_EVERY_S, ASK_EVERY_S = 0.05, 0.25
SETTLED = ("done", "failed", "refused", "withdrawn", "expired")


class Run:
    """Servers, agents and a subscriber below ``folder``, from ``start`` to ``close``; ``now`` is told what happens."""

    def __init__(
        self, database: Database, folder: Path, lease_s: float, away_s: float, now: Callable[[str], None]
    ) -> None:
        self.lost = False  # an action: the job's attempt is not what its nodes take it for
        self._database = database
        self._folder = folder
        self._lease_s = lease_s
        self._away_s = away_s
        self._now = now
        self._pair = Pair(database, folder, lease_s)
        self._nodes = [node for nodes in JOB_NODES.values() for node in nodes]
        self._lines = folder / "said.jsonl"
        self._said: list[Said] = []
        self._faults: set[tuple[str, int]] = set()
        self._attempts = dict.fromkeys(JOB_NODES, 0)
        self._counted_s = [0.0]  # until when rows were counted, the last two times
        self._log = logging.FileHandler(folder / "agents.log")
        self._tasks: list[asyncio.Task[None]] = []
        self._subscriber: Process | None = None
        self._deliveries: Relay | None = None  # the way to the subscriber
        self._agents: Agents | None = None

    async def start(self) -> None:
        """All run, and the subscriber is subscribed. Raises RuntimeError."""
        self._now("starting")
        logging.getLogger("eagle_eye").addHandler(self._log)
        await self._pair.start(self._nodes)
        urls = [member.url for member in self._pair.members]
        self._agents = Agents(self._folder, urls)
        (self._folder / "site.json").write_bytes(msgspec.json.encode(SubscribedSite(JOB_NODES, GPUS)))
        (self._folder / "token").write_text(ADMIN, encoding="utf-8")
        self._lines.touch()
        command = [sys.executable, "-m", "benchmarks.failover.subscriber", "--servers", ",".join(urls)]
        port = free_port()
        self._deliveries = Relay(lambda: asyncio.open_connection("127.0.0.1", port))
        command += ["--folder", str(self._folder), "--port", str(port), "--asked-at", str(self._deliveries.port)]
        self._subscriber = Process(command, self._folder / "subscriber.log")
        self._subscriber.start()
        self._tasks = [asyncio.create_task(work) for work in (self._agents.run(), self._follow(self._agents))]
        end_s = time.monotonic() + READY_S
        while not await self._is_known():
            if time.monotonic() > end_s:
                raise RuntimeError(f"subscriber and nodes are not known after {READY_S:g} s; see {self._folder}")
            await asyncio.sleep(ASK_EVERY_S)
        self._counted_s = [_between_rows()]

    async def play(self, item: Item) -> Outcome:
        """Return what came of an event. Raises RuntimeError where the servers do not come back."""
        agents, deliveries = self._agents, self._deliveries
        assert agents is not None
        assert deliveries is not None
        for task in self._tasks:
            if task.done():
                task.result()  # it is to run until the end: this raises why it does not
        leader = await self._ready(item)
        outage = Outage(item.kind, self._pair, leader, self._database, deliveries)
        await outage.prepare()
        job = f"job-{item.job}"
        attempt, before, heard = self._attempts[job], self._counts(), len(self._said)
        found = Outcome(number=item.number, kind=item.kind, fault_after_s=round(item.fault_after_s, 2))
        self._now(f"{item.number} {item.kind}")
        ours = (job, attempt)

        def crash() -> None:
            self._faults.add(ours)
            agents.crash(job, item.place)

        event_s = await self._through(outage, item, leader, crash, found)

        def acted() -> Said | None:
            return next((one for one in said.restarts(self._said) if (one.job, one.attempt) == ours), None)

        await until(lambda: acted() is not None, PATIENCE_S)
        taken = (one for one in self._said[heard:] if (one.job, one.attempt) == ours and one.outcome == "queued")
        found.taken_s = next((round(one.time_s - event_s, 2) for one in taken), None)
        if (restart := acted()) is not None:
            found.acted_s, found.found_as = round(restart.time_s - event_s, 2), restart.fault
        self.lost = restart is None
        self._now(f"{item.number} {item.kind}: rows")
        await self._count_rows(agents, found, event_s)
        found.unsettled = await self._unsettled()
        found.opened_twice = await self._more_than_one("/api/v1/incidents", job, attempt)
        found.asked_twice = await self._more_than_one("/api/v1/actions", job, attempt)
        for name, count in self._counts().items():
            setattr(found, name, count - before[name])
        found.dropped = agents.dropped()
        found.load_average = round(os.getloadavg()[0], 2)
        return found

    async def close(self) -> None:
        """Nothing runs any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._subscriber is not None:
            await asyncio.to_thread(self._subscriber.stop, signal.SIGTERM)
        if self._agents is not None:
            await asyncio.to_thread(self._agents.close)
        await self._pair.close()
        if self._deliveries is not None:
            await self._deliveries.close()
        logging.getLogger("eagle_eye").removeHandler(self._log)
        self._log.close()

    async def _ready(self, item: Item) -> Member:
        """Return who leads once both servers answer, and have for as long as the kind of event asks for."""
        for member in self._pair.members:
            await self._pair.answers(member)
        await until(self._pair.agree, READY_S)
        await asyncio.sleep(item.pause_s)
        leader = await self._pair.wait_for_leader()
        if item.kind == "cut_from_agents":
            # A leader gives way after a term of so long at least.
            self._now(f"{item.number} {item.kind}: the term is young")
            await until(lambda: self._pair.led_for_s() > TERM_LEASES_MIN * self._lease_s, 2.0 * PATIENCE_S)
        return leader

    async def _through(
        self, outage: Outage, item: Item, leader: Member, crash: Callable[[], None], found: Outcome
    ) -> float:
        """Let it happen, with the fault, until what was away is back; return from when on is counted."""
        if not await outage.begin(crash, PATIENCE_S):
            raise RuntimeError(f"{item.kind}: it did not come to it within {PATIENCE_S:g} s; see {self._folder}")
        if item.kind not in BY_FAULT:
            await asyncio.sleep(max(outage.began_s + item.fault_after_s - time.time(), 0.0))
            crash()
        if item.kind in AWAY:
            await asyncio.sleep(max(outage.began_s + self._away_s - time.time(), 0.0))
            await outage.end()
            event_s = outage.ended_s
        else:
            event_s = outage.began_s
        before = None if item.kind in AWAY else leader
        if item.kind not in SAME_LEADER and await until(lambda: self._led_s(before, event_s) is not None, PATIENCE_S):
            found.led_s = self._led_s(before, event_s)
        if item.kind not in AWAY:
            await asyncio.sleep(item.back_after_s)
            await outage.end()
        return event_s

    def _led_s(self, before: Member | None, event_s: float) -> float | None:
        """Return how long after the event another server than ``before`` was seen to lead; None while none was."""
        name = "" if before is None else before.name
        terms = (term for term in self._pair.terms if term.server != name and term.since_s > event_s)
        return next((round(term.since_s - event_s, 2) for term in terms), None)

    async def _count_rows(self, agents: Agents, found: Outcome, event_s: float) -> None:
        """Wait until whoever leads has all rows that agents made during this event, the one before, and between.

        What it lacks in the end is missing.
        """
        end_s = time.monotonic() + PATIENCE_S
        since_s, until_s = self._counted_s[0], _between_rows()
        self._counted_s = [*self._counted_s[-1:], until_s]
        await until(lambda: agents.waiting() <= 0, PATIENCE_S)
        while True:
            made, there = agents.rows(since_s, until_s), await self._rows(since_s, until_s)
            missing = sum(max(count - there.get(node, 0), 0) for node, count in made.items())
            found.rows, found.rows_missing = sum(made.values()), missing
            if not missing:
                found.whole_s = round(time.time() - event_s, 2)
            if not missing or time.monotonic() > end_s:
                return
            await asyncio.sleep(ASK_EVERY_S)

    async def _rows(self, since_s: float, until_s: float) -> dict[str, int]:
        """Return how many rows the leader has of each node; none where it does not answer."""
        query = {"metric": ROW, "start": str(since_s), "end": str(until_s)}
        answer = await self._get(self._pair.leader(), "/api/v1/query_range", query)
        series = [] if answer is None else answer["series"]
        return {one["node"]: len(one["points"]) for one in series if one["device"] == 0}

    async def _unsettled(self) -> int:
        """Return how many actions are under way still, by the leader's records, after some patience."""
        end_s, left = time.monotonic() + READY_S, 1
        while left and time.monotonic() < end_s:
            answer = await self._get(self._pair.leader(), "/api/v1/actions", {"limit": "500"})
            if answer is not None:
                left = sum(one["state"] not in SETTLED for one in answer["items"])
            if left:
                await asyncio.sleep(ASK_EVERY_S)
        return left

    async def _more_than_one(self, path: str, job: str, attempt: int) -> int:
        """Return how many there are of the job's attempt, beside the first, in the records of whoever leads."""
        answer = await self._get(self._pair.leader(), path, {"limit": "500", "job": job})
        attempts = [] if answer is None else [one["attempt"] for one in answer["items"]]
        return max(attempts.count(attempt) - 1, 0)

    async def _is_known(self) -> bool:
        """Return whether the leader knows the subscription, the jobs' ranks and the nodes."""
        leader = self._pair.leader()
        subscriptions = await self._get(leader, "/api/v1/subscriptions", {})
        nodes = await self._get(leader, "/api/v1/nodes", {"limit": "500"})
        jobs = await self._get(leader, "/api/v1/jobs", {"limit": "500"})
        return (
            bool(subscriptions and subscriptions["items"])
            and nodes is not None
            and len(nodes["items"]) == len(self._nodes)
            and jobs is not None
            and len(jobs["items"]) == len(JOB_NODES)
        )

    async def _get(self, server: Member | None, path: str, query: dict[str, str]) -> Any:
        """Return what a server itself answers; None where it does not."""
        if server is None:
            return None
        try:
            answer = await self._pair.client.get(server.direct + path, params=query)
        except httpx.TransportError:
            return None
        return answer.json() if answer.is_success else None

    def _counts(self) -> dict[str, int]:
        return {
            "twice": said.twice(self._said),
            "for_nothing": said.for_nothing(self._said, self._faults),
            "of_a_former_leader": said.of_a_former_leader(self._said, self._pair.terms),
            "refused_for_their_epoch": said.refused(self._said),
        }

    async def _follow(self, agents: Agents) -> None:
        """Read what the subscriber writes down, and have jobs go on that it restarted."""
        unread = b""
        with self._lines.open("rb") as file:
            while True:
                *lines, unread = (unread + file.read()).split(b"\n")
                for one in (msgspec.json.decode(line, type=Said) for line in lines):
                    self._said.append(one)
                    if one.what == "restart" and one.attempt == self._attempts[one.job]:
                        self._attempts[one.job] += 1
                        agents.begin(one.job, self._attempts[one.job])
                await asyncio.sleep(LOOK_EVERY_S)


def _between_rows() -> float:
    """Return a time just now at which no row is: rows are at whole seconds."""
    return int(time.time()) - 0.5
