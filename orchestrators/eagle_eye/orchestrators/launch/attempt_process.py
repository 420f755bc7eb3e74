"""The process that runs an attempt on a node: forked from a standby or from the runner; exits here."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Collection
from typing import NoReturn

from eagle_eye.orchestrators.launch.messages import FromRunner, Start, line
from eagle_eye.orchestrators.launch.own_process import PR_SET_PDEATHSIG, note, prctl, write


def become_attempt(start: Start, write_end: int, kept: Collection[int] | None = None) -> NoReturn:
    """Run the attempt in this forked process, report on ``write_end``, and exit.

    ``kept`` are files that ranks may share with this process, which are then forked from it; None: they are spawned.
    """
    exit_code = 1
    try:
        # If the parent is killed, the elastic agent ends its ranks as on any SIGTERM.
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
