"""A store that serves in a thread, and ranks that speak to it without a training program."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eagle_eye.checkpoint.connection import BlockingConnection
from eagle_eye.checkpoint.messages import (
    VERSION,
    Captured,
    Grant,
    Hello,
    Member,
    Message,
    Open,
    Opened,
    Skipped,
    Welcome,
    Whole,
)
from eagle_eye.checkpoint.store import SOCKET, Store, StoreSettings

KEY = b"k" * 32
PLAN = "1-plan"
SHARD = b"state" * 1000
WITHIN_S = 30.0


@contextlib.contextmanager
def running_store(folder: Path, node: str = "n1", **settings: Any) -> Iterator[Path]:
    """Serve until the block ends; yield the store's folder."""
    ready = threading.Event()
    store = Store(StoreSettings(folder=folder, node=node, listen=("127.0.0.1", 0), **settings))
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await store.run(ready.set)

    serving = loop.create_task(serve())
    thread = threading.Thread(target=loop.run_until_complete, args=(serving,))
    thread.start()
    try:
        assert ready.wait(WITHIN_S)
        yield folder
    finally:
        loop.call_soon_threadsafe(serving.cancel)
        thread.join(WITHIN_S)
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


class Rank:
    """The only rank of a job, connected and with an attempt open."""

    def __init__(self, folder: Path, job: str = "llm", **opening: Any) -> None:
        end = socket.socket(socket.AF_UNIX)
        end.settimeout(WITHIN_S)
        end.connect(str(folder / SOCKET))
        self._connection = BlockingConnection(end, WITHIN_S)
        welcome = self._connection.ask(Hello(VERSION, job, KEY), Welcome)
        fields: dict[str, Any] = {
            "job": job,
            "key": KEY,
            "attempt": welcome.attempt + 1,
            "rank": 0,
            "members": (Member(welcome.node, welcome.address, (0,)),),
            "holders": (welcome.node,),
            "plan": PLAN,
            "blob": b"",
            "capacity_bytes": len(SHARD),
            "keep": 2,
            "step": 0,
            "resumed_step": None,
            "sources": (),
            "directory": str(folder),
            "persist_every": 0,
        }
        self.slots = self._connection.ask(Open(**(fields | opening)), Opened).slots
        self._grants = [self._hears(Grant).slot]

    def captures(self, step: int, blocked_s: float = 0.25) -> None:
        """Return once the step is whole on all."""
        slot = self._grants.pop() if self._grants else self._hears(Grant).slot
        Path(self.slots[slot]).write_bytes(SHARD)
        self._connection.send(Captured(step, slot, len(SHARD), (), 1.7e9, blocked_s))
        assert self._hears(Whole).step == step

    def skips(self, step: int) -> None:
        self._connection.send(Skipped(step, "no slot is free"))

    def close(self) -> None:
        self._connection.close()

    def _hears(self, kind: type[Any]) -> Any:
        while not isinstance(message := self._said(), kind):
            if isinstance(message, Grant):
                self._grants.append(message.slot)
        return message

    def _said(self) -> Message:
        message = self._connection.receive()
        assert message is not None, "the store has ended the connection"
        return message
