"""The process in which an attempt runs on a node: forked from a standby or from the runner, it ends here."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Collection, MutableMapping
from typing import NoReturn

from eagle_eye.orchestrators.launch.messages import FromRunner, Start, line

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def become_attempt(start: Start, write_end: int, kept: Collection[int] | None = None) -> NoReturn:
    """Run the attempt in this forked process, say how it goes on ``write_end``, and leave.

    ``kept`` are files that ranks may share with this process, which are then forked from it; None: they are spawned.
    """
    exit_code = 1
    try:
        # Should the parent be killed, the elastic agent ends its ranks as it does on any SIGTERM.
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        from eagle_eye.orchestrators.launch.elastic import run_attempt

        def say(message: FromRunner) -> None:
            write(write_end, line(message))

        run_attempt(start, say, kept)
        exit_code = 0
    except BaseException as error:  # noqa: BLE001 - nothing of the parent may go on in this process
        note(f"attempt {start.attempt}: {type(error).__name__}: {error}")
    finally:
        sys.stderr.flush()
        os._exit(exit_code)


def set_defaults(environ: MutableMapping[str, str], ranks_per_node: int) -> None:
    """What ranks need of torch is in the environment, unless somebody has set it. Some is read as torch is imported."""
    # Without the flight recorder nobody can tell which rank a hang waits for.
    environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    if ranks_per_node > 1:  # as torchrun does, or every rank would take every core
        environ.setdefault("OMP_NUM_THREADS", "1")


def write(descriptor: int, content: bytes) -> None:
    """All of it was written. Raises OSError."""
    while content:
        content = content[os.write(descriptor, content) :]


def prctl(option: int, value: int) -> None:
    """The kernel was told; where it refuses, that stands in the log."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        note(f"prctl {option}: {os.strerror(ctypes.get_errno())}; ranks might outlive a killed runner")


def note(text: str) -> None:
    """The line stands in the runner's log."""
    sys.stderr.write(f"runner: {text}\n")
    sys.stderr.flush()
