"""What the launcher does next: a pure function from its state and something that happened to effects.

    GATHERING ─▶ STARTING ─▶ RUNNING ─▶ FINISHED
        ▲            │           │
        │            ▼           ▼
        └──────── DECIDING ◀─────┘        FAILED and CANCELLED from anywhere

GATHERING waits until the nodes of the next attempt are ready and what ran on them has stopped. DECIDING
leaves a failed attempt as it is and waits for word from Eagle Eye, then restarts by itself: training never
depends on us.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from eagle_eye.orchestrators.launch import happenings as on
from eagle_eye.orchestrators.launch import orders as to
from eagle_eye.orchestrators.launch.checkpoints import Span
from eagle_eye.orchestrators.launch.plan import Fleet, choose_nodes


class Phase(StrEnum):
    """Where the job is."""

    GATHERING = "gathering"
    STARTING = "starting"
    RUNNING = "running"
    DECIDING = "deciding"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED = frozenset({Phase.FINISHED, Phase.FAILED, Phase.CANCELLED})


@dataclass(frozen=True)
class Rules:
    """What the user has decided. Durations in seconds."""

    fleet: Fleet
    verdict_wait_s: float = 30.0
    restarts_max: int = 3
    ready_within_s: float = 180.0
    stopped_within_s: float = 5.0
    started_within_s: float = 60.0


@dataclass(frozen=True)
class State:
    """Everything that decides what happens next.

    ``members`` are the nodes of the attempt by node rank; ``awaiting`` are nodes told to stop that have not
    confirmed it; ``returning`` are lost ones whose runner is started again; ``requests`` are answered once
    the attempt runs. Dues are on the monotonic clock.
    """

    phase: Phase = Phase.GATHERING
    attempt: int = 1
    members: tuple[str, ...] = ()
    ready: frozenset[str] = frozenset()
    lost: frozenset[str] = frozenset()
    returning: frozenset[str] = frozenset()
    excluded: frozenset[str] = frozenset()
    draining: frozenset[str] = frozenset()
    started: frozenset[str] = frozenset()
    succeeded: frozenset[str] = frozenset()
    awaiting: frozenset[str] = frozenset()
    restarts: int = 0
    distrusted: tuple[Span, ...] = ()
    distrust_since_s: float | None = None
    requests: tuple[int, ...] = ()
    ready_due_s: float = field(default=float("inf"))
    stopped_due_s: float = field(default=float("inf"))
    due_s: float = field(default=float("inf"))

    @property
    def unusable(self) -> frozenset[str]:
        """Return the nodes that no attempt may be started on."""
        return self.excluded | self.lost


Step = tuple[State, list[to.Order]]


def due_s(state: State) -> float:
    """Return the monotonic time at which something is to be done although nothing happens."""
    return min(state.ready_due_s, state.stopped_due_s, state.due_s)


def step(rules: Rules, state: State, happening: on.Happening, now: on.Moment) -> Step:
    """Return the state after what happened, and what is now to be done, in order."""
    if state.phase in ENDED:
        return state, _turn_away(happening, f"the job is {state.phase}")
    state, orders = _dispatch(rules, state, happening, now)
    if not state.awaiting:
        state = replace(state, stopped_due_s=float("inf"))
    return state, orders


def _dispatch(rules: Rules, state: State, happening: on.Happening, now: on.Moment) -> Step:
    match happening:
        case on.Opened():
            return _consider(rules, replace(state, ready_due_s=now.monotonic_s + rules.ready_within_s), now)
        case on.ExcludeAsked() | on.RestartAsked() | on.ReadmitAsked():
            return _asked(rules, state, happening, now)
        case on.Cancelled(reason, exit_code):
            return _end(state, Phase.CANCELLED, reason, exit_code)
        case on.StartImpossible(attempt, detail):
            if attempt == state.attempt:
                return _attempt_failed(state, detail, now, rules.verdict_wait_s)
        case on.Tick():
            return _tick(rules, state, now)
        case _:
            return _runner_says(rules, state, happening, now)
    return state, []


def _runner_says(rules: Rules, state: State, said: on.RunnerWord, now: on.Moment) -> Step:
    match said:
        case on.RunnerReady(node):
            state = replace(
                state, ready=state.ready | {node}, lost=state.lost - {node}, returning=state.returning - {node}
            )
            return _consider(rules, state, now, [to.Say("node_ready", {"node": node})])
        case on.RunnerLost():
            return _runner_lost(rules, state, said, now)
        case on.RanksStopped(node, survivors):
            return _ranks_stopped(rules, state, node, survivors, now)
        case on.RanksStarted(node, attempt):
            if attempt == state.attempt and node in state.members:
                return _running_yet(replace(state, started=state.started | {node}))
        case on.RanksEnded(node, attempt):
            if attempt == state.attempt and node in state.members:
                return _ranks_ended(state, said, now, rules.verdict_wait_s)
    return state, []  # word of an attempt that is over


def _asked(rules: Rules, state: State, asked: on.Asked, now: on.Moment) -> Step:
    match asked:
        case on.ExcludeAsked():
            return _exclude(rules, state, asked)
        case on.RestartAsked():
            return _restart(rules, state, asked, now)
        case on.ReadmitAsked(request, nodes):
            back = frozenset(nodes) & (state.excluded | state.draining)
            revived: list[to.Order] = [to.Revive(node) for node in sorted(back & state.lost)]
            state = replace(state, excluded=state.excluded - back, draining=state.draining - back)
            text = f"readmitted: {', '.join(sorted(back)) or 'none'}"
            told = to.Say("readmitted", {"nodes": sorted(back)})
            return state, [to.Persist(), to.Answer(request, True, text), told, *revived]


def _turn_away(happening: on.Happening, reason: str) -> list[to.Order]:
    if isinstance(happening, on.ExcludeAsked | on.RestartAsked | on.ReadmitAsked):
        return [to.Answer(happening.request, False, reason)]
    return []


def _consider(rules: Rules, state: State, now: on.Moment, orders: list[to.Order] | None = None) -> Step:
    """While gathering: start the attempt if everything for it is there, fail where it cannot come."""
    orders = orders or []
    if state.phase is not Phase.GATHERING:
        return state, orders
    plan = choose_nodes(rules.fleet, state.members, state.unusable, state.draining)
    if plan is None:
        hopeless = state.unusable - state.returning
        if choose_nodes(rules.fleet, state.members, hopeless, state.draining) is not None:
            return state, orders  # until they are back, or ready_due_s
        usable = len(rules.fleet.nodes) - len(state.unusable)
        reason = f"{usable} nodes are usable, the job needs {rules.fleet.least}"
        state, more = _end(state, Phase.FAILED, reason, 1)
        return state, orders + more
    if state.awaiting & set(plan) or not state.ready.issuperset(plan):
        return state, orders
    distrusted = state.distrusted
    if state.distrust_since_s is not None:
        distrusted += (Span(state.distrust_since_s, max(state.distrust_since_s, now.unix_s)),)
    state = replace(
        state,
        phase=Phase.STARTING, members=plan, started=frozenset(), succeeded=frozenset(),
        draining=state.draining & set(plan), excluded=state.excluded | (state.draining - set(plan)),
        distrusted=distrusted, distrust_since_s=None,
        ready_due_s=float("inf"), due_s=now.monotonic_s + rules.started_within_s,
    )  # fmt: skip
    return state, [
        *orders,
        to.Persist(),
        to.TellServer("running", state.attempt, plan),
        to.StartRanks(state.attempt, plan, distrusted),
    ]


def _gather(rules: Rules, state: State, reason: str, now: on.Moment) -> Step:
    """The attempt is over and the next one is prepared; what runs is stopped."""
    running = frozenset(state.members) - state.lost
    state = replace(
        state,
        phase=Phase.GATHERING, attempt=state.attempt + 1, awaiting=state.awaiting | running,
        stopped_due_s=now.monotonic_s + rules.stopped_within_s,
        ready_due_s=now.monotonic_s + rules.ready_within_s, due_s=float("inf"),
    )  # fmt: skip
    plan = choose_nodes(rules.fleet, state.members, state.unusable, state.draining) or ()
    return _consider(rules, state, now, [
        # The server first: the exits that follow belong to an attempt that is over, and are no crash.
        to.TellServer("running", state.attempt, plan),
        to.StopRanks(tuple(node for node in state.members if node in running)),
        to.Say("stopping", {"reason": reason}),
    ])  # fmt: skip


def _running_yet(state: State) -> Step:
    if state.phase is not Phase.STARTING or not state.started.issuperset(state.members):
        return state, []
    unconfirmed = tuple(sorted(state.awaiting))
    running = to.Running(state.attempt, state.members, state.requests, unconfirmed)
    return replace(state, phase=Phase.RUNNING, due_s=float("inf"), requests=()), [running]


def _ranks_ended(state: State, ended: on.RanksEnded, now: on.Moment, verdict_wait_s: float) -> Step:
    if not ended.success:
        exits = {str(rank): code for rank, code in ended.exits}
        told = to.Say("ranks_failed", {"node": ended.node, "exit_codes": exits, "detail": ended.detail})
        if state.phase not in (Phase.STARTING, Phase.RUNNING):
            return state, [told]
        wait_s = verdict_wait_s if ended.in_touch else 0.0
        first = f"rank {ended.exits[0][0]} ended with {ended.exits[0][1]}" if ended.exits else "its ranks ended"
        state, orders = _attempt_failed(state, f"{ended.node}: {first}", now, wait_s)
        return state, [told, *orders]
    state = replace(state, succeeded=state.succeeded | {ended.node}, started=state.started | {ended.node})
    state, orders = _running_yet(state)
    if state.phase is Phase.RUNNING and state.succeeded.issuperset(state.members):
        state, more = _end(state, Phase.FINISHED, "every rank ended with success", 0)
        return state, orders + more
    return state, orders


def _attempt_failed(state: State, reason: str, now: on.Moment, wait_s: float) -> Step:
    orders: list[to.Order] = [
        to.Answer(request, False, f"attempt {state.attempt} failed as it started: {reason}")
        for request in state.requests
    ]
    state = replace(state, phase=Phase.DECIDING, requests=(), due_s=now.monotonic_s + wait_s)
    waiting = to.Say("attempt_failed", {"reason": reason, "waits_s": wait_s})
    return state, [*orders, waiting]


def _runner_lost(rules: Rules, state: State, lost: on.RunnerLost, now: on.Moment) -> Step:
    node, detail = lost.node, lost.detail
    state = replace(
        state,
        lost=state.lost | {node}, ready=state.ready - {node}, awaiting=state.awaiting - {node},
        returning=state.returning | {node} if lost.returning else state.returning - {node},
    )  # fmt: skip
    orders: list[to.Order] = [to.Say("node_lost", {"node": node, "detail": detail})]
    if node in state.members and state.phase in (Phase.STARTING, Phase.RUNNING) and node not in state.succeeded:
        wait_s = rules.verdict_wait_s if lost.in_touch else 0.0
        state, more = _attempt_failed(state, f"{node}: {detail}", now, wait_s)
        return state, orders + more
    return _consider(rules, state, now, orders)


def _ranks_stopped(rules: Rules, state: State, node: str, survivors: int, now: on.Moment) -> Step:
    state = replace(state, awaiting=state.awaiting - {node})
    if survivors:
        return _abandon(rules, state, {node}, f"{survivors} processes cannot be killed", now)
    return _consider(rules, state, now)


def _abandon(rules: Rules, state: State, nodes: set[str] | frozenset[str], why: str, now: on.Moment) -> Step:
    state = replace(
        state,
        lost=state.lost | nodes, ready=state.ready - nodes, awaiting=state.awaiting - nodes,
        returning=state.returning - nodes,
    )  # fmt: skip
    orders: list[to.Order] = [to.Abandon(node, why) for node in sorted(nodes)]
    orders += [to.Say("node_lost", {"node": node, "detail": why}) for node in sorted(nodes)]
    return _consider(rules, state, now, orders)


def _exclude(rules: Rules, state: State, asked: on.ExcludeAsked) -> Step:
    nodes = frozenset(asked.nodes)
    named = ", ".join(asked.nodes)
    if not asked.now:
        state = replace(state, draining=state.draining | (nodes - state.excluded))
        text = f"{named}: not used from the next start on, if the job can do without"
        return state, [
            to.Persist(), to.Answer(asked.request, True, text), to.Say("draining", {"nodes": sorted(nodes)}),
        ]  # fmt: skip
    if choose_nodes(rules.fleet, state.members, state.unusable | nodes, state.draining) is None:
        left = len(set(rules.fleet.nodes) - state.unusable - nodes)
        text = f"no spare: {left} nodes would be left, the job needs {rules.fleet.least}"
        return state, [to.Answer(asked.request, False, text)]
    state = replace(state, excluded=state.excluded | nodes, draining=state.draining - nodes)
    return state, [
        to.Persist(),
        to.Answer(asked.request, True, f"{named} excluded"),
        to.Say("excluded", {"nodes": sorted(nodes), "reason": asked.reason}),
    ]


def _restart(rules: Rules, state: State, asked: on.RestartAsked, now: on.Moment) -> Step:
    if choose_nodes(rules.fleet, state.members, state.unusable, state.draining) is None:
        return state, [to.Answer(asked.request, False, "too few nodes are usable")]
    if asked.distrust_since_s is not None:
        since_s = asked.distrust_since_s
        if state.distrust_since_s is not None:
            since_s = min(since_s, state.distrust_since_s)
        state = replace(state, distrust_since_s=since_s)
    state = replace(state, requests=(*state.requests, asked.request))
    if state.phase is Phase.GATHERING:
        return state, []  # the attempt being prepared is the one asked for
    superseded = asked.over_attempt < state.attempt and asked.distrust_since_s is None
    if superseded and state.phase is not Phase.DECIDING and not state.excluded & set(state.members):
        if state.phase is Phase.RUNNING:
            orders: list[to.Order] = [to.Answer(asked.request, True, f"attempt {state.attempt} runs already")]
            return replace(state, requests=()), orders
        return state, []
    return _gather(rules, state, asked.reason, now)


def _tick(rules: Rules, state: State, now: on.Moment) -> Step:
    if state.awaiting and now.monotonic_s >= state.stopped_due_s:
        state = replace(state, stopped_due_s=float("inf"))
        why = f"did not confirm within {rules.stopped_within_s:g} s that its ranks stopped"
        return _abandon(rules, state, state.awaiting, why, now)
    if state.phase is Phase.GATHERING and now.monotonic_s >= state.ready_due_s:
        plan = choose_nodes(rules.fleet, state.members, state.unusable, state.draining) or ()
        late = (set(plan) - state.ready) | state.returning
        return _abandon(rules, state, late, f"was not ready within {rules.ready_within_s:g} s", now)
    if now.monotonic_s < state.due_s:
        return state, []
    if state.phase is Phase.STARTING:
        late = set(state.members) - state.started
        state, orders = _abandon(
            rules, state, late, f"had not started its ranks within {rules.started_within_s:g} s", now
        )
        state, more = _restart_alone(rules, state, f"{', '.join(sorted(late))} did not start", now)
        return state, orders + more
    if state.phase is Phase.DECIDING:
        return _restart_alone(rules, state, "no word from Eagle Eye on the failed attempt", now)
    return replace(state, due_s=float("inf")), []


def _restart_alone(rules: Rules, state: State, reason: str, now: on.Moment) -> Step:
    if state.restarts >= rules.restarts_max:
        return _end(state, Phase.FAILED, f"{reason}; {state.restarts} restarts are used up", 1)
    state = replace(state, restarts=state.restarts + 1)
    text = f"{reason}; restart {state.restarts} of {rules.restarts_max} by the launcher itself"
    return _gather(rules, state, text, now)


def _end(state: State, phase: Phase, reason: str, exit_code: int) -> Step:
    unanswered = [to.Answer(request, False, f"the job is {phase}: {reason}") for request in state.requests]
    alive = tuple(node for node in state.members if node not in state.lost)
    ended = replace(
        state, phase=phase, requests=(), ready_due_s=float("inf"), stopped_due_s=float("inf"), due_s=float("inf")
    )
    # Cancelled is told before the ranks die, so that nobody takes their exits for a crash.
    return ended, [
        to.TellServer(phase.value, state.attempt, state.members),
        to.StopRanks(alive),
        *unanswered,
        to.End(phase.value, reason, exit_code),
    ]
