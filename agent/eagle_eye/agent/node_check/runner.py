"""Runs the active check as a child process: own session, timeout, bounded output; terminated if the agent dies.

It gets none of the agent's secrets and is the kernel's preferred OOM victim. Touches: processes.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

OUTPUT_BYTES_MAX = 192 << 10  # a report of 16 GPUs is 40 KiB; the server accepts 256 KiB
COMPLAINT_BYTES_MAX = 2_048
READ_BYTES = 1 << 16
LOOK_EVERY_S = 0.5  # how often to check whether it must end: the longest a starting job waits for this
ENDS_S = 10.0  # it cleans up its own children; after this it is killed

# Variables for finding libraries and for communication: what the checks' own children need.
_KEPT = ("PATH", "HOME", "TMPDIR", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "VIRTUAL_ENV", "CUDA_HOME")
_KEPT_PREFIXES = ("NCCL_", "UCX_", "GLOO_")

# This small program execs the command. PR_SET_PDEATHSIG (1): it ends with the thread that started it, and so with a
# killed agent. Only the standard library, by a Python that reads no site files.
_START = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
try:
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")
except OSError:
    pass
os.execvp(sys.argv[2], sys.argv[2:])
"""


class Ran(NamedTuple):
    """The outcome. ``status`` None: it was ended, and ``why`` says for what reason."""

    status: int | None
    output: bytes
    complaint: str
    why: str = ""


def run(
    command: Sequence[str],
    until_s: float,
    in_the_way: Callable[[], str],
    monotonic_s: Callable[[], float] = time.monotonic,
) -> Ran:
    """Run it until it exits, or ``until_s``, or ``in_the_way`` says why it must stop. Raises OSError.

    Must be called from a thread that lives as long as the agent.
    """
    kept = {k: v for k, v in os.environ.items() if k in _KEPT or k.startswith(_KEPT_PREFIXES)}
    process = subprocess.Popen(
        (sys.executable, "-I", "-S", "-c", _START, str(os.getpid()), *command),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=Path("/"),
        env={**kept, "LC_ALL": "C.UTF-8"},
        start_new_session=True,
    )
    output, complaint = bytearray(), bytearray()
    why = "the agent failed"
    try:
        why = _read(process, output, complaint, until_s, in_the_way, monotonic_s)
    finally:
        status = _end(process, why)
    said = bytes(complaint[:COMPLAINT_BYTES_MAX]).decode("utf-8", "replace").strip()
    return Ran(None if why else status, bytes(output[:OUTPUT_BYTES_MAX]), said, why)


def _read(
    process: subprocess.Popen[bytes],
    output: bytearray,
    complaint: bytearray,
    until_s: float,
    in_the_way: Callable[[], str],
    monotonic_s: Callable[[], float],
) -> str:
    """Read its output until it exits; return why it must be ended early, "" when not."""
    assert process.stdout is not None  # noqa: S101 - both are pipes
    assert process.stderr is not None  # noqa: S101
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ, (output, OUTPUT_BYTES_MAX))
        selector.register(process.stderr, selectors.EVENT_READ, (complaint, COMPLAINT_BYTES_MAX))
        while selector.get_map():
            if why := in_the_way():
                return why
            left_s = until_s - monotonic_s()
            if left_s <= 0:
                return "it did not end in time"
            for key, _ in selector.select(min(left_s, LOOK_EVERY_S)):
                into, most = key.data
                data = os.read(key.fd, READ_BYTES)
                if not data:
                    selector.unregister(key.fileobj)
                into += data[: most + 1 - len(into)]
            if len(output) > OUTPUT_BYTES_MAX:
                return f"it said more than {OUTPUT_BYTES_MAX} bytes"
    try:
        process.wait(max(0.0, min(until_s - monotonic_s(), ENDS_S)))
    except subprocess.TimeoutExpired:
        return "it closed its output and did not end"
    return ""


def _end(process: subprocess.Popen[bytes], why: str) -> int | None:
    """Let it clean up, then kill what is left of it; return its status, None if it cannot be reaped."""
    if why:
        with contextlib.suppress(OSError):
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDS_S)
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    status = None
    with contextlib.suppress(subprocess.TimeoutExpired):
        status = process.wait(1.0)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
    return status
