"""A store's state for one job: slots with copies, the running attempt, agreements. Its files outlive the store.

A record in the job's folder lists the slots' contents, so that a restarted store finds its copies again.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
import shutil
import struct
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_low
from typing import Any

import msgspec
import xxhash

from eagle_eye.checkpoint.connection import StoreConnection
from eagle_eye.checkpoint.messages import VERSION, Copies, CopyInfo, JobNode, Missed, Open, Reserve
from eagle_eye.checkpoint.shared_memory import DoesNotFit, SlotFile, reserve, spaced_of
from eagle_eye.checkpoint.slots import Agreement, Needed, Slots
from eagle_eye.checkpoint.storage import Damaged, check_all
from eagle_eye.schema.checkpoint_files import MemoryStep

# A record in shared memory: rewritten atomically, even when no memory is left.
#
# Each write overwrites the older of two files in place: a process killed midway leaves the other one intact.
FILES = ("record.0", "record.1")
_HEAD = struct.Struct("<8sQQ")  # checksum of what follows, number of the writing, length
_SPARE_BYTES = 1 << 16


class Record:
    """The record of a folder. Memory for one of so many bytes, and some more, is reserved with the first writing."""

    def __init__(self, folder: Path) -> None:
        self._paths = [folder / name for name in FILES]
        self._number = max((number for number, _ in map(_read, self._paths)), default=0)

    def read(self) -> bytes | None:
        """Return what was written last, as a whole; None where nothing was."""
        return max(map(_read, self._paths), key=lambda found: found[0])[1]

    def write(self, data: bytes) -> None:
        """Write it. Raises OSError where it is larger than what is reserved, and no more is left: all is as it was."""
        self._number += 1
        body = _HEAD.pack(b"", self._number, len(data))[8:] + data
        whole = memoryview(xxhash.xxh3_64_digest(body) + body)
        handles = [os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600) for path in self._paths]
        try:
            for handle in handles:
                if os.fstat(handle).st_size < len(whole):
                    os.posix_fallocate(handle, 0, 2 * len(whole) + _SPARE_BYTES)
            written = 0
            while written < len(whole):
                written += os.pwrite(handles[self._number % 2], whole[written:], written)
        except OSError:
            self._number -= 1
            raise
        finally:
            for handle in handles:
                os.close(handle)


def _read(path: Path) -> tuple[int, bytes | None]:
    """Return the number of the writing, and what was written; 0 and None where that is not whole."""
    try:
        found = path.read_bytes()
    except OSError:
        return 0, None
    if len(found) < _HEAD.size:
        return 0, None
    checksum, number, length = _HEAD.unpack_from(found)
    body = found[8 : _HEAD.size + length]
    if len(body) != _HEAD.size - 8 + length or xxhash.xxh3_64_digest(body) != checksum:
        return 0, None
    return number, body[_HEAD.size - 8 :]


_log = logging.getLogger(__name__)

ShardKey = tuple[str, int, int]  # plan, rank, and the slots' capacity

SLOTS_FIRST = 2  # with one alone its step would be gone before the next one is whole
# One at a time, of whichever job: how much is free is looked at before each.
_reserving = ThreadPoolExecutor(1, "eagle-eye-reserve")


class SavedSlot(msgspec.Struct, frozen=True):
    """A slot with a copy, as in the state file."""

    file: str
    copy: CopyInfo
    sums: bytes


class SavedShard(msgspec.Struct, frozen=True):
    """The slots of one rank's shards that hold a copy, as in the state file."""

    plan: str
    rank: int
    local: bool
    capacity_bytes: int
    wanted: int
    attempt: int
    slots: tuple[SavedSlot, ...]


class SavedJob(msgspec.Struct, frozen=True):
    """A job as in the state file."""

    version: int
    name: str
    key: bytes
    attempt: int
    keep: int
    spaced: int
    capture_every: int
    whole: tuple[int, ...]
    void: tuple[int, ...]
    persisted: int | None
    shards: tuple[SavedShard, ...]


@dataclass
class ShardSlots:
    """The slots for one rank's shards, of this node's rank (``local``) or of another node's.

    ``sums`` are the checksums of the slots' copies; a copy without is not verified yet. ``opening`` is the message of
    its rank, if on this node; ``reported`` are reports that the coordinator has not answered yet.
    """

    rank: int
    plan: str
    capacity_bytes: int
    local: bool
    wanted: int
    files: list[SlotFile] = field(default_factory=list)
    slots: Slots = field(default_factory=lambda: Slots([]))
    sums: dict[int, bytes] = field(default_factory=dict)
    newest_step: int = -1  # that its rank has come to
    attempt: int = 0
    holders: tuple[str, ...] = ()
    connection: StoreConnection | None = None
    closed: bool = False
    opening: Open | None = None
    is_short: bool = False
    awaited: int = 0  # older steps that will be fetched once all slots are there: captures leave them room
    sending: set[int] = field(default_factory=set)
    reported: dict[int, Copies | Missed] = field(default_factory=dict)

    @property
    def key(self) -> ShardKey:
        """Its key in a job."""
        return self.plan, self.rank, self.capacity_bytes

    def verified(self, step: int) -> int | None:
        """Return the slot with a verified copy of the step, None if none."""
        slot = self.slots.copy_of(step, self.plan)
        return slot if slot in self.sums else None

    def slot_of(self, file: SlotFile) -> int | None:
        """Return the slot with this file, None if it is no longer one."""
        return next((number for number, one in enumerate(self.files) if one is file), None)

    def has(self, slot: int, file: SlotFile, copy: CopyInfo) -> bool:
        """Whether the slot still is this file with this copy."""
        return slot < len(self.files) and self.files[slot] is file and self.slots.holds[slot] == copy

    def view(self, slot: int, length: int) -> memoryview:
        """Return the memory of a copy of this length in the slot. Raises ValueError beyond the slot's end."""
        if not 0 <= length <= self.capacity_bytes:
            raise ValueError(f"a shard of {length:,} bytes in a slot of {self.capacity_bytes:,}")
        return self.files[slot].view[:length]


class HeldJob:
    """One job in one store. All memory is below ``folder``."""

    def __init__(self, name: str, key: bytes, folder: Path) -> None:
        self.name = name
        self.key = key
        self.folder = folder
        self.attempt = 0
        self.begun_attempt = 0
        self.members: dict[str, JobNode] = {}
        self.shards: dict[ShardKey, ShardSlots] = {}
        self.needed = Needed(keep=1)
        self.given_up: set[int] = set()  # kept steps of which a copy has made room for a newer one
        self.agreement: Agreement | None = None
        self.capture_every = 1
        self.directory = ""
        self.persisted: int | None = None
        self.persisting_since_s: float | None = None
        self.left_s: float | None = None
        self.changed = False
        self.step: int | None = None
        self.blocked_s = 0.0
        self.counts: dict[str, int] = {}
        self.troubles: list[str] = []
        self._record = Record(folder)
        self.links: Callable[[], list[dict[str, Any]]] = list  # what is known of the interfaces that copies take

    @property
    def coordinator(self) -> JobNode | None:
        """The member whose store decides what is whole: the first."""
        return next(iter(self.members.values()), None)

    @property
    def local(self) -> list[ShardSlots]:
        """The shards of this node's ranks in this attempt."""
        return [shard for shard in self.shards.values() if shard.local and shard.holders]

    def needed_of(self, shard: ShardSlots) -> set[int]:
        """Return the steps whose copies of the shard must stay, including those being sent.

        Only its own node writes it to storage.
        """
        held = {copy.step for copy in shard.slots.copies}
        needed = self.needed.among(held, persists=shard.local, slots_missing=shard.wanted - len(shard.files))
        return needed | (held & shard.sending)

    def grant(self, shard: ShardSlots) -> int | None:
        """Return the slot to write next, None where there is none; its copy is dropped.

        That may be one of a kept step, where slots are missing.
        """
        before = {copy.step for copy in shard.slots.copies}
        slot = shard.slots.grant(self.needed_of(shard))
        dropped = before - {copy.step for copy in shard.slots.copies}
        self.given_up = (self.given_up | dropped) & self.needed.whole
        return slot

    def count(self, what: str, by: int = 1) -> None:
        """Count an event for the status."""
        self.counts[what] = self.counts.get(what, 0) + by

    def trouble(self, text: str) -> None:
        """Keep a problem for people, the newest few; log it."""
        _log.warning("%s: %s", self.name, text)
        self.troubles = [*self.troubles[-7:], text]

    def came_to(self, step: int) -> None:
        """Record that a rank of this node has finished the step."""
        self.step = step if self.step is None else max(step, self.step)

    def begin(self, opening: Open) -> None:
        """Start the attempt for this node's first rank, or continue it in a restarted store."""
        self.enter(opening)
        self.begun_attempt = opening.attempt
        self.members = {member.node: member for member in opening.members}
        if opening.resumed_step is not None:
            self.needed.know([opening.resumed_step])
        ranks = frozenset(rank for member in opening.members for rank in member.ranks)
        persisted = opening.persisted_step
        if opening.again:
            persisted = max(persisted, self.persisted or 0)
        else:
            self.capture_every = 1
        self.agreement = Agreement(
            ranks,
            opening.keep,
            opening.persist_every,
            persisted,
            whole=set(self.needed.whole),
            void=set(self.needed.void),
            unheard=set(ranks) if opening.again else set(),
            reach_s=opening.reach_s,
            capture_every=self.capture_every,
        )
        captured_s = self._captured_s(opening.plan) | {one.step: one.captured_s for one in opening.kept}
        for step in sorted(captured_s):
            if step in self.needed.whole or not self.needed.passed(step):
                self.agreement.date(step, captured_s[step])
        self.directory = opening.directory
        self.persisting_since_s = None
        self.step = opening.step or None

    def enter(self, said: Open | Reserve) -> None:
        """Start a new attempt here; its first message may come from another node's store.

        Members of the previous one may no longer write here. Steps later than the resumed one will be recomputed and
        are dropped, and so are other attempts' copies of a kept step. Does nothing if it has already started.
        """
        if said.attempt <= self.attempt:
            return
        self.attempt = said.attempt
        resumed, attempts = said.resumed_step, attempts_resumed(said)
        self.needed = Needed(said.keep, set(attempts), spaced=spaced_of(said.reach_s))
        self.given_up.clear()
        for shard in self.shards.values():
            shard.connection, shard.closed, shard.holders, shard.opening = None, False, (), None
            shard.reported.clear()
            shard.sending.clear()
            self.drop_granted(shard)
        self._drop(lambda copy: resumed is None or copy.step > resumed)
        self._drop(lambda copy: attempts.get(copy.step, copy.attempt) != copy.attempt)

    async def shard(self, plan: str, rank: int, capacity_bytes: int, slots: int, *, local: bool) -> ShardSlots:
        """Return the slots for a rank's shards, two of them reserved: ``top_up`` reserves the others.

        Raises DoesNotFit where those two do not fit. Where that is because of an earlier plan's copies one will do: the
        rest comes once those are gone. The same goes for smaller slots with copies: a rank's objects are seldom as long
        as they were.
        """
        fits = [one for one in self._shards_of(plan, rank) if one.capacity_bytes >= capacity_bytes]
        shard = fits[0] if fits else ShardSlots(rank, plan, capacity_bytes, local, slots)
        self.shards[shard.key] = shard
        shard.local, shard.wanted, shard.attempt = local, slots, self.attempt
        if local:  # a rank begins: what it had been granted before is not to be granted to it meanwhile, either
            shard.connection = None
            self.drop_granted(shard)
        reason = await self.top_up(shard, SLOTS_FIRST)
        if len(shard.files) < SLOTS_FIRST and not shard.slots.copies and not self._more_room_later(shard):
            if self._has(shard):
                self._free(self.shards.pop(shard.key))
            raise DoesNotFit(reason)
        return shard

    def drop_granted(self, shard: ShardSlots) -> None:
        """Drop the slot that a rank may be writing into; ``top_up`` reserves another: the rank may still be alive.

        A stopped rank that continues then writes into unused memory.
        """
        slot = shard.slots.granted
        if slot is None:
            return
        shard.slots.remove(slot)
        shard.files.pop(slot).close(remove=True)
        shard.sums = {number - (number > slot): sums for number, sums in shard.sums.items() if number != slot}

    async def top_up(self, shard: ShardSlots, wanted: int | None = None) -> str:
        """Reserve the shard's missing slots, up to ``wanted`` (None: all). Return why it has fewer, "" if not.

        In a thread: reserving gigabytes takes seconds, in which the store keeps answering.
        """
        wanted = shard.wanted if wanted is None else min(wanted, shard.wanted)
        while len(shard.files) < wanted:
            try:
                file = await asyncio.get_running_loop().run_in_executor(_reserving, self._new_slot, shard)
            except (DoesNotFit, OSError) as error:
                if not shard.is_short:
                    self.trouble(f"rank {shard.rank} has {len(shard.files)} of {shard.wanted} slots: {error}")
                shard.is_short = True
                return str(error)
            if not self._has(shard) or len(shard.files) >= shard.wanted:  # freed meanwhile, or filled up
                file.close(remove=True)
                return "" if self._has(shard) else "it is not wanted any more"
            shard.files.append(file)
            shard.slots.holds.append(None)
        shard.is_short = shard.is_short and len(shard.files) < shard.wanted
        return ""

    def _has(self, shard: ShardSlots) -> bool:
        return self.shards.get(shard.key) is shard

    def _new_slot(self, shard: ShardSlots) -> SlotFile:
        return reserve(self.folder / f"{shard.rank}-{secrets.token_hex(4)}.slot", shard.capacity_bytes)

    def _more_room_later(self, shard: ShardSlots) -> bool:
        """Whether it has a slot, and memory of another plan or attempt will be freed once a step is whole."""
        return bool(shard.files) and any(
            other is not shard and other.attempt != self.attempt for other in self.shards.values()
        )

    def settle(self, plan: str) -> None:
        """Free the memory of earlier attempts elsewhere: a step of this attempt is whole."""
        for key in [key for key, shard in self.shards.items() if key[0] != plan or shard.attempt != self.attempt]:
            self._free(self.shards.pop(key))

    def copies(self) -> Iterable[tuple[ShardSlots, int, CopyInfo]]:
        """Yield every verified copy: the shard, the slot, the copy."""
        for shard in self.shards.values():
            for slot, copy in enumerate(shard.slots.holds):
                if copy is not None and slot in shard.sums:
                    yield shard, slot, copy

    def find(self, plan: str, rank: int, step: int) -> tuple[ShardSlots, int, CopyInfo] | None:
        """Return where a verified copy is, None if none is here."""
        for shard in self._shards_of(plan, rank):
            slot = shard.verified(step)
            if slot is not None and (copy := shard.slots.holds[slot]) is not None:
                return shard, slot, copy
        return None

    def current(self, plan: str, rank: int) -> ShardSlots | None:
        """Return the slots for a rank's shards in this attempt, None if none were requested."""
        return next((shard for shard in self._shards_of(plan, rank) if shard.attempt == self.attempt), None)

    def blob(self, plan: str) -> bytes | None:
        """Return a plan's layout; None if unknown."""
        try:
            return self._blob_path(plan).read_bytes()
        except FileNotFoundError:
            return None

    def keep_blob(self, plan: str, data: bytes) -> None:
        """Store it beside the copies."""
        path = self._blob_path(plan)
        if not path.exists():
            write_whole(path, data)

    @property
    def reserved_bytes(self) -> int:
        """The job's shared memory here."""
        return sum(file.capacity_bytes for shard in self.shards.values() for file in shard.files)

    def save(self) -> bool:
        """Record the slots' contents for the store's successor. False if the record has no room."""
        shards = tuple(
            SavedShard(
                shard.plan,
                shard.rank,
                shard.local,
                shard.capacity_bytes,
                shard.wanted,
                shard.attempt,
                tuple(
                    SavedSlot(shard.files[number].path.name, copy, shard.sums[number])
                    for number, copy in enumerate(shard.slots.holds)
                    if copy is not None and number in shard.sums
                ),
            )
            for shard in self.shards.values()
        )
        saved = SavedJob(
            VERSION,
            self.name,
            self.key,
            self.attempt,
            self.needed.keep,
            self.needed.spaced,
            self.capture_every,
            self.needed.known,
            self.needed.known_void,
            self.persisted,
            shards,
        )
        self.changed = True
        try:
            self._record.write(msgspec.msgpack.encode(saved))
        except OSError as error:
            self.trouble(f"what is held is not on record: {error}")
            return False
        return True

    def steps(self) -> list[MemoryStep]:
        """Return the verified copies for the store's file."""
        return [
            MemoryStep(self.name, copy.plan, copy.rank, copy.step, copy.captured_s, copy.attempt)
            for _, _, copy in self.copies()
        ]

    def free(self) -> None:
        """Free everything of the job."""
        for shard in self.shards.values():
            self._free(shard)
        self.shards.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def unmap(self) -> None:
        """Unmap its files, which remain."""
        for shard in self.shards.values():
            for file in shard.files:
                file.close(remove=False)

    def _drop(self, wrong: Callable[[CopyInfo], bool]) -> None:
        for shard in self.shards.values():
            for slot, copy in enumerate(shard.slots.holds):
                if copy is not None and wrong(copy):
                    shard.slots.holds[slot] = None
                    shard.sums.pop(slot, None)

    def _captured_s(self, plan: str) -> dict[int, float]:
        """Return the capture times of the steps with copies here."""
        found: dict[int, list[float]] = {}
        for _, _, copy in self.copies():
            if copy.plan == plan:
                found.setdefault(copy.step, []).append(copy.captured_s)
        return {step: median_low(times) for step, times in found.items()}

    def _shards_of(self, plan: str, rank: int) -> list[ShardSlots]:
        """Return those of a plan and rank, the newest attempt's first."""
        found = [shard for shard in self.shards.values() if (shard.plan, shard.rank) == (plan, rank)]
        return sorted(found, key=lambda shard: shard.attempt, reverse=True)

    def _free(self, shard: ShardSlots) -> None:
        for file in shard.files:
            file.close(remove=True)

    def _blob_path(self, plan: str) -> Path:
        return self.folder / f"{hashlib.sha256(plan.encode()).hexdigest()[:16]}.plan"


def attempts_resumed(said: Open | Reserve) -> dict[int, int]:
    """Return the steps that an attempt resumes with, and which attempt captured each."""
    kept = {one.step: one.attempt for one in said.kept}
    return kept if said.resumed_step is None else kept | {said.resumed_step: said.resumed_attempt}


def adopt(folder: Path) -> HeldJob | None:
    """Return the job left in the folder by an earlier store, with its intact copies; None for none.

    Unreadable files are logged and removed: they are no copies.
    """
    try:
        saved = msgspec.msgpack.decode(Record(folder).read() or b"", type=SavedJob)
    except msgspec.DecodeError as error:
        _log.warning("%s holds nothing that can be read (%s), and is removed", folder, error)
        shutil.rmtree(folder, ignore_errors=True)
        return None
    if saved.version != VERSION:
        _log.warning("%s is of version %d, this is %d; it is removed", folder, saved.version, VERSION)
        shutil.rmtree(folder, ignore_errors=True)
        return None
    job = HeldJob(saved.name, saved.key, folder)
    job.attempt, job.persisted, job.capture_every = saved.attempt, saved.persisted, saved.capture_every
    job.needed = Needed(saved.keep, set(saved.whole), set(saved.void), spaced=saved.spaced)
    kept = set()
    for one in saved.shards:
        shard = ShardSlots(one.rank, one.plan, one.capacity_bytes, one.local, one.wanted, attempt=one.attempt)
        job.shards[shard.key] = shard
        kept |= {slot.file for slot in one.slots if _adopt_slot(job, shard, slot)}
    # Slots without a copy are removed, too: a rank that the earlier store let write into one may still do so.
    for path in folder.glob("*.slot"):
        if path.name not in kept:
            path.unlink(missing_ok=True)
    return job


def _adopt_slot(job: HeldJob, shard: ShardSlots, saved: SavedSlot) -> bool:
    """Whether the slot has the copy that the record says, and is adopted."""
    copy, what = saved.copy, f"rank {saved.copy.rank}, step {saved.copy.step}"
    try:
        file = SlotFile(job.folder / saved.file, shard.capacity_bytes)
    except OSError as error:
        job.trouble(f"the copy of {what} is gone: {error}")
        return False
    try:
        check_all(file.view[: copy.length], saved.sums, what)
    except Damaged as error:
        job.count("damaged")
        job.trouble(f"a copy is damaged and not used: {error}")
        file.close(remove=True)
        return False
    shard.sums[len(shard.files)] = saved.sums
    shard.files.append(file)
    shard.slots.holds.append(copy)
    return True


def write_whole(path: Path, data: bytes) -> None:
    """Write the file atomically, readable only by its owner. Raises OSError."""
    part = path.with_suffix(path.suffix + ".part")
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        _write_all(handle, data)
    finally:
        os.close(handle)
    part.replace(path)


def _write_all(handle: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]
