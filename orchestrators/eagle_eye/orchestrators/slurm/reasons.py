"""Reasons of our drains: their owner, the incident, and a checksum that shows changes. Pure.

Slurm keeps one reason per node, and writing another one takes the drain over. So our reasons end with a checksum of
themselves: a reason changed in any way is no longer ours.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Literal

from eagle_eye.orchestrators.protocol import Cause

Tag = Literal["node_problem", "user_problem"]

REASON_CHARS_MAX = 255
NAME_CHARS_MAX = 64
# Faults of what the job computes, not of where: its node is excluded because the fault would recur there.
USER_FAULTS = frozenset(
    {
        "application_error",
        "process_crash",
        "out_of_memory",
        "loss_not_finite",
        "loss_divergence",
        "loss_spike",
        "workload_imbalance",
        "throughput_drop",
    }
)
_OURS = re.compile(
    r"(?P<text>eagle-eye \[(?P<tag>node_problem|user_problem)\] incident:(?P<incident>\S+) action:(?P<action>\S+)"
    r" by:(?P<owner>\S+) .*) #(?P<sum>[0-9a-f]{8})",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Drain:
    """The contents of one of our reasons, unchanged since it was written."""

    tag: Tag
    incident_id: str
    action_id: str
    owner: str


def tag_of(fault: str) -> Tag:
    """Return whether a fault is the node's, or the program's that runs there."""
    return "user_problem" if fault in USER_FAULTS else "node_problem"


def reason_of(cause: Cause, owner: str) -> str:
    """Return the reason for a drain: one line of plain ASCII, at most REASON_CHARS_MAX characters."""
    ids = f"incident:{_word(cause.incident_id)} action:{_word(cause.action_id)} by:{_word(owner)}"
    text = f"eagle-eye [{tag_of(cause.fault)}] {ids} {_plain(cause.reason)}"
    text = text[: REASON_CHARS_MAX - 10].rstrip()
    return f"{text} #{_checksum(text)}"


def drain_of(reason: str) -> Drain | None:
    """Return the contents of one of our reasons; None for others' and for changed ones."""
    found = _OURS.fullmatch(reason)
    if found is None or found["sum"] != _checksum(found["text"]):
        return None
    tag: Tag = "user_problem" if found["tag"] == "user_problem" else "node_problem"
    return Drain(tag, found["incident"], found["action"], found["owner"])


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode("ascii", "replace")).hexdigest()[:8]


def _word(text: str) -> str:
    """Return a name as one word: ids are untrusted and must not forge the rest of the reason."""
    return re.sub(r"[^A-Za-z0-9._:@-]", "_", text)[:NAME_CHARS_MAX] or "-"


def _plain(text: str) -> str:
    """Return what survives Slurm's and sudo's argument parsing: quotes and non-ASCII do not.

    "=" is also removed, so that a sudo rule can distinguish a reason from another setting.
    """
    return " ".join(re.sub(r"[^A-Za-z0-9 ._:,;/%()+*@-]", "?", text).split()) or "-"
