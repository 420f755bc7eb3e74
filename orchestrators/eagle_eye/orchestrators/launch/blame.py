"""Attributes an attempt's failure, from the end of its ranks' logs, to the script or to a connection. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

LINE_CHARS_MAX = 300
_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+), in .+')
_EXCEPTION = re.compile(r"(?P<kind>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?\Z")
_VARIES = re.compile(r"0x[0-9a-fA-F]+|\d+")
# Errors that a node, its network or its storage may cause in a correct script.
_KINDS_OF_OTHERS = re.compile(
    r"Dist\w*Error|Connection|Timeout|Network|Socket|HTTP|SSL|Broken|Remote|Interrupt|Signal"
    r"|OSError|IOError|FileNotFound|Permission"
)
_WORDS_OF_OTHERS = re.compile(
    r"nccl|rccl|gloo|cuda|\bhip\b|gpu|device|\becc\b|socket|connect|peer|timed? ?out|network"
    r"|input/output|stale|space|store",
    re.IGNORECASE,
)
# Log text of a rank that could not reach a peer or the store, as in the detectors (signs/exits.py)...
CANNOT_CONNECT = re.compile(
    r"connectFullMesh|no route to host|network is (?:unreachable|down)|host is (?:unreachable|down)"
    r"|\bconnect(?:ion|ing|ed)?\b[^\n]{0,200}(?:timed? ?out|refused|unreachable|invalid argument|cannot assign)"
    r"|socket\w*connect[^\n]{0,200}(?:timed? ?out|refused|failed)|tim(?:ed?|ing) ?out[^\n]{0,60}\bconnect"
    r"|failed to connect|ibv_modify_qp[^\n]{0,80}(?:timed? ?out|failed)",
    re.IGNORECASE,
)
# ...and of one that lost a peer, or waited for it in vain.
_FOLLOWED = re.compile(
    r"connection (?:closed|reset)|clos(?:ed|ing)[^\n]{0,40}peer|broken pipe|remote process exited|remote error"
    r"|waiting for clients|wait timeout|barrier|SIGTERM|signal: 15",
    re.IGNORECASE,
)
_PREFIX = re.compile(r"\[rank\d+\]: ?")  # torch's prefix of each line


@dataclass(frozen=True)
class Raised:
    """The exceptions that ended an attempt's ranks, and their nodes; ``step`` is that of the last new checkpoint."""

    step: int | None = None
    on: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def and_also(self, node: str, log: str) -> Raised:
        """Return a copy with the end of another rank's log on the node added."""
        name = exception(log)
        return Raised(self.step, {**self.on, name: self.on.get(name, frozenset()) | {node}}) if name else self


def exception(log: str) -> str:
    """Return where the log's final exception was raised, and its line; "" if none, or if caused from outside.

    Numbers in the line are ignored: they are ranks, sizes and addresses.
    """
    lines = [_PREFIX.sub("", line, count=1) for line in log.rstrip().splitlines()]
    for index in range(len(lines) - 1, 0, -1):
        said = _EXCEPTION.match(lines[index])
        if said is None or not lines[index - 1].startswith("  "):
            continue
        kind, message = said["kind"].rpartition(".")[2], said["message"] or ""
        place = next((frame for text in reversed(lines[:index]) if (frame := _FRAME.match(text))), None)
        if place is None or _KINDS_OF_OTHERS.search(kind) or _WORDS_OF_OTHERS.search(message):
            return ""
        line = _VARIES.sub("#", lines[index])[:LINE_CHARS_MAX]
        return f"{place['file']}:{place['line']}: {line}"
    return ""


def cannot_connect(log: str) -> bool:
    """Whether the log ends with a failed connection attempt."""
    return CANNOT_CONNECT.search(_last_words(log)) is not None


def followed(log: str) -> bool:
    """Whether the log ends because another rank exited or did not arrive."""
    words = _last_words(log)
    return _FOLLOWED.search(words) is not None and not CANNOT_CONNECT.search(words)


def _last_words(log: str) -> str:
    """Return the text after the last indented line: of a traceback, the exception."""
    lines = [_PREFIX.sub("", line, count=1) for line in log.rstrip().splitlines()]
    first = next((at + 1 for at in range(len(lines) - 1, -1, -1) if lines[at][:1].isspace()), 0)
    return "\n".join(lines[first:])


def scripts_own(before: Raised, now: Raised) -> str:
    """Return, as text, the error that ended two attempts alike on at least two nodes; "" if none."""
    if before.step != now.step:
        return ""
    for name in sorted(before.on.keys() & now.on.keys()):
        nodes = before.on[name] | now.on[name]
        if len(nodes) > 1:
            return f"the same exception again, on {', '.join(sorted(nodes))}: {name}"
    return ""
