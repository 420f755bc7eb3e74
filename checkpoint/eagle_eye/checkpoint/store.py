"""A node's store: a separate process that owns the copies of shards in shared memory, and transfers them.

It outlives the ranks whose steps it keeps, their job's restarts and their launcher. Ranks of this node connect over a
Unix socket in its folder, stores and ranks of other nodes over TCP, with the job's key. Neither the store nor training
ever blocks on the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import hmac
import logging
import math
import os
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from eagle_eye.checkpoint.connection import (
    NONCE_BYTES,
    UNPROVEN_FRAME_BYTES_MAX,
    ProtocolError,
    SendPace,
    StoreConnection,
    connect_local,
    expected,
    proof,
    tuned,
)
from eagle_eye.checkpoint.held_job import HeldJob, ShardSlots, adopt, write_whole
from eagle_eye.checkpoint.job_service import JobService
from eagle_eye.checkpoint.messages import (
    VERSION,
    Agreed,
    Blob,
    Bytes,
    Challenge,
    Copies,
    Find,
    Found,
    GetBlob,
    Greet,
    Hello,
    Message,
    Missed,
    Open,
    Proceed,
    Proof,
    Put,
    RanksDone,
    Read,
    RequestRefused,
    Reserve,
    Reserved,
    ShardPersisted,
    StatusAsked,
    Stored,
    StoreStatus,
    Verified,
    VerifyAsked,
    Welcome,
)
from eagle_eye.checkpoint.shared_memory import DoesNotFit, spaced_of
from eagle_eye.checkpoint.storage import CHUNK_BYTES, SUM_BYTES, Damaged, check, chunks, sums_in
from eagle_eye.checkpoint.traffic import Cap, Capped, Traffic
from eagle_eye.schema.checkpoint_files import (
    JOBS_MAX,
    OLDER_MAX,
    RANKS_MAX,
    SAID_EVERY_S,
    STANDING_FILE,
    STEPS_FILE,
    STORE_SOCKET,
    JobStanding,
    OlderStep,
    Standing,
    encode_standing,
)
from eagle_eye.schema.record_types import prepare_record_types

LOOK_EVERY_S = 0.5


class StandingFile:
    """The file in a store's folder: written on changes, at most twice a second, and periodically."""

    def __init__(self, folder: Path, unix_s: Callable[[], float] = time.time) -> None:
        self._path = folder / STANDING_FILE
        self._unix_s = unix_s
        self._said: list[JobStanding] | None = None
        self._said_s = self._looked_s = -math.inf

    def say(self, jobs: Iterable[HeldJob], now_s: float) -> None:
        """Write the jobs' state at ``now_s``, monotonic. Retried where it cannot be written."""
        if now_s - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now_s
        standing = [standing_of(job, now_s) for job in islice(jobs, JOBS_MAX)]
        changes = [msgspec.structs.replace(job, persisting_for_s=None) for job in standing]  # that passes by itself
        if changes == self._said and now_s - self._said_s < SAID_EVERY_S:
            return
        try:
            write_whole(self._path, encode_standing(Standing(self._unix_s(), standing)))
        except OSError as error:  # shared memory may be full of somebody else's
            _log.warning("%s is not written: %s", self._path, error)
            return
        self._said, self._said_s = changes, now_s

    def remove(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)


def standing_of(job: HeldJob, now_s: float) -> JobStanding:
    """Return the state of a job's checkpoints at ``now_s``, monotonic."""
    counts, whole, persisting = job.counts, job.needed.newest_whole, job.needed.persisting
    since_s = job.persisting_since_s if persisting is not None else None
    # By ranks: after a restart one's shards may be in two kinds of slots for a time.
    held = {copy.rank for _, _, copy in job.copies() if copy.step == whole}
    wanted = {shard.rank for shard in job.shards.values() if shard.attempt == job.attempt}
    return JobStanding(
        job=job.name,
        attempt=job.attempt,
        pids=[shard.connection.peer_pid for shard in job.local if shard.connection is not None][:RANKS_MAX],
        step=job.step,
        whole_step=whole,
        copies=len(held),
        copies_wanted=0 if whole is None else len(wanted),
        older=_older(job, wanted),
        captured=counts.get("captured", 0),
        skipped=counts.get("skipped", 0) + counts.get("not_due", 0),
        void=counts.get("void", 0),
        blocked_s=round(job.blocked_s, 6),
        reserved_bytes=job.reserved_bytes,
        sent_bytes=counts.get("bytes_sent", 0),
        persisted_step=job.persisted,
        persisting_step=persisting,
        persisting_for_s=None if since_s is None else round(max(now_s - since_s, 0.0), 1),
        damaged=counts.get("damaged", 0),
    )


def _older(job: HeldJob, wanted: Collection[int]) -> list[OlderStep]:
    """Return the whole steps before the newest one of which every rank's shard that is wanted here is here."""
    held: dict[int, set[int]] = {step: set() for step in job.needed.known[:-1]}
    captured_s: dict[int, float] = {}
    for shard, _, copy in job.copies():
        if copy.step in held:
            held[copy.step].add(copy.rank)
            if shard.local:  # by this node's clock, like the reader of the file
                captured_s[copy.step] = max(captured_s.get(copy.step, 0.0), copy.captured_s)
    whole = [step for step, ranks in held.items() if step in captured_s and ranks.issuperset(wanted)]
    reported = whole if len(whole) <= OLDER_MAX else [*whole[: OLDER_MAX - 1], whole[-1]]
    return [OlderStep(step, captured_s[step]) for step in reported]


def status_of(job: HeldJob) -> dict[str, Any]:
    """Return it. ``whole_step`` is the newest step that is whole on all, None where none is known to be.

    ``older_steps`` are those of the ``whole_steps`` that reach further back; of ``capture_every`` captures one is made.
    """
    now_s = time.monotonic()
    return {
        "job": job.name,
        "attempt": job.attempt,
        "nodes": sorted(job.members),
        "ranks_connected": sum(shard.connection is not None for shard in job.local),
        "whole_step": job.needed.newest_whole,
        "whole_steps": list(job.needed.known),
        "older_steps": list(job.needed.older),
        "capture_every": job.capture_every,
        "copies": [
            {
                "step": copy.step,
                "rank": copy.rank,
                "plan": copy.plan,
                "bytes": copy.length,
                "captured_s": copy.captured_s,
                "of_this_node": shard.local,
            }
            for shard, _, copy in sorted(job.copies(), key=lambda held: (held[2].step, held[2].rank))
        ],
        "reserved_bytes": job.reserved_bytes,
        "persisted_step": job.persisted,
        "persisting_step": job.needed.persisting,
        "persisting_for_s": _since(job.persisting_since_s, now_s) if job.needed.persisting is not None else None,
        "without_ranks_for_s": _since(job.left_s, now_s),
        "links": job.links(),
        "counts": dict(sorted(job.counts.items())),
        "troubles": list(job.troubles),
    }


def _since(then_s: float | None, now_s: float) -> float | None:
    return None if then_s is None else round(now_s - then_s, 1)


_log = logging.getLogger(__name__)

SOCKET, PORT, LOCK = STORE_SOCKET, "port", "lock"
BACKLOG = 1024
HANDSHAKE_WITHIN_S = 10.0
HOUSEKEEPING_S = 0.05
ACCEPT_AGAIN_S = 0.1
TOP_UP_S = 1.0
CONNECTIONS_MAX = 4096

MessageT = TypeVar("MessageT")


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The user's settings.

    ``folder`` is in shared memory; ``listen`` is for other nodes, port 0 for any; ``free_after_s`` is how long copies
    of a job without ranks are kept; ``persist_bytes_per_s`` is the most that goes to storage, ``copy_bytes_per_s`` to
    other nodes, None for no limit; ``paced`` copies go while training leaves the network idle. It exits after
    ``exit_when_idle_s`` without any job and without being contacted; None: never.
    """

    folder: Path
    node: str
    listen: tuple[str, int]
    free_after_s: float = 3600.0
    persist_bytes_per_s: float | None = None
    copy_bytes_per_s: float | None = None
    paced: bool = True
    scrub_every_s: float = 600.0
    exit_when_idle_s: float | None = None


class CheckpointStore:
    """One node's store. ``run`` serves until it is cancelled, or idle for as long as it may be; its files stay."""

    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings
        self._jobs: dict[str, JobService] = {}
        self._tasks: set[asyncio.Future[None]] = set()
        self._idle = asyncio.Event()
        self._used_s = time.monotonic()
        self._standing = StandingFile(settings.folder)
        self._cap = Cap(settings.copy_bytes_per_s)
        self._steps_changed = True
        self.address = ""

    async def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve. Raises OSError where it cannot listen."""
        folder = self._settings.folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in sorted((folder / "jobs").glob("*")):
            job = adopt(path)
            if job is not None:
                job.left_s = time.monotonic()
                self._jobs[job.name] = self._service(job)
        tcp = self._listening()
        self.address = "{}:{}".format(*tcp.getsockname()[:2])
        (folder / PORT).write_text(str(tcp.getsockname()[1]), encoding="ascii")
        path = folder / SOCKET
        path.unlink(missing_ok=True)
        unix = socket.socket(socket.AF_UNIX)
        unix.bind(str(path))
        path.chmod(0o600)
        unix.listen(BACKLOG)
        try:
            self._spawn(self._accept(tcp, self._serve_peer))
            self._spawn(self._accept(unix, self._serve_local))
            self._spawn(self._keep_house())
            self._spawn(self._scrub_now_and_then())
            for service in self._jobs.values():
                self._spawn(service.top_up(service.job.shards.values()))
            ready()
            await self._idle.wait()
        finally:
            for service in self._jobs.values():
                service.close()  # first: slots that ranks were writing must not be replaced for a successor
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # none looks at memory that is about to be unmapped
            tcp.close()
            unix.close()
            path.unlink(missing_ok=True)
            self._standing.remove()
            for service in self._jobs.values():
                service.job.unmap()

    def _listening(self) -> socket.socket:
        """Listen: where any port will do, on that of the store before, for other nodes know no other."""
        host, port = self._settings.listen
        if port == 0:
            with contextlib.suppress(OSError, ValueError):
                before = int((self._settings.folder / PORT).read_text(encoding="ascii"))
                return socket.create_server((host, before), backlog=BACKLOG)
        return socket.create_server((host, port), backlog=BACKLOG)

    async def _accept(self, server: socket.socket, serve: Callable[[StoreConnection], Awaitable[None]]) -> None:
        server.setblocking(False)
        while True:
            await _acceptable(server)
            try:
                sock, _ = server.accept()
            except BlockingIOError:
                continue
            except OSError as error:  # too many files are open, above all: some will be closed
                _log.warning("a connection is not accepted: %s", error)
                await asyncio.sleep(ACCEPT_AGAIN_S)
                continue
            if len(self._tasks) > CONNECTIONS_MAX:
                sock.close()
                continue
            if sock.family != socket.AF_UNIX:
                tuned(sock)
            connection = StoreConnection(sock)
            serving = asyncio.ensure_future(self._served(connection, serve))
            serving.add_done_callback(functools.partial(_close, connection))  # it may be cancelled before it begins
            self._spawn(serving)

    async def _served(self, connection: StoreConnection, serve: Callable[[StoreConnection], Awaitable[None]]) -> None:
        try:
            await serve(connection)
        except (OSError, ValueError, asyncio.TimeoutError) as error:
            _log.info("a connection has ended: %s", error)

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Future[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a task of the store failed", exc_info=error)

    def _service(self, job: HeldJob) -> JobService:
        traffic = Traffic(self._cap, job.count, paced=self._settings.paced)
        return JobService(job, self._settings.node, self._settings.persist_bytes_per_s, self._spawn, traffic)

    # Ranks of this node.

    async def _serve_local(self, connection: StoreConnection) -> None:
        self._used_s = time.monotonic()
        first = await asyncio.wait_for(connection.receive(), HANDSHAKE_WITHIN_S)
        match first:
            case None:
                return  # somebody has looked whether a store is here
            case StatusAsked():
                await connection.send(StoreStatus([status_of(service.job) for service in self._jobs.values()]))
            case VerifyAsked():
                await connection.send(await self._verified())
            case Hello():
                await self._serve_rank(first, connection)
            case _:
                raise ProtocolError(f"{type(first).__name__} where a rank says hello")

    async def _serve_rank(self, hello: Hello, connection: StoreConnection) -> None:
        if hello.version != VERSION:
            reason = f"this store speaks version {VERSION} and the rank {hello.version}: update the older one"
            await connection.send(RequestRefused(reason))
            return
        service = self._entered(hello.job, hello.key)
        if service is None:
            await connection.send(RequestRefused(f"job {hello.job!r} is here with another key: it is somebody else's"))
            return
        service.entered(connection)
        job = service.job
        shard: ShardSlots | None = None
        try:
            copies, kept = tuple(copy for _, _, copy in job.copies()), job.needed.known
            await connection.send(Welcome(VERSION, self._settings.node, self.address, job.attempt, copies, kept))
            while (message := await connection.receive()) is not None:
                if isinstance(message, Open):
                    shard = await service.open(message, connection)
                elif shard is not None and shard.connection is connection:
                    await service.hear(shard, message)
                else:
                    await self._answer(service, message, connection)
        finally:
            service.left(connection, shard)

    def _entered(self, name: str, key: bytes) -> JobService | None:
        """Return the job's service, None where the job is here with another key, and has ranks.

        One that has none yields to a new job of its name.
        """
        service = self._jobs.get(name)
        if service is not None and service.job.left_s is not None and not hmac.compare_digest(service.job.key, key):
            self._free(service, "is another job now")
            service = None
        if service is None:
            folder = self._settings.folder / "jobs" / hashlib.sha256(name.encode()).hexdigest()[:16]
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            service = self._jobs[name] = self._service(HeldJob(name, key, folder))
        return service if hmac.compare_digest(service.job.key, key) else None

    async def _verified(self) -> Verified:
        held = [copy for service in self._jobs.values() for _, _, copy in service.job.copies()]
        damaged = [text for service in list(self._jobs.values()) for text in await service.scrub()]
        return Verified(len(held) - len(damaged), sum(copy.length for copy in held), tuple(damaged))

    # Other nodes.

    async def _serve_peer(self, connection: StoreConnection) -> None:
        first = await asyncio.wait_for(connection.receive(UNPROVEN_FRAME_BYTES_MAX), HANDSHAKE_WITHIN_S)
        if not isinstance(first, Greet) or len(first.nonce) != NONCE_BYTES:
            raise ProtocolError("a peer that does not greet")
        service = self._jobs.get(first.job)
        if first.version != VERSION or service is None:
            reason = f"version {VERSION} is spoken here" if service else f"job {first.job!r} is not known here"
            await connection.send(RequestRefused(reason))
            return
        nonce, key = os.urandom(NONCE_BYTES), service.job.key
        await connection.send(Challenge(nonce, proof(key, b"store", first.nonce, nonce)))
        given = expected(
            await asyncio.wait_for(connection.receive(UNPROVEN_FRAME_BYTES_MAX), HANDSHAKE_WITHIN_S), Proof
        )
        if not hmac.compare_digest(given.proof, proof(key, b"peer", first.nonce, nonce)):
            raise ProtocolError("a peer without the job's key")
        while (message := await connection.receive()) is not None:
            if self._jobs.get(first.job) is not service:
                raise ProtocolError("the job has ended here")
            await self._answer(service, message, connection)

    async def _answer(self, service: JobService, message: Message, connection: StoreConnection) -> None:
        job = service.job
        match message:
            case Find(plan, rank, step):
                await connection.send(_found(job, plan, rank, step))
            case GetBlob(plan):
                await connection.send(Blob(job.blob(plan)))
            case Read():
                await _read(job, message, connection, Capped(self._cap))
            case Reserve():
                await self._reserve(service, message, connection)
            case Put():
                await _take(job, message, connection)
            case Copies() | Missed() | Agreed() | RanksDone() | ShardPersisted():
                await service.agree(message)
            case _:
                raise ProtocolError(f"{type(message).__name__} was not expected")

    async def _reserve(self, service: JobService, wish: Reserve, connection: StoreConnection) -> None:
        job = service.job
        if wish.attempt >= job.attempt:
            job.enter(wish)
            slots = wish.keep + spaced_of(wish.reach_s) + 1
            try:
                job.keep_blob(wish.plan, wish.blob)
                shard = await job.shard(wish.plan, wish.rank, wish.capacity_bytes, slots, local=False)
            except (DoesNotFit, OSError) as error:
                await connection.send(RequestRefused(f"{self._settings.node}: {error}"))
                return
            self._spawn(service.top_up([shard]))
            job.save()
        if wish.attempt < job.attempt:
            await connection.send(RequestRefused(f"attempt {wish.attempt} is over: attempt {job.attempt} has begun"))
            return
        await connection.send(Reserved())

    def _free(self, service: JobService, why: str) -> None:
        _log.info("%s %s; its memory is free", service.job.name, why)
        del self._jobs[service.job.name]
        service.close()
        service.job.free()
        self._steps_changed = True

    def _say_steps(self) -> None:
        """Write the held steps to the file that is read when deciding where a job resumes."""
        jobs = [service.job for service in self._jobs.values()]
        if not self._steps_changed and not any(job.changed for job in jobs):
            return
        steps = [step for job in jobs for step in job.steps()]
        try:
            write_whole(self._settings.folder / STEPS_FILE, msgspec.json.encode(steps))
        except OSError as error:  # the tmpfs is full, by somebody else; said again until it is not
            if not self._steps_changed:
                _log.warning("%s is not written: %s", STEPS_FILE, error)
            self._steps_changed = True
            return
        self._steps_changed = False
        for job in jobs:
            job.changed = False

    async def _keep_house(self) -> None:
        """Report what is held; free what is no longer needed."""
        topped_up_s = time.monotonic()
        while True:
            self._say_steps()
            await asyncio.sleep(HOUSEKEEPING_S)
            now_s = time.monotonic()
            self._standing.say((service.job for service in self._jobs.values()), now_s)
            self._used_s = now_s if self._jobs else self._used_s
            if self._settings.exit_when_idle_s is not None and now_s - self._used_s > self._settings.exit_when_idle_s:
                self._idle.set()
            if not (self._settings.folder / SOCKET).exists():
                _log.warning("%s is gone, and nobody finds this store any more: it ends", self._settings.folder)
                self._idle.set()
            self._end_jobs(now_s)
            if now_s - topped_up_s > TOP_UP_S:
                topped_up_s = now_s
                for service in self._jobs.values():
                    self._spawn(service.top_up_short())

    async def _scrub_now_and_then(self) -> None:
        """Verify all copies periodically, apart from the housekeeping, which must not wait for minutes of reading."""
        while True:
            await asyncio.sleep(self._settings.scrub_every_s)
            for service in list(self._jobs.values()):
                try:
                    await service.scrub()
                except (OSError, ValueError) as error:  # the job's memory was freed meanwhile
                    _log.info("%s is not verified: %s", service.job.name, error)

    def _end_jobs(self, now_s: float) -> None:
        for service in list(self._jobs.values()):
            left_s = service.job.left_s
            if service.done:
                service.say_done()
            if service.ended:
                self._free(service, "has ended")
            elif left_s is not None and now_s - left_s > self._settings.free_after_s:
                self._free(service, f"has had no ranks for {now_s - left_s:.0f} s")


async def _acceptable(server: socket.socket) -> None:
    """Return once somebody connects. Unlike ``sock_accept`` it has no connection to lose when it is cancelled."""
    loop, connects = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(server, connects.set)
    try:
        await connects.wait()
    finally:
        loop.remove_reader(server)


def _close(connection: StoreConnection, _: asyncio.Future[None]) -> None:
    connection.close()


def ask_status(folder: Path, within_s: float = 5.0) -> list[dict[str, Any]]:
    """Return what the store of a folder holds, job by job: ``status_of``. Raises OSError where none answers."""
    return _asked(folder, StatusAsked(), StoreStatus, within_s).jobs


def ask_verify(folder: Path, within_s: float = 600.0) -> Verified:
    """Have the store of a folder verify every copy. Raises OSError where none answers."""
    return _asked(folder, VerifyAsked(), Verified, within_s)


def _asked(folder: Path, question: Message, kind: type[MessageT], within_s: float) -> MessageT:
    connection = connect_local(folder / SOCKET, within_s)
    try:
        return connection.request(question, kind)
    finally:
        connection.close()


def _found(job: HeldJob, plan: str, rank: int, step: int) -> Found:
    held = job.find(plan, rank, step)
    if held is None:
        return Found(None)
    shard, slot, copy = held
    return Found(str(shard.files[slot].path), copy.length, shard.sums[slot], copy)


async def _read(job: HeldJob, read: Read, connection: StoreConnection, pace: SendPace) -> None:
    held = job.find(read.plan, read.rank, read.step)
    if held is None or read.offset % CHUNK_BYTES or not 0 < read.length <= held[2].length - read.offset:
        await connection.send(Bytes(-1))
        return
    shard, slot, copy = held
    view = shard.view(slot, copy.length)[read.offset : read.offset + read.length]
    await connection.send(Bytes(read.length, sums_in(shard.sums[slot], read.offset, read.length)), view, pace)


async def _take(job: HeldJob, put: Put, connection: StoreConnection) -> None:
    """Receive a copy from another node, verified chunk by chunk."""
    copy = put.copy
    shard = job.current(copy.plan, copy.rank)
    if put.attempt != job.attempt or len(put.sums) != SUM_BYTES * -(-copy.length // CHUNK_BYTES):
        await connection.send(Proceed(yes=False))
        return
    if shard is None or shard.local or not 0 < copy.length <= shard.capacity_bytes:
        await connection.send(Proceed(yes=False, reserved=False))
        return
    if job.find(copy.plan, copy.rank, copy.step) is not None:
        await connection.send(Proceed(yes=False, have=True))
        return
    job.needed.know(put.whole, put.void)
    slot = job.grant(shard)
    if slot is None:
        await connection.send(Proceed(yes=False))
        return
    shard.sums.pop(slot, None)
    file, whole, reason = shard.files[slot], False, "another attempt has begun"
    try:
        await connection.send(Proceed(yes=True))
        reason = await _received(shard.view(slot, copy.length), put, connection)
    finally:
        # Where an attempt has begun meanwhile the slot has another file, and may be granted to somebody else.
        if slot == shard.slots.granted and shard.files[slot] is file:
            if put.attempt == job.attempt and not reason:
                shard.slots.written(slot, copy)
                shard.sums[slot] = put.sums
                whole = job.save()
            else:
                shard.slots.give_back()
    if whole:
        job.count("bytes_received", copy.length)
    else:
        reason = reason or "another attempt has begun, or the record of it has no room"
        job.trouble(f"a copy did not arrive whole: {reason}")
    await connection.send(Stored(whole, reason))


async def _received(view: memoryview, put: Put, connection: StoreConnection) -> str:
    """Fill the view; return which chunk arrived damaged, "" if none."""
    reason = ""
    for number, (start, end) in enumerate(chunks(0, put.copy.length)):
        await connection.receive_into(view[start:end])
        try:
            check(view[start:end], put.sums, number, f"step {put.copy.step} of rank {put.copy.rank}")
        except Damaged as error:
            reason = reason or str(error)
    return reason


prepare_record_types()  # for those who import this module late
