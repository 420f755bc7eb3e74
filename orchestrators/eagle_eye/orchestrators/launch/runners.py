"""All runners of a job: started, pinged, restarted when lost. Touches processes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection

from eagle_eye.orchestrators.launch import events as on
from eagle_eye.orchestrators.launch import logs, messages
from eagle_eye.orchestrators.launch.job import LaunchedJob
from eagle_eye.orchestrators.launch.nodes import RUNNER, NodeRunner
from eagle_eye.schema.memory_steps import MemoryStep

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

    def look(self, nodes: Collection[str], attempt: int) -> None:
        """Ask the nodes' runners, as far as there are any, for the state of their ranks."""
        for node in self._runners.keys() & set(nodes):
            self._runners[node].look(attempt)

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
