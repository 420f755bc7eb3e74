"""Evidence requests: passed to agents with their acknowledgements, and ended. Touches: the store, one folder."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from msgspec.structs import replace

from eagle_eye.server.engine.settings import EvidenceSettings
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import Refusal, StoreUnavailable
from eagle_eye.server.model.records import EvidenceRequest, EvidenceState
from eagle_eye.server.store.store import EVIDENCE, PAGE_LIMIT_MAX, Change, Store, repeat

# Evidence bundles on disk: files from agents, stored as received and never opened.
#
# A file is named by its request's id, which the server chose; no input from an agent becomes part of a path.

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


# Requests for them.

READ_EVERY_S = 0.2  # maximum age of the list of open requests when records have changed
REQUESTS_PER_ANSWER_MAX = 4  # to one node; the next answer has the others
SWEEP_S = 30.0
DETAIL_CHARS_MAX = 1_000

# States that an agent may still answer: late answers are accepted, second ones are not.
OPEN_STATES: tuple[EvidenceState, ...] = ("asked", "expired")

_log = logging.getLogger(__name__)


class EvidenceRequests:
    """Open evidence requests and their results. The store is the source of truth; open requests are cached."""

    def __init__(self, store: Store, bundles: Bundles, settings: EvidenceSettings, clock: Clock) -> None:
        self.bundles = bundles
        self._store = store
        self._settings = settings
        self._clock = clock
        self._by_node: dict[str, list[EvidenceRequest]] = {}
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._changed.set()
        self._read_s = float("-inf")
        store.listen(self._changed.set)

    def has_requests(self) -> bool:
        """Return whether there are open requests for any node."""
        if self._changed.is_set() and self._clock.monotonic_s() - self._read_s >= READ_EVERY_S:
            self._read()
        return bool(self._by_node)

    def asked_of(self, node: str) -> list[dict[str, Any]]:
        """Return the requests to include in the answer to the node's frames; called for each answer.

        A request is repeated until its bundle has arrived or it has expired, as an answer may be lost.
        """
        if not self.has_requests():
            return []
        known = self._by_node.get(node)
        if not known:
            return []
        now_s = self._clock.now_s()
        asked = [evidence for evidence in known if now_s < evidence.expires_s]
        return [self._request(evidence) for evidence in asked[:REQUESTS_PER_ANSWER_MAX]]

    def _request(self, evidence: EvidenceRequest) -> dict[str, Any]:
        """Return the request as the agent gets it: an element of ``requests`` in the answer to its frames."""
        return {
            "id": evidence.id,
            "kind": evidence.kind,
            "deadline_s": evidence.within_seconds,
            "job": evidence.job,
            "attempt": evidence.attempt,
            "bytes_max": self._settings.bundle_bytes_max,
        }

    def received(self, id_: str, incoming: Incoming) -> EvidenceRequest:
        """Store a bundle that has arrived, unless there is an answer already; return the record.

        Raises StoreUnavailable, Refusal 404, OSError, NotGzip.
        """
        with self._lock:  # of two that arrive at once the first is kept and recorded
            record = self._store.get(EVIDENCE, id_)
            if record is not None and record.state not in OPEN_STATES:
                return record
            kept = incoming.finish()
            return self._end(id_, "received", bytes=kept.bytes, sha256=kept.sha256, detail="")

    def failed(self, id_: str, detail: str) -> EvidenceRequest:
        """Record that there will be no bundle; return the record. Raises StoreUnavailable, Refusal 404."""
        with self._lock:
            return self._end(id_, "failed", detail=detail[:DETAIL_CHARS_MAX])

    async def run(self) -> None:
        """Sweep every SWEEP_S until cancelled."""
        await asyncio.to_thread(self.bundles.sweep_partial)
        await repeat(lambda: asyncio.to_thread(self.sweep), SWEEP_S, "evidence is not swept")

    def sweep(self) -> None:
        """Expire unanswered requests; delete the oldest bundles beyond the limits. Raises StoreUnavailable.

        A bundle that cannot be deleted stays on record, and is retried at the next sweep.
        """
        with self._lock:  # answers that arrive meanwhile wait until this is done
            self._sweep()

    def _sweep(self) -> None:
        now_s = self._clock.now_s()
        expired = tuple(
            replace(evidence, state="expired", updated_s=now_s, detail="the node's agent did not answer in time")
            for evidence in self._of_state("asked")
            if now_s >= evidence.expires_s
        )
        for evidence in expired:  # a bundle may have arrived just before the server was killed
            self._delete(evidence.id)
        deleted = tuple(
            replace(evidence, state="deleted", updated_s=now_s, detail=why)
            for evidence, why in self._beyond_limits(self._of_state("received"), now_s)
            if self._delete(evidence.id)
        )
        if expired or deleted:
            self._store.commit(Change(evidence=(*expired, *deleted)))

    def _delete(self, id_: str) -> bool:
        """Delete a bundle, if it exists; return whether it is gone."""
        try:
            self.bundles.delete(id_)
        except OSError as error:
            _log.warning("a bundle cannot be deleted", extra={"evidence": id_, "error": str(error)})
            return False
        return True

    def _beyond_limits(
        self, newest_first: Iterable[EvidenceRequest], now_s: float
    ) -> Iterable[tuple[EvidenceRequest, str]]:
        settings = self._settings
        size = 0
        for count, evidence in enumerate(newest_first, 1):
            size += evidence.bytes
            if now_s - evidence.created_s > settings.retention_s:
                yield evidence, f"older than {settings.retention_s:.0f} s (evidence.retention_s)"
            elif count > settings.bundles_max:
                yield evidence, f"more than {settings.bundles_max} bundles were kept (evidence.bundles_max)"
            elif size > settings.folder_bytes_max:
                yield evidence, f"more than {settings.folder_bytes_max} bytes were kept (evidence.folder_bytes_max)"

    def _of_state(self, state: EvidenceState) -> Iterable[EvidenceRequest]:
        """Yield the records in a state, newest first."""
        cursor: str | None = None
        while True:
            page = self._store.page(EVIDENCE, {"state": state}, cursor, PAGE_LIMIT_MAX)
            yield from page.items
            cursor = page.next
            if cursor is None:
                return

    def _end(self, id_: str, state: EvidenceState, **fields: Any) -> EvidenceRequest:
        def change(store: Store) -> Change:
            record = store.get(EVIDENCE, id_)
            if record is None:
                raise Refusal(404, "not_found", f"no evidence {id_[:80]!r} was asked for")
            if record.state not in OPEN_STATES:
                return Change()
            return Change(evidence=(replace(record, state=state, updated_s=self._clock.now_s(), **fields),))

        self._store.update(change)
        record = self._store.get(EVIDENCE, id_)
        assert record is not None  # noqa: S101 - records are never deleted
        return record

    def _read(self) -> None:
        self._changed.clear()
        self._read_s = self._clock.monotonic_s()
        by_node: dict[str, list[EvidenceRequest]] = {}
        try:
            for evidence in self._store.page(EVIDENCE, {"state": "asked"}, limit=PAGE_LIMIT_MAX).items:
                by_node.setdefault(evidence.node, []).append(evidence)
        except StoreUnavailable:
            self._changed.set()  # frames are acknowledged anyway
            return
        self._by_node = by_node
