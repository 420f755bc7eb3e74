"""The runners on the nodes, as seen by the coordinator: processes with a pipe in each direction."""

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
    CheckNode,
    Configure,
    FromRunner,
    Hold,
    Look,
    Ping,
    ReachStore,
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
    """A runner on a node, started on construction. Calls ``heard`` with its messages and ``gone`` on its exit.

    Both are called from a thread of this runner. Writing never blocks: a runner that does not read counts as lost,
    which its answer's deadline detects.
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
            # A session of its own: Ctrl-C in the terminal is only for the coordinator.
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
        """Seconds since its last message; 0 before its first one."""
        return time.monotonic() - self._heard_s if self._heard_s else 0.0

    def start(self, configure: Configure) -> None:
        """Tell the runner to get ready; it reports when it is."""
        self._thread.start()
        self._send(configure)

    def check(self) -> None:
        """Tell the runner to check its node again; it reports the result."""
        self._send(CheckNode())

    def look(self, attempt: int) -> None:
        """Ask the runner for the state of the attempt's ranks."""
        self._send(Look(attempt))

    def reach(self, store_host: str, store_port: int) -> None:
        """Ask the runner whether its node reaches the store."""
        self._send(ReachStore(store_host, store_port))

    def hold(self, job: str) -> None:
        """Ask the runner which steps of the job its node has in memory."""
        self._send(Hold(job, self.node))

    def run(self, start: Start) -> None:
        """Tell the runner to start the ranks, replacing running ones."""
        self._send(start)

    def regroup(self, regroup: Regroup) -> None:
        """Tell the runner to continue its ranks in another attempt, once all of them wait at their restart points."""
        self._send(regroup)

    def stop(self) -> None:
        """Tell the runner to kill everything that runs; it confirms."""
        self._send(Stop())

    def ping(self, *, store: bool) -> None:
        """Tell the runner that the coordinator is alive, and whether its node needs a store."""
        self._send(Ping(store))

    def abandon(self) -> None:
        """Ignore the runner from now on, and kill its local processes."""
        self._abandoned = True
        _kill_tree(self._process.pid)

    def close(self, within_s: float) -> bool:
        """Tell the runner to exit; return whether it did within ``within_s``. Kills it otherwise."""
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
                # Bypass the buffer: a partial line kept there would be sent before the next one.
                written = os.write(self._stdin.fileno(), content)
            except OSError:  # gone, or not reading; either the reader or a deadline detects it
                return
            if written != len(content):
                self._process.kill()  # a partial message cannot be undone

    def _listen(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None  # noqa: S101 - asked for when started
        with stdout:
            for text in stdout:
                try:
                    message = decode_from_runner(text)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    # Banners of the tool that runs commands on the node.
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
