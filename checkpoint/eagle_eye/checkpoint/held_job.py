"""What a store holds of one job: slots with copies, the attempt that runs, what was agreed. Its files outlive it.

``state`` in the job's folder says what the slots hold, so that a store that was killed finds its copies again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from eagle_eye.checkpoint.checksums import Damaged, check_all
from eagle_eye.checkpoint.connection import Connection
from eagle_eye.checkpoint.memory_plan import DoesNotFit
from eagle_eye.checkpoint.messages import VERSION, CopyInfo, Member, Open, Reserve
from eagle_eye.checkpoint.shared_memory import SlotFile, reserve
from eagle_eye.checkpoint.slots import Agreement, Needed, Slots
from eagle_eye.schema.memory_steps import MemoryStep

_log = logging.getLogger(__name__)
_STATE = "state"

ShardKey = tuple[str, int]  # plan and rank


class SavedSlot(msgspec.Struct, frozen=True):
    """A slot with a copy, as the state file keeps it."""

    plan: str
    rank: int
    local: bool
    file: str
    capacity_bytes: int
    copy: CopyInfo | None
    sums: bytes


class SavedJob(msgspec.Struct, frozen=True):
    """A job as the state file keeps it."""

    version: int
    name: str
    key: bytes
    attempt: int
    slots: tuple[SavedSlot, ...]


@dataclass
class Shard:
    """The slots for one rank's shards, of this node's rank (``local``) or of another node's.

    ``sums`` are the checksums of the slots' copies; a copy without is not verified yet.
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
    connection: Connection | None = None
    closed: bool = False

    def verified(self, step: int) -> int | None:
        """Return the slot with a verified copy of the step, None where none is."""
        slot = self.slots.copy_of(step, self.plan)
        return slot if slot in self.sums else None

    def view(self, slot: int, length: int) -> memoryview:
        """Return what a copy of this length in the slot is. Raises ValueError beyond the slot's end."""
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
        self.members: dict[str, Member] = {}
        self.shards: dict[ShardKey, Shard] = {}
        self.needed = Needed(keep=1)
        self.agreement: Agreement | None = None
        self.directory = ""
        self.persisted: int | None = None
        self.persisting_since_s: float | None = None
        self.left_s: float | None = None
        self.changed = False
        self.step: int | None = None
        self.blocked_s = 0.0
        self.counts: dict[str, int] = {}
        self.troubles: list[str] = []
        self.links: Callable[[], list[dict[str, Any]]] = list  # what is known of the interfaces that copies take

    @property
    def coordinator(self) -> Member | None:
        """The member whose store agrees on what is whole: the first."""
        return next(iter(self.members.values()), None)

    @property
    def local(self) -> list[Shard]:
        """The shards of this node's ranks in this attempt."""
        return [shard for shard in self.shards.values() if shard.local and shard.holders]

    def count(self, what: str, by: int = 1) -> None:
        """Count something that the status tells."""
        self.counts[what] = self.counts.get(what, 0) + by

    def trouble(self, text: str) -> None:
        """Keep what went wrong for people, the newest few; log it."""
        _log.warning("%s: %s", self.name, text)
        self.troubles = [*self.troubles[-7:], text]

    def came_to(self, step: int) -> None:
        """A rank of this node has finished the step."""
        self.step = step if self.step is None else max(step, self.step)

    def begin(self, opening: Open) -> None:
        """A new attempt begins. What is later than the step that it resumed from will be made again, and is dropped."""
        self.attempt = self.begun_attempt = opening.attempt
        self.members = {member.node: member for member in opening.members}
        self.needed = Needed(opening.keep)
        if opening.resumed_step is not None:
            self.needed.whole.add(opening.resumed_step)
        ranks = frozenset(rank for member in opening.members for rank in member.ranks)
        self.agreement = Agreement(ranks, opening.persist_every, persisted=opening.step)
        self.directory = opening.directory
        self.persisting_since_s = None
        self.step = opening.step or None
        for shard in self.shards.values():
            shard.connection, shard.closed, shard.holders = None, False, ()
        self._drop_after(opening.resumed_step)

    def begin_elsewhere(self, wish: Reserve) -> None:
        """The same, heard from another node's store before a rank of this node has said it."""
        if wish.attempt > self.attempt:
            self.attempt = wish.attempt
            self.needed = Needed(wish.keep)
            if wish.resumed_step is not None:
                self.needed.whole.add(wish.resumed_step)
            self._drop_after(wish.resumed_step)

    def shard(self, plan: str, rank: int, capacity_bytes: int, slots: int, *, local: bool) -> Shard:
        """Return the slots for a rank's shards, reserved. Raises DoesNotFit where not one does.

        Where some do not fit yet because of an earlier plan's copies, they come once those are gone: ``top_up``.
        """
        shard = self.shards.get((plan, rank))
        if shard is None or shard.capacity_bytes != capacity_bytes:
            if shard is not None:
                self._free(shard)
            shard = self.shards[plan, rank] = Shard(rank, plan, capacity_bytes, local, slots)
        shard.local, shard.wanted, shard.attempt = local, slots, self.attempt
        self.top_up(shard)
        return shard

    def renew_granted(self, shard: Shard) -> None:
        """Put another file in the place of the slot that a rank may be writing into: it need not be dead.

        A rank that was stopped and goes on then writes into memory that nobody looks at. Never raises: a slot that
        cannot be had again is one less.
        """
        slot = shard.slots.granted
        if slot is None:
            return
        shard.slots.give_back()
        shard.files[slot].close(remove=True)
        try:
            shard.files[slot] = self._new_slot(shard)
        except (DoesNotFit, OSError) as error:
            self.trouble(f"rank {shard.rank} has a slot less: {error}")
            del shard.files[slot], shard.slots.holds[slot]
            shard.sums = {number - (number > slot): sums for number, sums in shard.sums.items()}

    def _new_slot(self, shard: Shard) -> SlotFile:
        return reserve(self.folder / f"{shard.rank}-{secrets.token_hex(4)}.slot", shard.capacity_bytes)

    def top_up(self, shard: Shard) -> None:
        """Reserve what the shard still lacks. Raises DoesNotFit where it would have no slot at all."""
        while len(shard.files) < shard.wanted:
            try:
                shard.files.append(self._new_slot(shard))
            except DoesNotFit as error:
                if not shard.files:
                    del self.shards[shard.plan, shard.rank]
                    raise
                self.trouble(f"rank {shard.rank} has {len(shard.files)} of {shard.wanted} slots: {error}")
                return
            shard.slots.holds.append(None)

    def settle(self, plan: str) -> None:
        """A step of this attempt is whole: what earlier ones left elsewhere is needed no more. Its memory is free."""
        for key in [key for key, shard in self.shards.items() if key[0] != plan or shard.attempt != self.attempt]:
            self._free(self.shards.pop(key))
        for shard in self.shards.values():
            self.top_up(shard)

    def copies(self) -> Iterable[tuple[Shard, int, CopyInfo]]:
        """Yield every verified copy: the shard, the slot, the copy."""
        for shard in self.shards.values():
            for slot, copy in enumerate(shard.slots.holds):
                if copy is not None and slot in shard.sums:
                    yield shard, slot, copy

    def find(self, plan: str, rank: int, step: int) -> tuple[Shard, int, CopyInfo] | None:
        """Return where a verified copy is, None where none is here."""
        shard = self.shards.get((plan, rank))
        slot = shard.verified(step) if shard is not None else None
        if shard is None or slot is None:
            return None
        copy = shard.slots.holds[slot]
        return None if copy is None else (shard, slot, copy)

    def blob(self, plan: str) -> bytes | None:
        """Return what is laid out where, of a plan; None where it was never said."""
        try:
            return self._blob_path(plan).read_bytes()
        except FileNotFoundError:
            return None

    def keep_blob(self, plan: str, data: bytes) -> None:
        """Keep it beside the copies."""
        path = self._blob_path(plan)
        if not path.exists():
            write_whole(path, data)

    @property
    def reserved_bytes(self) -> int:
        """The shared memory that the job has here."""
        return sum(file.capacity_bytes for shard in self.shards.values() for file in shard.files)

    def save(self) -> None:
        """What the slots hold is on record, for the store's successor."""
        slots = tuple(
            SavedSlot(
                shard.plan,
                shard.rank,
                shard.local,
                file.path.name,
                file.capacity_bytes,
                shard.slots.holds[number] if number in shard.sums else None,
                shard.sums.get(number, b""),
            )
            for shard in self.shards.values()
            for number, file in enumerate(shard.files)
        )
        saved = SavedJob(VERSION, self.name, self.key, self.attempt, slots)
        write_whole(self.folder / _STATE, msgspec.msgpack.encode(saved))
        self.changed = True

    def steps(self) -> list[MemoryStep]:
        """Return the verified copies as the store's file tells them."""
        return [MemoryStep(self.name, copy.plan, copy.rank, copy.step, copy.captured_s) for _, _, copy in self.copies()]

    def free(self) -> None:
        """Nothing of the job is left."""
        for shard in self.shards.values():
            self._free(shard)
        self.shards.clear()
        shutil.rmtree(self.folder, ignore_errors=True)

    def unmap(self) -> None:
        """Its files stay, and are this process's no more."""
        for shard in self.shards.values():
            for file in shard.files:
                file.close(remove=False)

    def _drop_after(self, step: int | None) -> None:
        for shard in self.shards.values():
            held = [copy.step for copy in shard.slots.copies]
            gone = [number for number in held if step is None or number > step]
            for number in gone:
                slot = shard.slots.copy_of(number)
                if slot is not None:
                    shard.sums.pop(slot, None)
            shard.slots.drop(gone)

    def _free(self, shard: Shard) -> None:
        for file in shard.files:
            file.close(remove=True)

    def _blob_path(self, plan: str) -> Path:
        return self.folder / f"{hashlib.sha256(plan.encode()).hexdigest()[:16]}.plan"


def adopt(folder: Path) -> HeldJob | None:
    """Return the job that an earlier store left in the folder, with the copies that are as they were; None for none.

    What cannot be read is told of and removed: it is no copy of anything.
    """
    try:
        saved = msgspec.msgpack.decode((folder / _STATE).read_bytes(), type=SavedJob)
    except (OSError, msgspec.DecodeError) as error:
        _log.warning("%s holds nothing that can be read (%s), and is removed", folder, error)
        shutil.rmtree(folder, ignore_errors=True)
        return None
    if saved.version != VERSION:
        _log.warning("%s is of version %d, this is %d; it is removed", folder, saved.version, VERSION)
        shutil.rmtree(folder, ignore_errors=True)
        return None
    job = HeldJob(saved.name, saved.key, folder)
    job.attempt = saved.attempt
    for one in saved.slots:
        shard = job.shards.get((one.plan, one.rank))
        if shard is None:
            shard = Shard(one.rank, one.plan, one.capacity_bytes, one.local, 0)
            job.shards[one.plan, one.rank] = shard
        _adopt_slot(job, shard, one)
    named = {one.file for one in saved.slots}
    for path in folder.glob("*.slot"):
        if path.name not in named:
            path.unlink(missing_ok=True)
    return job


def _adopt_slot(job: HeldJob, shard: Shard, saved: SavedSlot) -> None:
    try:
        file = SlotFile(job.folder / saved.file, saved.capacity_bytes)
    except OSError as error:
        job.trouble(f"slot {saved.file} is gone: {error}")
        return
    number, copy = len(shard.files), saved.copy
    if copy is not None:
        try:
            check_all(file.view[: copy.length], saved.sums, f"rank {copy.rank}, step {copy.step}")
            shard.sums[number] = saved.sums
        except Damaged as error:
            job.trouble(f"a copy is damaged and not used: {error}")
            copy = None
    shard.files.append(file)
    shard.slots.holds.append(copy)
    shard.wanted = len(shard.files)


def write_whole(path: Path, data: bytes) -> None:
    """The file has this content, as a whole, for its owner alone. Raises OSError."""
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
