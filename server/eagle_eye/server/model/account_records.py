"""What is kept of the past for counting: attempts of jobs, GPUs and where they sat, driver errors, repair tickets.

Times are Unix seconds on the server's clock (``_s``), as in ``records.py``; a change is a new record under the same id.
"""

from __future__ import annotations

from typing import Literal

import msgspec

# How an attempt ended, as far as anybody said. "": it goes on. superseded: the next attempt began. gone: its agents
# no longer speak of it, and nobody said why.
AttemptEnd = Literal["", "finished", "failed", "cancelled", "preempted", "timeout", "superseded", "gone"]


class Gap(msgspec.Struct, frozen=True):
    """A time in which nobody watched an attempt: the server was down, or none of its nodes was heard."""

    start_s: float
    end_s: float


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt of a job, from when it was first declared or seen to its end.

    ``run`` is the id of the first attempt of the same run: what began anew after the job was finished or cancelled is
    another run. ``nodes`` and ``gpus`` count its members; ``gpus`` are device rows, so local ranks where there are no
    GPUs, and None while nobody said. ``node`` is the only one, "" with several. ``first_step`` is where it took up,
    ``first_step_s`` when that step ended; ``last_step_s`` when the newest one did: all None before the first.
    ``prior_step`` is the highest step of the run before this attempt (None: none), ``caught_up_s`` when this attempt
    went beyond it (None: not yet). ``step_s`` is what a step typically takes. ``seen_s`` is when it was last watched.
    Of too many ``gaps`` the two nearest are joined.
    """

    id: str
    run: str
    job: str
    attempt: int
    started_s: float
    seen_s: float
    state: str = "running"
    declared: bool = False
    nodes: int = 0
    node: str = ""
    gpus: int | None = None
    first_step: float | None = None
    first_step_s: float | None = None
    last_step: float | None = None
    last_step_s: float | None = None
    step_s: float | None = None
    prior_step: float | None = None
    caught_up_s: float | None = None
    gaps: list[Gap] = []
    ended_s: float | None = None
    end: AttemptEnd = ""


class AttemptMembers(msgspec.Struct, frozen=True, kw_only=True):
    """Who took part in an attempt; ``id`` is the attempt's. Kept apart: it is long and seldom changes."""

    id: str
    job: str
    started_s: float
    nodes: list[str]


class Seat(msgspec.Struct, frozen=True):
    """Where a GPU sat, from when it was first told of there until it was told of elsewhere."""

    node: str
    device: int
    since_s: float
    until_s: float


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU by its UUID, and where it sits; ``moves`` are the seats before, oldest first.

    ``seen_s`` is when an agent last told of it. ``moves_dropped`` counts the oldest seats, which are no longer kept.
    ``pci_address`` is where it sits on its node's bus, ``serial`` what is printed on its board; "" where nobody said.
    ``told_with`` is of how many GPUs, itself among them, its node told then; 0 where it did not say. ``nvlinks`` were
    up then (None: not said), and ``nvlinks_most`` at most since it sits there.
    """

    uuid: str
    node: str
    device: int
    model: str
    since_s: float
    first_seen_s: float
    seen_s: float
    moves: list[Seat] = []
    moves_dropped: int = 0
    pci_address: str = ""
    serial: str = ""
    told_with: int = 0
    nvlinks: int | None = None
    nvlinks_most: int = 0

    @property
    def moved(self) -> int:
        """1 when it sat elsewhere before."""
        return int(bool(self.moves))


class Comparison(msgspec.Struct, frozen=True):
    """What one check for silent corruption found of a GPU, on the node in which it sat then."""

    check_id: str
    node: str
    time_s: float
    seconds: float
    operations: float
    wrong_numbers: float


class GpuChecks(msgspec.Struct, frozen=True, kw_only=True):
    """All checks of one GPU for silent corruption, wherever it sat; ``newest`` are the last of them, oldest first.

    Of those with wrong numbers the newest stay longest. That none was wrong says nothing beyond these operations.
    """

    uuid: str
    checks: int
    seconds: float
    operations: float
    wrong_numbers: float
    first_s: float
    last_s: float
    newest: list[Comparison] = []


class DriverError(msgspec.Struct, frozen=True, kw_only=True):
    """How often one error code was told of for one device of a node; ``kind`` is xid or sxid.

    ``uuid`` is the GPU's that sat there then, "" when it is not known or the whole node is meant (``device`` -1).
    """

    id: str
    node: str
    device: int
    uuid: str
    kind: str
    code: int
    count: int
    first_s: float
    last_s: float


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """A repair ticket of the site's own system; ``id`` is that system's. ``closed_s`` None: still open."""

    id: str
    node: str
    opened_s: float
    closed_s: float | None
    text: str
    imported_s: float
