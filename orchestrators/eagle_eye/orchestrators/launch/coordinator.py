"""Carries out the state machine's orders, feeds it events, and saves its state. The impure half of the launcher."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import pickle
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import msgspec

from eagle_eye.orchestrators.launch import events as on
from eagle_eye.orchestrators.launch import logs, messages
from eagle_eye.orchestrators.launch import orders as to
from eagle_eye.orchestrators.launch.attempt import KILLED_MAX, pace_left_ratio
from eagle_eye.orchestrators.launch.blame import Raised
from eagle_eye.orchestrators.launch.checkpoints import (
    Checkpoint,
    Span,
    beginning,
    choose_checkpoint,
    find_checkpoints,
    in_memory,
)
from eagle_eye.orchestrators.launch.logs import Output
from eagle_eye.orchestrators.launch.machine import step
from eagle_eye.orchestrators.launch.runner import LAUNCH_VARIABLE
from eagle_eye.orchestrators.launch.runners import LaunchedJob, ObservedProgress, Runners, ServerLink
from eagle_eye.orchestrators.launch.state import ENDED, KnownStarts, LauncherNodes, Phase, Rules, State, due_s
from eagle_eye.orchestrators.ledger import write_whole
from eagle_eye.orchestrators.protocol import CannotCarryOutError, JobState, OrchestratorError
from eagle_eye.planning.plan import LAYOUT_VARIABLE, variable
from eagle_eye.schema.action import JobUpdate, MemberRank, ReportedExit
from eagle_eye.schema.checkpoint_files import MemoryStep, whole_in_memory


class LauncherMemory(msgspec.Struct, frozen=True):
    """The saved part of the state (state.py), and the id shared by the ranks of this folder's launchers.

    ``phase`` is the last launcher's; after a kill it is not a final one.
    """

    job: str
    attempt: int = 0
    excluded: list[str] = []
    draining: list[str] = []
    distrusted: list[Span] = []
    distrust_since_s: float | None = None
    suspected: list[float] = []
    doubted_s: float | None = None
    members: list[str] = []
    restarts: int = 0
    step_max: int | None = None
    starts: KnownStarts = KnownStarts()
    raised_before: Raised = Raised()
    phase: str = Phase.FINISHED.value
    launch: str = ""


def remember(memory: LauncherMemory, state: State) -> LauncherMemory:
    """Return the part of the state to save."""
    return msgspec.structs.replace(
        memory,
        attempt=state.attempt,
        excluded=sorted(state.excluded),
        draining=sorted(state.draining),
        distrusted=list(state.distrusted),
        distrust_since_s=state.distrust_since_s,
        suspected=list(state.suspected),
        doubted_s=state.doubted_s,
        members=list(state.members),
        restarts=state.restarts,
        step_max=state.step_max,
        starts=state.starts,
        raised_before=state.raised_before,
        phase=state.phase.value,
    )


def resume(memory: LauncherMemory, fleet: LauncherNodes, attempts_before: int = 0) -> State:
    """Return the next launcher's initial state: a new attempt, whatever the last one was doing.

    ``attempts_before`` is the attempt that the server knows of: requests about those attempts are void. The restart
    budget is reset where the last launcher exited by itself, and kept where it was killed.
    """
    known = frozenset(fleet.nodes)
    ended = memory.phase in ENDED
    excluded = frozenset(memory.excluded) & known
    return State(
        attempt=max(memory.attempt, attempts_before) + 1,
        members=tuple(node for node in memory.members if node in known)[: fleet.wanted],
        excluded=excluded,
        lost=excluded,  # no runner is started there: once readmitted, it is not waited for before it is ready
        draining=frozenset(memory.draining) & known,
        distrusted=tuple(memory.distrusted),
        distrust_since_s=memory.distrust_since_s,
        suspected=tuple(memory.suspected),
        doubted_s=memory.doubted_s,
        restarts=0 if ended else memory.restarts,
        step_max=memory.step_max,
        starts=memory.starts,
        raised_before=Raised() if ended else memory.raised_before,
    )


class MemoryFile:
    """The file in the state folder, locked until ``close``."""

    def __init__(self, folder: Path, job: str) -> None:
        """Raise OrchestratorError where another launcher uses the folder or it belongs to another job."""
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "launch.json"
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.memory = self._read(job)
        except BlockingIOError:
            os.close(self._lock)
            raise OrchestratorError(f"another launcher uses {folder}") from None
        except BaseException:
            os.close(self._lock)
            raise

    def keep(self, state: State) -> None:
        """Save the state to disk. Raises OSError."""
        memory = remember(self.memory, state)
        if memory != self.memory:
            write_whole(self._path, msgspec.json.format(msgspec.json.encode(memory)))
            self.memory = memory

    def close(self) -> None:
        """Release the folder for another launcher."""
        os.close(self._lock)

    def _read(self, job: str) -> LauncherMemory:
        try:
            memory = msgspec.json.decode(self._path.read_bytes(), type=LauncherMemory)
        except FileNotFoundError:
            memory = LauncherMemory(job)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise OrchestratorError(f"{self._path}: {error}; repair or remove it") from None
        if memory.job != job:
            raise OrchestratorError(f"{self._path} belongs to job {memory.job!r}; use another --state-dir")
        return memory if memory.launch else msgspec.structs.replace(memory, launch=secrets.token_hex(8))


# Verifies a checkpoint against its own table of contents. Reads files; executes nothing named in them.
#
# torch.distributed.checkpoint writes ``.metadata``, a pickle with each tensor's file, offset and length. It is
# unpickled without its classes, so that a forged one cannot execute anything.
METADATA_BYTES_MAX = 512 << 20


def flaw(folder: Path) -> str:
    """Return what is wrong with the checkpoint, "" where nothing is, or its table is in an unknown format.

    Each file in the table must exist, be readable, and have the length in the table.
    """
    try:
        lengths = _lengths(folder / ".metadata")
    except OSError as error:
        return f".metadata: {error.strerror}"
    except _UnknownTableError:
        return ""
    except Exception as error:  # noqa: BLE001 - whatever a pickle's bytes lead to
        return f".metadata cannot be read: {type(error).__name__}"
    for name, length in sorted(lengths.items()):
        path = folder / name
        try:
            with path.open("rb") as file:
                file.read(1)
            size = path.stat().st_size
        except OSError as error:
            return f"{name}: {error.strerror}"
        if size < length:
            return f"{name} has {size} bytes, its table of contents names {length}"
    return ""


class _UnknownTableError(Exception):
    """The file lists no files and lengths, or is too long."""


def _lengths(path: Path) -> dict[str, int]:
    if path.stat().st_size > METADATA_BYTES_MAX:
        raise _UnknownTableError
    with path.open("rb") as file:
        table = _Reader(file).load()
    lengths: dict[str, int] = {}
    for name, end in _places(table):
        lengths[name] = max(end, lengths.get(name, 0))
    if not lengths:
        raise _UnknownTableError
    return lengths


def _places(table: object) -> Iterator[tuple[str, int]]:
    """Yield each item's file, relative to the checkpoint, and its end offset."""
    stored = getattr(table, "storage_data", None)
    if not isinstance(stored, dict):
        raise _UnknownTableError
    for place in stored.values():
        name, offset, length = (getattr(place, key, None) for key in ("relative_path", "offset", "length"))
        if not (isinstance(name, str) and isinstance(offset, int) and isinstance(length, int)):
            continue
        # A path that leads out of the checkpoint is ignored.
        if not Path(name).is_absolute() and ".." not in Path(name).parts:
            yield name, offset + length


class _Reader(pickle.Unpickler):
    """An unpickler that replaces every class with a plain container."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ARG002 - the base's names
        return _Container


class _Container:
    """Accepts any arguments and attributes of a pickle."""

    def __new__(cls, *_: object, **__: object) -> Self:
        return super().__new__(cls)

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        """Take pickled attributes: a mapping, a pair with one for slots, or a class-specific state."""
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                self.__dict__.update(part)

    def append(self, _: object) -> None:
        """Take an item of a list."""

    def extend(self, _: object) -> None:
        """Take items of a list."""

    def __setitem__(self, _: object, __: object) -> None:
        """Take an item of a mapping."""


# Tracks the attempt's progress in a thread, since a checkpoint folder may hang and a server may be slow.
#
# Touches the checkpoint folder, and the server through a callback.
LOOK_EVERY_S = 1.0
# How many more steps an attempt may have made than its observed pace implies.
PACE_MARGIN = 3.0
STEPS_MARGIN = 20


@dataclass
class _Attempt:
    number: int
    resumed_step: int
    began_s: float  # monotonic
    known: set[tuple[str, float]]
    first: tuple[float, int] | None = None  # when the first step was seen, and which it was
    reported: bool = False
    captures_before: int = 0  # the last attempt, as counted by stores, with steps in the nodes' memory from before


class ProgressReporter:
    """Reports an attempt's first known step and each checkpoint that it completes.

    ``look`` returns the server's view of the job, None where it has none; ``in_memory`` the copies of steps in the
    nodes' memory.
    """

    def __init__(
        self,
        folder: Path | None,
        look: Callable[[], ObservedProgress | None],
        post: Callable[[on.LaunchEvent], None],
        clock: Callable[[], float] = time.monotonic,
        in_memory: Callable[[], list[MemoryStep]] = list,
    ) -> None:
        self._folder = folder
        self._in_memory = in_memory
        self._look_at_server = look
        self._post = post
        self._clock = clock
        self._attempt: _Attempt | None = None
        self._changed = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def start(self) -> None:
        """Start watching attempts."""
        self._thread.start()

    def stop(self) -> None:
        """Stop reporting. A thread that hangs in a folder is left behind."""
        self._stopping = True
        self._changed.set()

    def watch(
        self, attempt: int, resumed_step: int | None, known: Iterable[Checkpoint], copies: Iterable[MemoryStep] = ()
    ) -> None:
        """Watch this attempt from now on instead of the last one.

        ``known`` checkpoints existed before, and these ``copies`` in the nodes' memory.
        """
        before = {(one.path, one.written_s) for one in known}
        captures_before = max((copy.attempt for copy in copies), default=0)
        self._attempt = _Attempt(attempt, resumed_step or 0, self._clock(), before, captures_before=captures_before)
        self._changed.set()

    def report_progress(self) -> None:
        """Report what is new."""
        attempt = self._attempt
        if attempt is None:
            return
        if not attempt.reported and (sight := self._look_at_server()) is not None and sight.attempt == attempt.number:
            self._step_seen(attempt, sight.step)
        if not attempt.reported:
            self._in_memory_seen(attempt)
        for path, written_s in sorted(self._checkpoints() - attempt.known, key=lambda one: one[1]):
            attempt.known.add((path, written_s))
            attempt.reported = True
            self._post(on.CheckpointWritten(attempt.number, int(path.rpartition("_")[2])))

    def _in_memory_seen(self, attempt: _Attempt) -> None:
        """Report a step that the attempt has captured on each rank."""
        captured = [copy for copy in self._in_memory() if copy.attempt > attempt.captures_before]
        whole = [step for step in whole_in_memory(captured) if step > attempt.resumed_step]
        if whole and attempt is self._attempt:
            attempt.reported = True
            self._post(on.StepSeen(attempt.number, min(whole), min(whole)))

    def _step_seen(self, attempt: _Attempt, step: int) -> None:
        """Report the first step once a later one shows the pace, and that it is not a dead attempt's last report."""
        now_s = self._clock()
        if attempt.first is None or step <= attempt.first[1]:
            attempt.first = attempt.first if attempt.first and step == attempt.first[1] else (now_s, step)
            return
        seen_s, first = attempt.first
        pace = (step - first) / max(now_s - seen_s, 1e-3)
        most = attempt.resumed_step + int(PACE_MARGIN * pace * (seen_s - attempt.began_s)) + STEPS_MARGIN
        attempt.reported = True
        self._post(on.StepSeen(attempt.number, first, most))

    def _checkpoints(self) -> set[tuple[str, float]]:
        with contextlib.suppress(OSError):
            return {(one.path, one.written_s) for one in find_checkpoints(self._folder)}
        return set()

    def _run(self) -> None:
        while not self._stopping:
            self._changed.wait(LOOK_EVERY_S if self._attempt is not None else None)
            self._changed.clear()
            if not self._stopping:
                self.report_progress()


# The name by which the server knows that it can request restarts.
RESTART_OWNER = "eagle-eye"
WORD_S = 0.25
LAST_WORD_S = 2.0
CHECKPOINT_WITHIN_S, CHECKPOINT_LOOK_S = 30.0, 0.5
IN_MEMORY_WITHIN_S = 2.0  # for nodes to report what they hold


class Coordinator:
    """Runs the job from ``run`` until it has ended. ``post`` and ``request`` are thread-safe."""

    def __init__(
        self,
        job: LaunchedJob,
        rules: Rules,
        memory: MemoryFile,
        link: ServerLink,
        output: Output,
        attempts_before: int = 0,
        look: Callable[[], ObservedProgress | None] = lambda: None,
    ) -> None:
        """``look`` returns the server's view of the job's progress; ``attempts_before`` see persisted_state.resume."""
        self._job = job
        self._rules = rules
        self._memory = memory
        self._link = link
        self._output = output
        self._state = resume(memory.memory, rules.fleet, attempts_before)
        self._interrupted = memory.memory.phase not in ENDED
        # A SimpleQueue, because signal handlers also put into it.
        self._events: queue.SimpleQueue[on.LaunchEvent] = queue.SimpleQueue()
        self._runners = Runners(
            job, memory.memory.launch, self.post, lambda: link.in_touch, lambda: self._state.excluded
        )
        self._watcher = ProgressReporter(job.checkpoint_dir, look, self.post, in_memory=self._steps_in_memory)
        self._requests = itertools.count(1)
        self._answers: dict[int, Future[tuple[bool, str]]] = {}
        self._store: Any = None
        self._found: list[Checkpoint] = []
        self._copies: list[MemoryStep] = []
        self._begun: dict[str, int] = {}  # the attempt in which each node's processes started and have their logs
        self._end: to.End | None = None
        self._reported: tuple[to.TellServer, float | None] | None = None
        self._closed = False

    def post(self, event: on.LaunchEvent) -> None:
        """Queue the event; safe in a signal handler."""
        self._events.put(event)

    def request(self, make: Callable[[int], on.LaunchEvent]) -> str:
        """Return the answer to the request, once there is one. Raises CannotCarryOutError with the reason."""
        request = next(self._requests)
        answer: Future[tuple[bool, str]] = Future()
        self._answers[request] = answer
        # After it is registered: from then on _close would answer it.
        if self._closed:
            raise CannotCarryOutError("the launcher has ended")
        self.post(make(request))
        success, text = answer.result()
        if not success:
            raise CannotCarryOutError(text)
        return text

    def wait_for_checkpoint(self, within_s: float = CHECKPOINT_WITHIN_S) -> str:
        """Return a step captured after this call that is complete in the nodes' memory. Raises CannotCarryOutError."""
        until_s = time.monotonic() + within_s
        before: int | None = None
        while True:
            copies = self._runners.steps_in_memory(self._state.members, IN_MEMORY_WITHIN_S)
            if before is None:
                before = max((copy.step for copy in copies), default=-1)
            newest = max((one.step for one in in_memory(copies)), default=-1)
            if newest > before:
                return f"step {newest} is whole in the memory of the job's nodes"
            if self._closed or time.monotonic() > until_s:
                known = f"the newest in memory is step {newest}" if newest >= 0 else "none is in memory"
                raise CannotCarryOutError(f"the job kept no step within {within_s:g} s; {known}")
            time.sleep(CHECKPOINT_LOOK_S)

    def job_state(self) -> JobState:
        """Return the current attempt and the nodes that may be named."""
        state = self._state
        return JobState(state.attempt, frozenset(self._job.nodes), state.phase not in ENDED)

    def run(self) -> int:
        """Run until the job has ended and no rank runs; return the exit code."""
        # Importing torch takes seconds: meanwhile the runners do the same.
        threading.Thread(target=_import_store, name="import", daemon=True).start()
        self._watcher.start()
        try:
            self._begin()
            while self._end is None:
                self._take(self._next())
                self._runners.tend()
        finally:
            self._close()
        return self._end.exit_code

    def _begin(self) -> None:
        state = self._state
        where = {"logs": str(self._job.log_dir)}
        if self._interrupted:
            text = f"a launcher ended in the midst of attempt {state.attempt - 1}; going on from there"
            self._output.say("resuming", state.attempt, {"reason": text, "restarts": state.restarts})
        self._output.say("warming", state.attempt, {"nodes": list(self._job.nodes), **where})
        try:
            logs.mark(self._job.log_dir, self._memory.memory.launch)
        except OSError as error:
            self._output.say("forgetful", state.attempt, {"reason": f"no logs are gathered: {error}"})
        self._persist()
        for node in self._job.nodes:
            if node not in state.excluded:
                self._runners.open(node)
        self._take(on.Opened())

    def _next(self) -> on.LaunchEvent:
        due = min(due_s(self._state), self._runners.due_s)
        try:
            return self._events.get(timeout=max(0.0, due - time.monotonic()))
        except queue.Empty:
            return on.Tick()

    def _take(self, event: on.LaunchEvent) -> None:
        match event:
            case on.RunnerLost(node):
                event = replace(event, returning=self._runners.failed(node))
            case on.RunnerReady(node):
                self._runners.ready(node)
        moment = on.Moment(time.monotonic(), time.time())
        self._state, orders = step(self._rules, self._state, event, moment)
        for order in orders:
            self._carry_out(order)
        # Spares come and go during an attempt, and with them the cost of an exclusion.
        if self._reported is not None and self._reported[1] != pace_left_ratio(self._rules, self._state):
            self._tell(self._reported[0])

    def _carry_out(self, order: to.Order) -> None:
        match order:
            case to.TellServer():
                self._tell(order)
            case to.TellUnfit(node, reasons):
                self._link.take_out(node, f"failed its check before joining job {self._job.name}: {reasons}")
            case to.ChooseCheckpoint():
                threading.Thread(target=self._choose, args=(order,), name="choose", daemon=True).start()
            case to.Running():
                self._running(order)
            case to.Answer(request, success, text):
                self._answers.pop(request).set_result((success, text))
            case to.Say(name, fields):
                self._output.say(name, self._state.attempt, fields)
            case to.Persist():
                self._persist()
            case to.End():
                self._end = order
                where = {"reason": order.reason, "logs": str(self._job.log_dir)}
                self._output.say(order.phase, self._state.attempt, where)
            case _:
                self._order_runners(order)

    def _order_runners(self, order: to.RunnerOrder) -> None:
        match order:
            case to.StartRanks():
                self._start_ranks(order)
            case to.LookAtRanks(attempt, nodes):
                self._runners.request_states(nodes, attempt)
            case to.AskReach(nodes):
                if self._store is not None:  # before the first attempt there is none
                    self._runners.reach(nodes, self._store.host, self._store.port)
            case to.StopRanks(nodes):
                for node in nodes:
                    self._runners.stop(node)
            case to.Abandon(node, _):
                self._runners.abandon(node)
            case to.CheckAgain(node):
                self._runners.check(node)
            case to.Revive(node):
                self._runners.revive(node)

    def _steps_in_memory(self) -> list[MemoryStep]:
        """Return the copies of steps that the attempt's nodes hold in memory. Thread-safe."""
        if not self._runners.keeps_in_memory:
            return []
        return self._runners.steps_in_memory(self._state.members, IN_MEMORY_WITHIN_S)

    def _choose(self, order: to.ChooseCheckpoint) -> None:
        """Choose the checkpoint to resume from, without damaged ones; in a thread, because a folder may hang."""
        try:
            found = find_checkpoints(self._job.checkpoint_dir)
            copies = self._runners.steps_in_memory(order.nodes, IN_MEMORY_WITHIN_S)
            left = known = in_memory(copies) + found
            while (chosen := choose_checkpoint(left, order.distrusted, order.suspected)) is not None:
                if chosen.folder is None or not (wrong := flaw(chosen.folder)):
                    break
                fields = {"step": chosen.step, "path": chosen.path, "reason": wrong}
                self._output.say("checkpoint_damaged", order.attempt, fields)
                left = [one for one in left if one != chosen]
        except OSError as error:
            self.post(on.StartImpossible(order.attempt, f"checkpoints: {type(error).__name__}: {error}"))
            return
        self._found, self._copies = found, copies
        if chosen is None:
            word = beginning(known, order.distrusted, finds_newest=self._runners.keeps_in_memory)
            self.post(on.CheckpointChosen(order.attempt, None, word))
        else:
            self.post(on.CheckpointChosen(order.attempt, chosen.step, chosen.path, chosen.written_s))

    def _start_ranks(self, order: to.StartRanks) -> None:
        job = self._job
        try:
            if self._store is not None:
                self._store.close()
            self._store = _import_store()(job.store_host, job.store_port)
        except OSError as error:
            self.post(on.StartImpossible(order.attempt, f"{type(error).__name__}: {error}"))
            return
        self._runners.started = {}
        self._watcher.watch(order.attempt, order.step, self._found, self._copies)
        self._begun = {node: self._begun[node] if node in order.kept else order.attempt for node in order.nodes}
        logs.drop_old(job.log_dir, order.attempt, self._begun.values())
        self._output.say(
            "starting",
            order.attempt,
            {
                "nodes": list(order.nodes),
                "resume_from": order.resume_from,
                **self._laid_out(order.nodes),
                "logs": str(job.log_dir / f"attempt-{order.attempt}"),
            },
        )
        for node_rank, node in enumerate(order.nodes):
            if node in order.kept:
                self._runners.regroup(node, self._regroup_message(order, node))
            else:
                self._runners.run(node, self._start_message(order, node, node_rank))

    def _regroup_message(self, order: to.StartRanks, node: str) -> messages.Regroup:
        host, port = self._store.host, self._store.port
        meeting = {"MASTER_ADDR": host, "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": self._run_id(order)}
        return messages.Regroup(order.attempt, host, port, {**self._env(order, node), **meeting})

    def _run_id(self, order: to.StartRanks) -> str:
        return f"{self._job.name}-{order.attempt}"

    def _start_message(self, order: to.StartRanks, node: str, node_rank: int) -> messages.Start:
        job = self._job
        return messages.Start(
            attempt=order.attempt,
            run_id=self._run_id(order),
            node=node,
            node_rank=node_rank,
            nodes=len(order.nodes),
            ranks_per_node=job.ranks_per_node,
            store_host=self._store.host,
            store_port=self._store.port,
            env=self._env(order, node),
            command=list(job.command),
            log_dir=str(job.log_dir / f"attempt-{order.attempt}" / node),
            log_bytes_max=job.log_bytes_max,
        )

    def _env(self, order: to.StartRanks, node: str) -> dict[str, str]:
        plan = self._rules.layouts
        return {
            "EAGLE_EYE_JOB": self._job.name,
            "EAGLE_EYE_ATTEMPT": str(order.attempt),
            "EAGLE_EYE_NODE": node,
            "EAGLE_EYE_RESUME_FROM": order.resume_from,
            LAUNCH_VARIABLE: self._memory.memory.launch,
            **({} if plan is None else {LAYOUT_VARIABLE: variable(plan, len(order.nodes))}),
        }

    def _running(self, order: to.Running) -> None:
        started = {node: said for node in order.nodes if (said := self._runners.started.get(node)) is not None}
        ranks = [
            {"rank": rank.rank, "node": node, "device": rank.local_rank, "pid": rank.pid}
            for node, said in started.items()
            for rank in said.ranks
        ]
        step_number = self._state.resumed_step
        resumed = "the beginning" if step_number is None else f"step {step_number}"
        text = f"attempt {order.attempt} runs on {', '.join(order.nodes)} from {resumed}"
        if laid_out := self._laid_out(order.nodes):
            text += f", laid out as {laid_out['layout']}"
        if kept := [node for node, said in started.items() if said.kept]:
            text += f"; the processes on {', '.join(kept)} stayed"
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
                "kept": kept,
                "standbys": [node for node, said in started.items() if said.standby],
                "spawned": {node: said.why_not for node, said in started.items() if said.why_not},
            },
        )
        for request in order.requests:
            self._answers.pop(request).set_result((True, text))

    def _laid_out(self, nodes: Sequence[str]) -> dict[str, str]:
        """Return the mixture of pipelines that the nodes run, by its key; empty where there is no plan."""
        plan = self._rules.layouts
        return {} if plan is None else {"layout": plan.layout(len(nodes)).mixture}

    def _tell(self, word: to.TellServer) -> None:
        each = self._job.ranks_per_node
        ranks = [
            MemberRank(node_rank * each + device, node, device)
            for node_rank, node in enumerate(word.nodes)
            for device in range(each)
        ]
        before = self._reported[0] if self._reported is not None else word
        if before.attempt == word.attempt:  # a later report on the attempt does not take this back
            word = replace(word, held_up_by=tuple(sorted({*before.held_up_by, *word.held_up_by})))
        left = pace_left_ratio(self._rules, self._state)
        self._reported = (word, left)
        told = self._state.done_told if word.attempt == self._state.attempt else ()
        ended = dict.fromkeys(sorted(told)[:KILLED_MAX], 0)
        ended |= self._state.killed if word.attempt == self._state.attempt else {}
        exits = [ReportedExit(rank, code) for rank, code in sorted(ended.items())]
        update = JobUpdate(
            word.attempt, word.state, ranks, RESTART_OWNER, self._job.owner, list(word.held_up_by), left, exits
        )
        self._link.report_job(self._job.name, update)
        # Exits of ranks follow: the server should know by then that they are not crashes.
        if word.state == Phase.CANCELLED:
            self._link.flush(LAST_WORD_S)
        elif self._link.in_touch:
            self._link.flush(WORD_S)

    def _persist(self) -> None:
        try:
            self._memory.keep(self._state)
        except OSError as error:
            # The job can continue without it; a launcher started later would lack this state.
            reason = f"the state is not on disk: {error}"
            self._output.say("forgetful", self._state.attempt, {"reason": reason})

    def _close(self) -> None:
        """End or kill every runner, and answer all pending requests."""
        self._closed = True
        self._watcher.stop()
        for answer in list(self._answers.values()):
            answer.set_result((False, "the launcher has ended"))
        self._answers.clear()
        self._runners.close()
        if self._store is not None:
            self._store.close()


def _import_store() -> type[Any]:
    from eagle_eye.orchestrators.launch.store import AttemptStore

    return AttemptStore
