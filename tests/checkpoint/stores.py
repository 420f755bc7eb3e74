"""Stores in this process, each in a thread with its event loop, and ranks that speak to them without torch."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from eagle_eye.checkpoint.connection import BlockingConnection, connect
from eagle_eye.checkpoint.messages import (
    VERSION,
    Captured,
    CaptureEvery,
    CopyInfo,
    Grant,
    Hello,
    JobNode,
    Message,
    Open,
    Proceed,
    Put,
    SlotsOpened,
    Stored,
    Welcome,
    Whole,
)
from eagle_eye.checkpoint.shared_memory import mapped
from eagle_eye.checkpoint.storage import sums_of
from eagle_eye.checkpoint.store import SOCKET, CheckpointStore, StoreSettings, ask_status

JOB, KEY = "job", b"k" * 32
WITHIN_S = 30.0

MessageT = TypeVar("MessageT", bound=Message)


def until(true: Callable[[], bool], what: str) -> None:
    """It becomes true. Fails where it does not."""
    end_s = time.monotonic() + WITHIN_S
    while not true():
        assert time.monotonic() < end_s, f"not within {WITHIN_S:g} s: {what}"
        time.sleep(0.005)


class Node:
    """A node's store."""

    @property
    def has_all_slots(self) -> bool:
        """Whether every shard of the attempts that run has the slots that it is to have, or there is no room."""
        jobs = [service.job for service in list(self.store._jobs.values())]
        shards = [one for job in jobs for one in list(job.shards.values()) if one.attempt == job.attempt]
        return all(one.is_short or len(one.files) >= one.wanted for one in shards)

    def __init__(self, folder: Path, node: str = "a", **settings: Any) -> None:
        self.folder, self.name = folder, node
        self._settings = StoreSettings(folder=folder, node=node, listen=("127.0.0.1", 0), **settings)
        self.store = CheckpointStore(self._settings)
        self._thread: threading.Thread | None = None

    def start(self) -> Node:
        ready = threading.Event()
        self.store = CheckpointStore(self._settings)
        self._thread = threading.Thread(target=self._run, args=(ready,), name=f"store-{self.name}")
        self._thread.start()
        assert ready.wait(WITHIN_S), "the store does not start"
        return self

    def stop(self) -> None:
        """End it as a signal does; its files stay."""
        if self._thread is not None:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                self._loop.call_soon_threadsafe(self._serving.cancel)
            self._thread.join(WITHIN_S)
            assert not self._thread.is_alive(), "the store does not end"
            self._thread = None

    def _run(self, ready: threading.Event) -> None:
        async def serve() -> None:
            self._loop = asyncio.get_running_loop()
            self._serving = asyncio.ensure_future(self.store.run(ready.set))
            with contextlib.suppress(asyncio.CancelledError):
                await self._serving

        asyncio.run(serve())

    @property
    def status(self) -> dict[str, Any]:
        """What it says of the only job."""
        (job,) = ask_status(self.folder)
        return job

    @property
    def steps(self) -> set[tuple[int, int]]:
        """The (rank, step) of all copies."""
        return {(one["rank"], one["step"]) for one in self.status["copies"]}

    @property
    def slot_files(self) -> set[Path]:
        return set(self.folder.glob("jobs/*/*.slot"))


@contextlib.contextmanager
def running(folders: Sequence[Path], **settings: Any) -> Iterator[list[Node]]:
    """Yield a store on each folder, named a, b, ..."""
    nodes = [Node(folder, "abcdef"[number], **settings) for number, folder in enumerate(folders)]
    try:
        for node in nodes:
            node.start()
        yield nodes
    finally:
        for node in nodes:
            node.stop()


class Rank:
    """A rank of a node, as the store sees it."""

    def __init__(self, node: Node, rank: int = 0, key: bytes = KEY) -> None:
        self.node, self.rank = node, rank
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(WITHIN_S)
        sock.connect(str(node.folder / SOCKET))
        self.connection = BlockingConnection(sock, WITHIN_S)
        self._key = key
        self.slots: dict[int, mmap.mmap] = {}
        self._grants: list[Grant] = []
        self.capture_every = 1
        self.paths: tuple[str, ...] = ()
        self._capacity_bytes = 0

    def hello(self) -> Welcome:
        return self.connection.request(Hello(VERSION, JOB, self._key), Welcome)

    def open(self, opening: Open) -> None:
        opened = self.connection.request(opening, SlotsOpened)
        self.paths = opened.slots
        self.slots = {number: mapped(path, opening.capacity_bytes) for number, path in enumerate(opened.slots)}
        self._capacity_bytes = opening.capacity_bytes

    def expect(self, kind: type[MessageT], which: Callable[[MessageT], bool] = lambda _: True) -> MessageT:
        """Return the next message of a kind; others are passed over, but what it may write, and when, is remembered."""
        while True:
            message = self.connection.receive()
            assert message is not None, f"the store has ended the connection, and {kind.__name__} was expected"
            if isinstance(message, CaptureEvery):
                self.capture_every = message.captures
            if isinstance(message, kind) and which(message):
                return message
            if isinstance(message, Grant):
                self._grants.append(message)

    @property
    def has_grant(self) -> bool:
        """Whether it has heard by now that it may write."""
        return bool(self._grants)

    def grant(self) -> Grant:
        return self._grants.pop() if self._grants else self.expect(Grant)

    def granted(self) -> int:
        """Return the number of the slot that is granted, which is mapped."""
        grant = self.grant()
        if grant.path not in self.paths:
            self.slots[grant.slot] = mapped(grant.path, self._capacity_bytes)
        return grant.slot

    def write(self, step: int, data: bytes, slot: int) -> None:
        self.slots[slot][: len(data)] = data
        self.connection.send(Captured(step, slot, len(data), (), float(step)))

    def capture(self, step: int, data: bytes) -> None:
        self.write(step, data, self.granted())

    def whole(self, step: int) -> None:
        """It hears that the step is whole."""
        self.expect(Whole, lambda word: word.step == step)

    def ended(self) -> bool:
        """Whether the store ends the connection."""
        try:
            while self.connection.receive() is not None:
                pass
        except ConnectionError:
            pass
        return True


def opening(nodes: Sequence[Node], rank: int = 0, **changes: Any) -> Open:
    """What a rank says that begins the first attempt, of a job with one rank a node that keeps a copy on the next."""
    names = [node.name for node in nodes]
    said = Open(
        job=JOB,
        key=KEY,
        attempt=1,
        rank=rank,
        members=tuple(JobNode(node.name, node.store.address, (number,)) for number, node in enumerate(nodes)),
        holders=tuple((names[rank:] + names[:rank])[:2]),
        plan=f"{len(nodes)}-plan",
        blob=b"what lies where",
        capacity_bytes=5000,
        keep=2,
        step=0,
        resumed_step=None,
        sources=(),
        directory="/nowhere",
        persist_every=0,
    )
    return msgspec.structs.replace(said, **changes)


def opened(nodes: Sequence[Node], **changes: Any) -> list[Rank]:
    """Return a rank of each node, all of which have begun the attempt. It ``waits`` for the slots that ranks do not."""
    waits = changes.pop("waits", True)
    ranks = [Rank(node, number) for number, node in enumerate(nodes)]
    for rank in ranks:
        rank.hello()
    for rank in ranks:
        rank.open(opening(nodes, rank.rank, **changes))
    if waits:
        until(lambda: all(node.has_all_slots for node in nodes), "all slots are reserved")
    return ranks


def close(*ranks: Rank) -> None:
    for rank in ranks:
        rank.connection.close()


def contents(rank: int, step: int, length: int = 3000) -> bytes:
    return f"{rank}:{step};".encode() * (length // 4)


def put(
    node: Node, one: CopyInfo, data: bytes, attempt: int = 1, key: bytes = KEY
) -> tuple[BlockingConnection, Proceed]:
    """Announce a copy to a store, as another node's store does."""
    connection = connect(node.store.address, JOB, key, WITHIN_S)
    return connection, connection.request(Put(attempt, one, sums_of(memoryview(data))), Proceed)


def stored(node: Node, one: CopyInfo, data: bytes) -> Stored:
    """Return what the store says once the whole copy has been sent."""
    connection, proceed = put(node, one, data)
    try:
        assert proceed.yes
        connection._socket.sendall(data)
        answer = connection.receive()
        assert isinstance(answer, Stored)
        return answer
    finally:
        connection.close()
