"""A runner's standby: a process on the node that has imported what ranks need, and forks them at once.

It is prepared before the node is ready, serves every attempt, and is replaced when it exits. Touches processes.
"""

from __future__ import annotations

import os
import queue
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec

from eagle_eye.orchestrators.launch.messages import Forked, Prepare, Prepared, Start, line
from eagle_eye.orchestrators.launch.own_process import note, set_defaults

PROCESS = ("-u", "-m", "eagle_eye.orchestrators.launch.standby_process")
# /proc shows a process's strings at their size when executed: room for the ranks' variables and words.
ROOM_VARIABLE = "EAGLE_EYE_STANDBY_ROOM"
ROOM_BYTES = 8_192
WORDS_BYTES = 1_024
MESSAGE_BYTES_MAX = 128 << 10
# Not at once: after an exit, the attempt being started needs the processor.
REPLACED_AFTER_S = 30.0
REPLACED_AFTER_S_MAX = 3_600.0
FORKED_WITHIN_S = 10.0

_decode = msgspec.json.Decoder(Prepared).decode
_decode_forked = msgspec.json.Decoder(Forked).decode


class Standby:
    """One standby process, prepared from construction on. Raises OSError."""

    def __init__(self, prepare: Prepare) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = {**os.environ, ROOM_VARIABLE: "." * ROOM_BYTES}
        set_defaults(env, prepare.ranks_per_node)
        # With it, an import that checks for GPUs does not initialize them.
        env.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        command = [sys.executable, *PROCESS, str(theirs.fileno()), " " * WORDS_BYTES]
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, env=env, pass_fds=[theirs.fileno()], start_new_session=True
                )
            self._socket.send(line(prepare))
        except OSError:
            self._socket.close()
            raise
        self.pid = self._process.pid

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when it has a message or exits."""
        return self._socket.fileno()

    def heard(self) -> Prepared | None:
        """Return its message, None where it has exited."""
        try:
            content = self._socket.recv(MESSAGE_BYTES_MAX)
            return _decode(content) if content else None
        except (OSError, msgspec.DecodeError):
            return None

    def start(self, start: Start, write_end: int) -> None:
        """Run the attempt in its child, which reports on ``write_end``. Raises OSError.

        The child exists on return, so killing the runner's descendants includes it.
        """
        socket.send_fds(self._socket, [line(start)], [write_end])
        self._socket.settimeout(FORKED_WITHIN_S)
        try:
            _decode_forked(self._socket.recv(MESSAGE_BYTES_MAX))
        except msgspec.DecodeError:
            raise ConnectionError("it has ended") from None
        finally:
            self._socket.settimeout(None)

    def close(self) -> None:
        """End it; attempts started by it are told to end."""
        self._socket.close()
        self._process.kill()
        self._process.wait()

    def disown(self) -> None:
        """Release in a forked process, which does not own it."""
        self._socket.close()


class StandbyKeeper:
    """Keeps a standby, where one is wanted. All but ``outcome`` is called from the runner's main thread.

    Also because PR_SET_PDEATHSIG ends the process with the thread that started it.
    """

    def __init__(self, selector: selectors.BaseSelector, clock: Callable[[], float] = time.monotonic) -> None:
        self._selector = selector
        self._clock = clock
        self._wanted: Prepare | None = None
        self._standby: Standby | None = None
        self._ready = False
        self._failures = 0
        self._replaced_due_s = float("inf")
        self._outcome: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.reason = ""  # why there is none, although wanted
        self.rss_bytes = 0

    @property
    def pid(self) -> int | None:
        """Return its pid."""
        return self._standby.pid if self._standby else None

    @property
    def text(self) -> str:
        """Return for people whether ranks will come from it; "" where none is wanted."""
        if self._wanted is None:
            return ""
        if not self._ready:
            return f"not used: {self.reason}"
        imports = ", ".join(["torch", *self._wanted.imports])
        return f"ready: {imports} imported, {self.rss_bytes / 2**20:.0f} MiB"

    @property
    def why_not(self) -> str:
        """Return why ranks were spawned; "" where no standby is wanted."""
        if self._wanted is None:
            return ""
        return self.reason or "this version of torch starts its workers in a way that is not known here"

    def prepare(self, wanted: Prepare | None) -> None:
        """Prepare a standby, if one is wanted and missing."""
        self._wanted = wanted
        if wanted is None or self._standby is not None:
            if self._ready:
                self._outcome.put("")
            return
        self._ready, self._replaced_due_s, self.reason = False, float("inf"), "it is being prepared"
        self._outcome = queue.SimpleQueue()
        try:
            self._standby = Standby(wanted)
        except OSError as error:
            self._failed(f"it cannot be started: {error.strerror}")
            return
        self._selector.register(self._standby, selectors.EVENT_READ, self._read)

    def outcome(self, within_s: float) -> str:
        """Return "" once it is ready, else why it cannot be used; thread-safe, once per ``prepare``."""
        try:
            return self._outcome.get(timeout=within_s)
        except queue.Empty:
            return f"it was not ready within {within_s:g} s"

    def settle(self, reason: str) -> None:
        """Apply the result of ``outcome``: a late standby is no longer awaited."""
        if reason and self._standby is not None and not self._ready:
            self._give_up(reason)

    def _give_up(self, reason: str) -> None:
        """Drop it; none is prepared until requested again."""
        self._drop()
        self.reason = reason
        self._replaced_due_s = float("inf")
        note(f"ranks will be spawned, the standby is not used: {reason}")

    def start(self, start: Start, write_end: int) -> bool:
        """Return whether the attempt is run by the standby; its ranks are then forked.

        If not, a child of the standby may be left that is unaware of this.
        """
        if self._standby is None or not self._ready:
            return False
        try:
            self._standby.start(start, write_end)
        except OSError as error:
            self._failed(f"it does not take the attempt: {error.strerror or error}")
            return False
        return True

    def tend(self) -> None:
        """Replace a standby that has exited, when due."""
        if self._clock() >= self._replaced_due_s:
            self.prepare(self._wanted)

    def disown(self) -> None:
        """Release in a forked process, which does not own it."""
        if self._standby is not None:
            self._standby.disown()

    def close(self) -> None:
        """End the standby."""
        self._wanted = None
        self._drop()

    def _read(self) -> None:
        assert self._standby is not None  # noqa: S101 - registered only while there is one
        word = self._standby.heard()
        if word is None:
            self._failed("it has ended" if self._ready else "it ended before it was ready")
        elif word.reason:
            self._outcome.put(word.reason)
            self._give_up(word.reason)
        else:
            self._ready, self.reason, self.rss_bytes = True, "", word.rss_bytes
            self._outcome.put("")

    def _failed(self, reason: str) -> None:
        self._outcome.put(reason)
        self._drop()
        self.reason = reason
        wait_s = min(REPLACED_AFTER_S_MAX, REPLACED_AFTER_S * 2.0 ** min(self._failures, 16))
        self._failures += 1
        self._replaced_due_s = self._clock() + wait_s
        note(f"the standby: {reason}; another one is prepared in {wait_s:g} s")

    def _drop(self) -> None:
        if self._standby is not None:
            self._selector.unregister(self._standby)
            self._standby.close()
        self._standby, self._ready = None, False
