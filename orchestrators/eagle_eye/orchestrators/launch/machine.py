"""The launcher's state machine: a pure function from its state and an event to the next state and orders.

    GATHERING ─▶ STARTING ─▶ VERIFYING ─▶ RUNNING ─▶ FINISHED
        ▲            │            │          │
        │            ▼            ▼          ▼
        └─────── DECIDING ◀───────┴──────────┘        FAILED and CANCELLED from anywhere

GATHERING waits until the nodes of the next attempt are ready, checked if requested, and what ran on them has stopped.
VERIFYING runs, and waits for confirmation that the attempt continued from its checkpoint; a start that takes too long
is examined (warm_up.py). DECIDING leaves a failed attempt untouched and waits for Eagle Eye's report, then restarts by
itself: training never depends on us. Where a restart need not renew every process (scopes.py, regroup.py), GATHERING
waits for those that stay to reach their restart points. After being killed, a launcher starts at GATHERING with the
state saved by persisted_state.py.
"""

from __future__ import annotations

from dataclasses import replace

from eagle_eye.orchestrators.launch import events as on
from eagle_eye.orchestrators.launch import orders as to
from eagle_eye.orchestrators.launch import reachability, regroup
from eagle_eye.orchestrators.launch.asked import asked, turn_away
from eagle_eye.orchestrators.launch.attempt import (
    attempt_failed,
    done_alone,
    progress,
    ranks_done,
    ranks_ended,
    restart_alone,
    running_yet,
)
from eagle_eye.orchestrators.launch.budget import settle
from eagle_eye.orchestrators.launch.failed_start import look_at_the_others, others_seen
from eagle_eye.orchestrators.launch.gathering import abandon, consider, end, gather, next_nodes, not_ready, renew_all
from eagle_eye.orchestrators.launch.state import ENDED, NEVER_S, UP, Phase, Rules, State, Step
from eagle_eye.orchestrators.launch.warm_up import overdue, seen

# Longer than the lease after which a runner without contact has killed its ranks.
LEASE_MARGIN_S = 10.0


def step(rules: Rules, state: State, event: on.LaunchEvent, now: on.Moment) -> Step:
    """Return the state after the event, and the orders, in sequence."""
    if state.phase in ENDED:
        return state, turn_away(event, f"the job is {state.phase}")
    state, orders = _dispatch(rules, state, event, now)
    if not state.awaiting:
        state = replace(state, stopped_due_s=NEVER_S)
    return state, orders


def _dispatch(rules: Rules, state: State, event: on.LaunchEvent, now: on.Moment) -> Step:
    match event:
        case on.Opened():
            return consider(rules, replace(state, ready_due_s=now.monotonic_s + rules.ready_within_s), now)
        case on.ExcludeAsked() | on.RestartAsked() | on.ReadmitAsked():
            return asked(rules, state, event, now)
        case on.CheckpointChosen() | on.StepSeen() | on.CheckpointWritten():
            return progress(rules, state, event, now)
        case on.RanksSeen():
            return others_seen(state, event) if state.phase is Phase.DECIDING else seen(state, event)
        case on.NodeReached():
            return _reached(rules, state, event, now)
        case on.Cancelled(reason, exit_code):
            return end(state, Phase.CANCELLED, reason, exit_code)
        case on.StartImpossible(attempt, detail):
            if attempt == state.attempt and state.phase is Phase.STARTING:
                return attempt_failed(rules, state, detail, now, rules.verdict_wait_s)
        case on.Tick():
            state, asked_again = _ask_again(rules, state, now) if now.monotonic_s >= state.reach_due_s else (state, [])
            state, orders = _tick(rules, state, now)
            return state, asked_again + orders
        case _:
            return _runner_says(rules, state, event, now)
    return state, []


def _reached(rules: Rules, state: State, said: on.NodeReached, now: on.Moment) -> Step:
    """Prepare the next attempt by the answer; one that starts is given up for a node that it can do without."""
    before = state.out_of_reach
    state, orders = reachability.answered(state, said, now)
    holds_up = state.phase is Phase.STARTING and said.node in set(state.members) - state.started.keys()
    if holds_up and said.node in state.out_of_reach - before and said.node not in (next_nodes(rules, state) or ()):
        reason = f"{said.node} cannot start its ranks: it does not reach the launcher's store"
        state, more = gather(rules, state, reason, now)
        return state, orders + more
    return consider(rules, state, now, orders)


def _runner_says(rules: Rules, state: State, said: on.RunnerEvent, now: on.Moment) -> Step:
    match said:
        case on.RunnerReady() | on.RunnerBusy() | on.NodeUnfit():
            return _runner_prepares(rules, state, said, now)
        case on.RunnerLost():
            return _runner_lost(rules, state, said, now)
        case on.RunnerSilent():
            return _runner_silent(rules, state, said, now)
        case on.RanksStopped(node, survivors):
            return _ranks_stopped(rules, state, node, survivors, now)
        case on.RanksStarted() | on.RankReachedPoint() | on.RankFinished() | on.RanksEnded():
            return _rank_says(rules, state, said, now)


def _rank_says(rules: Rules, state: State, said: on.RankEvent, now: on.Moment) -> Step:
    before = regroup.from_before(state, said.node, said.attempt)
    if not before and (said.attempt != state.attempt or said.node not in state.members):
        return state, []  # about an attempt that is over
    match said:
        case on.RanksStarted(node, attempt, ranks):
            if attempt == state.attempt:
                return running_yet(rules, replace(state, started={**state.started, node: ranks}), now)
        case on.RankFinished(_, _, rank):
            return ranks_done(state, frozenset({rank}), now), []
        case on.RankReachedPoint():
            return regroup.at_point(rules, state, said, now)
        case on.RanksEnded():
            return (regroup.ended_meanwhile if before else ranks_ended)(rules, state, said, now)
    return state, []


def _runner_prepares(
    rules: Rules, state: State, said: on.RunnerReady | on.RunnerBusy | on.NodeUnfit, now: on.Moment
) -> Step:
    node = said.node
    if isinstance(said, on.RunnerBusy):
        return replace(state, doing={**state.doing, node: said.doing}), []
    if isinstance(said, on.NodeUnfit):
        state = replace(_without(state, node), unfit=state.unfit | {node}, lost=state.lost - {node})
        reported: list[to.Order] = [to.Say("node_unfit", {"node": node, "reasons": said.reasons})]
        return consider(rules, state, now, [*reported, to.TellUnfit(node, said.reasons)])
    state = replace(
        _without(state, node), ready=state.ready | {node}, lost=state.lost - {node}, unfit=state.unfit - {node}
    )
    state, asked = reachability.ask(state, state.out_of_reach & {node}, now)
    fields = {"node": node, "check": said.check, "standby": said.standby}
    if state.phase in UP:
        plan = next_nodes(rules, state) or ()
        if node in set(plan) - set(state.members) and len(plan) > len(state.members):
            fields["joins"] = "after the next checkpoint" if rules.grow_at_checkpoint else "at the next restart"
    return consider(rules, state, now, [to.Say("node_ready", fields), *asked])


def _runner_lost(rules: Rules, state: State, lost: on.RunnerLost, now: on.Moment) -> Step:
    state = _missing(state, lost.node, returning=lost.returning)
    reported = to.Say("node_lost", {"node": lost.node, "detail": lost.detail})
    return _without_it(rules, state, lost.node, lost.detail, lost.in_touch, now, [reported])


def _runner_silent(rules: Rules, state: State, silent: on.RunnerSilent, now: on.Moment) -> Step:
    """Give up a silent runner: early while its node is awaited, late while only the connection may be down."""
    node = silent.node
    at_work = state.phase in UP and node in state.members
    within_s = rules.silent_within_s
    if at_work:
        within_s = max(within_s, rules.lease_s + LEASE_MARGIN_S)
    if node in state.lost or silent.for_s < within_s:
        return state, []
    ends = "; its ranks have ended with its lease" if at_work else ""
    detail = f"crashed or cut off: it spoke, and then not for {silent.for_s:.0f} s{ends}"
    state = _missing(state, node, returning=silent.returning)
    reported: list[to.Order] = [to.Abandon(node, detail), to.Say("node_lost", {"node": node, "detail": detail})]
    return _without_it(rules, state, node, detail, silent.in_touch, now, reported)


def _without_it(
    rules: Rules, state: State, node: str, detail: str, in_touch: bool, now: on.Moment, orders: list[to.Order]
) -> Step:
    """Fail the attempt if it needed the node; while the next one is gathered, another node may replace it."""
    needed = node in state.members and node not in state.succeeded
    if state.kept and state.phase is Phase.GATHERING and node in state.members:
        return renew_all(rules, state, f"{node} is gone, and what ran there may not be", now, orders)
    if needed and (state.phase is Phase.STARTING or state.phase in UP):
        wait_s = rules.verdict_wait_s if in_touch else 0.0
        state, more = attempt_failed(rules, state, f"{node}: {detail}", now, wait_s)
        return state, orders + more
    return consider(rules, state, now, orders)


def _missing(state: State, node: str, *, returning: bool) -> State:
    state = _without(state, node)
    return replace(
        state,
        lost=state.lost | {node}, awaiting=state.awaiting - {node},
        returning=state.returning | {node} if returning else state.returning,
    )  # fmt: skip


def _without(state: State, node: str) -> State:
    """Forget everything about the node's runner."""
    doing = {name: text for name, text in state.doing.items() if name != node}
    return replace(
        state,
        ready=state.ready - {node}, returning=state.returning - {node}, doubted=state.doubted - {node}, doing=doing,
    )  # fmt: skip


def _ranks_stopped(rules: Rules, state: State, node: str, survivors: int, now: on.Moment) -> Step:
    state = replace(state, awaiting=state.awaiting - {node})
    if survivors:
        return abandon(rules, state, {node: f"{survivors} processes cannot be killed"}, now)
    return consider(rules, state, now)


def _tick(rules: Rules, state: State, now: on.Moment) -> Step:
    if state.awaiting and now.monotonic_s >= state.stopped_due_s:
        state = replace(state, stopped_due_s=NEVER_S)
        why = f"did not confirm within {rules.stopped_within_s:g} s that its ranks stopped"
        return abandon(rules, state, dict.fromkeys(state.awaiting, why), now)
    if now.monotonic_s >= state.regroup_due_s:
        return regroup.overdue(rules, state, now)
    if state.phase is Phase.GATHERING and now.monotonic_s >= state.ready_due_s:
        late = (set(next_nodes(rules, state) or ()) - state.ready) | state.returning
        return abandon(rules, state, {node: not_ready(state, node, rules.ready_within_s) for node in late}, now)
    if now.monotonic_s >= state.done_due_s:
        return done_alone(state)
    if now.monotonic_s >= state.settled_due_s:
        return settle(rules, state, now)
    if now.monotonic_s >= state.unreached_due_s:
        return look_at_the_others(state)
    return (state, []) if now.monotonic_s < state.due_s else _phase_is_due(rules, state, now)


def _phase_is_due(rules: Rules, state: State, now: on.Moment) -> Step:
    if state.phase is Phase.STARTING:
        return _start_late(rules, state, now)
    if state.phase is Phase.VERIFYING:
        return overdue(rules, state, now)
    if state.phase is Phase.DECIDING:
        return restart_alone(rules, state, "no word from Eagle Eye on the failed attempt", now)
    return replace(state, due_s=NEVER_S), []


def _ask_again(rules: Rules, state: State, now: on.Moment) -> Step:
    """Ask the nodes that did not reach the store or hold the start up; no answer says nothing."""
    slow = set(state.members) - state.started.keys() if state.phase is Phase.STARTING else set[str]()
    state, asked = reachability.ask(
        replace(state, doubted=frozenset(), reach_due_s=NEVER_S), state.out_of_reach | slow, now
    )
    return consider(rules, state, now, asked)


def _start_late(rules: Rules, state: State, now: on.Moment) -> Step:
    if not state.chosen:
        detail = f"the checkpoints could not be looked through within {rules.started_within_s:g} s"
        return attempt_failed(rules, state, detail, now, 0.0)
    late = set(state.members) - state.started.keys()
    why = f"slow: it answers, and had not started its ranks within {rules.started_within_s:g} s"
    state, orders = abandon(rules, state, dict.fromkeys(late, why), now)
    state, more = attempt_failed(rules, state, f"{', '.join(sorted(late))} did not start", now, 0.0)
    return state, orders + more
