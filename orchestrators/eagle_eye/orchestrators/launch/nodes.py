"""The runners on the nodes, as seen by the coordinator: processes with a pipe each way."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import psutil

from eagle_eye.orchestrators.launch.logs import shorten_runner_log
from eagle_eye.orchestrators.launch.messages import (
    Check,
    Configure,
    FromRunner,
    Hold,
    Look,
    Ping,
    Regroup,
    Start,
    Stop,
    ToRunner,
    decode_from_runner,
    line,
)
from eagle_eye.orchestrators.logs import one_line

RUNNER = ("-m", "eagle_eye.orchestrators.launch.runner")
KILLED_WITHIN_S = 2.0


class NodeRunner:
    """A runner on a node, started when made. What it says and that it is gone is told to ``heard`` and ``gone``.

    Both are called from a thread of this runner. Writing never blocks: a runner that does not read is
    as good as gone, and is left to whoever waits for its answer.
    """

    def __init__(
        self,
        node: str,
        command: list[str],
        marks: Mapping[str, str],
        log: Path,
        heard: Callable[[str, FromRunner], None],
        gone: Callable[[str, str], None],
    ) -> None:
        self.node = node
        self._heard = heard
        self._gone = gone
        log.parent.mkdir(parents=True, exist_ok=True)
        shorten_runner_log(log)
        self._log = log
        self._heard_s = 0.0
        with log.open("ab") as stderr:
            # A session of its own: Ctrl-C in the terminal is for the coordinator alone.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **marks},
                start_new_session=True,
            )
        assert self._process.stdin is not None  # noqa: S101 - asked for above
        self._stdin = self._process.stdin
        os.set_blocking(self._stdin.fileno(), False)
        self._writing = threading.Lock()
        self._abandoned = False
        self._thread = threading.Thread(target=self._listen, name=f"runner-{node}", daemon=True)

    @property
    def alive(self) -> bool:
        """Whether its process runs and it was not given up."""
        return not self._abandoned and self._process.poll() is None

    @property
    def silent_s(self) -> float:
        """How long ago it said its last word; 0 where it has not said a first one yet."""
        return time.monotonic() - self._heard_s if self._heard_s else 0.0

    def start(self, configure: Configure) -> None:
        """The runner gets ready and will say so."""
        self._thread.start()
        self._send(configure)

    def check(self) -> None:
        """The runner has its node checked again and says what came of it."""
        self._send(Check())

    def look(self, attempt: int) -> None:
        """The runner says where the attempt's ranks are."""
        self._send(Look(attempt))

    def hold(self, job: str) -> None:
        """The runner says which steps of the job its node has in memory."""
        self._send(Hold(job, self.node))

    def run(self, start: Start) -> None:
        """The ranks will be started, replacing what runs."""
        self._send(start)

    def regroup(self, regroup: Regroup) -> None:
        """The ranks that run will go on in another attempt, once all of them wait at their restart points."""
        self._send(regroup)

    def stop(self) -> None:
        """What runs will be killed and the runner will confirm it."""
        self._send(Stop())

    def ping(self, *, store: bool) -> None:
        """The runner knows that the coordinator is there, and whether its node is to have a store."""
        self._send(Ping(store))

    def abandon(self) -> None:
        """The runner is not heard any more; what of it is on this machine has been killed."""
        self._abandoned = True
        _kill_tree(self._process.pid)

    def close(self, within_s: float) -> bool:
        """The runner was told to end; whether it has, after at most ``within_s``. A remaining one is killed."""
        with self._writing, contextlib.suppress(OSError):
            self._stdin.close()
        try:
            self._process.wait(within_s)
            ended = True
        except subprocess.TimeoutExpired:
            ended = False
            _kill_tree(self._process.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILLED_WITHIN_S)
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(KILLED_WITHIN_S)
        return ended

    def _send(self, message: ToRunner) -> None:
        with self._writing:
            if self._stdin.closed:
                return
            content = line(message)
            try:
                # Past the buffer: a partial line kept there would be sent in front of the next one.
                written = os.write(self._stdin.fileno(), content)
            except OSError:  # gone, or it does not read; either way the reader or a deadline tells
                return
            if written != len(content):
                self._process.kill()  # half a message cannot be taken back

    def _listen(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None  # noqa: S101 - asked for when started
        with stdout:
            for text in stdout:
                try:
                    message = decode_from_runner(text)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    # Banners of whatever runs commands on the node.
                    sys.stderr.write(f"{self.node}: {one_line(text.decode(errors='replace').rstrip())}\n")
                    continue
                self._heard_s = time.monotonic()
                if not self._abandoned:
                    self._heard(self.node, message)
        code = self._process.wait()
        if not self._abandoned:
            self._gone(self.node, f"its runner ended with {code}{self._last_words()}")

    def _last_words(self) -> str:
        try:
            lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        except OSError:
            return ""
        return f" ({lines[-1][:200]})" if lines else ""


def _kill_tree(pid: int) -> None:
    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
