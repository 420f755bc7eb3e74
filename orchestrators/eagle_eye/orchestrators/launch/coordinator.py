"""Carries out what the state machine orders, and tells it what happens. The impure half of the launcher."""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from eagle_eye.orchestrators.errors import CannotCarryOutError
from eagle_eye.orchestrators.launch import happenings as on
from eagle_eye.orchestrators.launch import messages
from eagle_eye.orchestrators.launch import orders as to
from eagle_eye.orchestrators.launch.checkpoints import Checkpoint, choose_checkpoint, find_checkpoints
from eagle_eye.orchestrators.launch.machine import ENDED, Phase, Rules, State, due_s, step
from eagle_eye.orchestrators.launch.memory import Memory, MemoryFile
from eagle_eye.orchestrators.launch.nodes import RUNNER, NodeRunner
from eagle_eye.orchestrators.launch.output import Output
from eagle_eye.orchestrators.protocol import JobState
from eagle_eye.schema.action import JobUpdate, MemberRank

# The name by which the server knows that it may ask for restarts.
RESTART_OWNER = "eagle-eye"
PING_EVERY_S = 2.0
LEASE_S = 30.0
RETRY_AFTER_S = 5.0
RETRIES_MAX = 3
WORD_S = 0.25
LAST_WORD_S = 2.0
ENDED_WITHIN_S = 5.0


@dataclass(frozen=True)
class Job:
    """What runs, and how a command is run on a node.

    ``{node}`` and ``{index}`` (its place in the list of nodes) are substituted in each word of ``exec_words``
    and in the values of ``env``. ``command`` is what follows ``python`` on the command line of a rank.
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

    def on_node(self, text: str, node: str) -> str:
        """Return the text with the node's name and index put in."""
        return text.replace("{node}", node).replace("{index}", str(self.nodes.index(node)))


class ServerLink(Protocol):
    """How the job's state gets to Eagle Eye."""

    @property
    def in_touch(self) -> bool:
        """Whether word from Eagle Eye can be expected."""

    def tell(self, job: str, update: JobUpdate) -> None:
        """The server will hear of it."""

    def flush(self, within_s: float) -> bool:
        """Return whether the server has heard everything, after at most ``within_s``."""


class NoServer:
    """Nobody to tell."""

    in_touch = False

    def tell(self, job: str, update: JobUpdate) -> None:
        """Do nothing."""

    def flush(self, within_s: float) -> bool:  # noqa: ARG002 - the protocol's name
        """Return True: nothing is owed."""
        return True


class Coordinator:
    """Runs the job from ``run`` until it has ended. ``post`` and ``ask`` may be called from any thread."""

    def __init__(
        self,
        job: Job,
        rules: Rules,
        memory: MemoryFile,
        link: ServerLink,
        output: Output,
        attempts_before: int = 0,
    ) -> None:
        self._job = job
        self._rules = rules
        self._memory = memory
        self._link = link
        self._output = output
        kept = memory.memory
        self._state = State(
            # Further than any launcher got before: what was asked about those attempts is void.
            attempt=max(kept.attempt, attempts_before) + 1,
            excluded=frozenset(kept.excluded),
            draining=frozenset(kept.draining),
            distrusted=tuple(kept.distrusted),
        )
        # A SimpleQueue, because signal handlers put into it as well.
        self._happenings: queue.SimpleQueue[on.Happening] = queue.SimpleQueue()
        self._runners: dict[str, NodeRunner] = {}
        self._retries: dict[str, int] = {}
        self._retry_due_s: dict[str, float] = {}
        self._requests = itertools.count(1)
        self._answers: dict[int, Future[tuple[bool, str]]] = {}
        self._ranks: dict[str, list[messages.Rank]] = {}
        self._store: Any = None
        self._resumed: Checkpoint | None = None
        self._ping_due_s = 0.0
        self._end: to.End | None = None
        self._closed = False

    def post(self, happening: on.Happening) -> None:
        """The happening will be dealt with; safe in a signal handler."""
        self._happenings.put(happening)

    def ask(self, make: Callable[[int], on.Happening]) -> str:
        """Return the answer to what is asked, once there is one; raises CannotCarryOutError with the reason."""
        if self._closed:
            raise CannotCarryOutError("the launcher has ended")
        request = next(self._requests)
        answer: Future[tuple[bool, str]] = Future()
        self._answers[request] = answer
        self.post(make(request))
        success, text = answer.result()
        if not success:
            raise CannotCarryOutError(text)
        return text

    def job_state(self) -> JobState:
        """Return the attempt that counts and the nodes that may be named."""
        state = self._state
        return JobState(state.attempt, frozenset(self._job.nodes), state.phase not in ENDED)

    def run(self) -> int:
        """The job has ended and no rank runs any more; returns the exit code."""
        # Torch takes seconds to import: meanwhile the runners do the same.
        threading.Thread(target=_import_store, name="import", daemon=True).start()
        try:
            self._output.say("warming", self._state.attempt, {"nodes": list(self._job.nodes)})
            for node in self._job.nodes:
                if node not in self._state.excluded:
                    self._open(node)
            self._take(on.Opened())
            while self._end is None:
                self._take(self._next())
                self._keep_runners()
        finally:
            self._close()
        return self._end.exit_code

    def _next(self) -> on.Happening:
        due = min(due_s(self._state), self._ping_due_s, *self._retry_due_s.values(), float("inf"))
        try:
            return self._happenings.get(timeout=max(0.0, due - time.monotonic()))
        except queue.Empty:
            return on.Tick()

    def _take(self, happening: on.Happening) -> None:
        if isinstance(happening, on.RunnerLost):
            happening = self._try_again(happening)
        moment = on.Moment(time.monotonic(), time.time())
        self._state, orders = step(self._rules, self._state, happening, moment)
        for order in orders:
            self._carry_out(order)

    def _carry_out(self, order: to.Order) -> None:
        match order:
            case to.TellServer(state, attempt, nodes):
                self._tell(state, attempt, nodes)
            case to.Running():
                self._running(order)
            case to.Answer(request, success, text):
                self._answers.pop(request).set_result((success, text))
            case to.Say(event, fields):
                self._output.say(event, self._state.attempt, fields)
            case to.Persist():
                self._persist()
            case to.End():
                self._end = order
                self._output.say(order.phase, self._state.attempt, {"reason": order.reason})
            case _:
                self._order_runners(order)

    def _order_runners(self, order: to.RunnerOrder) -> None:
        match order:
            case to.StartRanks():
                self._start_ranks(order)
            case to.StopRanks(nodes):
                for node in nodes:
                    self._runners[node].stop()
            case to.Abandon(node, _):
                self._retry_due_s.pop(node, None)
                if node in self._runners:
                    self._runners[node].abandon()
            case to.Revive(node):
                self._retries.pop(node, None)
                self._retry_due_s[node] = 0.0

    def _start_ranks(self, order: to.StartRanks) -> None:
        job = self._job
        try:
            self._resumed = choose_checkpoint(find_checkpoints(job.checkpoint_dir), order.distrusted)
            if self._store is not None:
                self._store.close()
            self._store = _import_store()(job.store_host, job.store_port)
        except OSError as error:
            self.post(on.StartImpossible(order.attempt, f"{type(error).__name__}: {error}"))
            return
        resume_from = self._resumed.path if self._resumed else ""
        self._ranks = {}
        self._output.say("starting", order.attempt, {"nodes": list(order.nodes), "resume_from": resume_from})
        for node_rank, node in enumerate(order.nodes):
            self._runners[node].run(self._start_message(order, node, node_rank, resume_from))

    def _start_message(self, order: to.StartRanks, node: str, node_rank: int, resume_from: str) -> messages.Start:
        job = self._job
        return messages.Start(
            attempt=order.attempt,
            run_id=f"{job.name}-{order.attempt}",
            node=node,
            node_rank=node_rank,
            nodes=len(order.nodes),
            ranks_per_node=job.ranks_per_node,
            store_host=self._store.host,
            store_port=self._store.port,
            env={
                "EAGLE_EYE_JOB": job.name,
                "EAGLE_EYE_ATTEMPT": str(order.attempt),
                "EAGLE_EYE_NODE": node,
                "EAGLE_EYE_RESUME_FROM": resume_from,
            },
            command=list(job.command),
            log_dir=str(job.log_dir / f"attempt-{order.attempt}" / node),
        )

    def _running(self, order: to.Running) -> None:
        ranks = [
            {"rank": rank.rank, "node": node, "device": rank.local_rank, "pid": rank.pid}
            for node in order.nodes
            for rank in self._ranks.get(node, [])
        ]
        step_number = self._resumed.step if self._resumed else None
        resumed = "the beginning" if step_number is None else f"step {step_number}"
        text = f"attempt {order.attempt} runs on {', '.join(order.nodes)} from {resumed}"
        if order.unconfirmed:
            text += f"; {', '.join(order.unconfirmed)} did not confirm that its ranks stopped"
        self._output.say(
            "running",
            order.attempt,
            {
                "nodes": list(order.nodes),
                "ranks": ranks,
                "resumed_step": step_number,
                "unconfirmed": list(order.unconfirmed),
            },
        )
        for request in order.requests:
            self._answers.pop(request).set_result((True, text))

    def _tell(self, state: str, attempt: int, nodes: tuple[str, ...]) -> None:
        each = self._job.ranks_per_node
        ranks = [
            MemberRank(node_rank * each + device, node, device)
            for node_rank, node in enumerate(nodes)
            for device in range(each)
        ]
        self._link.tell(self._job.name, JobUpdate(attempt, state, ranks, RESTART_OWNER))
        # What follows are exits of ranks: the server should know by then that they are no crash.
        if state == Phase.CANCELLED:
            self._link.flush(LAST_WORD_S)
        elif self._link.in_touch:
            self._link.flush(WORD_S)

    def _persist(self) -> None:
        state = self._state
        memory = Memory(
            self._job.name, state.attempt, sorted(state.excluded), sorted(state.draining), list(state.distrusted)
        )
        try:
            self._memory.keep(memory)
        except OSError as error:
            # The job can go on without; a launcher started later would not know what this one knew.
            self._output.say("forgetful", state.attempt, {"reason": f"the state is not on disk: {error}"})

    def _open(self, node: str) -> None:
        job = self._job
        command = [*(job.on_node(word, node) for word in job.exec_words), job.python, *RUNNER]
        log = job.log_dir / f"runner-{node}.log"
        try:
            # In the environment as well, so that what runs for the job on a node can be told in a process list.
            marks = {"EAGLE_EYE_JOB": job.name, "EAGLE_EYE_NODE": node}
            runner = NodeRunner(node, command, marks, log, self._heard, self._gone)
        except OSError as error:
            self._gone(node, f"its runner cannot be started: {error}")
            return
        if (former := self._runners.get(node)) is not None:
            former.close(0.0)
        self._runners[node] = runner
        runner.start({name: job.on_node(value, node) for name, value in job.env.items()}, LEASE_S)

    def _keep_runners(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._ping_due_s:
            self._ping_due_s = now_s + PING_EVERY_S
            for runner in self._runners.values():
                runner.ping()
        for node in [node for node, due in self._retry_due_s.items() if now_s >= due]:
            del self._retry_due_s[node]
            self._open(node)

    def _heard(self, node: str, message: messages.FromRunner) -> None:
        """On the runner's thread: what a runner says becomes something that happened."""
        match message:
            case messages.Ready():
                self.post(on.RunnerReady(node))
            case messages.Started(attempt, ranks):
                self._ranks[node] = ranks
                self.post(on.RanksStarted(node, attempt))
            case messages.Ended(attempt, success, exits, detail):
                codes = tuple((one.rank, one.exit_code) for one in exits)
                in_touch = self._link.in_touch
                self.post(on.RanksEnded(node, attempt, success, codes, detail, in_touch))
            case messages.Stopped(survivors):
                self.post(on.RanksStopped(node, len(survivors)))

    def _gone(self, node: str, detail: str) -> None:
        """On the runner's thread: it has ended."""
        self.post(on.RunnerLost(node, detail, in_touch=self._link.in_touch))

    def _try_again(self, lost: on.RunnerLost) -> on.RunnerLost:
        """Another runner will be started on the node, unless it is out or that was tried often enough."""
        tries = self._retries[lost.node] = self._retries.get(lost.node, 0) + 1
        returning = tries <= RETRIES_MAX and lost.node not in self._state.excluded
        if returning:
            self._retry_due_s[lost.node] = time.monotonic() + RETRY_AFTER_S
        return replace(lost, returning=returning)

    def _close(self) -> None:
        """Every runner has ended or was killed, everybody who waits for an answer has one."""
        self._closed = True
        for answer in list(self._answers.values()):
            answer.set_result((False, "the launcher has ended"))
        self._answers.clear()
        closing = [threading.Thread(target=runner.close, args=(ENDED_WITHIN_S,)) for runner in self._runners.values()]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
        if self._store is not None:
            self._store.close()


def _import_store() -> type[Any]:
    from eagle_eye.orchestrators.launch.store import AttemptStore

    return AttemptStore
