"""Rules for frames, however they arrive: who may send them, and what detection sees of late ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from eagle_eye.schema.frame import BadFrame, Frame, Rank
from eagle_eye.server.ingest.fleet import Heard, job_of
from eagle_eye.server.model.errors import Refusal
from eagle_eye.server.security.auth import Credentials, Principal

KEYS_EVERY = 64  # one whole frame in this many per stream, starting with the first, is checked for unknown keys
KEPT_DIGITS_MAX = 8  # of the number of frames that follow
RETRY_BUSY_S = 1
RETRY_UNAVAILABLE_S = 5
# Likewise those that another server acknowledged before: agents are told at what pace to send them.
RESENT_AT_ONCE_MAX = 32
LATE_AT_ONCE_MAX = 4  # concurrent requests with late frames only: after an outage a whole fleet has an hour to resend

# Events that stay true: what happened to a device, a process or the node, not which phase it was in.
LASTING = frozenset(
    {"xid", "sxid", "gpu_lost", "machine_check", "kernel_panic", "host_error", "oom_kill"}
    | {"process_exit", "training_error"}
)


class Authenticator(Protocol):
    """Identifies the sender; see auth.py."""

    def authenticate(self, credentials: Credentials) -> Principal:
        """Return the principal of the credentials. Raises Refusal 401 or 403."""
        ...

    def authorise_frames(self, principal: Principal, node: str) -> None:
        """Raise Refusal 403 unless the principal may send the node's frames."""
        ...


def refusal_of(error: BadFrame, where: str) -> Refusal:
    """Return the refusal for an unusable frame."""
    return Refusal(413 if error.reason == "oversized" else 400, error.reason, f"{where}: {error}"[:2000])


def belated(frame: Frame, newest: Heard) -> Frame | None:
    """Return the part of a late frame that the detection loop gets: its lasting events, in the context of ``newest``.

    None if there is none. An event that names no attempt counts only while the same attempts run.
    """
    same = job_of(frame) == newest.job and _attempts(frame.ranks) == _attempts(newest.ranks)
    events = [event for event in frame.events if event.kind in LASTING and (same or "attempt" in event.attributes)]
    if not events or newest.farewell:
        return None
    standing = {"job": newest.job, "ranks": list(newest.ranks), "collectors": dict(newest.collectors)}
    return msgspec.structs.replace(frame, **standing, blocks=[], events=events)


def _attempts(ranks: Sequence[Rank]) -> set[tuple[str, int]]:
    return {(rank.job, rank.attempt) for rank in ranks}
