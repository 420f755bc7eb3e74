"""Which events take the leader away, and the fault beside each: drawn beforehand. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec

KINDS = (
    "killed",  # SIGKILL
    "stopped",  # SIGSTOP, and SIGCONT after the other one leads
    "stopped_in_transaction",  # as it sends the COMMIT of an action, which goes on after the other one leads
    "stopped_in_delivery",  # as it sends the webhook of an action, likewise
    "cut_from_database",
    "database_restarted",
    "database_failed_over",  # stopped at once, and its streaming replica promoted
    "database_away",  # for ``away_s``
    "cut_from_agents",  # and from the other server and the subscriber's requests
    "handed_over",  # SIGTERM
    "both_gone",  # SIGKILL to both servers, which are back after ``away_s``
)
SHORT = ("database_restarted", "database_failed_over", "handed_over")  # over within a second or so
SHORT_S = 0.5
AWAY = ("database_away", "both_gone")  # measured from its return: meanwhile nobody can act
BY_FAULT = ("stopped_in_transaction", "stopped_in_delivery")  # the fault is first, and what follows from it is stopped
SAME_LEADER = ("database_restarted", "database_failed_over", "database_away")  # the leader may go on leading
JOBS, NODES_EACH = 4, 2
PAUSE_S_MIN, PAUSE_LEASES, BACK_S = 0.2, 0.8, (0.0, 1.0)
AWAY_S = 60.0


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


def draw(takeovers: int, seed: int, lease_s: float, kinds: Sequence[str] = KINDS, away_s: float = AWAY_S) -> list[Item]:
    """Return the plan: of every round of all kinds each one once. A longer plan begins as a shorter one."""
    return [_item(number, seed, lease_s, kinds, away_s) for number in range(takeovers)]


def order(kinds: Sequence[str], chance: random.Random) -> list[str]:
    """Return the kinds in an order drawn by chance, those that keep the leader right before ``cut_from_agents``.

    A leader gives way to agents only after a term of some length, which these make a part of.
    """
    drawn = chance.sample(list(kinds), len(kinds))
    if "cut_from_agents" not in drawn:
        return drawn
    keeping = [kind for kind in drawn if kind in SAME_LEADER]
    others = [kind for kind in drawn if kind not in SAME_LEADER]
    place = others.index("cut_from_agents")
    return [*others[:place], *keeping, *others[place:]]


def _item(number: int, seed: int, lease_s: float, kinds: Sequence[str], away_s: float) -> Item:
    turn, place = divmod(number, len(kinds))
    kind = order(kinds, random.Random(f"{seed} round {turn}"))[place]
    chance = random.Random(f"{seed} item {number}")
    within_s = SHORT_S if kind in SHORT else away_s if kind in AWAY else 0.0 if kind in BY_FAULT else lease_s
    return Item(
        number=number,
        kind=kind,
        job=number % JOBS,
        place=number // JOBS % NODES_EACH,
        pause_s=chance.uniform(PAUSE_S_MIN, PAUSE_S_MIN + PAUSE_LEASES * lease_s),
        fault_after_s=chance.uniform(0.0, within_s),
        back_after_s=chance.uniform(*BACK_S),
    )
