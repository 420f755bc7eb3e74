"""The events: each takes something away, and brings it back. Touches: processes, relays, the database."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable

from benchmarks.failover.relay import Relay, Trap
from benchmarks.failover.servers import Database, Member, Pair
from benchmarks.soak.site import until
from eagle_eye.schema.action import ACTION_REQUESTED

# Of a leader that is stopped in the middle: what it has sent on the connection before, and what it is sending.
TRANSACTION = b"INSERT INTO actions", b"COMMIT"
DELIVERY = ACTION_REQUESTED.encode(), ACTION_REQUESTED.encode()


class Outage:
    """One event, of this kind. ``began_s`` is when (Unix time); ``ended_s`` when what was away began to return."""

    def __init__(self, kind: str, pair: Pair, leader: Member, database: Database, subscriber: Relay) -> None:
        self.began_s = self.ended_s = 0.0
        self._kind = kind
        self._pair = pair
        self._leader = leader
        self._database = database
        self._subscriber = subscriber
        self._going: asyncio.Future[None] | None = None
        self._trap: Trap | None = None

    async def prepare(self) -> None:
        """What it needs is there."""
        if self._kind == "database_failed_over":
            await asyncio.to_thread(self._database.prepare_replica)

    async def begin(self, crash: Callable[[], None], patience_s: float) -> bool:
        """It has begun; return False if it did not. ``crash`` is called where the fault is what leads to it."""
        if self._kind in ("stopped_in_transaction", "stopped_in_delivery"):
            relay = self._leader.database if self._kind == "stopped_in_transaction" else self._subscriber
            trap = self._trap = Trap(*(TRANSACTION if relay is self._leader.database else DELIVERY), self._stop)
            relay.trap = trap
            crash()
            return await until(lambda: trap.has_sprung, patience_s)
        self.began_s = time.time()
        if self._kind == "cut_from_database":
            self._leader.database.cut()
        elif self._kind == "cut_from_agents":
            self._leader.asked.cut()
        elif self._kind == "database_restarted":
            self._going = self._control("restart", "--wait", "--mode=fast")
        elif self._kind == "database_away":
            await self._control("stop", "--wait", "--mode=fast")
        elif self._kind == "database_failed_over":
            self._going = asyncio.ensure_future(asyncio.to_thread(self._database.fail_over))
        elif self._kind == "handed_over":
            self._going = asyncio.ensure_future(asyncio.to_thread(self._end, self._leader, signal.SIGTERM))
        elif self._kind == "both_gone":
            for member in self._pair.members:
                member.signal(signal.SIGKILL)
        else:
            self._leader.signal(signal.SIGKILL if self._kind == "killed" else signal.SIGSTOP)
        return True

    async def end(self) -> None:
        """What was away is there again, or starts."""
        if self._going is not None:
            await self._going
        self.ended_s = time.time()
        if self._kind == "database_away":
            await self._control("start", "--wait")
        elif self._kind.startswith("stopped"):
            self._leader.signal(signal.SIGCONT)
            if self._trap is not None:
                self._trap.let_go.set()
        elif self._kind in ("killed", "handed_over"):
            await asyncio.to_thread(self._leader.process.kill)
            self._leader.process.start()
        elif self._kind == "both_gone":
            for member in self._pair.members:
                await asyncio.to_thread(member.process.kill)
                member.process.start()
        for relay in (self._leader.database, self._leader.asked):
            relay.mend()

    def _stop(self) -> None:
        self._leader.signal(signal.SIGSTOP)
        self.began_s = time.time()

    def _control(self, *words: str) -> asyncio.Future[None]:
        return asyncio.ensure_future(asyncio.to_thread(self._database.primary.control, *words))

    @staticmethod
    def _end(member: Member, number: int) -> None:
        member.process.stop(number)
