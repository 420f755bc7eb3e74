"""Rank logs: size-limited while they are written, and collected at the launcher.

Touches files below the log folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

from eagle_eye.orchestrators.command_line import one_line


class Output:
    """Writes to ``stream``; thread-safe. A closed stream does not end the job."""

    def __init__(self, stream: TextIO, job: str, *, as_json: bool, clock: Callable[[], float] = time.time) -> None:
        self._stream = stream
        self._job = job
        self._as_json = as_json
        self._clock = clock
        self._lock = threading.Lock()
        self._deaf = False

    def say(self, event: str, attempt: int, fields: dict[str, Any]) -> None:
        """Write the change: ``{"time", "event", "job", "attempt", ...fields}`` or a line of text."""
        now_s = self._clock()
        if self._as_json:
            text = json.dumps({"time": now_s, "event": event, "job": self._job, "attempt": attempt, **fields})
        else:
            reported = ((name, value) for name, value in fields.items() if value not in (None, "", [], {}))
            words = "  ".join(f"{name}={_word(value)}" for name, value in reported)
            text = f"{time.strftime('%H:%M:%S', time.localtime(now_s))} attempt {attempt}: {event}  {words}".rstrip()
        with self._lock:
            if self._deaf:
                return
            try:
                self._stream.write(text + "\n")
                self._stream.flush()
            except (BrokenPipeError, ValueError):
                self._deaf = True


def _word(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return str(len(value))  # the details are for programs
    if isinstance(value, list | tuple):
        return ",".join(_word(item) for item in value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_word(item)}" for name, item in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else one_line(str(value))  # it may contain text written by ranks


LOOK_EVERY_S = 5.0
ATTEMPTS_KEPT = 20
TAIL_BYTES = 64 << 10
GATHERED_BYTES_MAX = 2 << 20
RUNNER_LOG_BYTES_MAX = 8 << 20
MARK = ".launch"
_RANK_LOG = re.compile(r"rank\d{1,7}\.(stdout|stderr)\.log(\.1)?\Z")
_ATTEMPT = re.compile(r"attempt-(\d{1,18})\Z")


class SizeLimit:
    """Limits the size of files that other processes write, from ``start`` to ``stop``: the rest goes to ``.1``."""

    def __init__(self, paths: Iterable[Path], bytes_max: int, every_s: float = LOOK_EVERY_S) -> None:
        self._paths = [*paths]
        self._bytes_max = bytes_max
        self._every_s = every_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="logs", daemon=True)

    def start(self) -> None:
        """Watch the files. They must be open in this process, as they are in one that started their writers."""
        append_only(self._paths)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching the files."""
        self._stopped.set()
        self._thread.join()

    def cut_long_files(self) -> None:
        """Copy each file that has grown too long to its ``.1`` and empty it; lines written meanwhile may be lost."""
        for path in self._paths:
            with contextlib.suppress(OSError):
                if path.stat().st_size > self._bytes_max:
                    shutil.copyfile(path, path.with_name(path.name + ".1"))
                    os.truncate(path, 0)

    def _run(self) -> None:
        while not self._stopped.wait(self._every_s):
            self.cut_long_files()


def append_only(paths: Iterable[Path]) -> None:
    """Make writers that share this process's file descriptions append at the current end.

    Otherwise an emptied file would be continued at the old offset, with a hole before it.
    """
    wanted = {str(path) for path in paths}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - the entry of the listing itself is gone by then
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") in wanted:  # noqa: PTH115
                flags = fcntl.fcntl(int(name), fcntl.F_GETFL)
                fcntl.fcntl(int(name), fcntl.F_SETFL, flags | os.O_APPEND)


def mark(folder: Path, launch: str) -> None:
    """Mark the folder, so that a runner that sees it too does not send its logs here. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).write_text(launch, encoding="utf-8")


def is_marked(folder: Path, launch: str) -> bool:
    """Whether this is the launcher's own folder."""
    try:
        return (folder / MARK).read_text(encoding="utf-8") == launch
    except OSError:
        return False


def ends(folder: Path) -> dict[str, str]:
    """Return the ends of the ranks' logs in the folder by name, as many as may be sent."""
    found: dict[str, str] = {}
    left = GATHERED_BYTES_MAX
    for path in sorted(folder.glob("rank*.log")):
        with contextlib.suppress(OSError), path.open("rb") as file:
            size = min(file.seek(0, os.SEEK_END), TAIL_BYTES, left)
            file.seek(-size, os.SEEK_END)
            found[path.name] = file.read(size).decode(errors="replace")
            left -= size
    return found


def gather(folder: Path, files: Mapping[str, str]) -> None:
    """Write the files to the folder; files that are not rank logs are ignored. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        if _RANK_LOG.fullmatch(name):
            (folder / name).write_text(text, encoding="utf-8")


def drop_old(folder: Path, attempt: int, in_use: Collection[int] = (), kept: int = ATTEMPTS_KEPT) -> None:
    """Delete logs of earlier attempts, except the last ``kept`` ones and those ``in_use``."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        named = _ATTEMPT.match(path.name)
        if named is not None and int(named[1]) <= attempt - kept and int(named[1]) not in in_use:
            shutil.rmtree(path, ignore_errors=True)


def shorten_runner_log(path: Path) -> None:
    """Move a runner's log that has grown too long to its ``.1``."""
    with contextlib.suppress(OSError):
        if path.stat().st_size > RUNNER_LOG_BYTES_MAX:
            path.replace(path.with_name(path.name + ".1"))
