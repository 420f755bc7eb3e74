"""The user's job, and all runners of it: started, pinged, restarted when lost. Touches processes."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import psutil

from eagle_eye.orchestrators.command_line import one_line
from eagle_eye.orchestrators.launch import events as on
from eagle_eye.orchestrators.launch import logs, messages
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
from eagle_eye.schema.action import JobUpdate
from eagle_eye.schema.checkpoint_files import MemoryStep


@dataclass(frozen=True)
class LaunchedJob:
    """The job, and how a command is run on a node.

    ``{node}`` and ``{index}`` (its place in the list of nodes) are substituted in each word of ``exec_words``
    and in the values of ``env``. ``command`` is what follows ``python`` on the command line of a rank. ``check`` is
    how a node is checked before it joins (runner.py). ``standby`` is "auto", "on" or "off" (standbys.py);
    ``standby_imports`` are the modules that standbys import besides torch. ``owner`` is the user who runs it.
    """

    name: str
    nodes: tuple[str, ...]
    ranks_per_node: int
    command: tuple[str, ...]
    exec_words: tuple[str, ...]
    python: str
    env: Mapping[str, str]
    store_host: str
    store_port: int
    checkpoint_dir: Path | None
    log_dir: Path
    log_bytes_max: int = 64 << 20
    check: str = "off"
    check_within_s: float = 60.0
    standby: str = "off"
    standby_imports: tuple[str, ...] = ()
    owner: str = ""

    def on_node(self, text: str, node: str) -> str:
        """Return the text with the node's name and index substituted."""
        return text.replace("{node}", node).replace("{index}", str(self.nodes.index(node)))


class ObservedProgress(NamedTuple):
    """An attempt's progress when the server was queried: the last finished step."""

    attempt: int
    step: int


class ServerLink(Protocol):
    """Reports the job's state to Eagle Eye."""

    @property
    def in_touch(self) -> bool:
        """Whether reports from Eagle Eye can be expected."""

    def report_job(self, job: str, update: JobUpdate) -> None:
        """Report the update to the server."""

    def take_out(self, node: str, reason: str) -> None:
        """Have the server count the node as out of service, if it knows the node."""

    def flush(self, within_s: float) -> bool:
        """Return whether the server has received everything, after at most ``within_s``."""


class NoServer:
    """No server to report to."""

    in_touch = False

    def report_job(self, job: str, update: JobUpdate) -> None:
        """Do nothing."""

    def take_out(self, node: str, reason: str) -> None:
        """Do nothing."""

    def flush(self, within_s: float) -> bool:  # noqa: ARG002 - the protocol's name
        """Return True: nothing is pending."""
        return True


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

    def request_state(self, attempt: int) -> None:
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


PING_EVERY_S = 2.0
LEASE_S = 30.0
SILENT_AFTER_S = 3 * PING_EVERY_S
RETRY_AFTER_S = 5.0
RETRY_AFTER_S_MAX = 300.0
# A node lost this often in a row is no longer awaited, but still retried.
RETURNS_MAX = 3
ENDED_WITHIN_S = 5.0


_log = logging.getLogger(__name__)


class Runners:
    """The runners by node. All but ``close`` is called from one thread; messages are posted from the runners' own."""

    def __init__(
        self,
        job: LaunchedJob,
        launch: str,
        post: Callable[[on.LaunchEvent], None],
        in_touch: Callable[[], bool],
        excluded: Callable[[], frozenset[str]],
    ) -> None:
        """``launch`` is the id of the state folder; ``excluded`` nodes get no runner."""
        self._job = job
        self._launch = launch
        self._post = post
        self._in_touch = in_touch
        self._excluded = excluded
        self._runners: dict[str, NodeRunner] = {}
        self._failures: dict[str, int] = {}  # in a row, by node
        self._retry_due_s: dict[str, float] = {}
        self._ping_due_s = 0.0
        self._doing: dict[str, str] = {}
        self.started: dict[str, messages.Started] = {}  # of the running attempt, by node
        self._memory_heard = threading.Condition()
        self._in_memory: dict[str, list[MemoryStep]] = {}  # each node's last message...
        self._memory_words: dict[str, int] = {}  # ...and how many there were
        self._keeps_in_memory = False

    @property
    def keeps_in_memory(self) -> bool:
        """Whether the job keeps checkpoints in memory, as far as nodes have reported."""
        return self._keeps_in_memory

    @property
    def due_s(self) -> float:
        """When ``tend`` should be called next, on the monotonic clock."""
        return min(self._ping_due_s, *self._retry_due_s.values(), float("inf"))

    def open(self, node: str) -> None:
        """Start a runner on the node, replacing an earlier one."""
        job = self._job
        command = [*(job.on_node(word, node) for word in job.exec_words), job.python, *RUNNER]
        self._doing.pop(node, None)
        try:
            # In the environment as well, so that the job's processes on a node are recognizable in a process list.
            marks = {"EAGLE_EYE_JOB": job.name, "EAGLE_EYE_NODE": node}
            log = job.log_dir / f"runner-{node}.log"
            runner = NodeRunner(node, command, marks, log, self._heard, self._gone)
        except OSError as error:
            self._gone(node, f"its runner cannot be started: {error}")
            return
        if (former := self._runners.get(node)) is not None:
            former.close(0.0)
        self._runners[node] = runner
        env = {name: job.on_node(value, node) for name, value in job.env.items()}
        standby = None
        if job.standby != "off":
            imports, vouched = list(job.standby_imports), job.standby == "on"
            standby = messages.Prepare(list(job.command), imports, job.ranks_per_node, vouched)
        runner.start(messages.Configure(env, LEASE_S, node, self._launch, job.check, job.check_within_s, standby))

    def run(self, node: str, start: messages.Start) -> None:
        """Start the node's ranks."""
        self._runners[node].run(start)

    def regroup(self, node: str, regroup: messages.Regroup) -> None:
        """Continue the node's ranks in another attempt."""
        self._runners[node].regroup(regroup)

    def stop(self, node: str) -> None:
        """Kill everything that runs on the node."""
        if node in self._runners:
            self._runners[node].stop()

    def request_states(self, nodes: Collection[str], attempt: int) -> None:
        """Ask the nodes' runners, as far as there are any, for the state of their ranks."""
        for node in self._runners.keys() & set(nodes):
            self._runners[node].request_state(attempt)

    def reach(self, nodes: Collection[str], store_host: str, store_port: int) -> None:
        """Ask the nodes' runners, as far as there are any, whether their nodes reach the store."""
        for node in self._runners.keys() & set(nodes):
            self._runners[node].reach(store_host, store_port)

    def steps_in_memory(self, nodes: Collection[str], within_s: float) -> list[MemoryStep]:
        """Return these nodes' copies of the job's steps, as far as they answer in time.

        Thread-safe.
        """
        with self._memory_heard:
            before = {node: self._memory_words.get(node, 0) for node in nodes if node in self._runners}

            def answered() -> list[str]:
                return [node for node, words in before.items() if self._memory_words.get(node, 0) > words]

            for node in before:
                self._runners[node].hold(self._job.name)
            self._memory_heard.wait_for(lambda: len(answered()) == len(before), within_s)
            return [copy for node in answered() for copy in self._in_memory[node]]

    def check(self, node: str) -> None:
        """Check the node again, by its current runner or a new one."""
        if (runner := self._runners.get(node)) is not None and runner.alive:
            runner.check()
        else:
            self.revive(node)

    def abandon(self, node: str) -> None:
        """Give up the node's runner; another one is tried later."""
        if node in self._runners:
            self._runners[node].abandon()
        self.failed(node)

    def revive(self, node: str) -> None:
        """Start a runner at once on a node without one."""
        self._failures.pop(node, None)
        if (runner := self._runners.get(node)) is None or not runner.alive:
            self._retry_due_s[node] = 0.0

    def ready(self, node: str) -> None:
        """The node's runner is well: forget its failures."""
        self._failures.pop(node, None)

    def failed(self, node: str) -> bool:
        """Schedule another runner on the node; return whether it is worth waiting for."""
        if node in self._excluded():
            self._retry_due_s.pop(node, None)
            return False
        failures = self._failures[node] = self._failures.get(node, 0) + 1
        wait_s = min(RETRY_AFTER_S_MAX, RETRY_AFTER_S * 2.0 ** max(0, failures - RETURNS_MAX))
        self._retry_due_s[node] = time.monotonic() + wait_s
        return failures <= RETURNS_MAX

    def tend(self) -> None:
        """Ping runners, report silent ones, and restart those that are due."""
        now_s = time.monotonic()
        if now_s >= self._ping_due_s:
            self._ping_due_s = now_s + PING_EVERY_S
            for node, runner in self._runners.items():
                if not runner.alive:
                    continue
                runner.ping(store=self._keeps_in_memory)
                if not self._keeps_in_memory:
                    runner.hold(self._job.name)
                if (silent_s := runner.silent_s) > SILENT_AFTER_S:
                    returning = node not in self._excluded() and self._failures.get(node, 0) < RETURNS_MAX
                    self._post(on.RunnerSilent(node, silent_s, returning, self._in_touch()))
        for node in [node for node, due in self._retry_due_s.items() if now_s >= due]:
            del self._retry_due_s[node]
            if node not in self._excluded():
                self.open(node)

    def close(self) -> None:
        """End or kill every runner."""
        closing = [threading.Thread(target=runner.close, args=(ENDED_WITHIN_S,)) for runner in self._runners.values()]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()

    def _heard(self, node: str, message: messages.FromRunner) -> None:
        """On the runner's thread: turn its message into an event."""
        match message:
            case messages.Alive(doing):
                self._note_doing(node, doing)
            case messages.Ready(_, check, standby):
                self._post(on.RunnerReady(node, check, standby))
            case messages.Unfit(reasons):
                self._post(on.NodeUnfit(node, reasons))
            case messages.Started() | messages.RankAtPoint() | messages.RankDone() | messages.Seen() | messages.Ended():
                self._heard_of_ranks(node, message)
            case messages.Reached(reaches):
                self._post(on.NodeReached(node, reaches))
            case messages.Stopped(survivors):
                self._post(on.RanksStopped(node, len(survivors)))
            case messages.Held(copies):
                self._note_memory(node, copies)
            case messages.Logs(attempt, files):
                self._gather(node, attempt, files)

    def _heard_of_ranks(
        self,
        node: str,
        message: messages.Started | messages.RankAtPoint | messages.RankDone | messages.Seen | messages.Ended,
    ) -> None:
        match message:
            case messages.Started():
                self.started[node] = message
                self._post(on.RanksStarted(node, message.attempt, tuple(rank.rank for rank in message.ranks)))
            case messages.RankAtPoint(attempt, rank, waits, reason):
                self._post(on.RankReachedPoint(node, attempt, rank, waits, reason, self._in_touch()))
            case messages.RankDone(attempt, rank):
                self._post(on.RankFinished(node, attempt, rank))
            case messages.Seen():
                self._post(_seen(node, message, self._in_touch()))
            case messages.Ended(attempt, success, exits, detail):
                codes = tuple((one.rank, one.exit_code) for one in exits)
                self._post(on.RanksEnded(node, attempt, success, codes, detail, self._in_touch()))

    def _note_doing(self, node: str, doing: str) -> None:
        if doing and self._doing.get(node) != doing:
            self._doing[node] = doing
            self._post(on.RunnerBusy(node, doing))

    def _note_memory(self, node: str, copies: list[MemoryStep]) -> None:
        with self._memory_heard:
            self._in_memory[node] = copies
            self._memory_words[node] = self._memory_words.get(node, 0) + 1
            self._keeps_in_memory = self._keeps_in_memory or bool(copies)
            self._memory_heard.notify_all()

    def _gather(self, node: str, attempt: int, files: dict[str, str]) -> None:
        try:
            logs.gather(self._job.log_dir / f"attempt-{attempt}" / node, files)
        except OSError as error:
            _log.warning("logs of %s are not kept: %s", node, error)

    def _gone(self, node: str, detail: str) -> None:
        """On the runner's thread: it has exited."""
        self._post(on.RunnerLost(node, detail, in_touch=self._in_touch()))


def _seen(node: str, said: messages.Seen, in_touch: bool) -> on.RanksSeen:
    absent = tuple(one.rank for one in said.ranks if one.joined is False)
    stopped = tuple(one.rank for one in said.ranks if one.stopped)
    joined = sum(one.joined is True for one in said.ranks)
    return on.RanksSeen(node, said.attempt, joined, absent, stopped, said.reaches is False, in_touch)
