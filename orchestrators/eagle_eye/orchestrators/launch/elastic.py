"""Runs one attempt on one node with PyTorch's elastic agent. Imports torch; runs in its own process.

The elastic agent starts and watches the node's ranks, as torchrun would. Two of its documented extension points are
used: a rendezvous handler, because the launcher has already decided the members and their ranks, and the log location.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException, SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from eagle_eye.orchestrators.launch.logs import SizeLimit
from eagle_eye.orchestrators.launch.messages import (
    Ended,
    FromRunner,
    RankDone,
    RankExit,
    Start,
    Started,
    StartedRank,
)
from eagle_eye.orchestrators.launch.own_process import (
    PR_SET_PDEATHSIG,
    default_signals,
    forget,
    prctl,
    reseed,
    run_as_main,
    set_defaults,
    show,
)
from eagle_eye.orchestrators.launch.standbys import ROOM_VARIABLE

# Ranks that are forked from a process that has imported torch, for torch's elastic agent.
#
# The agent starts its workers as executed binaries, or as functions: with the latter a script that exits by
# ``os._exit(0)`` never ends for the agent. So these are processes like the former, and only differ in how they start.
POLL_S = 0.01
LOST_EXIT_CODE = 255


class ForkedProcess:
    """A child process with the methods of ``subprocess.Popen`` that the elastic agent uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # its exit status was already collected elsewhere
                self.returncode = LOST_EXIT_CODE
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Return the exit code; raises subprocess.TimeoutExpired after ``timeout`` seconds."""
        until_s = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() >= until_s:
                raise subprocess.TimeoutExpired(f"rank with process id {self.pid}", timeout)
            time.sleep(POLL_S)
        return code


class ForkedRank:
    """A rank's process and its logs: replaces the elastic agent's own ``SubprocessHandler``."""

    def __init__(
        self, words: Sequence[str], env: Mapping[str, str], stdout: str, stderr: str, kept: Collection[int]
    ) -> None:
        """``words`` is the command line that would be executed: Python, its flag, the command."""
        # Also open in this process, which limits their size.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._logs = [os.open(path, flags, 0o666) for path in (stdout, stderr)]
        pid = os.fork()
        if pid == 0:
            _become_rank(words, env, self._logs, kept)
        self.proc = ForkedProcess(pid)

    def close(self, death_sig: signal.Signals = signal.SIGTERM) -> None:
        """Send the signal to the rank and its children."""
        try:
            os.killpg(self.proc.pid, death_sig)
        except ProcessLookupError:  # it has no process group of its own yet
            with suppress(ProcessLookupError):
                os.kill(self.proc.pid, death_sig)
        while self._logs:
            os.close(self._logs.pop())


class ForkedRanks(SubprocessContext):
    """The node's ranks. They differ from torch's own only in how they start."""

    kept: Collection[int] = ()

    def _start(self) -> None:
        handlers: dict[int, Any] = {
            local: ForkedRank(
                (str(self.entrypoint), *self.args[local]),
                self.envs[local],
                self.stdouts[local],
                self.stderrs[local],
                self.kept,
            )
            for local in range(self.nprocs)
        }
        self.subprocess_handlers = handlers


def fork_ranks(kept: Collection[int]) -> None:
    """Make this process's elastic agent fork its ranks, if this torch version starts them in the usual place.

    Its way of starting processes is not configurable; everything else it prepares for them is kept.
    """
    if "start_processes" in vars(local_elastic_agent):
        vars(local_elastic_agent)["start_processes"] = partial(_start_processes, frozenset(kept))


def _start_processes(
    kept: Collection[int], name: str, entrypoint: str, args: Any, envs: Any, logs_specs: Any, **_: Any
) -> ForkedRanks:
    context = ForkedRanks(name=name, entrypoint=entrypoint, args=args, envs=envs, logs_specs=logs_specs)
    context.kept = kept
    context.start()
    return context


def _become_rank(words: Sequence[str], env: Mapping[str, str], logs: Sequence[int], kept: Collection[int]) -> NoReturn:
    try:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for standard, log in enumerate(logs, start=1):
            os.dup2(log, standard)
        forget(kept)
        default_signals()
        os.environ.pop(ROOM_VARIABLE, None)
        os.environ.update(env)
        show(words, os.environ)
        reseed()
        _python, _flag, *command = words
        run_as_main(command)
    except BaseException:  # noqa: BLE001 - nothing of the parent may go on in this process
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)


STORE_TIMEOUT_S = 60.0
MONITOR_INTERVAL_S = 0.1
# Only for ranks left over when this process itself is terminated; the runner's own stop kills at once.
SHUTDOWN_TIMEOUT_S = 1
TAIL_CHARACTERS = 1_500


class AssignedRendezvous(RendezvousHandler):
    """A rendezvous whose outcome the launcher has decided: this node's rank, and the launcher's own store.

    PyTorch's ``c10d`` rendezvous would let the nodes vote (seconds, and ranks by order of arrival), its
    ``static`` one would have node 0 serve the store, which dies with that node.
    """

    def __init__(self, start: Start) -> None:
        self._start = start
        self._client: TCPStore | None = None

    def get_backend(self) -> str:
        """Return the name under which events mention this rendezvous."""
        return "assigned"

    @property
    def use_agent_store(self) -> bool:
        """Whether ranks join the store that serves the agents instead of making one."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return this node's place. Raises torch's DistError where the launcher's store is unreachable."""
        start = self._start
        self._client = TCPStore(
            start.store_host, start.store_port, is_master=False, timeout=timedelta(seconds=STORE_TIMEOUT_S)
        )
        store = PrefixStore(f"{start.run_id}/agents", self._client)
        info = RendezvousStoreInfo(start.store_host, start.store_port)
        return RendezvousInfo(store, start.node_rank, start.nodes, info)

    def is_closed(self) -> bool:
        """Whether a further rendezvous would be refused."""
        return False

    def set_closed(self) -> None:
        """Do nothing: there is one rendezvous per attempt."""

    def num_nodes_waiting(self) -> int:
        """Return 0: nodes come and go only between attempts."""
        return 0

    def get_run_id(self) -> str:
        """Return the job and attempt."""
        return self._start.run_id

    def shutdown(self) -> bool:
        """Return True: the store belongs to the launcher."""
        return True


class RankLogs(LogsSpecs):
    """Logs in ``<folder>/rank<N>.stdout.log`` and ``.stderr.log``."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self._folder = folder

    @property
    def root_log_dir(self) -> str:
        """Return the folder."""
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return each local rank's log paths; torch's error file is beside its logs."""
        self._folder.mkdir(parents=True, exist_ok=True)
        stem = {local: self._folder / f"rank{env['RANK']}" for local, env in envs.items()}
        errors = {local: f"{path}.error.json" for local, path in stem.items()}
        for local, env in envs.items():
            env["TORCHELASTIC_ERROR_FILE"] = errors[local]
        return LogsDest(
            stdouts={local: f"{path}.stdout.log" for local, path in stem.items()},
            stderrs={local: f"{path}.stderr.log" for local, path in stem.items()},
            error_files=errors,
        )


class TellingAgent(LocalElasticAgent):
    """A node's elastic agent that reports which ranks it has started, whether they were forked, and each that is done.

    A rank is done if it exited with 0 while others of the node go on.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs: LogsSpecs,
        started: Callable[[list[StartedRank], bool], None],
        done: Callable[[int], None],
    ) -> None:
        super().__init__(spec, logs, start_method="spawn", shutdown_timeout=SHUTDOWN_TIMEOUT_S)
        self._tell_started = started
        self._tell_done = done
        self._done: set[int] = set()

    def _exit_barrier(self) -> None:
        """Do nothing: agents would wait for each other to keep the store alive, which is the launcher's.

        An agent whose ranks continued in a later attempt shares no store with a new node's agent.
        """

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        pids: dict[int, Any] = super()._start_workers(worker_group)
        self._tell_started(
            [
                StartedRank(worker.global_rank, worker.local_rank, pids[worker.local_rank])
                for worker in worker_group.workers
            ],
            isinstance(self._pcontext, ForkedRanks),
        )
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        handlers = getattr(self._pcontext, "subprocess_handlers", {}) if result.state is WorkerState.HEALTHY else {}
        for local, handler in handlers.items():
            if local not in self._done and handler.proc.poll() == 0:
                self._done.add(local)
                self._tell_done(worker_group.workers[local].global_rank)
        return result


def run_attempt(start: Start, say: Callable[[FromRunner], None], kept: Collection[int] | None = None) -> None:
    """Run the attempt's ranks on this node until they exit, and report start and end.

    They are forked from this process and share the files ``kept`` with it; with None they are spawned.
    """
    if kept is not None:
        fork_ranks(kept)
    os.environ.update(start.env)
    set_defaults(os.environ, start.ranks_per_node)
    # Agents then do not meet to number their ranks: where ranks on other nodes stay, their agents start nothing new.
    os.environ["TORCH_ELASTIC_WORKER_IDENTICAL"] = "1"
    logs = Path(start.log_dir)
    spec = WorkerSpec(
        role="default",
        local_world_size=start.ranks_per_node,
        rdzv_handler=AssignedRendezvous(start),
        entrypoint=sys.executable,
        args=("-u", *start.command),
        # Only the launcher restarts the job: a second restarter here would race with it.
        max_restarts=0,
        monitor_interval=MONITOR_INTERVAL_S,
    )
    limits: list[SizeLimit] = []

    def started(ranks: list[StartedRank], forked: bool) -> None:
        say(Started(start.attempt, ranks, forked))
        files = [logs / f"rank{rank.rank}.{stream}.log" for rank in ranks for stream in ("stdout", "stderr")]
        limits.append(SizeLimit(files, start.log_bytes_max))
        limits[-1].start()

    agent = TellingAgent(spec, RankLogs(logs), started, lambda rank: say(RankDone(start.attempt, rank)))
    try:
        result = agent.run()
    except SignalException as error:
        say(Ended(start.attempt, success=False, detail=str(error)))
    except Exception as error:  # noqa: BLE001 - whatever it was, the launcher must hear of it rather than wait
        say(Ended(start.attempt, success=False, detail=f"{type(error).__name__}: {error}"[:TAIL_CHARACTERS]))
    else:
        say(_ended(start, logs, result))


def _ended(start: Start, logs: Path, result: RunResult) -> Ended:
    if not result.is_failed():
        return Ended(start.attempt, success=True)
    failures = sorted(result.failures.items(), key=lambda item: item[1].timestamp)
    exits = [RankExit(rank, failure.exitcode) for rank, failure in failures]
    # The first to fail by itself: the others only report that the agent ended them.
    first = next((exit_.rank for exit_ in exits if exit_.exit_code != -15), exits[0].rank if exits else None)
    return Ended(start.attempt, success=False, exits=exits, detail=_tail(logs, first))


def _tail(logs: Path, rank: int | None) -> str:
    if rank is None:
        return ""
    try:
        text = (logs / f"rank{rank}.stderr.log").read_bytes()[-4 * TAIL_CHARACTERS :].decode(errors="replace")
    except OSError as error:
        return f"rank {rank}: no log ({error.strerror})"
    return f"rank {rank}: {text.strip()[-TAIL_CHARACTERS:]}"
