"""The launcher's state machine: a pure function from its state and an event to the next state and orders.

    GATHERING ─▶ STARTING ─▶ VERIFYING ─▶ RUNNING ─▶ FINISHED
        ▲            │            │          │
        │            ▼            ▼          ▼
        └─────── DECIDING ◀───────┴──────────┘        FAILED and CANCELLED from anywhere

GATHERING waits until the nodes of the next attempt are ready, checked if requested, and what ran on them has stopped.
VERIFYING runs, and waits for confirmation that the attempt continued from its checkpoint; a start that takes too long
is examined. DECIDING leaves a failed attempt untouched and waits for Eagle Eye's report, then restarts by
itself: training never depends on us. Where a restart need not renew every process (attempt.py), GATHERING
waits for those that stay to reach their restart points. After being killed, a launcher starts at GATHERING with the
state saved by coordinator.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace

import msgspec

from eagle_eye.orchestrators.fallback_layouts import no_spare
from eagle_eye.orchestrators.launch import attempt
from eagle_eye.orchestrators.launch import events as on
from eagle_eye.orchestrators.launch import orders as to
from eagle_eye.orchestrators.launch.attempt import (
    LOOK_EVERY_S,
    abandon,
    attempt_failed,
    consider,
    done_alone,
    end,
    first_step_within_s,
    gather,
    late,
    look_at_the_others,
    next_nodes,
    not_ready,
    others_seen,
    possible_nodes,
    progress,
    ranks_done,
    ranks_ended,
    renew,
    renew_all,
    restart_alone,
    running_yet,
    settle,
    start_within_s,
    too_few,
    unverified,
    word_within_s,
)
from eagle_eye.orchestrators.launch.state import ENDED, NEVER_S, UP, Phase, Rules, State, Step

SUSPECTED_MAX = 1_000


def turn_away(event: on.LaunchEvent, reason: str) -> list[to.Order]:
    """Return the answer to a request to a job that has ended."""
    if isinstance(event, on.ExcludeAsked | on.RestartAsked | on.ReadmitAsked):
        return [to.Answer(event.request, False, reason)]
    return []


def asked(rules: Rules, state: State, what: on.Asked, now: on.Moment) -> Step:
    """Carry out, start or refuse the request; it is answered at once, or later through ``requests``."""
    match what:
        case on.ExcludeAsked():
            return _exclude(rules, state, what)
        case on.RestartAsked():
            return _restart(rules, state, what, now)
        case on.ReadmitAsked():
            return _readmit(rules, state, what, now)


def _exclude(rules: Rules, state: State, wish: on.ExcludeAsked) -> Step:
    nodes = frozenset(wish.nodes)
    named = ", ".join(wish.nodes)
    known_s = state.distrust_since_s
    if wish.now:
        state = _distrusting(state, wish.over_attempt, wish.distrust_since_s)
    if nodes <= state.excluded:
        reported: list[to.Order] = [to.Persist()] if state.distrust_since_s != known_s else []
        return state, [*reported, to.Answer(wish.request, True, f"{named}: excluded already")]
    if not wish.now:
        state = replace(state, draining=state.draining | (nodes - state.excluded))
        text = f"{named}: not used from the next start on, if the job can do without"
        return state, [
            to.Persist(), to.Answer(wish.request, True, text), to.Say("draining", {"nodes": sorted(nodes)}),
        ]  # fmt: skip
    following = possible_nodes(rules, state, nodes)
    if following is None and not (wish.waits and rules.layouts is not None):
        left = len(set(rules.fleet.nodes) - state.hopeless - nodes)
        text = f"no spare: {left} nodes would be left, the job needs {rules.fleet.least}"
        return replace(state, distrust_since_s=known_s), [to.Answer(wish.request, False, text)]
    state = replace(state, excluded=state.excluded | nodes, draining=state.draining - nodes)
    return state, [
        to.Persist(),
        to.Answer(wish.request, True, f"{named} excluded{_by_plan(rules, state, following)}"),
        to.Say("excluded", {"nodes": sorted(nodes), "reason": wish.reason}),
    ]


def _by_plan(rules: Rules, state: State, following: tuple[str, ...] | None) -> str:
    """Return what the job loses where no spare replaces the node; "" where one does."""
    before = state.members
    if rules.layouts is None or following is None or not 0 < len(following) < len(before):
        return ""
    return f"; {no_spare(rules.layouts, len(following), len(before))}"


def _restart(rules: Rules, state: State, wish: on.RestartAsked, now: on.Moment) -> Step:
    if possible_nodes(rules, state) is None and (rules.layouts is None or state.phase is Phase.GATHERING):
        text = too_few(rules, len(set(rules.fleet.nodes) - state.hopeless))
        return state, [to.Answer(wish.request, False, text)]
    state = _distrusting(state, wish.over_attempt, wish.distrust_since_s)
    state, doubts = _doubting(state, wish)
    orders: list[to.Order]
    # Processes that continued from the previous attempt are not new, and new ones are what is requested.
    renewed = wish.scope != "job" or state.scope == "job"
    over = wish.over_attempt < state.attempt and state.distrust_since_s is None and renewed
    state = replace(state, requests=(*state.requests, wish.request))
    if state.phase is Phase.GATHERING:
        orders = [to.Persist(), *doubts]  # the attempt being prepared is the requested one
        if state.kept and (wish.scope == "job" or state.distrust_since_s is not None):
            return renew_all(rules, state, wish.reason, now, orders)
        return consider(rules, state, now, orders) if state.kept else (state, orders)
    if over and state.phase is not Phase.DECIDING and not state.excluded & set(state.members):
        if state.phase in UP:
            orders = [to.Answer(wish.request, True, f"attempt {state.attempt} runs already")]
            return replace(state, requests=()), orders
        return state, []
    state, orders = gather(rules, state, wish.reason, now, wish.scope)
    return state, [*doubts, *orders]


def _distrusting(state: State, over_attempt: int, since_s: float | None) -> State:
    """Do not resume the next attempt from checkpoints written since then; a request already handled changes nothing."""
    if since_s is None or (over_attempt < state.attempt and any(span.covers(since_s) for span in state.distrusted)):
        return state  # the running attempt was already started accordingly
    known_s = state.distrust_since_s
    return replace(state, distrust_since_s=since_s if known_s is None else min(since_s, known_s))


def _doubting(state: State, wish: on.RestartAsked) -> Step:
    """Suspect the checkpoint that was resumed from: its fault may have ended all ranks before it was reported.

    True where the numbers were broken at the first step, or broke a second time before the next checkpoint.
    """
    resumed_s = state.resumed_s
    theirs = wish.over_attempt == state.attempt and wish.blames_nobody and wish.distrust_since_s is not None
    if resumed_s is None or not theirs:
        return state, []
    state = replace(state, resumed_s=None)
    if state.stepped and resumed_s != state.doubted_s:
        return replace(state, doubted_s=resumed_s), []
    when = "once more before the next checkpoint" if state.stepped else "at once"
    fields = {"step": state.resumed_step, "reason": f"resumed from it, the numbers broke {when}"}
    suspected = (*state.suspected, resumed_s)[-SUSPECTED_MAX:]
    return replace(state, suspected=suspected, doubted_s=None), [to.Say("checkpoint_suspected", fields)]


def _readmit(rules: Rules, state: State, wish: on.ReadmitAsked, now: on.Moment) -> Step:
    nodes = frozenset(wish.nodes) & set(rules.fleet.nodes)
    back = nodes & (state.excluded | state.draining | state.unfit)
    busy = state.kept if state.phase is Phase.GATHERING else frozenset(state.members)
    revived = nodes & state.lost - state.returning
    called = revived & state.excluded  # the reason for having no runner is gone
    # Whatever the reason for its readmission, it joins only after a check.
    checked = (back if rules.check else back & state.unfit) - busy - state.lost
    state = replace(
        state,
        excluded=state.excluded - back, draining=state.draining - back, unfit=state.unfit - back,
        lost=state.lost | checked, returning=state.returning | checked | called, ready=state.ready - checked,
    )  # fmt: skip
    text = f"readmitted: {', '.join(sorted(back)) or 'none'}"
    return consider(rules, state, now, [
        to.Persist(),
        to.Answer(wish.request, True, text),
        to.Say("readmitted", {"nodes": sorted(back)}),
        *(to.Revive(node) for node in sorted(revived)),
        *(to.CheckAgain(node) for node in sorted(checked)),
    ])  # fmt: skip


# A restart that keeps processes: they reach their restart points and continue, or the restart is widened.
#
# A rank waiting at its restart point has lost its peers, so its attempt has failed. A restart that keeps processes has
# a limit (``regroup_within_s``), both for reaching the restart points and then for the attempt's first step. Beyond
# it, or where anything else fails meanwhile, more is renewed: the processes that are missing or have exited, then all.
LAST_WORDS_S = 3.0  # a rank notices a peer's exit sooner than the launcher does


def from_before(state: State, node: str, attempt: int) -> bool:
    """Whether this is from a rank that is to continue in the attempt being prepared, and has not started it."""
    preparing = state.phase is Phase.GATHERING or state.phase is Phase.STARTING
    return preparing and node in state.kept and attempt == state.attempt - 1


def at_point(rules: Rules, state: State, said: on.RankReachedPoint, now: on.Moment) -> Step:
    """Record a rank's restart point. If one waits there while the attempt is up, the attempt has failed."""
    if said.waits:
        state = replace(state, waiting=_with(state.waiting, said))
        if state.phase in UP or (state.phase is Phase.STARTING and said.attempt == state.attempt):
            reason = f"{said.node}: rank {said.rank} has lost its peers ({said.reason})"
            wait_s = max(LAST_WORDS_S, word_within_s(rules, state, now, in_touch=said.in_touch))
            return attempt_failed(rules, state, reason, now, wait_s)
        return consider(rules, state, now)
    return replace(state, points=_with(state.points, said)), []


def ended_meanwhile(rules: Rules, state: State, ended: on.RanksEnded, now: on.Moment) -> Step:
    """Handle the exit of a node's ranks that were to continue; perhaps the reason why the others wait."""
    reason = f"{ended.node}: its ranks ended while the others waited for the next attempt"
    if state.phase is Phase.GATHERING:
        return renew(rules, state, frozenset({ended.node}), reason, now)
    return gather(rules, state, reason, now)


def regroup_overdue(rules: Rules, state: State, now: on.Moment) -> Step:
    """The restart has exceeded its limit: a larger one follows."""
    within_s, scope = rules.regroup_within_s, state.scope
    if state.phase is Phase.GATHERING:
        missing = ", ".join(sorted(late(state)))
        if not missing:  # a joining node is awaited, which has its own limit
            return replace(state, regroup_due_s=NEVER_S), []
        reason = f"restart of scope {scope}: {missing} did not come to its restart point within {within_s:g} s"
        if scope == "process_group":
            return renew(rules, state, late(state), reason, now)
        return renew_all(rules, state, reason, now)
    if state.phase is Phase.STARTING:
        reason = f"restart of scope {scope}: not every rank began within {within_s:g} s"
    else:
        reason = f"restart of scope {scope}: no first step within {first_step_within_s(rules, state):g} s"
    reported = to.Say("widened", {"from": scope, "to": "job", "reason": reason, "stay": []})
    state, orders = gather(rules, replace(state, regroup_due_s=NEVER_S), reason, now)
    return state, [reported, *orders]


def _with(known: Mapping[str, frozenset[int]], said: on.RankReachedPoint) -> Mapping[str, frozenset[int]]:
    return {**known, said.node: known.get(said.node, frozenset()) | {said.rank}}


# From the ranks' start to the attempt's first step: time limits, and who blocks it.
#
# The duration of a start is learned from this job's earlier ones. A start is ended only if it is longer than any known
# one and a few ranks are stopped or missing at the rendezvous while the others are there: a missing step alone is not
# enough, since it may have gone unreported. A start is ended sooner for what persists from one look to the next:
# stopped ranks, since no start stops a process; and, while the ranks of all other nodes have arrived, the ranks of a
# node that cannot reach the store (an earlier connection proves nothing), or, once the start is longer than any known
# one, of a node that does not answer.
AT_ONCE_S = -math.inf
LOOK_WITHIN_S, EARLY_WITHIN_S = 5.0, 2.0  # for runners to report the state of their ranks
LOOK_AGAIN_S = 2.0  # what blocks a start may be momentary
UNHEARD_MARGIN = 1.5  # times the longest known start
# The server hears who blocks the start: it judges at its next look, and gathers evidence for some seconds.
STUCK_WAIT_S = 10.0


class BlockedStart(msgspec.Struct, frozen=True):
    """Who blocks a start, and how: ranks that are stopped or missing, or whose node is cut off or silent."""

    nodes: frozenset[str]
    stopped: tuple[int, ...] = ()
    absent: tuple[int, ...] = ()
    cut_off: tuple[int, ...] = ()
    unheard: tuple[int, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """All of them."""
        return tuple(sorted({*self.stopped, *self.absent, *self.cut_off, *self.unheard}))

    def __str__(self) -> str:
        """Return it in words."""
        parts = [
            ("are stopped", self.stopped),
            ("have not come to the rendezvous, as others have", self.absent),
            ("are on a node that does not reach the rendezvous, and the others wait", self.cut_off),
            ("are on a node that does not answer, and the others wait", self.unheard),
        ]
        return "; ".join(f"ranks {', '.join(map(str, ranks))} {what}" for what, ranks in parts if ranks)


def overdue(rules: Rules, state: State, now: on.Moment) -> Step:
    """Have the ranks examined, and judge the result once runners had time to answer."""
    if not rules.verified_within_s:
        return unverified(state)
    if not state.looking:
        early = now.monotonic_s - state.up_since_s < start_within_s(rules, state)
        due_s = now.monotonic_s + (EARLY_WITHIN_S if early else LOOK_WITHIN_S)
        state = replace(state, looking=True, sights=(), due_s=due_s)
        return state, [to.LookAtRanks(state.attempt, state.members)]
    state = replace(state, looking=False)
    waited_s = now.monotonic_s - state.up_since_s
    within_s = start_within_s(rules, state)
    if waited_s < within_s:
        return _early(rules, state, waited_s, within_s, now)
    held = held_up(state.members, state.sights)
    if held is not None and state.starts.any_known:
        return _stuck(rules, state, held, waited_s, now)
    if waited_s < rules.verified_within_s:
        return replace(state, due_s=state.up_since_s + rules.verified_within_s), []
    return unverified(state, "" if held is None else str(held))


def seen(state: State, sight: on.RanksSeen) -> Step:
    """Record the state of a node's ranks, if it was requested."""
    if not state.looking or sight.attempt != state.attempt or sight.node not in state.members:
        return state, []
    state = replace(state, sights=(*state.sights, sight))
    if {one.node for one in state.sights}.issuperset(state.members):
        state = replace(state, due_s=AT_ONCE_S)  # no answer is outstanding
    return state, []


def held_up(members: tuple[str, ...], sights: tuple[on.RanksSeen, ...]) -> BlockedStart | None:
    """Return who blocks the start, None where no rank stands out.

    At most half of the nodes, and not all, can: a job that was stopped as a whole is meant to be stopped.
    """
    latest = {seen.node: seen for seen in sights}
    come = sum(seen.joined for seen in latest.values())
    absent = [rank for seen in latest.values() for rank in seen.absent] if come else []
    if len(absent) > come:
        absent = []  # they use another rendezvous, or most are still loading
    stopped = [rank for seen in latest.values() for rank in seen.stopped]
    nodes = frozenset(seen.node for seen in latest.values() if {*seen.absent, *seen.stopped} & {*absent, *stopped})
    if not nodes or 2 * len(nodes) > len(members) or len(nodes) == len(members):
        return None
    return BlockedStart(nodes, tuple(sorted(stopped)), tuple(sorted({*absent} - {*stopped})))


def _early(rules: Rules, state: State, waited_s: float, within_s: float, now: on.Moment) -> Step:
    """Within a start's usual time only what persists from one look to the next counts as blocking: see above."""
    stopped = held_up(state.members, tuple(replace(sight, absent=()) for sight in state.sights))
    held = stopped or _cut_off(state) or _unheard(state)
    known_s = state.starts.took_s(state.members, resumed=state.resumed_step is not None)
    longer = known_s is not None and waited_s >= UNHEARD_MARGIN * known_s
    due = held is not None and (longer or not held.unheard)
    if held is not None and due and state.held_before.issuperset(held.ranks):
        return _stuck(rules, state, held, waited_s, now)
    due_s = now.monotonic_s + min(LOOK_EVERY_S if held is None else LOOK_AGAIN_S, within_s - waited_s)
    return replace(state, due_s=due_s, held_before=frozenset(held.ranks if held is not None else ())), []


def _cut_off(state: State) -> BlockedStart | None:
    """Return the ranks of nodes that cannot reach the rendezvous, once those of all others have arrived."""
    nodes = frozenset(sight.node for sight in state.sights if sight.cut_off)
    ranks = _ranks_on(state, nodes)
    return BlockedStart(nodes, cut_off=ranks) if ranks and _others_come(state, nodes) else None


def _unheard(state: State) -> BlockedStart | None:
    """Return the ranks of nodes that have not answered, once those of all others have arrived."""
    nodes = frozenset(state.members) - {sight.node for sight in state.sights}
    ranks = _ranks_on(state, nodes)
    return BlockedStart(nodes, unheard=ranks) if ranks and _others_come(state, nodes) else None


def _ranks_on(state: State, nodes: AbstractSet[str]) -> tuple[int, ...]:
    return tuple(sorted(rank for node in nodes for rank in state.started.get(node, ())))


def _others_come(state: State, nodes: AbstractSet[str]) -> bool:
    """Whether the ranks of all nodes but these, at most half of them, have reached the rendezvous."""
    others = [sight for sight in state.sights if sight.node not in nodes]
    come = all(sight.joined and not sight.absent and not sight.stopped for sight in others)
    heard = {sight.node for sight in others} | nodes
    return come and heard.issuperset(state.members) and 2 * len(nodes) <= len(state.members)


def _stuck(rules: Rules, state: State, held: BlockedStart, waited_s: float, now: on.Moment) -> Step:
    """Fail the attempt; a node that blocks two starts in a row is left out of the next one."""
    nodes = sorted(held.nodes)
    again = held.nodes & state.stuck
    state = replace(state, stuck=held.nodes, stuck_again=again)
    reason = f"no first step within {waited_s:.0f} s; {', '.join(nodes)}: {held}"
    reported: list[to.Order] = [
        to.TellServer("running", state.attempt, state.members, held.ranks),
        to.Say(
            "start_stuck",
            {
                "nodes": nodes,
                "stopped": list(held.stopped),
                "absent": list(held.absent),
                "cut_off": list(held.cut_off),
                "unheard": list(held.unheard),
                "waited_s": round(waited_s, 1),
            },
        ),
    ]
    wait_s = min(rules.verdict_wait_s, STUCK_WAIT_S) if any(seen.in_touch for seen in state.sights) else 0.0
    state, orders = attempt_failed(rules, state, reason, now, wait_s)
    return state, [*reported, *orders]


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
    state, orders = attempt.reach_answered(state, said, now)
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
    before = from_before(state, said.node, said.attempt)
    if not before and (said.attempt != state.attempt or said.node not in state.members):
        return state, []  # about an attempt that is over
    match said:
        case on.RanksStarted(node, attempt, ranks):
            if attempt == state.attempt:
                return running_yet(rules, replace(state, started={**state.started, node: ranks}), now)
        case on.RankFinished(_, _, rank):
            return ranks_done(state, frozenset({rank}), now), []
        case on.RankReachedPoint():
            return at_point(rules, state, said, now)
        case on.RanksEnded():
            return (ended_meanwhile if before else ranks_ended)(rules, state, said, now)
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
    state, asked = attempt.ask_reach(state, state.out_of_reach & {node}, now)
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
        return regroup_overdue(rules, state, now)
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
    state, asked = attempt.ask_reach(
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
