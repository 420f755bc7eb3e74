from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

import pytest

from eagle_eye.agent.processes.exit_watcher import exit_code, is_running, open_pidfd


def ended(code: str) -> tuple[subprocess.Popen[bytes], int]:
    """A child that has ended and is not yet reaped, and its descriptor."""
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", f"import os, signal, sys; sys.stdin.read(1); {code}"], stdin=-1
    )
    pidfd = open_pidfd(child.pid)
    assert pidfd is not None
    assert child.stdin is not None
    child.stdin.close()
    select.select([pidfd], [], [], 30)
    return child, pidfd


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("os._exit(0)", 0),
        ("os._exit(7)", 7),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
    ],
)
def test_the_exit_code_is_read_before_the_parent_reaps(code: str, expected: int) -> None:
    child, pidfd = ended(code)
    assert exit_code(child.pid, pidfd) == expected
    assert not is_running(child.pid)
    child.wait()
    os.close(pidfd)


def test_after_the_parent_reaped_the_descriptor_tells_or_nobody_does() -> None:
    child, pidfd = ended("os._exit(7)")
    child.wait()
    assert exit_code(child.pid, None) is None
    assert exit_code(child.pid, pidfd) in (7, None)  # None before Linux 6.15
    os.close(pidfd)


def test_a_process_that_is_gone_has_no_descriptor() -> None:
    child, pidfd = ended("os._exit(0)")
    child.wait()
    os.close(pidfd)
    with pytest.raises(ProcessLookupError):
        open_pidfd(child.pid)


def test_this_process_is_running() -> None:
    assert is_running(os.getpid())


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: starts a process as another user")
def test_who_may_not_see_the_exit_code_does_not_read_it_as_success() -> None:
    child, pidfd = ended("os._exit(7)")
    program = (
        "import os, sys; from eagle_eye.agent.processes.exit_watcher import _zombie_status;"
        "os.setgid(65534); os.setuid(65534); print(_zombie_status(int(sys.argv[1])))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(child.pid)], capture_output=True, text=True, check=False)
    child.wait()
    os.close(pidfd)
    assert done.stdout.strip() == "None", done.stderr
