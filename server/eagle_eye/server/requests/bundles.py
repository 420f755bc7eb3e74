"""Evidence bundles on disk: files from agents, stored as received and never opened. Touches: one folder.

A file is named by its request's id, which the server chose; no input from an agent becomes part of a path.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from pathlib import Path
from typing import BinaryIO, NamedTuple

EVIDENCE_FOLDER = "evidence"  # in data_dir
FREE_BYTES_MIN = 1 << 30  # the folder shares its disk with frames and records, which matter more
GZIP_MAGIC = b"\x1f\x8b"
PARTIAL = ".part"


class NotGzip(ValueError):
    """The body is not a gzip file."""


class StoredBundle(NamedTuple):
    """A bundle on disk."""

    bytes: int
    sha256: str


class Incoming:
    """A bundle being received. It is kept once ``finish`` returns, and deleted by ``discard`` before that."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}{PARTIAL}")  # two may arrive at once
        self._file: BinaryIO = self._partial.open("xb")
        self._hash = hashlib.sha256()
        self._head = b""
        self._bytes = 0

    def write(self, chunk: bytes) -> None:
        """Append a part. Raises OSError."""
        self._head += chunk[: len(GZIP_MAGIC) - len(self._head)]
        self._hash.update(chunk)
        self._bytes += self._file.write(chunk)

    def finish(self) -> StoredBundle:
        """Move the bundle to its final name and return it. Raises OSError, NotGzip."""
        if self._head != GZIP_MAGIC:
            raise NotGzip("the body is no gzip file")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._partial.replace(self._path)
        return StoredBundle(self._bytes, self._hash.hexdigest())

    def discard(self) -> None:
        """Delete an unfinished bundle; does nothing after ``finish``."""
        self._file.close()
        self._partial.unlink(missing_ok=True)


class Bundles:
    """The bundle folder, created with the first bundle."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def begin(self, id_: str) -> Incoming:
        """Start receiving the bundle of this id. Raises OSError."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        free = shutil.disk_usage(self._folder).free
        if free < FREE_BYTES_MIN:
            raise OSError(f"{free} bytes are free in {self._folder}; below {FREE_BYTES_MIN} no evidence is kept")
        return Incoming(self.path(id_))

    def path(self, id_: str) -> Path:
        """Return the path of this id's bundle, whether or not it exists."""
        return self._folder / f"{id_}.tar.gz"

    def delete(self, id_: str) -> None:
        """Delete the bundle, if it exists. Raises OSError."""
        self.path(id_).unlink(missing_ok=True)

    def sweep_partial(self) -> None:
        """Delete partial bundles of an earlier run."""
        for path in self._folder.glob(f"*{PARTIAL}"):
            path.unlink(missing_ok=True)
