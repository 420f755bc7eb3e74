"""What a store does for one job while it trains: copies to other nodes, what is whole on all, whole steps to storage.

The first node's store is the job's coordinator: the others tell it which of their ranks' shards are whole in all
copies, and it tells all which step is whole, which never will be, and which goes to storage.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

from eagle_eye.checkpoint.checksums import Damaged, check, check_all, chunks, sums_of
from eagle_eye.checkpoint.connection import Connection, Pace, ProtocolError
from eagle_eye.checkpoint.held_job import HeldJob, Shard
from eagle_eye.checkpoint.memory_plan import DoesNotFit
from eagle_eye.checkpoint.messages import (
    Agreed,
    Captured,
    Close,
    Copies,
    CopyInfo,
    Grant,
    Message,
    MetadataMade,
    MetadataWanted,
    Missed,
    Open,
    Opened,
    Persisted,
    Put,
    Refused,
    Reserve,
    ShardPersisted,
    Skipped,
    Whole,
)
from eagle_eye.checkpoint.peer import Peer
from eagle_eye.checkpoint.storage import complete, discard, write_shard
from eagle_eye.checkpoint.traffic import Traffic, Unwanted

SCRUB_PAUSE_S, SCRUB_CHUNKS = 0.02, 16  # a tenth of a core at most


class JobService:
    """One job in one store, at work. ``spawn`` runs what nobody waits for."""

    def __init__(
        self,
        job: HeldJob,
        node: str,
        persist_bytes_per_s: float | None,
        spawn: Callable[[Awaitable[None]], None],
        traffic: Traffic,
    ) -> None:
        self.job = job
        self._traffic = traffic
        job.links = traffic.status
        self._node = node
        self._persist_bytes_per_s = persist_bytes_per_s
        self._spawn = spawn
        self._peers: dict[str, Peer] = {}
        self._metadata: dict[int, bytes] = {}
        self._on_storage: dict[int, dict[str, str]] = {}

    @property
    def ended(self) -> bool:
        """Whether every rank of this node has ended as it should, and nothing is on its way to storage."""
        local = self.job.local
        return bool(local) and all(shard.closed for shard in local) and self.job.needed.persisting is None

    def close(self) -> None:
        """End the connections to other nodes."""
        self._traffic.close()
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()

    # A rank's attempt.

    async def open(self, opening: Open, connection: Connection) -> Shard | None:
        """Begin an attempt for a rank: its memory is reserved here and at the other holders, or it hears why not."""
        job = self.job
        if opening.attempt < job.attempt:
            reason = f"attempt {opening.attempt} of {job.name} is over: attempt {job.attempt} has begun"
            await connection.send(Refused(reason))
            return None
        if opening.attempt != job.begun_attempt:
            job.begin(opening)
            self._metadata.clear()
            self._on_storage.clear()
        job.left_s = None
        job.keep_blob(opening.plan, opening.blob)
        slots = opening.keep + 1 + (1 if opening.persist_every else 0)
        try:
            shard = job.shard(opening.plan, opening.rank, opening.capacity_bytes, slots, local=True)
            job.renew_granted(shard)
            for node in opening.holders[1:]:
                await self._peer(node).reserve(_wish(opening))
        except (DoesNotFit, OSError) as error:
            await connection.send(Refused(str(error)))
            return None
        shard.holders, shard.connection, shard.closed = opening.holders, connection, False
        job.save()
        await connection.send(Opened(tuple(str(file.path) for file in shard.files)))
        await self._grant(shard)
        if opening.resumed_step is not None:
            self._spawn(self._restore_copies(shard, opening, opening.resumed_step))
        return shard

    async def hear(self, shard: Shard, message: Message) -> None:
        """Take in what a rank says while it trains."""
        job = self.job
        match message:
            case Captured(step, slot, length, tail, captured_s, blocked_s):
                copy = CopyInfo(shard.plan, shard.rank, step, length, tail, captured_s)
                shard.view(slot, length)  # raises for what no slot could hold
                shard.slots.written(slot, copy)
                job.count("captured")
                job.came_to(step)
                job.blocked_s += blocked_s
                self._came_to(shard, step)
                self._spawn(self._replicate(shard, slot, copy))
                await self._grant(shard)
            case Skipped(step, reason):
                job.count("skipped")
                job.came_to(step)
                self._came_to(shard, step)
                await self._tell_coordinator(Missed(job.attempt, shard.rank, step, reason))
            case MetadataMade(step, data):
                self._metadata[step] = data
                await self._complete(step)
            case Close():
                shard.closed = True
            case _:
                raise ProtocolError(f"{type(message).__name__} from a rank that trains")

    def left(self, shard: Shard) -> None:
        """The rank's connection has ended: what it may have been writing is nobody's."""
        shard.connection = None
        self.job.renew_granted(shard)
        if all(one.connection is None for one in self.job.local):
            self.job.left_s = time.monotonic()

    def _came_to(self, shard: Shard, step: int) -> None:
        shard.newest_step = step
        if shard is next(iter(self.job.local), None):  # the other ranks of the node end their steps at the same time
            self._traffic.mark()

    async def _grant(self, shard: Shard) -> None:
        if shard.connection is None:
            return
        slot = shard.slots.grant(self.job.needed.among(copy.step for copy in shard.slots.copies))
        if slot is None:
            return
        if shard.sums.pop(slot, None) is not None:
            self.job.save()  # before the rank writes there: a store started anew must not take it for a copy
        with contextlib.suppress(OSError):  # the rank has ended; its connection will say so
            await shard.connection.send(Grant(slot))

    # Copies.

    async def _replicate(self, shard: Shard, slot: int, copy: CopyInfo) -> None:
        """Bring a captured shard to its other holders, and tell the coordinator once all copies are whole."""
        job, attempt, view = self.job, self.job.attempt, shard.view(slot, copy.length)
        sums = await asyncio.get_running_loop().run_in_executor(None, sums_of, view)
        if shard.slots.holds[slot] != copy:
            return  # it will never be whole, and is overwritten
        shard.sums[slot] = sums
        job.save()
        others = shard.holders[1:]
        put = Put(attempt, copy, sums)

        def wanted() -> bool:
            return job.attempt == attempt and shard.slots.holds[slot] == copy and job.needed.awaits(copy.step)

        def pace_to(host: str) -> Pace:
            return self._traffic.copy(host, wanted)

        bringing = (self._bring(node, put, view, pace_to) for node in others)
        outcomes = await asyncio.gather(*bringing, return_exceptions=True)
        if shard.newest_step != copy.step:
            job.count("copies_late")
        if any(isinstance(outcome, Unwanted) for outcome in outcomes):
            job.count("copies_dropped")
            return
        failed = [f"{node}: {why}" for node, why in zip(others, outcomes, strict=True) if why is not None]
        if job.attempt != attempt:
            return
        if not failed:
            await self._tell_coordinator(Copies(attempt, copy))
            return
        job.count("copies_failed")
        job.trouble(f"step {copy.step} of rank {copy.rank} has no copy on {'; '.join(failed)}")
        await self._tell_coordinator(Missed(attempt, copy.rank, copy.step, failed[0]))

    async def _bring(self, node: str, put: Put, view: memoryview, pace_to: Callable[[str], Pace]) -> None:
        if not await self._peer(node).put(put, view, pace_to):
            raise ProtocolError("no slot is free there")
        self.job.count("bytes_sent", len(view))

    async def _restore_copies(self, shard: Shard, opening: Open, step: int) -> None:
        """Have the resumed step's shard here and at the other holders, as a new node does not have it yet."""
        job = self.job
        held = job.find(opening.plan, shard.rank, step) or await self._fetch(shard, opening, step)
        if held is None:
            return
        _, slot, copy = held
        for node in shard.holders[1:]:
            try:
                put = Put(opening.attempt, copy, shard.sums[slot])
                await self._bring(node, put, shard.view(slot, copy.length), lambda _: self._traffic.urgent())
            except (OSError, KeyError) as error:
                job.trouble(f"step {step} of rank {shard.rank} is not on {node} again yet: {error}")

    async def _fetch(self, shard: Shard, opening: Open, step: int) -> tuple[Shard, int, CopyInfo] | None:
        """Fetch the resumed step's shard from whoever has it, where its plan is this attempt's."""
        job = self.job
        slot = shard.slots.take(job.needed.among(one.step for one in shard.slots.copies)) if opening.sources else None
        if slot is None:
            return None
        for address in opening.sources:
            peer = Peer(address, address, job.name, job.key)
            try:
                copy = await peer.describe(opening.plan, shard.rank, step)
                if copy is None or (sums := await peer.fetch(copy, shard.view(slot, copy.length))) is None:
                    continue
                check_all(shard.view(slot, copy.length), sums, f"step {step} of rank {copy.rank} from {address}")
            except (OSError, Damaged) as error:
                job.trouble(f"step {step} of rank {shard.rank} is not fetched from {address}: {error}")
            else:
                shard.slots.holds[slot], shard.sums[slot] = copy, sums
                job.save()
                return shard, slot, copy
            finally:
                peer.close()
        return None

    async def scrub(self) -> list[str]:
        """Verify every copy once more, slowly. One that is damaged is gone; return what is said of each."""
        job, damaged = self.job, []
        for shard, slot, copy in list(job.copies()):
            sums, view = shard.sums.get(slot, b""), shard.view(slot, copy.length)
            try:
                for number, (start, end) in enumerate(chunks(0, copy.length)):
                    if shard.slots.holds[slot] != copy:
                        break
                    check(view[start:end], sums, number, f"the copy of rank {copy.rank}, step {copy.step}")
                    if number % SCRUB_CHUNKS == SCRUB_CHUNKS - 1:
                        await asyncio.sleep(SCRUB_PAUSE_S)
            except Damaged as error:
                shard.slots.drop([copy.step])
                shard.sums.pop(slot, None)
                job.count("damaged")
                job.trouble(f"a copy is damaged and not used: {error}")
                job.save()
                damaged.append(f"{job.name}: {error}")
        return damaged

    def _peer(self, node: str) -> Peer:
        member = self.job.members.get(node)
        if member is None:
            raise ProtocolError(f"{node} is no node of {self.job.name}")
        peer = self._peers.get(node)
        if peer is None or peer.address != member.address:
            if peer is not None:
                peer.close()
            peer = self._peers[node] = Peer(node, member.address, self.job.name, self.job.key)
        return peer

    # What is whole on all.

    async def agree(self, word: Copies | Missed | Agreed | ShardPersisted) -> None:
        """Take in what another store says, the coordinator's or, at the coordinator, any."""
        job = self.job
        if word.attempt != job.attempt:
            return
        match word:
            case Agreed():
                await self._agreed(word)
            case ShardPersisted(_, node, step, reason):
                self._on_storage.setdefault(step, {})[node] = reason
                await self._complete(step)
            case Copies(_, copy) if job.agreement is not None:
                await self._announce(job.agreement.copied(copy))
            case Missed(_, _, step, _) if job.agreement is not None:
                await self._announce(job.agreement.missed(step))

    @property
    def _coordinates(self) -> bool:
        coordinator = self.job.coordinator
        return coordinator is not None and coordinator.node == self._node

    async def _tell_coordinator(self, word: Copies | Missed | ShardPersisted) -> None:
        coordinator = self.job.coordinator
        if self._coordinates or coordinator is None:
            await self.agree(word)
            return
        await self._tell(coordinator.node, word)

    async def _tell(self, node: str, word: Message) -> None:
        try:
            await self._peer(node).tell(word)
        except OSError as error:
            self.job.trouble(f"{node} was not told ({type(word).__name__}): {error}")

    async def _announce(self, words: list[Agreed]) -> None:
        for word in words:
            said = Agreed(self.job.attempt, word.whole, word.void, word.persist, word.persisted)
            for node in self.job.members:
                if node != self._node:
                    self._spawn(self._tell(node, said))
            await self._agreed(said)

    async def _agreed(self, word: Agreed) -> None:
        job = self.job
        job.needed.agree(word)
        if word.void is not None:
            job.count("void")
        if word.whole is not None and job.local:
            job.settle(job.local[0].plan)
            await self._tell_ranks(Whole(word.whole))
        for shard in job.local:
            await self._grant(shard)
        if word.persist is not None:
            self._spawn(self._persist(word.persist))

    async def _tell_ranks(self, message: Message) -> None:
        for shard in self.job.local:
            if shard.connection is not None:
                with contextlib.suppress(OSError):  # its connection will say so
                    await shard.connection.send(message)

    # To storage.

    async def _persist(self, step: int) -> None:
        """Write the shards of this node's ranks to storage, and tell the coordinator."""
        job, attempt = self.job, self.job.attempt
        job.persisting_since_s = time.monotonic()
        if self._coordinates:
            await self._ask_for_metadata(step)
        reason = ""
        try:
            for shard in job.local:
                await self._write(shard, step)
        except OSError as error:
            reason = f"step {step} is not on storage: {error}"
            job.count("persist_failed")
            job.trouble(reason)
        if job.attempt == attempt:
            if not self._coordinates:  # which waits for the others
                job.persisting_since_s = None
            await self._tell_coordinator(ShardPersisted(attempt, self._node, step, reason))

    async def _write(self, shard: Shard, step: int) -> None:
        held = self.job.find(shard.plan, shard.rank, step)
        if held is None:
            raise OSError(f"rank {shard.rank} has no copy of it any more")
        _, slot, copy = held
        view = shard.view(slot, copy.length)
        loop = asyncio.get_running_loop()
        rate = self._persist_bytes_per_s
        await loop.run_in_executor(None, write_shard, self.job.directory, step, shard.rank, view, rate)

    async def _ask_for_metadata(self, step: int) -> None:
        agreement = self.job.agreement
        first = min(self.job.local, key=lambda shard: shard.rank, default=None)
        if agreement is None or first is None or first.connection is None:
            return
        tails = {rank: copy.tail for rank, copy in agreement.copies.get(step, {}).items()}
        with contextlib.suppress(OSError):
            await first.connection.send(MetadataWanted(step, tails))

    async def _complete(self, step: int) -> None:
        """Once every store and rank 0 have brought their parts, the folder is complete; or it is discarded."""
        job, agreement = self.job, self.job.agreement
        said, metadata = self._on_storage.get(step, {}), self._metadata.get(step)
        failed = next((reason for reason in said.values() if reason), None)
        if agreement is None or not self._coordinates or agreement.persisting != step:
            return
        if not said.keys() >= job.members.keys() or (metadata is None and failed is None):
            return
        self._on_storage.pop(step, None)
        self._metadata.pop(step, None)
        loop, path = asyncio.get_running_loop(), None
        if failed is None and metadata is not None:
            try:
                captured_s = max(copy.captured_s for copy in agreement.copies[step].values())
                path = await loop.run_in_executor(None, complete, job.directory, step, metadata, captured_s)
            except OSError as error:
                job.trouble(f"step {step} is not on storage: {error}")
        if path is None:
            await loop.run_in_executor(None, discard, job.directory, step)
        else:
            job.persisted = step
            job.count("persisted")
        agreement.finished_persisting(step)
        await self._announce([Agreed(0, persisted=step)])
        if path is not None:
            await self._tell_ranks(Persisted(step, str(path)))


def _wish(opening: Open) -> Reserve:
    return Reserve(
        opening.attempt,
        opening.rank,
        opening.plan,
        opening.blob,
        opening.capacity_bytes,
        opening.keep,
        opening.resumed_step,
    )
