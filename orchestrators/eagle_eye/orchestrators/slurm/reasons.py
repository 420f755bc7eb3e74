"""The reasons that our drains carry: whose they are, for which incident, and whether they still are as written. Pure.

Slurm keeps one reason for a node, and whoever writes another one has taken the drain over. So a reason of ours ends
with a checksum of itself: one that somebody wrote into, however little, is not ours any more.
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
# Faults of what the job computes, not of where: its node is out because it would meet the same again there.
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
    """What a reason of ours says, unchanged since it was written."""

    tag: Tag
    incident_id: str
    action_id: str
    owner: str


def tag_of(fault: str) -> Tag:
    """Return whose problem a fault is: the node's, or that of the program which runs there."""
    return "user_problem" if fault in USER_FAULTS else "node_problem"


def reason_of(cause: Cause, owner: str) -> str:
    """Return the reason to drain a node with: one line of plain ASCII, at most REASON_CHARS_MAX characters."""
    ids = f"incident:{_word(cause.incident_id)} action:{_word(cause.action_id)} by:{_word(owner)}"
    text = f"eagle-eye [{tag_of(cause.fault)}] {ids} {_plain(cause.reason)}"
    text = text[: REASON_CHARS_MAX - 10].rstrip()
    return f"{text} #{_checksum(text)}"


def drain_of(reason: str) -> Drain | None:
    """Return what a reason of ours says; None for anybody else's and for one that is not as it was written."""
    found = _OURS.fullmatch(reason)
    if found is None or found["sum"] != _checksum(found["text"]):
        return None
    tag: Tag = "user_problem" if found["tag"] == "user_problem" else "node_problem"
    return Drain(tag, found["incident"], found["action"], found["owner"])


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode("ascii", "replace")).hexdigest()[:8]


def _word(text: str) -> str:
    """Return a name as one word: an id comes from outside and must not write the rest of the reason."""
    return re.sub(r"[^A-Za-z0-9._:@-]", "_", text)[:NAME_CHARS_MAX] or "-"


def _plain(text: str) -> str:
    """Return what survives Slurm's and sudo's reading of arguments: quotes and what is no ASCII do not.

    Nor is there a "=", so that a rule for sudo can tell a reason from a further order.
    """
    return " ".join(re.sub(r"[^A-Za-z0-9 ._:,;/%()+*@-]", "?", text).split()) or "-"
