"""An evidence bundle: a gzipped tar of pieces, and a manifest of what it holds and what is missing. In memory only.

Nothing is written to disk: the disk may be what is broken, and evidence may be sensitive.
"""

from __future__ import annotations

import io
import re
import tarfile
import threading

import msgspec

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
