"""Ranks that are forked from a process that has imported torch, for torch's elastic agent. Imports torch.

The agent starts its workers as executed binaries, or as functions: with the latter a script that exits by
``os._exit(0)`` never ends for the agent. So these are processes like the former, and only differ in how they start.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from torch.distributed.elastic.agent.server import local_elastic_agent
from torch.distributed.elastic.multiprocessing import SubprocessContext

from eagle_eye.orchestrators.launch.likeness import default_signals, forget, reseed, run_as_main, show
from eagle_eye.orchestrators.launch.own_process import PR_SET_PDEATHSIG, prctl
from eagle_eye.orchestrators.launch.standbys import ROOM_VARIABLE

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
