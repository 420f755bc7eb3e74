"""Records for accounting: attempts of jobs, GPUs and their seats, driver errors, repair tickets.

Times are Unix seconds on the server's clock (``_s``), as in ``records.py``; a change is a new record with the same id.
"""

from __future__ import annotations

from typing import Literal

import msgspec

# How an attempt ended, as far as reported. "": it is open. superseded: the next attempt began. gone: its agents no
# longer report it, and no reason is known.
AttemptEnd = Literal["", "finished", "failed", "cancelled", "preempted", "timeout", "superseded", "gone"]


class Gap(msgspec.Struct, frozen=True):
    """A time in which an attempt was not observed: the server was down, or none of its nodes was heard."""

    start_s: float
    end_s: float


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt of a job, from when it was first declared or seen to its end.

    ``run`` is the id of the first attempt of the same run: a job that starts again after it finished or was cancelled
    begins another run. ``nodes`` and ``gpus`` count its members; ``gpus`` are device rows, so local ranks where there
    are no GPUs, and None while unknown. ``node`` is the only one, "" with several. ``first_step`` is the first step,
    ``first_step_s`` when it ended; ``last_step_s`` when the newest one did: all None before the first. ``prior_step``
    is the highest step of the run before this attempt (None: none), ``caught_up_s`` when this attempt passed it (None:
    not yet). ``step_s`` is the typical duration of a step. ``seen_s`` is when it was last observed. If there are too
    many ``gaps`` the two nearest are merged.
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
    """The members of an attempt; ``id`` is the attempt's. A separate record because it is long and seldom changes."""

    id: str
    job: str
    started_s: float
    nodes: list[str]


class Seat(msgspec.Struct, frozen=True):
    """Where a GPU was, from the first report of it there until it was reported elsewhere."""

    node: str
    device: int
    since_s: float
    until_s: float


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """One GPU by its UUID, and its seat; ``moves`` are its earlier seats, oldest first.

    ``seen_s`` is when an agent last reported it. ``moves_dropped`` counts the oldest seats, which are no longer kept.
    ``pci_address`` is its address on its node's bus, ``serial`` the serial number of its board; "" if unknown.
    ``told_with`` is the number of GPUs, including itself, in its node's report then; 0 if unknown. ``nvlinks`` were up
    then (None: unknown), and ``nvlinks_most`` is the maximum in its current seat.
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
        """1 if it has moved, else 0."""
        return int(bool(self.moves))


class Comparison(msgspec.Struct, frozen=True):
    """The result of one check for silent corruption of a GPU, on the node where it was then."""

    check_id: str
    node: str
    time_s: float
    seconds: float
    operations: float
    wrong_numbers: float


class GpuChecks(msgspec.Struct, frozen=True, kw_only=True):
    """All checks of one GPU for silent corruption, in whatever seat; ``newest`` are the last of them, oldest first.

    Of those with wrong numbers the newest are kept longest. A passed check says nothing beyond its operations.
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
    """How often one error code was reported for one device of a node; ``kind`` is xid or sxid.

    ``uuid`` is that of the GPU there at the time, "" if unknown or for the whole node (``device`` -1).
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
