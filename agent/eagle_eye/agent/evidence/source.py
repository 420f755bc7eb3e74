"""What an evidence source is given and what it fills: the suspects, their files in /proc, the bundle.

A bundle is a gzipped tar of pieces, with a manifest of what it holds and what is missing. Nothing is written to disk:
the disk may be what is broken, and evidence may be sensitive.
"""

from __future__ import annotations

import errno
import io
import os
import re
import tarfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from eagle_eye.agent.foreign_files import NotTheirs, content, follow, open_file
from eagle_eye.agent.processes.process_files import ENVIRON_BYTES_MAX, ProcessFiles
from eagle_eye.agent.processes.process_registry import TrainingProcess

FORMAT = "eagle-eye-evidence/1"
BUNDLE_BYTES_MAX = 64 << 20  # compressed; the server accepts no more
PIECE_BYTES_MAX = 32 << 20  # before compression: five flight-recorder dumps of PyTorch's default length
PIECES_MAX = 1_024
MISSING_MAX = 1_024
NAME_CHARS_MAX = 100  # per path component: every file system accepts this
WHY_CHARS_MAX = 300
MANIFEST = "manifest.json"
RESERVE_BYTES = 1 << 20  # for the manifest, and for data that zlib has buffered and not yet counted
LOCK_S = 1.0  # how long closing waits for a piece that is being written
COMPRESSION = 1  # text already shrinks to a tenth, and the CPU belongs to training

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


class BundleFile(msgspec.Struct, frozen=True):
    """A file in the bundle. ``cut``: it was truncated; of a log the newest part is kept, of all else the beginning."""

    name: str
    source: str
    bytes: int
    cut: bool = False


class MissingItem(msgspec.Struct, frozen=True):
    """What could not be gathered, and why."""

    source: str
    what: str
    why: str


class Looked(msgspec.Struct, frozen=True):
    """A process that was examined; ``rank`` None: a child of the rank in the label."""

    label: str
    pid: int
    rank: int | None


class BundleManifest(msgspec.Struct, frozen=True, kw_only=True):
    """``manifest.json``. Times are Unix seconds of the node; ``attempt`` None: any."""

    format: str = FORMAT
    node: str
    job: str
    attempt: int | None
    kind: str
    agent_version: str
    begun_s: float
    ended_s: float
    deadline_s: float
    processes: list[Looked]
    files: list[BundleFile]
    missing: list[MissingItem]


class BundleStuck(Exception):
    """A thread holds the bundle's lock and does not release it."""


def safe_name(text: str) -> str:
    """Return the text as one path component: letters, digits, ".", "_" and "-", not hidden, never empty."""
    return _UNSAFE.sub("_", text)[:NAME_CHARS_MAX].lstrip(".") or "_"


class Bundle:
    """Accepts pieces from many threads until closed; later ones are dropped, and the manifest lists them as missing.

    ``node`` names the folder in the tar, so that the bundles of many nodes can be unpacked into one.
    """

    def __init__(self, node: str, time_s: float, bytes_max: int = BUNDLE_BYTES_MAX) -> None:
        self.folder = safe_name(node)
        self._time_s = time_s
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._file = io.BytesIO()
        self._tar: tarfile.TarFile | None = tarfile.open(  # noqa: SIM115 - closed by close()
            fileobj=self._file, mode="w:gz", compresslevel=COMPRESSION
        )
        self._pieces: dict[str, BundleFile] = {}
        self._missing: list[MissingItem] = []

    def add(self, source: str, name: str, content: bytes, *, cut: bool = False) -> None:
        """Add a piece; where there is no room for it, list it as missing."""
        with self._lock:
            if self._tar is None:
                return
            why = self._refusal(name, len(content))
            if why:
                self._miss(source, name, why)
                return
            self._write(name, content)
            self._pieces[name] = BundleFile(name, source, len(content), cut)

    def miss(self, source: str, what: str, why: str) -> None:
        """Record what could not be gathered, and why."""
        with self._lock:
            self._miss(source, what, why)

    def close(self, manifest: BundleManifest) -> tuple[BundleManifest, bytes]:
        """Return the manifest of what is in the bundle and what is missing, and the file. Raises BundleStuck."""
        if not self._lock.acquire(timeout=LOCK_S):
            raise BundleStuck(f"a piece is still being written after {LOCK_S:g} s")
        try:
            tar, self._tar = self._tar, None
            if tar is None:
                raise BundleStuck("the bundle was closed already")
            whole = msgspec.structs.replace(manifest, files=list(self._pieces.values()), missing=list(self._missing))
            content = msgspec.json.format(msgspec.json.encode(whole), indent=1)
            tar.addfile(self._entry(f"{self.folder}/{MANIFEST}", len(content)), io.BytesIO(content))
            tar.close()
            return whole, self._file.getvalue()
        finally:
            self._lock.release()

    def _refusal(self, name: str, size: int) -> str:
        if size > PIECE_BYTES_MAX:
            return f"{size} bytes; a piece may have {PIECE_BYTES_MAX}"
        if self._file.tell() + size + RESERVE_BYTES > self._bytes_max:
            return f"{size} bytes; the bundle of at most {self._bytes_max} has no room for them"
        if len(self._pieces) >= PIECES_MAX:
            return f"the bundle has {PIECES_MAX} pieces, which is the most"
        return "another piece has the same name" if name in self._pieces else ""

    def _miss(self, source: str, what: str, why: str) -> None:
        if len(self._missing) < MISSING_MAX:
            self._missing.append(MissingItem(source, what[: 2 * NAME_CHARS_MAX], why[:WHY_CHARS_MAX]))

    def _write(self, name: str, content: bytes) -> None:
        assert self._tar is not None  # noqa: S101 - the caller looked
        self._tar.addfile(self._entry(name, len(content)), io.BytesIO(content))

    def _entry(self, name: str, size: int) -> tarfile.TarInfo:
        entry = tarfile.TarInfo(name)
        entry.size, entry.mtime, entry.mode = size, int(self._time_s), 0o600
        return entry


# The suspects and their files in /proc, and the interface of the sources.
PROCESSES_MAX = 64  # ranks first, then their children: data loaders and the like
PIDS_MAX = 65_536  # of the whole host, scanned for children


@dataclass(frozen=True)
class Suspect:
    """A process to examine; ``rank`` None: a rank's descendant.

    ``started``, in the kernel's ticks since boot, distinguishes it from a later owner of its pid.
    """

    pid: int
    started: int
    label: str
    rank: TrainingProcess | None

    def is_still(self, proc: Path) -> bool:
        """Whether the pid still belongs to this process; False also when the pid is free."""
        return _parent_and_start(proc, self.pid)[1] == self.started

    def started_s(self, proc: Path) -> float:
        """Return when the process started, Unix seconds by the current wall clock. Raises OSError, ValueError."""
        up_s = float((proc / "uptime").read_text(encoding="ascii").split()[0])
        return time.time() - up_s + self.started / os.sysconf("SC_CLK_TCK")


def suspects(training: Iterable[TrainingProcess], proc: Path = Path("/proc")) -> tuple[list[Suspect], int]:
    """Return the processes to examine, and how many more were left out."""
    found: dict[int, Suspect] = {}
    for process in training:
        started = _parent_and_start(proc, process.pid)[1]
        if started >= 0:
            label = f"rank-{process.rank}-pid-{process.pid}"
            found.setdefault(process.pid, Suspect(process.pid, started, label, process))
    children = _descendants(list(found.values()), proc) if found else []
    everybody = [*found.values(), *children]
    return everybody[:PROCESSES_MAX], max(0, len(everybody) - PROCESSES_MAX)


def _descendants(roots: Sequence[Suspect], proc: Path) -> list[Suspect]:
    """Return the descendants of ranks that are not ranks themselves, nearest first."""
    children: dict[int, list[tuple[int, int]]] = {}
    for pid in _pids(proc):
        parent, started = _parent_and_start(proc, pid)
        if parent > 0:
            children.setdefault(parent, []).append((pid, started))
    known = {root.pid for root in roots}
    found: list[Suspect] = []
    generation = [(root.pid, root.label) for root in roots]
    while generation:
        below = []
        for parent, label in generation:
            for pid, started in sorted(children.get(parent, ())):
                if pid not in known:
                    known.add(pid)
                    rank = label.partition("-pid-")[0].partition("-child")[0]
                    found.append(Suspect(pid, started, f"{rank}-child-pid-{pid}", None))
                    below.append((pid, rank))
        generation = below
    return found


def _pids(proc: Path) -> list[int]:
    try:
        return sorted(ProcessFiles(proc).pids())[:PIDS_MAX]
    except OSError:
        return []


def _parent_and_start(proc: Path, pid: int) -> tuple[int, int]:
    """Return a process's parent and start time, in the kernel's ticks since boot; (-1, -1) when it is gone."""
    try:
        stat = ProcessFiles(proc).stat(pid)
    except OSError:
        stat = None
    return (-1, -1) if stat is None else (stat.parent, stat.started)


READ_BYTES = 1 << 16


def read(path: Path, bytes_max: int) -> tuple[bytes, bool]:
    """Return a file's first bytes, and whether there was more. Raises OSError."""
    found = content(str(path), bytes_max + 1)
    return found[:bytes_max], len(found) > bytes_max


def read_open(descriptor: int, bytes_max: int) -> tuple[bytes, bool]:
    """Return an open file's first bytes, and whether there was more. Raises OSError.

    Reads no more than the file's reported size: files of /proc report 0, and some never end.
    """
    size = os.fstat(descriptor).st_size
    wanted = min(size, bytes_max)
    found = bytearray()
    while len(found) < wanted:
        data = os.read(descriptor, min(READ_BYTES, wanted - len(found)))
        if not data:
            break
        found += data
    return bytes(found), size > bytes_max


def environment(proc: Path, pid: int) -> tuple[dict[str, str], bool]:
    """Return a process's initial environment, and whether there was more. Raises OSError."""
    raw = ProcessFiles(proc).environment(pid)
    if raw is None:
        raise _gone(pid)
    variables: dict[str, str] = {}
    for entry in raw[:ENVIRON_BYTES_MAX].split(b"\0"):
        name, found, value = entry.partition(b"=")
        if found and name:
            variables[name.decode("utf-8", "replace")] = value.decode("utf-8", "replace")
    return variables, len(raw) > ENVIRON_BYTES_MAX


def open_inside(proc: Path, pid: int, path: str) -> int:
    """Return a descriptor of what the process sees at the absolute ``path``, which cannot be read (O_PATH).

    Raises OSError, NotTheirs as ``foreign_file.follow`` does.
    """
    return follow(*_inside(proc, pid, path))[0]


def open_file_of(proc: Path, pid: int, path: str) -> int:
    """Return a descriptor to read the regular file that the process sees at ``path`` and its user owns.

    Raises OSError, NotTheirs.
    """
    status = ProcessFiles(proc).status(pid)
    if status is None:
        raise _gone(pid)
    return open_file(*_inside(proc, pid, path), status.user)


def _inside(proc: Path, pid: int, path: str) -> tuple[Path, Path]:
    """Return the process's path as this agent sees it, and the process's root folder."""
    if not path.startswith("/"):
        raise NotTheirs(f"{path[:80]!r}: expected an absolute path")
    root = proc / str(pid) / "root"
    return root / path.lstrip("/"), root


def _gone(pid: int) -> OSError:
    return ProcessLookupError(errno.ESRCH, f"process {pid} has ended")


def why(error: Exception) -> str:
    """Return what went wrong as a few words."""
    if isinstance(error, NotTheirs):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {error}"


TOOLS_EARLIER_S = 0.25  # tools are killed this long before the deadline, so that their output can still be included


@dataclass(frozen=True)
class Scene:
    """What a source may examine, where it puts its findings, and its deadline, by ``monotonic_s``."""

    suspects: Sequence[Suspect]
    bundle: Bundle
    until_s: float
    proc: Path = Path("/proc")
    monotonic_s: Callable[[], float] = time.monotonic

    def left_s(self) -> float:
        """Return the seconds left; 0 when there are none."""
        return max(0.0, self.until_s - self.monotonic_s())

    @property
    def tools_until_s(self) -> float:
        """Deadline for host programs."""
        return self.until_s - TOOLS_EARLIER_S


class Task(NamedTuple):
    """One thing to find out. ``run`` has a thread of its own, may hang forever, and may raise anything."""

    what: str
    run: Callable[[], None]


class EvidenceSource(Protocol):
    """One kind of evidence."""

    @property
    def name(self) -> str:
        """The source's name in the manifest."""
        ...

    def tasks(self, scene: Scene) -> list[Task]:
        """Return the tasks; must not block."""
        ...
