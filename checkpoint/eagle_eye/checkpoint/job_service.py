"""A store's work for one running job: copies to other nodes, agreement on whole steps, persisting to storage.

The first node's store is the job's coordinator: the others report which of their ranks' shards are whole in all copies,
and it announces which step is whole, which never will be, and which goes to storage.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

import msgspec

from eagle_eye.checkpoint.connection import ProtocolError, SendPace, StoreConnection
from eagle_eye.checkpoint.held_job import HeldJob, ShardSlots, attempts_resumed
from eagle_eye.checkpoint.messages import (
    Agreed,
    Captured,
    CaptureEvery,
    Close,
    Copies,
    CopyInfo,
    Grant,
    Message,
    MetadataMade,
    MetadataWanted,
    Missed,
    Open,
    Persisted,
    Put,
    RanksDone,
    RequestRefused,
    Reserve,
    ShardPersisted,
    Skipped,
    SlotsOpened,
    Whole,
)
from eagle_eye.checkpoint.peer import Peer
from eagle_eye.checkpoint.shared_memory import DoesNotFit, SlotFile, spaced_of
from eagle_eye.checkpoint.storage import (
    Damaged,
    apart,
    check,
    check_all,
    chunks,
    complete,
    discard,
    discard_others,
    partial,
    sums_of,
    write_shard,
)
from eagle_eye.checkpoint.traffic import CopyUnwanted, Traffic

SCRUB_PAUSE_S, SCRUB_CHUNKS = 0.02, 16  # a tenth of a core at most
SAY_AGAIN_S = 1.0
ROOM_WITHIN_S, ROOM_AGAIN_S = 2.0, 0.1  # until a step is whole, or void, that takes the place of a copy


class JobService:
    """One running job in one store. ``spawn`` runs background tasks.

    ``ended``: every rank of the job has ended normally, and its memory is free.
    """

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
        self._written: dict[int, ShardPersisted | None] = {}
        self._ranks: set[StoreConnection] = set()
        self._whole_said: int | None = None
        self._done_nodes: set[str] = set()
        self._said_done_s = 0.0
        self._closed = False
        self._topping_up = False
        self._news = asyncio.Event()
        self.ended = False

    @property
    def done(self) -> bool:
        """Whether every rank of this node has ended normally, and none of its copies is in transit.

        Unfinished copies are awaited as long as a rank waits for them.
        """
        local = self.job.local
        if not local or not all(shard.closed for shard in local) or self.job.needed.persisting is not None:
            return False
        return not self._ranks or not any(self._unresolved(shard) for shard in local)

    def say_done(self) -> None:
        """Tell this node's ranks, and the coordinator, that it is done; repeated until answered."""
        for connection in list(self._ranks):
            connection.close()
        now_s = time.monotonic()
        if now_s - self._said_done_s > SAY_AGAIN_S:
            self._said_done_s = now_s
            self._spawn(self._tell_coordinator(RanksDone(self.job.attempt, self._node)))

    def close(self) -> None:
        """Close the connections to other nodes and to ranks. Slots being written by ranks stay unchanged."""
        self._closed = True
        self._traffic.close()
        self._close_peers()
        for connection in list(self._ranks):
            connection.close()

    def _close_peers(self) -> None:
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()

    # A rank's attempt.

    def entered(self, connection: StoreConnection) -> None:
        """A rank has come."""
        self._ranks.add(connection)
        self._traffic.has_ranks(here=True)
        self.job.left_s = None

    def left(self, connection: StoreConnection, shard: ShardSlots | None) -> None:
        """A rank's connection has ended: release the slot that it may have been writing."""
        self._ranks.discard(connection)
        if shard is not None and shard.connection is connection and not self._closed:
            shard.connection = None
            self.job.drop_granted(shard)
        if not self._ranks:
            self.job.left_s = time.monotonic()
            self._traffic.has_ranks(here=False)

    async def open(self, opening: Open, connection: StoreConnection) -> ShardSlots | None:
        """Start an attempt for a rank: reserve its memory here and at the other holders, or answer why not."""
        job = self.job
        if opening.attempt < job.attempt:
            reason = f"attempt {opening.attempt} of {job.name} is over: attempt {job.attempt} has begun"
            await connection.send(RequestRefused(reason))
            return None
        if opening.again:  # what it kept at its beginning is no news
            opening = msgspec.structs.replace(opening, kept=())
        if opening.attempt != job.begun_attempt:
            self._begin(opening)
        slots = opening.keep + spaced_of(opening.reach_s) + 1 + (1 if opening.persist_every else 0)
        try:
            job.keep_blob(opening.plan, opening.blob)
            shard = await job.shard(opening.plan, opening.rank, opening.capacity_bytes, slots, local=True)
            for node in opening.holders[1:]:
                await self._peer(node).reserve(_wish(opening))
        except (DoesNotFit, OSError) as error:
            await connection.send(RequestRefused(str(error)))
            return None
        if job.attempt != opening.attempt:
            await connection.send(RequestRefused(f"attempt {opening.attempt} is over: attempt {job.attempt} has begun"))
            return None
        resumed = [step for step in attempts_resumed(opening) if step == opening.resumed_step]
        taken = self._taken_for(shard, opening, resumed)
        shard.awaited = len(self._missing(shard, opening, self._older(opening))) if opening.sources else 0
        shard.holders, shard.connection, shard.closed, shard.opening = opening.holders, connection, False, opening
        job.save()
        await connection.send(SlotsOpened(tuple(str(file.path) for file in shard.files)))
        if job.capture_every > 1:
            await connection.send(CaptureEvery(job.capture_every))
        await self._grant(shard)
        if opening.again:
            self._replicate_again(shard)
        self._spawn(self._restore_copies(shard, opening, resumed, taken))
        self._spawn(self._restore_older(shard, opening))
        return shard

    def _replicate_again(self, shard: ShardSlots) -> None:
        for slot, copy in enumerate(shard.slots.holds):
            if copy is not None and slot in shard.sums and self.job.needed.unresolved(copy.step):
                self._spawn(self._replicate(shard, slot, copy, again=True))

    def _begin(self, opening: Open) -> None:
        self._close_peers()  # what still goes to them is of an attempt that is over
        self.job.begin(opening)
        self._metadata.clear()
        self._on_storage.clear()
        self._written.clear()
        self._done_nodes.clear()
        self._whole_said = opening.resumed_step
        if self._coordinates:
            self._spawn(apart(discard_others, self.job.directory, self.job.attempt))

    async def hear(self, shard: ShardSlots, message: Message) -> None:
        """Process a rank's message during training."""
        job = self.job
        match message:
            case Captured(step, slot, length, tail, captured_s, blocked_s):
                copy = CopyInfo(shard.plan, shard.rank, step, length, tail, captured_s, job.attempt)
                shard.view(slot, length)  # raises for what no slot could hold
                shard.slots.written(slot, copy)
                job.count("captured")
                job.came_to(step)
                job.blocked_s += blocked_s
                self._came_to(shard, step)
                self._spawn(self._replicate(shard, slot, copy))
                await self._grant(shard)
            case Skipped(step, reason, due):
                job.count("skipped" if due else "not_due")
                job.came_to(step)
                self._came_to(shard, step)
                if not due:
                    return
                # No slot may stay blocked by a lost message: repeat those without an answer.
                before = [msgspec.structs.replace(word, whole=job.needed.known) for word in shard.reported.values()]
                missed = Missed(job.attempt, shard.rank, step, reason, job.needed.known)
                self._spawn(self._tell_in_order([*before, missed]))
            case MetadataMade(step, data):
                self._metadata[step] = data
                await self._complete(step)
            case Close():
                shard.closed = True
            case _:
                raise ProtocolError(f"{type(message).__name__} from a rank that trains")

    def _came_to(self, shard: ShardSlots, step: int) -> None:
        shard.newest_step = step
        if shard is next(iter(self.job.local), None):  # the other ranks of the node end their steps at the same time
            self._traffic.mark()

    async def _grant(self, shard: ShardSlots) -> None:
        if shard.connection is None:
            return
        needed = self.job.needed_of(shard)
        if len(shard.slots.available(needed)) + shard.wanted - len(shard.files) <= shard.awaited:
            return
        slot = self.job.grant(shard)
        if slot is None:
            return
        if shard.sums.pop(slot, None) is not None:
            # Before the rank writes there: a store started anew must not take it for a copy. It would not, by its sums.
            self.job.save()
        with contextlib.suppress(OSError):  # the rank has ended; its connection will say so
            await shard.connection.send(Grant(slot, str(shard.files[slot].path)))

    async def top_up(self, shards: Iterable[ShardSlots]) -> None:
        """Reserve these shards' missing slots, as far as there is room now."""
        for shard in list(shards):
            await self.job.top_up(shard)
            await self._grant(shard)

    async def top_up_short(self) -> None:
        """Retry reserving what did not fit, unless in progress."""
        if not self._topping_up:
            self._topping_up = True
            try:
                await self.top_up(shard for shard in self.job.shards.values() if shard.is_short)
            finally:
                self._topping_up = False

    # Copies.

    async def _replicate(self, shard: ShardSlots, slot: int, copy: CopyInfo, *, again: bool = False) -> None:
        """Copy a captured shard to its other holders, and report to the coordinator once all copies are whole."""
        shard.sending.add(copy.step)
        try:
            word = await self._brought(shard, slot, copy, again=again)
        finally:
            shard.sending.discard(copy.step)
        if word is not None:
            if self.job.needed.unresolved(copy.step):
                shard.reported[copy.step] = msgspec.structs.replace(word, again=True)
            await self._tell_coordinator(word)
        if shard.attempt == self.job.attempt:
            await self._grant(shard)  # its slot may be free only now

    async def _brought(self, shard: ShardSlots, slot: int, copy: CopyInfo, *, again: bool) -> Copies | Missed | None:
        """Return the report on a captured shard; None if no longer needed."""
        job, attempt, file = self.job, self.job.attempt, shard.files[slot]
        view = shard.view(slot, copy.length)
        sums = await asyncio.get_running_loop().run_in_executor(None, sums_of, view)
        held = shard.slot_of(file)
        if job.attempt != attempt or held is None or shard.slots.holds[held] != copy:
            return None  # another attempt has begun
        shard.sums[held] = sums
        outcomes: list[BaseException | None] = []
        others = shard.holders[1:]

        def wanted() -> bool:
            return job.attempt == attempt and job.needed.unresolved(copy.step)

        if job.save():
            put = Put(attempt, copy, sums)
            bringing = (self._bring(shard, node, put, view, wanted) for node in others)
            outcomes = await asyncio.gather(*bringing, return_exceptions=True)
        else:
            others, outcomes = (self._node,), [OSError("the record of it has no room")]
        if shard.newest_step != copy.step:
            job.count("copies_late")
        if any(isinstance(outcome, CopyUnwanted) for outcome in outcomes) or job.attempt != attempt:
            job.count("copies_dropped")
            return None
        failed = [f"{node}: {why}" for node, why in zip(others, outcomes, strict=True) if why is not None]
        if not failed:
            return Copies(attempt, copy, job.needed.known, again, tuple(sorted(job.given_up)))
        job.count("copies_failed")
        job.trouble(f"step {copy.step} of rank {copy.rank} has no copy on {'; '.join(failed)}")
        return Missed(attempt, copy.rank, copy.step, failed[0], job.needed.known, again)

    async def _bring(
        self, shard: ShardSlots, node: str, put: Put, view: memoryview, wanted: Callable[[], bool] | None = None
    ) -> None:
        """Send a copy to a node, between the training's collectives if it may become un``wanted`` meanwhile.

        Where all slots there hold steps that may still become whole it waits a little. Raises OSError; Unwanted;
        ProtocolError where no slot becomes free.
        """

        def pace_to(host: str) -> SendPace:
            return self._traffic.urgent() if wanted is None else self._traffic.copy(host, wanted)

        job, until_s = self.job, time.monotonic() + ROOM_WITHIN_S
        while True:
            peer = self._peer(node)
            said = msgspec.structs.replace(put, whole=job.needed.known, void=job.needed.known_void)
            outcome = await peer.put(said, view, pace_to)
            if outcome.yes or outcome.have:
                break
            if time.monotonic() > until_s:
                raise ProtocolError("no slot is free there")
            if not outcome.reserved and shard.opening is not None:
                await peer.reserve(_wish(shard.opening))  # its store was started anew, and found nothing
            else:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._news.wait(), ROOM_AGAIN_S)
            if wanted is not None and not wanted():
                raise CopyUnwanted("another step is whole, or this one never will be")
        if outcome.yes:
            job.count("bytes_sent", len(view))

    def _unresolved(self, shard: ShardSlots) -> list[int]:
        """Return the captured steps that may still become whole."""
        return [copy.step for copy in shard.slots.copies if self.job.needed.unresolved(copy.step)]

    def _taken_for(self, shard: ShardSlots, opening: Open, steps: Iterable[int]) -> dict[int, SlotFile]:
        """Take slots for those of the steps that are missing here, before captures fill them."""
        job, missing = self.job, self._missing(shard, opening, steps)
        taken: dict[int, SlotFile] = {}
        for step in sorted(missing, reverse=True)[: len(shard.files) - 1] if opening.sources else ():
            slot = shard.slots.take_slot(job.needed_of(shard))
            if slot is not None:
                shard.sums.pop(slot, None)
                taken[step] = shard.files[slot]
        return taken

    def _missing(self, shard: ShardSlots, opening: Open, steps: Iterable[int]) -> list[int]:
        return [step for step in steps if self.job.find(opening.plan, shard.rank, step) is None]

    def _older(self, opening: Open) -> list[int]:
        return [step for step in attempts_resumed(opening) if step != opening.resumed_step]

    async def _restore_older(self, shard: ShardSlots, opening: Open) -> None:
        """Reserve the slots that the shard lacks, and have the older steps that stay here and at the other holders."""
        job = self.job
        await job.top_up(shard)
        if job.attempt != opening.attempt:
            return
        older = self._older(opening)
        taken, shard.awaited = self._taken_for(shard, opening, older), 0
        await self._grant(shard)
        await self._restore_copies(shard, opening, older, taken)

    async def _restore_copies(
        self, shard: ShardSlots, opening: Open, steps: Sequence[int], taken: dict[int, SlotFile]
    ) -> None:
        """Have the shards of steps that an earlier attempt captured here and at the other holders, the newest first.

        A new node does not have them yet: it has ``taken`` slots for them. Others than the resumed one go as copies do,
        while training leaves the network idle.
        """
        job = self.job
        try:
            for step in sorted(steps, reverse=True):
                held = job.find(opening.plan, shard.rank, step)
                if held is None and step in taken:
                    held = await self._fetch(shard, opening, step, taken.pop(step))
                if held is not None:
                    await self._bring_kept(shard, opening, held)
        finally:
            for file in taken.values():
                if (slot := shard.slot_of(file)) is not None:
                    shard.slots.filled(slot, None)
        if shard.attempt == job.attempt:
            await self._grant(shard)  # a slot may be free only now

    async def _bring_kept(self, shard: ShardSlots, opening: Open, held: tuple[ShardSlots, int, CopyInfo]) -> None:
        job, (source, slot, copy) = self.job, held  # the slots of an earlier attempt, it may be
        # With the sums of now: what is written into the slot meanwhile is refused there.
        put, view = Put(opening.attempt, copy, source.sums[slot]), source.view(slot, copy.length)

        def wanted() -> bool:
            return job.attempt == opening.attempt and copy.step in job.needed.whole

        for node in shard.holders[1:]:
            try:
                await self._bring(shard, node, put, view, None if copy.step == opening.resumed_step else wanted)
            except CopyUnwanted:
                return
            except OSError as error:
                job.trouble(f"step {copy.step} of rank {shard.rank} is not on {node} again yet: {error}")

    async def _fetch(
        self, shard: ShardSlots, opening: Open, step: int, file: SlotFile
    ) -> tuple[ShardSlots, int, CopyInfo] | None:
        """Fetch an earlier attempt's shard, from any holder, into a slot taken for it."""
        job, attempt, fetched = self.job, attempts_resumed(opening)[step], None
        for address in opening.sources:
            peer = Peer(address, address, job.name, job.key)
            try:
                copy = await peer.describe(opening.plan, shard.rank, step)
                if copy is None or copy.attempt != attempt:
                    continue
                if not 0 <= copy.length <= file.capacity_bytes:
                    raise ProtocolError(f"a shard of {copy.length:,} bytes for a slot of {file.capacity_bytes:,}")
                view = file.view[: copy.length]
                if (sums := await peer.fetch(copy, view)) is None:
                    continue
                check_all(view, sums, f"step {step} of rank {copy.rank} from {address}")
            except (OSError, ValueError) as error:
                job.trouble(f"step {step} of rank {shard.rank} is not fetched from {address}: {error}")
            else:
                fetched = copy, sums
                break
            finally:
                peer.close()
        slot = shard.slot_of(file)
        if slot is None:
            return None
        if fetched is None or job.attempt != opening.attempt:
            shard.slots.filled(slot, None)
            return None
        copy, shard.sums[slot] = fetched
        shard.slots.filled(slot, copy)
        job.save()
        return shard, slot, copy

    async def scrub(self) -> list[str]:
        """Verify every copy again, slowly. Drop damaged ones; return a message for each."""
        job, damaged = self.job, []
        for shard, slot, copy in list(job.copies()):
            sums, view, file = shard.sums.get(slot, b""), shard.view(slot, copy.length), shard.files[slot]
            try:
                for number, (start, end) in enumerate(chunks(0, copy.length)):
                    if not shard.has(slot, file, copy):
                        break
                    check(view[start:end], sums, number, f"the copy of rank {copy.rank}, step {copy.step}")
                    if number % SCRUB_CHUNKS == SCRUB_CHUNKS - 1:
                        await asyncio.sleep(SCRUB_PAUSE_S)
            except Damaged as error:
                shard.slots.holds[slot] = None
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
        if self._closed:
            raise ConnectionError(f"{self.job.name} has ended here")
        peer = self._peers.get(node)
        if peer is None or peer.address != member.address:
            if peer is not None:
                peer.close()
            peer = self._peers[node] = Peer(node, member.address, self.job.name, self.job.key)
        return peer

    # Agreement on whole steps.

    async def agree(self, word: Copies | Missed | Agreed | ShardPersisted | RanksDone) -> None:
        """Process another store's message: the coordinator's or, at the coordinator, any."""
        job = self.job
        if word.attempt != job.attempt:
            return
        match word:
            case Agreed():
                await self._agreed(word)
            case ShardPersisted(_, node, step, reason):
                self._on_storage.setdefault(step, {})[node] = reason
                await self._complete(step)
            case RanksDone(_, node):
                await self._node_ended(node)
            case Copies(_, copy, whole, again, given_up) if job.agreement is not None:
                await self._announce(job.agreement.heard(copy.rank, whole))
                job.agreement.gave_up(given_up)
                await self._announce(job.agreement.copied(copy, again=again))
            case Missed(_, rank, step, _, whole, again) if job.agreement is not None:
                await self._announce(job.agreement.heard(rank, whole))
                await self._announce(job.agreement.missed(step, rank, again=again))

    @property
    def _coordinates(self) -> bool:
        coordinator = self.job.coordinator
        return coordinator is not None and coordinator.node == self._node

    async def _tell_coordinator(self, word: Copies | Missed | ShardPersisted | RanksDone) -> None:
        coordinator = self.job.coordinator
        if self._coordinates or coordinator is None:
            await self.agree(word)
            return
        await self._tell(coordinator.node, word)

    async def _tell_in_order(self, words: list[Copies | Missed]) -> None:
        for word in words:
            await self._tell_coordinator(word)

    async def _tell(self, node: str, word: Message) -> None:
        try:
            await self._peer(node).send_message(word)
        except OSError as error:
            self.job.trouble(f"{node} was not told ({type(word).__name__}): {error}")

    async def _announce(self, words: list[Agreed]) -> None:
        for word in words:
            said = msgspec.structs.replace(word, attempt=self.job.attempt)
            for node in self.job.members:
                if node != self._node:
                    self._spawn(self._tell(node, said))
            await self._agreed(said)

    async def _agreed(self, word: Agreed) -> None:
        job = self.job
        job.needed.agree(word)
        self._news.set()  # wakes tasks that wait for a change
        self._news.clear()
        self.ended = self.ended or word.ended
        if word.void is not None:
            job.count("void")
            job.save()  # before anybody else hears of it: a coordinator that begins anew must say the same
        if word.capture_every != job.capture_every:
            job.capture_every = word.capture_every
            job.save()
            await self._tell_ranks(CaptureEvery(word.capture_every))
        newest, said = job.needed.newest_whole, self._whole_said
        for shard in job.local:
            shard.reported = {step: said for step, said in shard.reported.items() if self.job.needed.unresolved(step)}
        if newest is not None and newest > (-1 if said is None else said) and job.local:
            self._whole_said = newest
            job.settle(job.local[0].plan)
            self._spawn(self.top_up_short())
            job.save()
        for shard in job.local:
            await self._grant(shard)
        if newest is not None and newest == self._whole_said != said:
            await self._tell_ranks(Whole(newest))  # last: who waits for it may write into the slot that it made free
        if word.persist is not None and word.persist == job.needed.persisting:
            await self._asked_to_persist(word.persist)

    async def _asked_to_persist(self, step: int) -> None:
        """Start persisting on the first request; repeat the result on later ones, in case it was lost."""
        if step not in self._written:
            self._written[step] = None
            self._spawn(self._persist(step))
        elif (said := self._written[step]) is not None:
            if not self._coordinates:
                await self._tell_coordinator(said)
            elif step not in self._metadata:
                await self._ask_for_metadata(step)

    async def _node_ended(self, node: str) -> None:
        """Once every node has ended, tell all: none frees memory that another's ranks may still need."""
        job = self.job
        self._done_nodes.add(node)
        if job.agreement is None or not self._coordinates or not self._done_nodes >= job.members.keys():
            return
        said = msgspec.structs.replace(job.agreement.word(), attempt=job.attempt, ended=True)
        await asyncio.gather(*(self._tell(other, said) for other in job.members if other != self._node))
        await self._agreed(said)

    async def _tell_ranks(self, message: Message) -> None:
        for shard in self.job.local:
            if shard.connection is not None:
                with contextlib.suppress(OSError):  # its connection will say so
                    await shard.connection.send(message)

    # Persisting.

    async def _persist(self, step: int) -> None:
        """Write this node's ranks' shards to storage, and report to the coordinator."""
        job, attempt = self.job, self.job.attempt
        job.persisting_since_s = time.monotonic()
        if self._coordinates:
            await self._ask_for_metadata(step)
        reason = ""
        try:
            for shard in job.local:
                await self._write(shard, step, attempt)
        except (OSError, Damaged) as error:
            reason = f"step {step} is not on storage: {error}"
        if job.attempt != attempt:
            return
        if reason:
            job.count("persist_failed")
            job.trouble(reason)
        if not self._coordinates:  # which waits for the others
            job.persisting_since_s = None
        said = self._written[step] = ShardPersisted(attempt, self._node, step, reason)
        await self._tell_coordinator(said)

    async def _write(self, shard: ShardSlots, step: int, attempt: int) -> None:
        job = self.job
        held = job.find(shard.plan, shard.rank, step)
        if held is None:
            raise OSError(f"rank {shard.rank} has no copy of it any more")
        source, slot, copy = held
        folder, view = partial(job.directory, step, attempt), source.view(slot, copy.length)
        rate = self._persist_bytes_per_s
        await apart(write_shard, folder, shard.rank, view, source.sums[slot], rate, lambda: job.attempt == attempt)

    async def _ask_for_metadata(self, step: int) -> None:
        agreement = self.job.agreement
        first = min(self.job.local, key=lambda shard: shard.rank, default=None)
        if agreement is None or first is None or first.connection is None:
            return
        tails = {rank: copy.tail for rank, copy in agreement.copies.get(step, {}).items()}
        with contextlib.suppress(OSError):
            await first.connection.send(MetadataWanted(step, tails))

    async def _complete(self, step: int) -> None:
        """Complete the folder once every store and rank 0 have written their parts; or discard it."""
        job, agreement, attempt = self.job, self.job.agreement, self.job.attempt
        said, metadata = self._on_storage.get(step, {}), self._metadata.get(step)
        failed = next((reason for reason in said.values() if reason), None)
        if agreement is None or not self._coordinates or agreement.persisting != step:
            return
        if not said.keys() >= job.members.keys() or (metadata is None and failed is None):
            return
        self._on_storage.pop(step, None)
        self._metadata.pop(step, None)
        path = None
        if failed is None and metadata is not None:
            try:
                captured_s = max(copy.captured_s for copy in agreement.copies[step].values())
                path = await apart(complete, job.directory, step, attempt, metadata, captured_s)
            except OSError as error:
                job.count("persist_failed")
                job.trouble(f"step {step} is not on storage: {error}")
        if path is None:
            self._spawn(apart(discard, job.directory, step, attempt))
        if job.attempt != attempt:
            return
        if path is not None:
            job.persisted = step
            job.count("persisted")
        agreement.finished_persisting(step)
        await self._announce([agreement.word()])
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
        opening.resumed_attempt,
        opening.reach_s,
        opening.kept,
    )
