"""One soak: what runs beside each other, and when."""

from __future__ import annotations

import asyncio
import random
import signal
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.soak.fleet import Agents
from benchmarks.soak.looks import Look, Looks
from benchmarks.soak.plan import Plan
from benchmarks.soak.received import Received
from benchmarks.soak.site import Site, until
from benchmarks.soak.stored import Stored
from benchmarks.soak.world import World
from eagle_eye.server.history.embedded_history import EmbeddedHistory
from eagle_eye.server.history.settings import HistorySettings
from eagle_eye.server.model.clock import SystemClock
from eagle_eye.simulator.load.connection import load_target
from eagle_eye.simulator.load.sender import LatencyHistogram

STORED_EVERY_S = 10.0
DELIVERIES_EVERY_S = 30.0
SUBSCRIBER_AWAY_S = (0.5, 4.0)
SETTLE_S = 120.0
DRAIN_S = 60.0
LIFE_S_MIN = 5.0  # of a server that is stopped again, however long it took to start


class Soak:
    """Runs a plan in a folder. What came of it stays in its parts."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self.plan = plan
        self.random = random.Random(plan.seed)
        self.site = Site(folder, plan.settings)
        self.received = Received(self.site.received)
        self.stored = Stored(self.site.data)
        self.looks: list[Look] = []
        self.phase = "starting"
        self.missing = self.undelivered = self.altered = 0
        self.server_starts_s: list[float] = []
        self.generator_cpu_ratio = 0.0
        self._began_s = time.monotonic()
        self._killed_s: list[float] = []
        self._delivered: set[str] = set()
        self.agents: Agents
        self.world: World

    @property
    def seconds(self) -> float:
        """How long it has been going on, its start not counted."""
        return time.monotonic() - self._began_s

    async def run(self, reported: Callable[[], object]) -> None:
        """Run it; ``reported`` is called about once a second."""
        names = [f"soak-{number:06d}" for number in range(self.plan.nodes)]
        self.agents = Agents(load_target(self.site.url), names, self.plan.gpus, self.plan.seed)
        self.world = World(self.site, self.agents, self.plan, self.random)
        helpers: list[asyncio.Task[Any]] = []
        try:
            await self.site.start()
            await self.world.begin()
            helpers = [asyncio.create_task(work) for work in (self.agents.run(), self._look(), self._compare())]
            self._began_s, cpu_s = time.monotonic(), time.process_time()
            restarts = asyncio.create_task(self._restart())
            helpers.append(restarts)
            while self.seconds < self.plan.duration_s or not restarts.done():
                self._turn(helpers)
                reported()
                await asyncio.sleep(1.0)
            self.generator_cpu_ratio = (time.process_time() - cpu_s) / self.seconds
            await self._finish(helpers, reported)
        finally:
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
            await self.world.close()
            await self.agents.close()
            await self.site.close()

    def _turn(self, helpers: list[asyncio.Task[Any]]) -> None:
        for helper in helpers:
            if helper.done() and (error := helper.exception()) is not None:
                raise error
        self._hear()
        self.world.turn()

    def _hear(self) -> None:
        for event in self.received.news(self._killed_s):
            self.world.hear(event)

    async def _restart(self) -> None:
        """Stop, kill and start what the plan says, when it says so."""
        plan = self.plan
        due: list[tuple[float, str]] = [
            *plan.server_restarts,
            *((at_s, "fleet") for at_s in plan.fleet_restarts),
            *((at_s, "subscriber") for at_s in plan.subscriber_kills),
        ]
        for at_s, what in sorted(due):
            await asyncio.sleep(max(at_s - self.seconds, 0.0))
            self.phase = f"restarting: {what}"
            if what == "fleet":
                await self.world.restart_agents()
            elif what == "subscriber":
                self.site.subscriber.kill()
                await asyncio.sleep(self.random.uniform(*SUBSCRIBER_AWAY_S))
                self.site.subscriber.start()
            else:
                await self._restart_server(what)
            self.phase = "undisturbed server" if at_s >= plan.server_restarts[-1][0] else "restarts"

    async def _restart_server(self, how: str) -> None:
        if how == "kill":
            self._killed_s.append(time.time())
        await self.site.stop_server(signal.SIGKILL if how == "kill" else signal.SIGTERM)
        self.server_starts_s.append(await self.site.start_server())
        await asyncio.sleep(LIFE_S_MIN)

    async def _look(self) -> None:
        looks = Looks(self.site)
        while True:
            await asyncio.sleep(self.plan.look_s)
            latencies, self.agents.tally.latencies = self.agents.tally.latencies, LatencyHistogram()
            self.looks.append(await looks.look(self.seconds, latencies))

    async def _compare(self) -> None:
        """Read what the server has as it comes, before retention takes it away."""
        next_s = 0.0
        while True:
            await asyncio.sleep(STORED_EVERY_S)
            try:
                await asyncio.to_thread(self.stored.look)
            except sqlite3.OperationalError:
                continue  # the server is just making or checking its file
            if time.monotonic() >= next_s:
                next_s = time.monotonic() + DELIVERIES_EVERY_S
                await self._compare_deliveries()

    async def _compare_deliveries(self) -> int:
        """Compare what the server says that it delivered with what came; return how many deliveries are pending."""
        pending, cursor = 0, ""
        while True:
            path = f"/api/v1/deliveries?subscription={self.site.subscription}&limit=500"
            page = await self.site.ask("GET", f"{path}&cursor={cursor}" if cursor else path)
            news = 0
            self._hear()  # what is said to be delivered has been written down
            for item in page["items"]:
                pending += item["state"] == "pending"
                if item["state"] == "pending" or item["id"] in self._delivered:
                    continue
                news += 1
                self._delivered.add(item["id"])
                await self._compare_delivery(item)
            cursor = page["next"]
            if not cursor or not news:
                return pending

    async def _compare_delivery(self, item: dict[str, Any]) -> None:
        if item["state"] == "expired":
            return
        got = self.received.events.get(item["event_id"])
        if item["state"] != "delivered" or got is None:
            self.undelivered += 1
            self.world.wrong.append(
                f"delivery of {item['event_id']}: {item['state']} {item['reason']}, received: {got is not None}"
            )
            return
        whole = await self.site.ask("GET", f"/api/v1/deliveries/{item['id']}", accepted=(404,))
        if whole is not None and whole["event"] is not None and whole["event"]["data"] != got["data"]:
            self.altered += 1

    async def _finish(self, helpers: list[asyncio.Task[Any]], reported: Callable[[], object]) -> None:
        """Let what goes on come to its end, stop the server, and compare everything."""
        self.phase = "settling"
        settling = asyncio.create_task(self.world.settle(SETTLE_S))
        while not settling.done():
            self._turn(helpers)
            reported()
            await asyncio.sleep(0.5)
        agents, making, *rest = self.agents, *helpers
        making.cancel()
        for helper in rest:
            helper.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)
        await until(lambda: not agents.waiting, DRAIN_S)
        for _ in range(int(DRAIN_S)):
            if not await self._compare_deliveries():
                break
            await asyncio.sleep(1.0)
        self._turn([])
        ledger = agents.reported()
        self.phase = "counting"
        reported()
        await self.site.stop_server(signal.SIGTERM)
        await asyncio.to_thread(self._compact)
        await asyncio.to_thread(self.stored.look)
        self.missing = self.stored.missing(ledger.watermarks)

    def _compact(self) -> None:
        """Have what is still in the journal written to segments."""
        history = EmbeddedHistory(self.site.data, HistorySettings(), 1 << 30, SystemClock(), 0.0)
        try:
            history.compaction.compact()
        finally:
            history.close()
