"""Which events take the leader away, and the fault beside each: drawn beforehand. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

KINDS = (
    "killed",  # SIGKILL
    "stopped",  # SIGSTOP, and SIGCONT after the other one leads
    "cut_from_database",
    "cut_from_agents",  # and from the other server and the subscriber's requests
    "database_restarted",
    "handed_over",  # SIGTERM
)
SHORT = ("database_restarted", "handed_over")  # over within a second or so
SHORT_S = 0.5
JOBS, NODES_EACH = 4, 2
PAUSE_S, BACK_S = (0.5, 4.0), (0.0, 1.0)


class Item(msgspec.Struct, frozen=True):
    """One event. A process on the ``place``-th node of the job crashes ``fault_after_s`` later.

    ``pause_s`` is before the event; ``back_after_s`` from another server's lead to the return of the one before.
    """

    number: int
    kind: str
    job: int
    place: int
    pause_s: float
    fault_after_s: float
    back_after_s: float


def draw(takeovers: int, seed: int, lease_s: float, kinds: Sequence[str] = KINDS) -> list[Item]:
    """Return the plan: of every round of all kinds each one once. A longer plan begins as a shorter one."""
    return [_item(number, seed, lease_s, kinds) for number in range(takeovers)]


def _item(number: int, seed: int, lease_s: float, kinds: Sequence[str]) -> Item:
    turn, place = divmod(number, len(kinds))
    kind = random.Random(f"{seed} round {turn}").sample(list(kinds), len(kinds))[place]
    chance = random.Random(f"{seed} item {number}")
    return Item(
        number=number,
        kind=kind,
        job=number % JOBS,
        place=number // JOBS % NODES_EACH,
        pause_s=chance.uniform(*PAUSE_S),
        fault_after_s=chance.uniform(0.0, SHORT_S if kind in SHORT else lease_s),
        back_after_s=chance.uniform(*BACK_S),
    )
