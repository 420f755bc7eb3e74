"""The state of the launcher's state machine, and its transitions. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import msgspec

from eagle_eye.orchestrators.launch import events as on
from eagle_eye.orchestrators.launch import orders as to
from eagle_eye.orchestrators.launch.blame import Raised
from eagle_eye.orchestrators.launch.checkpoints import Span
from eagle_eye.planning.plan import Plan, nodes_used
from eagle_eye.schema.action import RestartScope

KNOWN_MARGIN = 3.0  # times the longest known start


class KnownStarts(msgspec.Struct, frozen=True):
    """The longest start of this job that led to a step, from the beginning and from a checkpoint; None: none did.

    ``nodes`` are those that took part in one.
    """

    nodes: frozenset[str] = frozenset()
    fresh_s: float | None = None
    resumed_s: float | None = None

    @property
    def any_known(self) -> bool:
        """Whether a start of this job was ever seen to finish, so that another one's finish would be seen."""
        return self.fresh_s is not None or self.resumed_s is not None

    @property
    def longest_s(self) -> float:
        """Return the longest known start; 0 where there is none."""
        return max(self.fresh_s or 0.0, self.resumed_s or 0.0)

    def after(self, members: Iterable[str], took_s: float, *, resumed: bool) -> KnownStarts:
        """Return a copy with one more start added."""
        nodes = self.nodes | frozenset(members)
        if resumed:
            return KnownStarts(nodes, self.fresh_s, max(took_s, self.resumed_s or 0.0))
        return KnownStarts(nodes, max(took_s, self.fresh_s or 0.0), self.resumed_s)

    def took_s(self, members: Iterable[str], *, resumed: bool) -> float | None:
        """Return the longest known start; None where not all of these nodes have started the job in the same way.

        Loading a checkpoint may take longer than starting from scratch.
        """
        return (self.resumed_s if resumed else self.fresh_s) if self.nodes.issuperset(members) else None

    def limit_s(self, members: Iterable[str], least_s: float, most_s: float, *, resumed: bool) -> float:
        """Return after how long a start is checked: before ``most_s`` only where a similar one is known."""
        took_s = self.took_s(members, resumed=resumed)
        return most_s if took_s is None else min(most_s, max(least_s, KNOWN_MARGIN * took_s))


@dataclass(frozen=True)
class LauncherNodes:
    """The launcher's nodes, in order: the first ``wanted`` start, the rest are spares.

    A job may run on ``least`` to ``wanted`` nodes.
    """

    nodes: tuple[str, ...]
    least: int
    wanted: int


def choose_nodes(
    fleet: LauncherNodes,
    current: tuple[str, ...],
    unusable: AbstractSet[str],
    draining: AbstractSet[str] = frozenset(),
) -> tuple[str, ...] | None:
    """Return the nodes of the next attempt by node rank, None where fewer than ``least`` are usable.

    Nodes that stay keep their place, so that most ranks keep their neighbours; a spare takes the place of the node it
    replaces; without spares the job shrinks. A draining node is used only where the job could not run otherwise. Never
    returns an unusable node, nor a node twice.
    """
    chosen = _fill(fleet, current, unusable | draining)
    if len(chosen) >= fleet.least:
        return chosen
    missing = fleet.least - len(chosen)
    kept = [node for node in fleet.nodes if node in draining and node not in unusable][:missing]
    if len(kept) < missing:
        return None
    return _fill(fleet, current, unusable | (draining - set(kept)))


def lay_out(plan: Plan, current: tuple[str, ...], chosen: tuple[str, ...]) -> tuple[str, ...]:
    """Return the chosen nodes by their places in the plan's layout, without those that add no speed.

    A new node takes the place of one that is gone. Where the job shrinks, places are assigned to copy the least. The
    plan must have layouts for the numbers of chosen and of current nodes.
    """
    gone = [node for node in current if node not in chosen]
    places = list(current)
    for node in chosen:
        if node in current:
            continue
        if gone:
            places[places.index(gone.pop(0))] = node
        else:
            places.append(node)
    for node in gone:
        places = list(plan.lost(places, node).nodes)
    return tuple(places[: nodes_used(plan, len(places))])


def _fill(fleet: LauncherNodes, current: tuple[str, ...], unusable: AbstractSet[str]) -> tuple[str, ...]:
    places = current or fleet.nodes[: fleet.wanted]
    places += ("",) * (fleet.wanted - len(places))
    spares = [node for node in fleet.nodes if node not in places and node not in unusable]
    filled = []
    for node in places:
        if node and node not in unusable:
            filled.append(node)
        elif spares:
            filled.append(spares.pop(0))
    return tuple(filled)


NEVER_S = float("inf")


class Phase(StrEnum):
    """The job's phase."""

    GATHERING = "gathering"
    STARTING = "starting"
    VERIFYING = "verifying"
    RUNNING = "running"
    DECIDING = "deciding"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


UP = frozenset({Phase.VERIFYING, Phase.RUNNING})
ENDED = frozenset({Phase.FINISHED, Phase.FAILED, Phase.CANCELLED})
_OVER = ENDED - {Phase.FINISHED}

# Allowed transitions. FINISHED only from an attempt whose ranks were all spawned.
NEXT: Mapping[Phase, frozenset[Phase]] = MappingProxyType({
    Phase.GATHERING: frozenset({Phase.STARTING}) | _OVER,
    Phase.STARTING: frozenset({Phase.VERIFYING, Phase.DECIDING, Phase.GATHERING}) | _OVER,
    Phase.VERIFYING: frozenset({Phase.RUNNING, Phase.DECIDING, Phase.GATHERING}) | ENDED,
    Phase.RUNNING: frozenset({Phase.DECIDING, Phase.GATHERING}) | ENDED,
    Phase.DECIDING: frozenset({Phase.GATHERING}) | _OVER,
    Phase.FINISHED: frozenset(),
    Phase.FAILED: frozenset(),
    Phase.CANCELLED: frozenset(),
})  # fmt: skip


@dataclass(frozen=True)
class Rules:
    """The user's settings. Durations in seconds.

    ``silent_within_s`` is for a runner that has spoken and then does not answer, ``ready_within_s`` and
    ``started_within_s`` for one that answers and is not done. A running attempt's runner is given the lease after which
    it has killed its ranks. ``verified_within_s`` is how long to wait for a first step, ``warm_within_s`` the minimum
    before a start known to take less is examined. ``checkpoints`` says whether the launcher sees the job's checkpoints.
    With ``layouts`` the job runs on every number of nodes that the plan has a layout for. ``regroup_within_s`` is how
    long ranks may take to reach their restart points, and then to a first step, before a larger restart follows; the
    latter limit is at least the job's longest known start. 0: no process is kept.
    """

    fleet: LauncherNodes
    verdict_wait_s: float = 30.0
    restarts_max: int = 3
    backoff_s: float = 10.0
    settled_after_s: float = 300.0
    ready_within_s: float = 180.0
    silent_within_s: float = 20.0
    lease_s: float = 30.0
    stopped_within_s: float = 5.0
    started_within_s: float = 60.0
    verified_within_s: float = 1_800.0
    warm_within_s: float = 600.0
    checkpoints: bool = False
    grow_at_checkpoint: bool = False
    check: bool = False
    layouts: Plan | None = None
    regroup_within_s: float = 30.0


@dataclass(frozen=True)
class State:
    """Everything that decides what happens next.

    ``members`` are the nodes of the attempt by node rank; ``started`` those whose ranks were spawned, with them;
    ``awaiting`` are nodes told to stop that have not confirmed it; ``returning`` are lost ones that are expected back
    soon; ``unfit`` have failed their check; ``doing`` is what runners report doing before they are ready. ``requests``
    are answered once the attempt runs. ``step_max`` is the highest step of which a complete checkpoint was ever seen,
    ``resumed_step`` that of the checkpoint resumed from, None for a start from scratch, once it is ``chosen``;
    ``advanced`` says that this attempt has completed a checkpoint beyond ``step_max``, ``stepped`` that a step of it
    was reported. ``resumed_s`` is when the checkpoint resumed from was completed, None once the attempt has completed
    one itself or that one was judged; ``doubted_s`` that of one from which the numbers broke after some steps,
    ``suspected`` those from which they broke at once or again (checkpoints.py). ``raised`` are the exceptions that
    ended this attempt's ranks, ``raised_before`` those of the last one; ``killed`` are its ranks that a signal ended,
    with their exit codes; ``done`` those that exited with 0, ``done_told`` those of them that were named for it.
    ``starts`` is what starts took; while ``looking``, ``sights`` says where ranks are; ``held_before`` seemed to
    hold the start up one look ago. ``stuck`` are the nodes that held the last start up, ``stuck_again`` those that
    held two in a row up. Of an attempt without a step, ``unreached`` are the nodes whose ranks could not reach
    others, with these ranks, ``followed`` those whose ranks ended for that; ``ended_otherwise`` says that ranks
    ended of something else. ``out_of_reach`` are the nodes that do not reach the launcher's store, ``doubted``
    those that have said so once, ``reaching`` those whose last answer was that they do (attempt.py).
    ``failed`` are the nodes whose ranks have ended without success, ``points`` those ranks, by node, that have a
    restart point and ``waiting`` those of them that wait there; ``scope`` is that of the restart by which the
    attempt begins, or began, and the ranks of ``kept`` nodes go on in it from the one before, until a first step is
    heard of. Dues are monotonic times.
    """

    phase: Phase = Phase.GATHERING
    attempt: int = 1
    members: tuple[str, ...] = ()
    ready: frozenset[str] = frozenset()
    lost: frozenset[str] = frozenset()
    returning: frozenset[str] = frozenset()
    unfit: frozenset[str] = frozenset()
    doing: Mapping[str, str] = field(default_factory=dict)
    excluded: frozenset[str] = frozenset()
    draining: frozenset[str] = frozenset()
    started: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    succeeded: frozenset[str] = frozenset()
    awaiting: frozenset[str] = frozenset()
    restarts: int = 0
    distrusted: tuple[Span, ...] = ()
    distrust_since_s: float | None = None
    suspected: tuple[float, ...] = ()
    doubted_s: float | None = None
    requests: tuple[int, ...] = ()
    chosen: bool = False
    resumed_step: int | None = None
    resumed_s: float | None = None
    stepped: bool = False
    step_max: int | None = None
    advanced: bool = False
    killed: Mapping[int, int] = field(default_factory=dict)
    done: frozenset[int] = frozenset()
    done_told: frozenset[int] = frozenset()
    done_due_s: float = field(default=NEVER_S)
    raised: Raised = field(default_factory=Raised)
    raised_before: Raised = field(default_factory=Raised)
    starts: KnownStarts = field(default_factory=KnownStarts)
    looking: bool = False
    sights: tuple[on.RanksSeen, ...] = ()
    held_before: frozenset[int] = frozenset()
    stuck: frozenset[str] = frozenset()
    stuck_again: frozenset[str] = frozenset()
    unreached: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    followed: frozenset[str] = frozenset()
    ended_otherwise: bool = False
    unreached_due_s: float = field(default=NEVER_S)
    doubted: frozenset[str] = frozenset()
    out_of_reach: frozenset[str] = frozenset()
    reaching: frozenset[str] = frozenset()
    reach_due_s: float = field(default=NEVER_S)
    failed: frozenset[str] = frozenset()
    points: Mapping[str, frozenset[int]] = field(default_factory=dict)
    waiting: Mapping[str, frozenset[int]] = field(default_factory=dict)
    scope: RestartScope = "job"
    kept: frozenset[str] = frozenset()
    regroup_due_s: float = field(default=NEVER_S)
    up_since_s: float = NEVER_S
    ready_due_s: float = field(default=NEVER_S)
    stopped_due_s: float = field(default=NEVER_S)
    settled_due_s: float = field(default=NEVER_S)
    due_s: float = field(default=NEVER_S)

    @property
    def unusable(self) -> frozenset[str]:
        """Return the nodes on which no attempt may be started."""
        return self.excluded | self.lost | self.unfit

    @property
    def hopeless(self) -> frozenset[str]:
        """Return the unusable nodes that are not expected back soon."""
        return self.excluded | (self.lost - self.returning) | self.unfit


Step = tuple[State, list[to.Order]]


def move(state: State, phase: Phase, **changes: Any) -> State:
    """Return the state in another phase, with the changes. Raises ValueError for an invalid transition."""
    if phase not in NEXT[state.phase]:
        raise ValueError(f"no move leads from {state.phase} to {phase}")
    return replace(state, phase=phase, **changes)


def due_s(state: State) -> float:
    """Return the monotonic time of the next timer."""
    return min(
        state.ready_due_s, state.stopped_due_s, state.settled_due_s, state.unreached_due_s, state.regroup_due_s,
        state.reach_due_s, state.done_due_s, state.due_s,
    )  # fmt: skip
