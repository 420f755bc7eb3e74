"""Which job each node works for, from declared jobs, and which nodes are vouched for by jobs or tokens.

Reads the store occasionally, in a thread.
"""

from __future__ import annotations

import asyncio

from eagle_eye.server.ingest.vouching import Vouchers
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.model.records import Job
from eagle_eye.server.store.store import JOBS, PAGE_LIMIT_MAX, TOKENS, Store

FRESH_S = 10.0  # maximum age of the answer; a hundred thousand ranks take a thread some tens of milliseconds
STATES = ("maintenance", "suspended", "completing", "running")  # in which a job holds its nodes; later ones win


class NodeJobs:
    """The declared jobs of nodes; a node of several belongs to the one declared last.

    ``vouchers`` get the nodes that have a job or an agent's token.
    """

    def __init__(self, store: Store, clock: Clock, vouchers: Vouchers) -> None:
        self._store = store
        self._clock = clock
        self._vouchers = vouchers
        self._jobs: dict[str, str] = {}
        self._tokens_version = -1
        self._read_s = -FRESH_S
        self._reading: asyncio.Task[None] | None = None

    def job_of(self, node: str) -> str | None:
        """Return the job that the node was declared a member of; None if none is known."""
        return self._jobs.get(node)

    async def refresh(self) -> None:
        """Return once the answers are fresh; if the store cannot be read, the previous ones stay."""
        if self._clock.monotonic_s() - self._read_s < FRESH_S:
            return
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._refresh())
        await asyncio.shield(self._reading)

    async def _refresh(self) -> None:
        try:
            self._jobs = await asyncio.to_thread(self._read)
            version, enrolled = await asyncio.to_thread(self._read_tokens)
        except StoreUnavailable:
            return
        self._vouchers.use_jobs(self._jobs.keys())
        if enrolled is not None:
            self._tokens_version = version
            self._vouchers.use_tokens(enrolled)
        self._read_s = self._clock.monotonic_s()

    def _read(self) -> dict[str, str]:
        jobs: list[Job] = []
        for state in STATES:
            jobs += reversed(self._of_state(state))
        return {node: job.job for job in jobs for node in (*job.nodes, *(rank.node for rank in job.ranks))}

    def _read_tokens(self) -> tuple[int, frozenset[str] | None]:
        """Return the tokens' version and the nodes with a valid one; None if no token has changed."""
        version, now_s = self._store.marks().tokens, self._clock.now_s()
        if version == self._tokens_version:
            return version, None
        valid = (
            token.node
            for token in self._store.all(TOKENS)
            if not token.revoked and (token.expires_s is None or token.expires_s > now_s)
        )
        return version, frozenset(node for node in valid if node is not None)

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
