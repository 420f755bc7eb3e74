"""A rank's connection to its node's store: sends from a queue, receives in a thread."""

from __future__ import annotations

import logging
import os
import queue
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from eagle_eye.checkpoint.connection import BlockingConnection, connect_local
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
    SlotsOpened,
    Welcome,
)
from eagle_eye.checkpoint.store import LOCK, SOCKET
from eagle_eye.schema.checkpoint_files import FOLDER_VARIABLE, STORE_LOG, STORE_WORDS, spawn_store

_log = logging.getLogger(__name__)

ANSWER_WITHIN_S = 120.0  # to reserve and fill the memory of a large shard takes a while
START_WITHIN_S = 30.0
PROGRAM = [sys.executable, "-m", "eagle_eye.cli.main"]
RETRY_S = 0.5
SAID_WITHIN_S = 5.0


def start_store(folder: Path, node: str) -> None:
    """Make sure that a store serves the folder, starting one if needed. Raises OSError, CalledProcessError.

    Of several ranks that start one the first has it; the others' give up, and theirs is answered.
    """
    if folder.exists():
        require_own(folder)  # before sending the job's key
        if answers(folder):
            return
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    require_own(folder)
    spawn_store(PROGRAM, folder, node)
    until_s = time.monotonic() + START_WITHIN_S
    while not answers(folder):
        if time.monotonic() > until_s:
            raise ConnectionError(f"no store answers in {folder} within {START_WITHIN_S:g} s: see {folder / STORE_LOG}")
        time.sleep(0.02)


def require_own(folder: Path) -> None:
    """Raise PermissionError where another user could have substituted their own store."""
    for path in (folder, folder.parent):
        found = path.stat()
        if found.st_uid not in {0, os.geteuid()}:
            raise PermissionError(f"{path} belongs to user {found.st_uid}: name your own by {FOLDER_VARIABLE}")
        if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
            raise PermissionError(f"everybody may write to {path}: take that right away, or name another folder")


def end_store(folder: Path) -> None:
    """End a folder's store and remove everything it held. Does nothing where there is none."""
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
    """Whether a store accepts connections there."""
    try:
        connect_local(folder / SOCKET, ANSWER_WITHIN_S).close()
    except OSError:
        return False
    return True


class AttemptConnection:
    """A rank's connection with an open attempt: messages are sent from a queue by a thread.

    What was said on an earlier line is not sent on a later one: it is of slots that are another process's now.
    """

    def __init__(self, connection: BlockingConnection) -> None:
        self.connection = connection
        self._outgoing: queue.SimpleQueue[tuple[Message, Callable[[], None] | None] | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, name="eagle-eye-checkpoint-send", daemon=True)
        self._sender.start()

    def say(self, message: Message, after: Callable[[], None] | None = None) -> None:
        """Queue a message, to be sent after ``after`` has returned. Never blocks."""
        self._outgoing.put((message, after))

    def end(self, within_s: float) -> None:
        """Send what is queued, within the time limit."""
        self._outgoing.put(None)
        self._sender.join(timeout=within_s)

    def _send_all(self) -> None:
        while (outgoing := self._outgoing.get()) is not None:
            message, after = outgoing
            try:
                if after is not None:
                    after()
                self.connection.send(message)
            except OSError as error:
                _log.debug("not sent to the store: %s", error)  # the other thread sees that it is gone
            except RuntimeError as error:  # of the GPU, which then fails the training, too
                _log.warning("%s is not sent to the store: %s", type(message).__name__, error)


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
        self._line: AttemptConnection | None = None
        self._opening: Open | None = None
        self._hear: Callable[[Message], None] = lambda _: None
        self._opened: Callable[[SlotsOpened, AttemptConnection], None] = lambda *_: None
        self._receiver: threading.Thread | None = None
        self._ending, self._ended = threading.Event(), threading.Event()

    def hello(self) -> Welcome:
        """Connect, to a store that is started where there is none; return what it knows.

        Raises OSError; ProtocolError with the reason where it refuses.
        """
        self._connection, welcome = self._greeted()
        return welcome

    def find(self, plan: str, rank: int, step: int) -> Found:
        """Return where a copy is on this node. Raises OSError."""
        return self._asked().request(Find(plan, rank, step), Found)

    def blob(self, plan: str) -> bytes | None:
        """Return a plan's layout. Raises OSError."""
        return self._asked().request(GetBlob(plan), Blob).data

    def open(
        self, opening: Open, opened: Callable[[SlotsOpened, AttemptConnection], None], hear: Callable[[Message], None]
    ) -> None:
        """Begin an attempt. ``opened`` gets the slots, now and whenever the store was started anew; ``hear`` the rest.

        Raises OSError; ProtocolError with the reason where the store refuses.
        """
        self._opening, self._opened, self._hear = opening, opened, hear
        self._begin(self._asked(), opening)
        self._receiver = threading.Thread(target=self._receive_all, name="eagle-eye-checkpoint-receive", daemon=True)
        self._receiver.start()

    def say(self, message: Message) -> None:
        """Queue a message, if an attempt is open. Never blocks."""
        if self._line is not None:
            self._line.say(message)

    def close(self, *, ended: bool, within_s: float = 0.0) -> None:
        """End the connection; ``ended`` says that the training has, so that its memory may be freed.

        Then what was captured last is on its way still: the store is given so long to bring it where it goes.
        """
        self._ending.set()
        if ended and self._line is not None and self._receiver is not None:
            self._line.say(Close())
            self._receiver.join(timeout=within_s)  # what the store asks for meanwhile, such as metadata, it gets
        if self._line is not None:
            self._line.end(SAID_WITHIN_S)
        self._ended.set()
        if self._connection is not None:
            self._connection.close()
        if self._receiver is not None:
            self._receiver.join(timeout=SAID_WITHIN_S)

    def _greeted(self) -> tuple[BlockingConnection, Welcome]:
        start_store(self._folder, self._node)
        connection = connect_local(self._folder / SOCKET, ANSWER_WITHIN_S)
        try:
            return connection, connection.request(Hello(VERSION, self._job, self._key), Welcome)
        except BaseException:
            connection.close()
            raise

    def _begin(self, connection: BlockingConnection, opening: Open) -> None:
        opened = connection.request(opening, SlotsOpened)
        connection.set_timeout(None)
        if self._line is not None:
            self._line.end(0.0)
        self._connection, self._line = connection, AttemptConnection(connection)
        self._opened(opened, self._line)

    def _asked(self) -> BlockingConnection:
        if self._connection is None:
            raise ConnectionError("not connected to a store")
        return self._connection

    def _receive_all(self) -> None:
        try:
            self._receive_until_ended()
        finally:
            self._asked().close()  # it may have been made anew while ``close`` closed the one before

    def _receive_until_ended(self) -> None:
        while not self._ended.is_set():
            try:
                while (message := self._asked().receive()) is not None:
                    self._heard(message)
            except (OSError, ValueError) as error:
                if not self._ending.is_set():
                    _log.warning("the store of this node is gone (%s); steps are not captured meanwhile", error)
            while not self._ending.wait(RETRY_S):
                if self._reopened():
                    break
            if self._ending.is_set():
                return

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
        opening = msgspec.structs.replace(opening, again=True)
        if self.whole is not None and self.whole != opening.resumed_step:
            opening = msgspec.structs.replace(opening, resumed_step=self.whole, resumed_attempt=opening.attempt)
        connection: BlockingConnection | None = None
        try:
            self._asked().close()
            connection, _ = self._greeted()
            self._begin(connection, opening)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            if connection is not None:
                connection.close()
            _log.warning("the store of this node is not back yet: %s", error)
            return False
        _log.warning("the store of this node is back")
        return True
