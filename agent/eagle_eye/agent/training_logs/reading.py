"""What one line of a training log says, and what a framework's parser is. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

STEP_MAX = 10**12  # a step beyond is no step: an epoch of nanoseconds, a hash


class Writer(Enum):
    """Which rank writes a line that names none, where each rank might: the framework's own rule."""

    ANY = "any"
    FIRST = "first"  # rank 0
    LAST = "last"  # the highest rank of the job


class Quiet(Enum):
    """What a line says about a phase in which no step is due."""

    CHECKPOINT_BEGIN = "checkpoint_begin"
    CHECKPOINT_END = "checkpoint_end"
    EVAL_BEGIN = "eval_begin"
    EVAL_END = "eval_end"


@dataclass(frozen=True)
class LogReading:
    """What one line says; None is what it does not say.

    ``step`` is the last finished step. ``step_s`` (seconds a step), ``loss``, ``grad_norm`` and ``tokens_per_second``
    (of the rank) are means over the steps since the line before; NaN and infinity are what the line said.
    ``job_tokens_per_second`` is the whole job's. ``stamp_s`` is the line's own time: seconds since any moment, so that
    only differences mean something. ``quiet_step`` is the step that a checkpoint is of. ``rank`` is the global rank
    where the line itself names it; ``writer`` says who writes such lines where nothing else does.
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
    writer: Writer = Writer.ANY


Parse = Callable[[str], "LogReading | None"]


@dataclass(frozen=True)
class Framework:
    """One framework's log lines.

    A line that holds none of ``needles`` is none of its lines. ``parser`` makes a parser for one log: it takes lines
    without prefixes, never raises, and may remember. Once a log is known to be of the framework,
    ``needles_once_known`` are searched instead, where there are any. ``engine``: a library below other frameworks,
    whose lines say more. ``general``: reads lines of no framework in particular, until one is recognised.
    """

    name: str
    needles: tuple[bytes, ...]
    parser: Callable[[], Parse]
    engine: bool = False
    general: bool = False
    needles_once_known: tuple[bytes, ...] = ()
