"""Which job a node works for, by what schedulers and launchers declared. Reads the store, now and then, in a thread."""

from __future__ import annotations

import asyncio

from eagle_eye.server.clock import Clock
from eagle_eye.server.errors import StoreUnavailable
from eagle_eye.server.records import Job
from eagle_eye.server.store import JOBS, PAGE_LIMIT_MAX, Store

FRESH_S = 10.0  # how old the answer may be; a hundred thousand ranks take a thread some tens of milliseconds
STATES = ("maintenance", "suspended", "completing", "running")  # in which a job has its nodes; the last counts most


class Membership:
    """The jobs of nodes as they were declared; a node of several is that job's which was declared last."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._jobs: dict[str, str] = {}
        self._read_s = -FRESH_S
        self._reading: asyncio.Task[None] | None = None

    def job_of(self, node: str) -> str | None:
        """Return the job that the node was declared a member of; None: none is known."""
        return self._jobs.get(node)

    async def refresh(self) -> None:
        """Return once the answers are fresh, or the store cannot be read: then the last ones stand."""
        if self._clock.monotonic_s() - self._read_s < FRESH_S:
            return
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._refresh())
        await asyncio.shield(self._reading)

    async def _refresh(self) -> None:
        try:
            self._jobs = await asyncio.to_thread(self._read)
        except StoreUnavailable:
            return
        self._read_s = self._clock.monotonic_s()

    def _read(self) -> dict[str, str]:
        jobs: list[Job] = []
        for state in STATES:
            jobs += reversed(self._of_state(state))
        return {node: job.job for job in jobs for node in (*job.nodes, *(rank.node for rank in job.ranks))}

    def _of_state(self, state: str) -> list[Job]:
        """Return the jobs in a state, newest first."""
        found: list[Job] = []
        cursor: str | None = None
        while True:
            page = self._store.page(JOBS, {"state": state}, cursor, PAGE_LIMIT_MAX)
            found += page.items
            cursor = page.next
            if cursor is None:
                return found
