"""What holds for frames, whichever way they come: whose they may be, when they are late, what of late ones is told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from eagle_eye.schema.frame import BadFrame, Frame, Rank
from eagle_eye.server.ingest.fleet import Heard, job_of
from eagle_eye.server.model.errors import Refusal
from eagle_eye.server.security.auth import Credentials, Principal

KEYS_EVERY = 64  # whole frames of a stream, of which one is searched for unknown keys, the first to begin with
RETRY_BUSY_S = 1
RETRY_UNAVAILABLE_S = 5
LATE_AT_ONCE_MAX = 4  # requests of late frames alone at a time: after an outage a whole fleet has an hour to tell

# Events that are as true later: what happened to a device, a process or the node, as against the phase it was in.
LASTING = frozenset(
    {"xid", "sxid", "gpu_lost", "machine_check", "kernel_panic", "host_error", "oom_kill"}
    | {"process_exit", "training_error"}
)


class Authenticator(Protocol):
    """Who is asking; see auth.py."""

    def authenticate(self, credentials: Credentials) -> Principal:
        """Return who it is. Raises Refusal 401 or 403."""
        ...

    def authorise_frames(self, principal: Principal, node: str) -> None:
        """Return if the principal may send the node's frames. Raises Refusal 403."""
        ...


def refusal_of(error: BadFrame, where: str) -> Refusal:
    """Return how a frame that is of no use is refused."""
    return Refusal(413 if error.reason == "oversized" else 400, error.reason, f"{where}: {error}"[:2000])


def belated(frame: Frame, newest: Heard) -> Frame | None:
    """Return what the loop is told of a late frame: its lasting facts, as if the node's newest frame had told them.

    None: nothing. A fact that does not say itself which attempt it is of counts only while the same attempts run.
    """
    same = job_of(frame) == newest.job and _attempts(frame.ranks) == _attempts(newest.ranks)
    events = [event for event in frame.events if event.kind in LASTING and (same or "attempt" in event.attributes)]
    if not events or newest.farewell:
        return None
    standing = {"job": newest.job, "ranks": list(newest.ranks), "collectors": dict(newest.collectors)}
    return msgspec.structs.replace(frame, **standing, blocks=[], events=events)


def _attempts(ranks: Sequence[Rank]) -> set[tuple[str, int]]:
    return {(rank.job, rank.attempt) for rank in ranks}
