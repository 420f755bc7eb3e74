"""A rank's connection to the store of its node: what is sent waits in a queue, what is heard is noted by a thread."""

from __future__ import annotations

import logging
import os
import queue
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from eagle_eye.checkpoint.connection import BlockingConnection, ProtocolError
from eagle_eye.checkpoint.messages import (
    VERSION,
    Blob,
    Close,
    Find,
    Found,
    GetBlob,
    Hello,
    Message,
    Open,
    Opened,
    Welcome,
)
from eagle_eye.checkpoint.store import LOCK, SOCKET
from eagle_eye.schema.memory_steps import STORE_WORDS

_log = logging.getLogger(__name__)

ANSWER_WITHIN_S = 120.0  # to reserve and fill the memory of a large shard takes a while
START_WITHIN_S = 30.0
EXIT_WHEN_IDLE_S = 60.0
RETRY_S = 1.0
INHERITED = frozenset({"HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "TMPDIR", "VIRTUAL_ENV"})


def start_store(folder: Path, node: str) -> None:
    """Start a store where none is, in a session of its own: it outlives whoever starts it. Raises OSError.

    Of several ranks that start one the first has it; the others' give up, and theirs is answered.
    """
    if answers(folder):
        return
    command = [sys.executable, "-m", "eagle_eye.cli.main", *STORE_WORDS, "--folder", str(folder), "--node", node]
    command += ["--exit-when-idle", f"{EXIT_WHEN_IDLE_S:g}"]
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Neither a child of the rank nor, by its environment, taken for a rank: whoever ends those must not end it.
    command = ["/bin/sh", "-c", 'exec "$@" &', "sh", *command]
    environment = {name: value for name, value in os.environ.items() if name in INHERITED}
    with (folder / "store.log").open("ab") as log:
        subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
            check=True,
        )
    until_s = time.monotonic() + START_WITHIN_S
    while not answers(folder):
        if time.monotonic() > until_s:
            raise ConnectionError(f"no store answers in {folder} within {START_WITHIN_S:g} s: see {folder}/store.log")
        time.sleep(0.02)


def end_store(folder: Path) -> None:
    """The store of a folder has ended, and nothing of what it held is left. Nothing where there is none."""
    try:
        pid = int((folder / LOCK).read_text(encoding="ascii"))
    except (OSError, ValueError):
        pid = 0
    if pid and _is_store(pid):
        os.kill(pid, signal.SIGKILL)
    until_s = time.monotonic() + ANSWER_WITHIN_S
    while pid and _is_store(pid) and time.monotonic() < until_s:
        time.sleep(0.01)
    shutil.rmtree(folder, ignore_errors=True)


def _is_store(pid: int) -> bool:
    """Whether the process is a store, and not one that has its number by now."""
    try:
        return "\0".join(STORE_WORDS).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def answers(folder: Path) -> bool:
    """Whether a store takes connections there."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.connect(str(folder / SOCKET))
    except OSError:
        return False
    finally:
        sock.close()
    return True


class StoreClient:
    """One rank's connection. Questions are answered while no attempt is open; after ``open`` messages flow both ways.

    ``whole`` is the newest step that the rank knows to be whole: what a store that is started anew has to keep.
    """

    def __init__(self, folder: Path, node: str, job: str, key: bytes) -> None:
        self.whole: int | None = None
        self._folder = folder
        self._node = node
        self._job = job
        self._key = key
        self._connection: BlockingConnection | None = None
        self._outgoing: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._opening: Open | None = None
        self._hear: Callable[[Message], None] = lambda _: None
        self._opened: Callable[[Opened], None] = lambda _: None
        self._threads: list[threading.Thread] = []
        self._ended = threading.Event()

    def hello(self) -> Welcome:
        """Connect, to a store that is started where there is none; return what it knows.

        Raises OSError; ProtocolError with the reason where it refuses.
        """
        start_store(self._folder, self._node)
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(ANSWER_WITHIN_S)
        sock.connect(str(self._folder / SOCKET))
        self._connection = BlockingConnection(sock, ANSWER_WITHIN_S)
        return self._connection.ask(Hello(VERSION, self._job, self._key), Welcome)

    def find(self, plan: str, rank: int, step: int) -> Found:
        """Return where a copy is on this node. Raises OSError."""
        return self._asked().ask(Find(plan, rank, step), Found)

    def blob(self, plan: str) -> bytes | None:
        """Return what is laid out where, of a plan. Raises OSError."""
        return self._asked().ask(GetBlob(plan), Blob).data

    def open(self, opening: Open, opened: Callable[[Opened], None], hear: Callable[[Message], None]) -> None:
        """Begin an attempt. ``opened`` gets the slots, now and whenever the store was started anew; ``hear`` the rest.

        Raises OSError; ProtocolError with the reason where the store refuses.
        """
        self._opening, self._opened, self._hear = opening, opened, hear
        opened(self._asked().ask(opening, Opened))
        self._asked().set_timeout(None)
        for work in (self._send_all, self._receive_all):
            thread = threading.Thread(target=work, name=f"eagle-eye-checkpoint-{work.__name__}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def say(self, message: Message) -> None:
        """Have a message sent. Never waits."""
        self._outgoing.put(message)

    def close(self, *, ended: bool) -> None:
        """End the connection; ``ended`` says that the training has, so that its memory may be freed."""
        if ended:
            self._outgoing.put(Close())
        self._outgoing.put(None)
        if self._threads:
            self._threads[0].join(timeout=5.0)
        self._ended.set()
        if self._connection is not None:
            self._connection.close()
        for thread in self._threads:
            thread.join(timeout=5.0)

    def _asked(self) -> BlockingConnection:
        if self._connection is None:
            raise ConnectionError("not connected to a store")
        return self._connection

    def _send_all(self) -> None:
        while (message := self._outgoing.get()) is not None:
            try:
                self._asked().send(message)
            except OSError as error:
                _log.debug("not sent to the store: %s", error)  # the other thread sees that it is gone

    def _receive_all(self) -> None:
        while not self._ended.is_set():
            try:
                while (message := self._asked().receive()) is not None:
                    self._heard(message)
            except (OSError, ValueError) as error:
                if not self._ended.is_set():
                    _log.warning("the store of this node is gone (%s); steps are not captured meanwhile", error)
            while not self._ended.wait(RETRY_S):
                if self._reopened():
                    break

    def _heard(self, message: Message) -> None:
        try:
            self._hear(message)
        except Exception:  # noqa: BLE001 - the next message may be
            _log.exception("what the store said was not understood")

    def _reopened(self) -> bool:
        """Whether a store answers again, and has taken the attempt up."""
        opening = self._opening
        if opening is None:
            return False
        try:
            old = self._connection
            self.hello()
            if old is not None:
                old.close()
            if self.whole is not None:
                opening = msgspec.structs.replace(opening, step=self.whole, resumed_step=self.whole)
            opened = self._asked().ask(opening, Opened)
            self._asked().set_timeout(None)
            self._opened(opened)
        except ProtocolError as error:
            _log.warning("the store refuses: %s", error)
            return False
        except OSError:
            return False
        _log.warning("the store of this node is back")
        return True
