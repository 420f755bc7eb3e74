"""``run_restartable``: lets a rank whose peers are gone wait for the next attempt in its existing process.

A launcher that supports it (``eagle-eye launch``) then renews only the necessary processes. Without one, ``train`` runs
as if called directly. Touches a Unix socket, the environment, and torch's process groups.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import re
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import msgspec
import torch
import torch.distributed as dist

from eagle_eye.schema.restart_names import HOOK_ATTEMPT_VARIABLE, LAST_GROUP_VARIABLE, SOCKET_VARIABLE
from eagle_eye.schema.restart_point import PACKET_BYTES_MAX, REASON_CHARS_MAX, AtPoint, GoOn

_log = logging.getLogger(__name__)

RANK_VARIABLE, ATTEMPT_VARIABLE = "RANK", "EAGLE_EYE_ATTEMPT"
_OF_PEERS = re.compile(r"gloo/transport|connection (?:closed|reset) by peer", re.IGNORECASE)

T = TypeVar("T")


class StepKeeper(Protocol):
    """Keeps the training's steps in memory."""

    counts: dict[str, float]

    def abandon(self) -> None:
        """Release everything; kept steps stay for the successor."""


_noted: list[list[StepKeeper]] = []  # those of the call of ``train`` that runs; empty outside of one


def run_restartable(train: Callable[[], T]) -> T:
    """Call ``train`` and return its result; call it again, in this process, after ranks elsewhere were lost.

    Everything that depends on the process group must be created in ``train``, from ``init_process_group`` on, and not
    kept outside: wrapped models, optimizers, the MemoryCheckpointer. Attach the hook there, too: its report covers one
    attempt. Data and other things without a group may be loaded before, and so must connections that are to last: those
    opened by ``train`` are closed. Each call resumes where its ``restore`` says, on every rank at the same step.

    Only a collective that failed after a step was captured is retried: every other exception propagates, as do all
    without a launcher that supports this, and with GPUs, where a lost peer breaks no collective. Raises ConnectionError
    if the launcher's runner exits while this rank waits.
    """
    line = _connected()
    if line is None:
        return train()
    with line, _noting() as keepers:
        while True:
            os.environ.pop(HOOK_ATTEMPT_VARIABLE, None)
            before = _sockets()
            try:
                return train()
            except Exception as error:
                reason = _broken(error, keepers)
                if not reason:
                    raise
                # As text: a record that kept the exception would keep what its frames hold.
                _log.warning("a collective broke; this rank waits for the next attempt\n%s", traceback.format_exc())
            # The frames of ``train`` are gone with the exception, and with them what they held.
            _leave_the_others(_sockets() - before, keepers)
            _say(line, waits=True, reason=reason)
            _go_on(line)
            _say(line, waits=False)


def keeps(keeper: StepKeeper) -> None:
    """Register a keeper: the training has restored its state, and captures its steps from here on."""
    for keepers in _noted:
        keepers.append(keeper)


@contextlib.contextmanager
def _noting() -> Iterator[list[StepKeeper]]:
    _noted.append([])
    try:
        yield _noted[-1]
    finally:
        _noted.pop()


def _connected() -> socket.socket | None:
    """Connect to the launcher's runner, which then knows this rank's restart point; None: there is none."""
    name = os.environ.get(SOCKET_VARIABLE, "")
    if not name or not {RANK_VARIABLE, ATTEMPT_VARIABLE} <= os.environ.keys() or torch.accelerator.is_available():
        return None
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        line.connect(b"\0" + name.encode())
        _say(line, waits=False)
    except OSError as error:
        line.close()
        _log.warning("no restart point: the launcher's runner does not answer (%s)", error)
        return None
    return line


def _say(line: socket.socket, *, waits: bool, reason: str = "") -> None:
    rank, attempt = int(os.environ[RANK_VARIABLE]), int(os.environ[ATTEMPT_VARIABLE])
    line.sendall(msgspec.json.encode(AtPoint(rank, attempt, waits, reason[:REASON_CHARS_MAX])))


def _broken(error: Exception, keepers: Sequence[StepKeeper]) -> str:
    """Return what is said of a collective that broke in a training that can go on; "" for any other error."""
    of_peers = isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and _OF_PEERS.search(str(error)))
    if not of_peers or not any(keeper.counts["captured"] for keeper in keepers):
        return ""
    if os.environ.get(HOOK_ATTEMPT_VARIABLE) != os.environ[ATTEMPT_VARIABLE]:
        # Its agent would go on to name the attempt before, and the server take its node for one that says nothing.
        _log.warning("this rank does not go on in the next attempt: the hook was not attached in the training function")
        return ""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _leave_the_others(opened: set[tuple[int, str]], keepers: list[StepKeeper]) -> None:
    """No connection to another rank is left: those that still wait for this one in a collective leave it, too.

    ``opened`` are the sockets of ``train``. A group that is destroyed closes its own only once nothing holds it.
    """
    for descriptor, _ in opened:
        _shut_down(descriptor)
    os.environ[LAST_GROUP_VARIABLE] = _last_group()
    while keepers:
        keepers.pop().abandon()
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # models that are wrapped hold their groups in cycles


def _sockets() -> set[tuple[int, str]]:
    """Return the sockets of this process: their descriptors, and which sockets they are."""
    found = set()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - the entry of the listing itself is gone by then
        with contextlib.suppress(OSError):
            what = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
            if what.startswith("socket:"):
                found.add((int(name), what))
    return found


def _shut_down(descriptor: int) -> None:
    """A TCP connection has ended for both sides, unless it is that to the store. Listening sockets stay as they are."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
        tcp = copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM
        if tcp and str(copy.getpeername()[1]) != os.environ.get("MASTER_PORT"):
            copy.shutdown(socket.SHUT_RDWR)


def _last_group() -> str:
    """Return the highest number among this process's groups in torch's flight recorder, which never forgets one."""
    try:
        # A private name: without it collectives of later attempts are not reported.
        reported = json.loads(sys.modules["torch._C._distributed_c10d"]._dump_fr_trace_json(False, False))
        return str(max((int(number) for number in reported.get("pg_status", {})), default=-1))
    except Exception as error:  # noqa: BLE001 - the training goes on
        _log.warning("the flight recorder does not say which process groups are over: %r", error)
        return "unknown"


def _go_on(line: socket.socket) -> None:
    """The environment is that of the next attempt. Raises ConnectionError."""
    content = line.recv(PACKET_BYTES_MAX)
    if not content:
        raise ConnectionError("the launcher's runner has ended while this rank waited for the next attempt")
    word = msgspec.json.decode(content, type=GoOn)
    os.environ.update(word.env)
    _log.warning("this rank goes on in attempt %d", word.attempt)
