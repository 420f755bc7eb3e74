"""The standby's process: imports torch and what it is told to, waits, and forks a process for each attempt.

It takes orders from its runner over a socket that only the two have.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Collection
from typing import NoReturn

import msgspec
import psutil

from eagle_eye.orchestrators.launch.messages import Forked, FromRunner, Prepare, Prepared, Start, line
from eagle_eye.orchestrators.launch.own_process import PR_SET_PDEATHSIG, note, prctl, script_folder, write
from eagle_eye.orchestrators.launch.standbys import MESSAGE_BYTES_MAX, ROOM_VARIABLE
from eagle_eye.schema.record_types import prepare_record_types


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


AVAILABLE_BYTES_MIN = 1 << 30
REASON_CHARS_MAX = 500
# Opened by computing on GPUs, but not by querying them.
GPU_DEVICES = ("/dev/nvidia-uvm", "/dev/kfd")

_decode_prepare = msgspec.json.Decoder(Prepare).decode
_decode_start = msgspec.json.Decoder(Start).decode


def get_ready(prepare: Prepare) -> Prepared:
    """Import everything; return whether ranks can be forked from this process."""
    try:
        import torch._dynamo  # otherwise each rank imports it at its first optimizer step and DistributedDataParallel
        import torch.distributed.checkpoint  # noqa: F401 - with which scripts write what they resume from

        import eagle_eye.orchestrators.launch.elastic  # noqa: F401
    except Exception as error:  # noqa: BLE001 - whatever importing torch raises
        return Prepared(_one_line(f"importing torch: {type(error).__name__}: {error}"))
    threads = _threads()  # those of torch's libraries can survive a fork
    folder = script_folder(prepare.command)
    if folder is not None and not getattr(sys.flags, "safe_path", False):
        sys.path[0] = folder
    for module in prepare.imports:
        try:
            importlib.import_module(module)
        except BaseException as error:  # noqa: BLE001 - a module may also call sys.exit
            return Prepared(_one_line(f"importing {module}: {type(error).__name__}: {error}"))
    return Prepared(unsuited(_threads() - threads, vouched=prepare.vouched), psutil.Process().memory_info().rss)


def unsuited(threads: int, *, vouched: bool) -> str:
    """Return why ranks cannot be forked from this process, whose imports have started threads; "" if they can."""
    if sys.modules["torch"].cuda.is_initialized() or any(map(_is_open, GPU_DEVICES)):
        return "its imports have begun to use GPUs, which no forked process can then use"
    if vouched:
        return ""
    if threads > 0:
        named = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
        return _one_line(f"its imports have started {threads} threads ({', '.join(named) or 'not of Python'})")
    if (left := psutil.virtual_memory().available) < AVAILABLE_BYTES_MIN:
        return f"{left >> 20} MiB of memory are left, {AVAILABLE_BYTES_MIN >> 20} are wanted"
    return ""


def serve(control: socket.socket, kept: frozenset[int]) -> None:
    """Run each attempt in a forked process until the runner is gone."""
    while True:
        content, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES_MAX, 1)
        if not content:
            return
        child = os.fork()
        if child == 0:
            control.close()
            become_attempt(_decode_start(content), descriptors[0], kept)
        os.close(descriptors[0])
        control.send(line(Forked(child)))


def main() -> None:
    """Serve the runner whose socket has the descriptor in the first argument."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.pop(ROOM_VARIABLE, None)
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)  # not for programs that imported modules may execute
    content = control.recv(MESSAGE_BYTES_MAX)
    if not content:
        return
    prepared = get_ready(_decode_prepare(content))
    control.send(line(prepared))
    if prepared.reason:
        return
    # Attempts are not waited for here; the runner reads of their end.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.collect()
    gc.freeze()  # existing objects stay shared with the ranks
    with control:
        serve(control, frozenset(_open_files()) - {control.fileno()})


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208


def _open_files() -> dict[int, str]:
    files = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with contextlib.suppress(FileNotFoundError):  # the listing itself
            files[int(name)] = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
    return files


def _is_open(path: str) -> bool:
    return path in _open_files().values()


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else " " for c in text)[:REASON_CHARS_MAX]


if __name__ == "__main__":
    prepare_record_types()
    main()
