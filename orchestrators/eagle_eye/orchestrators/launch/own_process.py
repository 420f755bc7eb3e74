"""The launcher's processes on a node: their set-up, and forked ones made to look as if they had been executed."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import runpy
import signal
import sys
import threading
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from typing import NoReturn

# Makes a forked process look as if it had been executed: in /proc, its files and signals, and at exit.
#
# Touches this process. What /proc shows of a process is in its own memory, which it may write to (proc(5): arg_start to
# env_end); there is as much room as the process was executed with.

# Of /proc/self/stat, counted behind the command's name.
_ARGUMENTS, _ENVIRONMENT = slice(45, 47), slice(47, 49)


def show(words: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Make /proc show this command line and this environment for this process, as far as there is room.

    Variables that the process was not executed with come first. Returns False, with nothing changed, where that is
    impossible: /proc then shows what the process was forked from.
    """
    fields = _stat()
    arguments, environment = (range(*map(int, fields[part])) for part in (_ARGUMENTS, _ENVIRONMENT))
    before = set(ctypes.string_at(environment.start, len(environment)).split(b"\0"))
    for name, value in environ.items():
        os.putenv(name, value)  # a copy: the C library's own strings are elsewhere from here on
    if not arguments or _points_into(environment):
        return False
    variables = [os.fsencode(f"{name}={value}") for name, value in environ.items()]
    _write(environment, sorted(variables, key=before.__contains__), b"\0")
    _write(arguments, [os.fsencode(word) for word in words], b" ")
    return True


def forget(kept: Collection[int]) -> None:
    """Close all files except ``kept`` and the standard ones.

    The other descriptors are replaced with /dev/null: objects that still hold one may close it.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - the entry of the listing itself is gone by then
        descriptor = int(name)
        if descriptor > 2 and descriptor not in kept and descriptor != null:  # the standard ones
            with contextlib.suppress(OSError):
                os.fstat(descriptor)
                os.dup2(null, descriptor, inheritable=False)
    os.close(null)


def default_signals() -> None:
    """Reset signal handling to that of a newly started Python."""
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        if callable(handler) and handler is not signal.default_int_handler:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def reseed() -> None:
    """Make unseeded random numbers differ from those of processes with the same parent.

    Python reseeds its own at a fork; numpy's state is inherited.
    """
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()


def script_folder(command: Sequence[str]) -> str | None:
    """Return the path that Python prepends to sys.path for the command; None where that is the current folder."""
    return None if command[0] == "-m" else os.path.dirname(os.path.realpath(command[0]))  # noqa: PTH120 - as Python


def run_as_main(command: Sequence[str]) -> NoReturn:
    """Run what would follow ``python`` on a command line, then exit as that would, with its exit code."""
    code = 1
    try:
        sys.argv = list(command[1:] if command[0] == "-m" else command)
        if command[0] == "-m":
            runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(command[0], run_name="__main__")
        code = 0
    except SystemExit as ending:
        code = _exit_code(ending.code)
    except BaseException:  # noqa: BLE001 - what an interpreter does with what nobody has caught
        sys.excepthook(*sys.exc_info())
    _end(code)


def _end(code: int) -> NoReturn:
    """Exit in the interpreter's order, without returning to any frame above."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, also those of executors
        atexit._run_exitfuncs()
    except BaseException:  # noqa: BLE001 - as above
        sys.excepthook(*sys.exc_info())
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def _exit_code(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    sys.stderr.write(f"{code}\n")
    return 1


def _stat() -> list[bytes]:
    with open("/proc/self/stat", "rb") as file:  # noqa: PTH123
        return file.read().rpartition(b") ")[2].split()


def _points_into(region: range) -> bool:
    variables = ctypes.POINTER(ctypes.c_void_p).in_dll(ctypes.CDLL(None), "environ")
    index = 0
    while (address := variables[index]) is not None:
        if address in region:
            return True
        index += 1
    return False


def _write(region: range, items: Sequence[bytes], filler: bytes) -> None:
    """Fill the region with the items, each ended by NUL, as many as fit; the rest is one item of ``filler``."""
    content = b""
    for item in items:
        if len(content) + len(item) + 1 <= len(region):
            content += item + b"\0"
    if (left := len(region) - len(content)) > 0:
        content += filler * (left - 1) + b"\0"
    ctypes.memmove(region.start, content, len(region))


PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36


def set_defaults(environ: MutableMapping[str, str], ranks_per_node: int) -> None:
    """Set the environment that ranks need for torch, unless already set. Some is read when torch is imported."""
    # Without the flight recorder a hang cannot be attributed to a rank.
    environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    if ranks_per_node > 1:  # as torchrun does, or every rank would use every core
        environ.setdefault("OMP_NUM_THREADS", "1")


def write(descriptor: int, content: bytes) -> None:
    """Write all of it. Raises OSError."""
    while content:
        content = content[os.write(descriptor, content) :]


def prctl(option: int, value: int) -> None:
    """Call prctl; a refusal is logged."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        note(f"prctl {option}: {os.strerror(ctypes.get_errno())}; ranks might outlive a killed runner")


def note(text: str) -> None:
    """Write the line to the runner's log."""
    sys.stderr.write(f"runner: {text}\n")
    sys.stderr.flush()
