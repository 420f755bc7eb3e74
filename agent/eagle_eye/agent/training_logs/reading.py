"""The content of one training log line, and the interface of a framework's parser. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

STEP_MAX = 10**12  # a larger value is not a step but an epoch in nanoseconds, or a hash


class LineWriter(Enum):
    """Which rank writes a line without a rank, where any rank might: the framework's own rule."""

    ANY = "any"
    FIRST = "first"  # rank 0
    LAST = "last"  # the highest rank of the job


class Quiet(Enum):
    """What a line says about a phase without steps."""

    CHECKPOINT_BEGIN = "checkpoint_begin"
    CHECKPOINT_END = "checkpoint_end"
    EVAL_BEGIN = "eval_begin"
    EVAL_END = "eval_end"


@dataclass(frozen=True)
class LogReading:
    """One line's content; None for absent fields.

    ``step`` is the last finished step. ``step_s`` (seconds per step), ``loss``, ``grad_norm`` and ``tokens_per_second``
    (of the rank) are means over the steps since the line before; NaN and infinity are reported as logged.
    ``job_tokens_per_second`` is the whole job's. ``stamp_s`` is the line's timestamp: seconds since an arbitrary
    moment, so that only differences are meaningful. ``quiet_step`` is a checkpoint's step. ``rank`` is the global rank
    if the line contains it; ``writer`` says which rank writes such lines if nothing else does.
    """

    step: int | None = None
    step_s: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    tokens_per_second: float | None = None
    job_tokens_per_second: float | None = None
    stamp_s: float | None = None
    quiet: Quiet | None = None
    quiet_step: int | None = None
    rank: int | None = None
    writer: LineWriter = LineWriter.ANY


Parse = Callable[[str], "LogReading | None"]


@dataclass(frozen=True)
class Framework:
    """One framework's log lines.

    A line without any of ``needles`` is not one of its lines. ``parser`` creates a parser for one log: it takes lines
    without prefixes, never raises, and may keep state. Once a log is known to be the framework's,
    ``needles_once_known`` are searched instead, if any. ``engine``: a library below other frameworks, whose lines say
    more. ``general``: parses lines of no particular framework, until one is recognised.
    """

    name: str
    needles: tuple[bytes, ...]
    parser: Callable[[], Parse]
    engine: bool = False
    general: bool = False
    needles_once_known: tuple[bytes, ...] = ()
