"""Processes that have torch imported already: forked from one that has, and has nothing else, no thread above all.

A rank begins in milliseconds and not in the two seconds that torch takes: so a minute holds dozens of kills.

    with Warm() as warm:
        process = warm.fork("benchmarks.checkpoint.job:train", {"rank": 0}, environment, log)
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from typing_extensions import Self

WITHIN_S = 120.0
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class Forked:
    """A process that was forked. Its number is its own until ``poll`` has said that it has ended."""

    def __init__(self, warm: Warm, pid: int) -> None:
        self.pid = pid
        self.code: int | None = None
        self._warm = warm

    def poll(self) -> int | None:
        """Return its exit code, negative the signal that ended it, None while it runs."""
        if self.code is None:
            self.code = self._warm.ask({"poll": self.pid})["code"]
        return self.code

    def kill(self) -> None:
        """It gets SIGKILL, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)  # it is no other's: only ``poll`` lets go of the number


class Warm:
    """The process that forks. It and all that it has forked end with this object."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.checkpoint.warm"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            env=os.environ | ONE_THREAD,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fork(self, function: str, arguments: Mapping[str, Any], environment: Mapping[str, str], log: Path) -> Forked:
        """Run ``module:function`` with these arguments in a process of its own; what it prints goes to the log."""
        wish = {"fork": function, "arguments": dict(arguments), "environment": dict(environment), "log": str(log)}
        return Forked(self, self.ask(wish)["pid"])

    def ask(self, wish: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer. Raises ConnectionError where the process has ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(wish).encode() + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise ConnectionError("the process that forks has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End it, and all that it has forked."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(WITHIN_S)
        self._process.stdout.close()


def main() -> None:
    """Fork what is asked for until standard input ends."""
    import torch
    import torch._dynamo  # which DistributedDataParallel would import anew in each rank: longer than all the rest
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp

    import eagle_eye.checkpoint.checkpointer
    import eagle_eye.checkpoint.command  # noqa: F401

    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    children: set[int] = set()
    for line in sys.stdin:
        wish = json.loads(line)
        if "poll" in wish:
            pid, status = os.waitpid(wish["poll"], os.WNOHANG)
            children.discard(pid)
            print(json.dumps({"code": os.waitstatus_to_exitcode(status) if pid else None}), file=answers)
            continue
        threads = sum(1 for _ in Path("/proc/self/task").iterdir())
        if threads != 1:  # one that holds a lock is not there in the child to let go of it
            raise RuntimeError(f"{threads} threads where a fork needs one alone")
        pid = os.fork()
        if pid == 0:
            _run(wish)
        children.add(pid)
        print(json.dumps({"pid": pid}), file=answers)
    for pid in children:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _run(wish: dict[str, Any]) -> None:
    code = 1
    try:
        os.setsid()
        os.environ.update(wish["environment"])
        nothing = os.open(os.devnull, os.O_RDONLY)
        log = os.open(wish["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(nothing, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        module, _, function = wish["fork"].partition(":")
        getattr(importlib.import_module(module), function)(**wish["arguments"])
        code = 0
    except BaseException:  # noqa: BLE001 - it is in the log, whatever it was
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
