"""The logs of ranks: kept below a size while they are written, and gathered where the launcher runs.

Touches files below the log folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import threading
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

LOOK_EVERY_S = 5.0
ATTEMPTS_KEPT = 20
TAIL_BYTES = 64 << 10
GATHERED_BYTES_MAX = 2 << 20
RUNNER_LOG_BYTES_MAX = 8 << 20
MARK = ".launch"
_RANK_LOG = re.compile(r"rank\d{1,7}\.(stdout|stderr)\.log(\.1)?\Z")
_ATTEMPT = re.compile(r"attempt-(\d{1,18})\Z")


class SizeLimit:
    """Keeps files that other processes write below a size, from ``start`` to ``stop``: the rest goes to ``.1``."""

    def __init__(self, paths: Iterable[Path], bytes_max: int, every_s: float = LOOK_EVERY_S) -> None:
        self._paths = [*paths]
        self._bytes_max = bytes_max
        self._every_s = every_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="logs", daemon=True)

    def start(self) -> None:
        """The files are watched. They must be open in this process, as they are in one that started their writers."""
        append_only(self._paths)
        self._thread.start()

    def stop(self) -> None:
        """The files are left as they are."""
        self._stopped.set()
        self._thread.join()

    def look(self) -> None:
        """Each file that has grown too long was copied to its ``.1`` and emptied; lines in between may be lost."""
        for path in self._paths:
            with contextlib.suppress(OSError):
                if path.stat().st_size > self._bytes_max:
                    shutil.copyfile(path, path.with_name(path.name + ".1"))
                    os.truncate(path, 0)

    def _run(self) -> None:
        while not self._stopped.wait(self._every_s):
            self.look()


def append_only(paths: Iterable[Path]) -> None:
    """Who writes to the files through a description that this process shares goes on at their end, wherever that is.

    Without it an emptied file would be written on from the old offset, with a hole in front.
    """
    wanted = {str(path) for path in paths}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - the entry of the listing itself is gone by then
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") in wanted:  # noqa: PTH115
                flags = fcntl.fcntl(int(name), fcntl.F_GETFL)
                fcntl.fcntl(int(name), fcntl.F_SETFL, flags | os.O_APPEND)


def mark(folder: Path, launch: str) -> None:
    """A runner that sees this folder too knows that its logs need not be brought here. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).write_text(launch, encoding="utf-8")


def is_marked(folder: Path, launch: str) -> bool:
    """Whether it is the launcher's own folder that is seen here."""
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
    """The files lie in the folder; what is no rank's log is left out. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        if _RANK_LOG.fullmatch(name):
            (folder / name).write_text(text, encoding="utf-8")


def drop_old(folder: Path, attempt: int, in_use: Collection[int] = (), kept: int = ATTEMPTS_KEPT) -> None:
    """Of the attempts before this one only the last ``kept``, and those ``in_use``, have logs left."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        named = _ATTEMPT.match(path.name)
        if named is not None and int(named[1]) <= attempt - kept and int(named[1]) not in in_use:
            shutil.rmtree(path, ignore_errors=True)


def shorten_runner_log(path: Path) -> None:
    """A runner's log that has grown too long is its ``.1``."""
    with contextlib.suppress(OSError):
        if path.stat().st_size > RUNNER_LOG_BYTES_MAX:
            path.replace(path.with_name(path.name + ".1"))
