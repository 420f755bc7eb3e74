"""The course of an attempt: nodes gather, ranks start, resume and run, and how they ended. Pure."""

from __future__ import annotations

import signal
from collections.abc import Collection
from collections.abc import Set as AbstractSet
from dataclasses import replace

from eagle_eye.orchestrators import fallback_layouts
from eagle_eye.orchestrators.launch import events as on
from eagle_eye.orchestrators.launch import orders as to
from eagle_eye.orchestrators.launch.blame import Raised, cannot_connect, followed, scripts_own
from eagle_eye.orchestrators.launch.checkpoints import Span
from eagle_eye.orchestrators.launch.state import (
    ENDED,
    NEVER_S,
    UP,
    Phase,
    Rules,
    State,
    Step,
    choose_nodes,
    lay_out,
    move,
)
from eagle_eye.schema.action import RestartScope
from eagle_eye.schema.backoff import doubled_s
from eagle_eye.schema.checkpoint_files import MEMORY_PREFIX

# Nodes that cannot reach the launcher's store: the next attempt does without them where it can.
#
# When an attempt fails or is replaced its nodes are asked, and again those that have not started their ranks soon. What
# counts is the node's own answer, twice in a row, and only if most nodes do reach the store or all others say so. Such
# a node is not excluded, and is asked until it reaches the store again.

REACH_AGAIN_S = 2.0  # until a node is asked again; a connection is given up sooner (runner.CONNECTED_WITHIN_S)
REACH_ASKED_MAX = 256  # at once: many connections in one moment would be late for that reason


def ask_reach(state: State, nodes: Collection[str], now: on.Moment) -> Step:
    """Ask the nodes whether they reach the store."""
    asked = tuple(sorted(set(nodes) - state.lost)[:REACH_ASKED_MAX])
    if not asked:
        return state, []
    state = replace(state, reaching=state.reaching.difference(asked), reach_due_s=now.monotonic_s + REACH_AGAIN_S)
    return state, [to.AskReach(asked)]


def reach_answered(state: State, said: on.NodeReached, now: on.Moment) -> Step:
    """Record a node's answer; the first that it does not reach the store is asked for again."""
    node = frozenset({said.node})
    if said.reaches:
        state = replace(state, doubted=state.doubted - node, out_of_reach=state.out_of_reach - node)
        return replace(state, reaching=state.reaching | node), []
    if node <= state.out_of_reach or node <= state.lost:
        return state, []
    if not node <= state.doubted:
        return ask_reach(replace(state, doubted=state.doubted | node), node, now)
    state = replace(
        state,
        doubted=state.doubted - node, out_of_reach=state.out_of_reach | node,
        reach_due_s=now.monotonic_s + REACH_AGAIN_S,
    )  # fmt: skip
    detail = "it does not reach the launcher's store; it is used again once it does"
    return state, [to.Say("node_out_of_reach", {"node": said.node, "detail": detail})]


# Determines whose processes continue in the next attempt.
#
# A restart smaller than the whole job keeps the processes of healthy nodes. They leave the failed attempt, wait at
# their restart points, and join the new ones in the next attempt, from a step that the nodes have in memory. A rank
# without a restart point must be renewed, and then all are: it could not leave a collective.
def staying(state: State, scope: RestartScope, plan: tuple[str, ...] | None) -> frozenset[str]:
    """Return the nodes whose ranks may continue in the next attempt, on the nodes of ``plan``; none: every rank is new.

    Only after an attempt that has made steps, and where every process that does not continue has exited by itself or is
    the culprit that a scope of ``rank`` ends: any other might still take part.
    """
    if scope == "job" or not state.stepped or state.distrust_since_s is not None:
        return frozenset()
    members = frozenset(state.members)
    ended = state.failed & members
    culprits = state.excluded & members - ended if scope == "rank" else frozenset[str]()
    kept = members - ended - culprits
    broken = ended or culprits or any(state.waiting.values())
    if not broken or not kept or kept & (state.excluded | state.succeeded) or members & state.lost:
        return frozenset()
    return kept if all(has_point(state, node) for node in kept) and fits(state, kept, plan) else frozenset()


def fits(state: State, kept: frozenset[str], plan: tuple[str, ...] | None) -> bool:
    """Whether continuing ranks keep their numbers and world size in the plan, which cannot change."""
    if plan is None or len(plan) != len(state.members):
        return False
    return all(then == now for now, then in zip(state.members, plan, strict=True) if now in kept)


def has_point(state: State, node: str) -> bool:
    """Whether each of the node's ranks has reported a restart point."""
    ranks = state.started.get(node, ())
    return bool(ranks) and state.points.get(node, frozenset()).issuperset(ranks)


def late(state: State) -> frozenset[str]:
    """Return the kept nodes of which not every rank waits at its restart point."""
    return frozenset(
        node for node in state.kept if not state.waiting.get(node, frozenset()).issuperset(state.started[node])
    )


def next_nodes(rules: Rules, state: State, without: AbstractSet[str] = frozenset()) -> tuple[str, ...] | None:
    """Return the nodes of the next attempt as of now, None where too few are usable.

    Without those that do not reach the launcher's store, if it can do without them: if they are few, or the others have
    just been heard to reach it.
    """
    unusable = state.unusable | without
    away = state.out_of_reach - unusable
    few = 2 * len(away) <= len(away | set(state.members))
    rest = _nodes_without(rules, state, unusable | away)
    return rest if rest and (few or state.reaching.issuperset(rest)) else _nodes_without(rules, state, unusable)


def possible_nodes(rules: Rules, state: State, without: AbstractSet[str] = frozenset()) -> tuple[str, ...] | None:
    """Return the nodes of the next attempt including those expected back soon; None where too few are left."""
    return _nodes_without(rules, state, state.hopeless | without)


def _nodes_without(rules: Rules, state: State, unusable: AbstractSet[str]) -> tuple[str, ...] | None:
    chosen = choose_nodes(rules.fleet, state.members, unusable, state.draining)
    return chosen if chosen is None or rules.layouts is None else lay_out(rules.layouts, state.members, chosen)


def pace_left_ratio(rules: Rules, state: State) -> float | None:
    """Return the attempt's remaining pace ratio, by plan, without one of its nodes; 0 where the job would wait.

    None where a spare replaces the node, where there is no plan, and between attempts.
    """
    members = len(state.members)
    spares = state.ready - {*state.members} - state.unusable - state.draining - state.out_of_reach
    if rules.layouts is None or spares or state.phase is Phase.GATHERING or state.phase in ENDED:
        return None
    return 0.0 if members <= rules.fleet.least else fallback_layouts.pace_left_ratio(rules.layouts, members)


def too_few(rules: Rules, usable: int) -> str:
    """Return why no attempt can run on so many nodes."""
    have = f"{usable} {'node is' if usable == 1 else 'nodes are'} usable"
    if rules.layouts is None:
        return f"{have}, the job needs {rules.fleet.least}"
    return f"{have}, and the plan's layouts need {rules.fleet.least}: the job waits for a spare"


def consider(rules: Rules, state: State, now: on.Moment, orders: list[to.Order] | None = None) -> Step:
    """While gathering: start the attempt if everything is ready, fail where it never can be."""
    orders = orders or []
    if state.phase is not Phase.GATHERING:
        return state, orders
    plan = next_nodes(rules, state)
    if state.kept and not fits(state, state.kept, plan):
        return renew_all(rules, state, "another node has to be replaced", now, orders)
    if plan is None and possible_nodes(rules, state) is None:
        state, more = _without_enough(rules, state)
        return state, orders + more
    if state.ready_due_s == NEVER_S:  # it has waited for a spare, and one is available or being started
        state = replace(state, ready_due_s=now.monotonic_s + rules.ready_within_s)
    if plan is None:
        return state, orders  # until they are back, or ready_due_s
    if state.awaiting & set(plan) or not state.ready.issuperset(plan):
        return state, orders
    if state.doubted & set(plan) and next_nodes(rules, state, state.doubted) is not None:
        return state, orders  # its next answer is due in a moment
    if state.kept and (state.awaiting or late(state)):
        return state, orders  # no new rank starts while a process of the previous attempt may still take part in it
    distrusted = state.distrusted
    if state.distrust_since_s is not None:
        distrusted += (Span(state.distrust_since_s, max(state.distrust_since_s, now.unix_s)),)
    state = move(
        state, Phase.STARTING,
        members=plan, started={}, succeeded=frozenset(), advanced=False, chosen=False,
        resumed_step=None, resumed_s=None, stepped=False, failed=frozenset(), points={}, waiting={},
        draining=state.draining & set(plan), excluded=state.excluded | (state.draining - set(plan)),
        distrusted=distrusted, distrust_since_s=None,
        regroup_due_s=now.monotonic_s + rules.regroup_within_s if state.kept else NEVER_S,
        ready_due_s=NEVER_S, reach_due_s=now.monotonic_s + REACH_AGAIN_S,
        due_s=now.monotonic_s + rules.started_within_s,
    )  # fmt: skip
    return state, [
        *orders,
        to.Persist(),
        to.TellServer("running", state.attempt, plan),
        to.ChooseCheckpoint(state.attempt, distrusted, state.suspected, plan),
    ]


def _without_enough(rules: Rules, state: State) -> Step:
    """End the job; one with a plan for any number of nodes waits instead, and says so once."""
    reason = too_few(rules, len(set(rules.fleet.nodes) - state.unusable))
    if rules.layouts is None:
        return end(state, Phase.FAILED, reason, 1)
    if state.ready_due_s == NEVER_S:
        return state, []
    # The request is answered now: a node's return arrives through the same queue.
    orders: list[to.Order] = [to.Answer(request, False, reason) for request in state.requests]
    return replace(state, requests=(), ready_due_s=NEVER_S), [*orders, to.Say("waiting", {"reason": reason})]


def gather(rules: Rules, state: State, reason: str, now: on.Moment, scope: RestartScope = "job") -> Step:
    """End the attempt and prepare the next one; stop what runs, except what may stay by the scope."""
    kept = staying(state, scope, next_nodes(rules, state)) if rules.regroup_within_s else frozenset()
    scope = scope if kept else "job"
    running = frozenset(state.members) - state.lost - kept
    state = move(
        state, Phase.GATHERING,
        attempt=state.attempt + 1, awaiting=state.awaiting | running, kept=kept, scope=scope,
        regroup_due_s=now.monotonic_s + rules.regroup_within_s if kept else NEVER_S,
        stopped_due_s=now.monotonic_s + rules.stopped_within_s, up_since_s=NEVER_S, settled_due_s=NEVER_S,
        ready_due_s=now.monotonic_s + rules.ready_within_s, due_s=NEVER_S,
        raised=Raised(), raised_before=replace(state.raised, step=state.step_max), killed={}, stuck_again=frozenset(),
        done=frozenset(), done_told=frozenset(), done_due_s=NEVER_S,
        unreached={}, followed=frozenset(), ended_otherwise=False, unreached_due_s=NEVER_S,
    )  # fmt: skip
    plan = next_nodes(rules, state) or ()
    state, asked = ask_reach(state, plan, now)
    return consider(rules, state, now, [
        *asked,
        # A launcher that is killed from here on continues this restart, and not from a corrupt checkpoint.
        to.Persist(),
        # The server before the ranks: the exits that follow belong to a finished attempt, and are not crashes.
        to.TellServer("running", state.attempt, plan),
        to.StopRanks(tuple(node for node in state.members if node in running)),
        to.Say("stopping", {"reason": reason, "scope": scope, "stay": sorted(kept)}),
    ])  # fmt: skip


def renew_all(rules: Rules, state: State, reason: str, now: on.Moment, orders: list[to.Order] | None = None) -> Step:
    """While gathering: keep no process after all; stop those that were to stay."""
    return renew(rules, state, state.kept, reason, now, orders)


def renew(
    rules: Rules,
    state: State,
    nodes: frozenset[str],
    reason: str,
    now: on.Moment,
    orders: list[to.Order] | None = None,
) -> Step:
    """While gathering: stop the ranks of these ``kept`` nodes after all; they are new in the attempt."""
    kept = state.kept - nodes
    scope: RestartScope = "rank" if kept else "job"
    reported = {"from": state.scope, "to": scope, "reason": reason, "stay": sorted(kept)}
    alive = nodes - state.lost
    state = replace(
        state,
        kept=kept, scope=scope, awaiting=state.awaiting | alive,
        stopped_due_s=now.monotonic_s + rules.stopped_within_s,
        ready_due_s=now.monotonic_s + rules.ready_within_s,
        regroup_due_s=now.monotonic_s + rules.regroup_within_s if kept else NEVER_S,
    )  # fmt: skip
    stop = to.StopRanks(tuple(node for node in state.members if node in alive))
    return consider(rules, state, now, [*(orders or []), to.Say("widened", reported), stop])


def abandon(rules: Rules, state: State, why: dict[str, str], now: on.Moment) -> Step:
    """Give up the nodes, each for its reason; they are spares again once their runner is ready.

    A process of the previous attempt that may still run must not meet one that continues: then all are new.
    """
    nodes = frozenset(why)
    if state.kept and state.phase is Phase.GATHERING and not nodes.isdisjoint(state.members):
        state, first = renew_all(
            rules, state, f"{', '.join(sorted(nodes))} may still run processes that should have ended", now
        )
        state, more = abandon(rules, state, why, now)
        return state, first + more
    state = replace(
        state,
        lost=state.lost | nodes, ready=state.ready - nodes, awaiting=state.awaiting - nodes,
        returning=state.returning - nodes,
        doing={node: doing for node, doing in state.doing.items() if node not in nodes},
    )  # fmt: skip
    orders: list[to.Order] = [to.Abandon(node, reason) for node, reason in sorted(why.items())]
    orders += [to.Say("node_lost", {"node": node, "detail": reason}) for node, reason in sorted(why.items())]
    return consider(rules, state, now, orders)


def not_ready(state: State, node: str, within_s: float) -> str:
    """Return why a node that has exceeded its time to get ready is given up: busy and silent differ."""
    doing = state.doing.get(node, "")
    if doing:
        return f"slow: it answers, and was still {doing} after {within_s:g} s"
    return f"has not answered within {within_s:g} s of being called"


def end(state: State, phase: Phase, reason: str, exit_code: int) -> Step:
    """End the job and answer all pending requests."""
    unanswered = [to.Answer(request, False, f"the job is {phase}: {reason}") for request in state.requests]
    alive = tuple(node for node in state.members if node not in state.lost)
    ended = move(
        state, phase,
        requests=(), ready_due_s=NEVER_S, stopped_due_s=NEVER_S, settled_due_s=NEVER_S, unreached_due_s=NEVER_S,
        regroup_due_s=NEVER_S, reach_due_s=NEVER_S, due_s=NEVER_S,
    )  # fmt: skip
    return ended, [
        to.Persist(),
        # Before the ranks die, so that their exits are not taken for crashes.
        to.TellServer(phase.value, state.attempt, state.members),
        to.StopRanks(alive),
        *unanswered,
        to.End(phase.value, reason, exit_code),
    ]


# An attempt that ended before its first step because one node's ranks could not reach the others.
#
# If the ranks of exactly one node could not connect while those of every other node reached the rendezvous, the job
# continues without that node, and the server is told which ranks block the first step. Otherwise the cause is unknown.
MEMBERS_MIN = 3  # with two it is unknown which one cannot reach the other
SETTLE_S = 2.0  # for others that could not connect either to report it


def note_end(state: State, ended: on.RanksEnded, now: on.Moment) -> State:
    """Record what the exit of a node's ranks says about the attempt's start."""
    before = state.phase is Phase.DECIDING and bool(state.unreached)
    if state.stepped or not (state.phase is Phase.VERIFYING or before) or len(state.members) < MEMBERS_MIN:
        return state
    if cannot_connect(ended.detail):
        due_s = state.unreached_due_s if state.unreached else now.monotonic_s + SETTLE_S
        ranks = tuple(sorted(rank for rank, _ in ended.exits))
        return replace(state, unreached={**state.unreached, ended.node: ranks}, unreached_due_s=due_s)
    if followed(ended.detail):
        return replace(state, followed=state.followed | {ended.node})
    return replace(state, ended_otherwise=True)


def look_at_the_others(state: State) -> Step:
    """Check whether the other nodes' ranks have reached the rendezvous."""
    state = replace(state, unreached_due_s=NEVER_S, looking=True, sights=())
    if state.phase is not Phase.DECIDING or not _alone(state):
        return replace(state, looking=False), []
    waiting = _others(state) - state.followed
    if not waiting:
        return _judged(state)
    return state, [to.LookAtRanks(state.attempt, tuple(node for node in state.members if node in waiting))]


def others_seen(state: State, sight: on.RanksSeen) -> Step:
    """Record a node's ranks; once all nodes are known, name the one that did not reach them."""
    if not state.looking or sight.attempt != state.attempt or sight.node not in _others(state):
        return state, []
    state = replace(state, sights=(*state.sights, sight))
    return _judged(state) if {one.node for one in state.sights} | state.followed >= _others(state) else (state, [])


def _others(state: State) -> frozenset[str]:
    return frozenset(state.members) - state.unreached.keys()


def _alone(state: State) -> bool:
    gone = state.lost & frozenset(state.members)  # a lost node cannot be reached by any
    return len(state.unreached) == 1 and any(state.unreached.values()) and not state.ended_otherwise and not gone


def _judged(state: State) -> Step:
    state = replace(state, looking=False)
    come = all(sight.joined and not sight.absent and not sight.stopped for sight in state.sights)
    if not (come and _alone(state)):
        return state, []
    (node, ranks), *_ = state.unreached.items()
    before, nodes = state.stuck, frozenset({node})
    state = replace(state, stuck=nodes, stuck_again=before & nodes)
    if before and before != nodes:
        return state, []  # consecutive starts that accuse different nodes accuse none
    said = {"nodes": [node], "stopped": [], "absent": [], "cut_off": [], "unheard": [], "unreached": list(ranks)}
    return state, [
        to.TellServer("running", state.attempt, state.members, ranks),
        to.Say("start_stuck", said),
    ]


BACKOFF_MAX_S = 300.0


def pause_s(rules: Rules, restarts: int) -> float:
    """Return the backoff before the next own restart: none, then doubling, at most 5 minutes."""
    return 0.0 if restarts == 0 else doubled_s(rules.backoff_s, BACKOFF_MAX_S, restarts)


def settle(rules: Rules, state: State, now: on.Moment) -> Step:
    """Forget earlier restarts once the attempt has run long enough and, as far as visible, made progress."""
    if state.phase not in UP or now.monotonic_s < state.up_since_s + rules.settled_after_s:
        return state, []
    state = replace(state, settled_due_s=NEVER_S)
    if not state.restarts or (rules.checkpoints and not state.advanced):
        return state, []
    reported = to.Say("settled", {"restarts_forgotten": state.restarts})
    return replace(state, restarts=0, raised_before=Raised()), [to.Persist(), reported]


DONE_ALONE_S = 10.0  # after a rank's end with 0 the others of a job that is at its end have followed
UNSEEN_S = 5.0  # ranks that exit this early may have done so before any agent saw them, so nobody reports why...
UNSEEN_WAIT_S = 6.0  # ...so other reports, such as a lost GPU, are awaited no longer: facts arrive within seconds
AFTERMATH = (signal.SIGABRT, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # of another rank's end, or of a job's
KILLED_MAX = 64  # reported to the server of an attempt: when many were killed, it was not for one of them
LOOK_EVERY_S = 2.0  # during a start, for ranks that are stopped, cut off or unresponsive
UNSEEN = "no step was reported; only Eagle Eye's hook in the training script can report one"


def running_yet(rules: Rules, state: State, now: on.Moment) -> Step:
    """Mark the attempt as up once each of its nodes has started; pending requests for it are answered."""
    if state.phase is not Phase.STARTING or not state.started.keys() >= set(state.members):
        return state, []
    within_s = start_within_s(rules, state)
    if state.starts.any_known:
        within_s = min(within_s, LOOK_EVERY_S)
    running = to.Running(state.attempt, state.members, state.requests, tuple(sorted(state.awaiting)))
    state = move(
        state, Phase.VERIFYING,
        regroup_due_s=now.monotonic_s + first_step_within_s(rules, state) if state.kept else NEVER_S,
        requests=(), up_since_s=now.monotonic_s, settled_due_s=now.monotonic_s + rules.settled_after_s,
        due_s=now.monotonic_s + within_s, looking=False, sights=(), held_before=frozenset(),
    )  # fmt: skip
    return state, [running]


def first_step_within_s(rules: Rules, state: State) -> float:
    """Return an attempt's limit to its first step if it keeps processes: at least the longest start so far."""
    return max(rules.regroup_within_s, state.starts.longest_s)


def start_within_s(rules: Rules, state: State) -> float:
    """Return how long the attempt's start may take before a missing rank counts as holding it up."""
    resumed = state.resumed_step is not None
    return state.starts.limit_s(state.members, rules.warm_within_s, rules.verified_within_s, resumed=resumed)


def progress(rules: Rules, state: State, seen: on.Progress, now: on.Moment) -> Step:
    """Process the attempt's reported progress: it is verified, has settled, or is the moment to grow."""
    if seen.attempt != state.attempt:
        return state, []
    match seen:
        case on.CheckpointChosen():
            return _checkpoint_chosen(rules, state, seen, now)
        case on.StepSeen(_, step, most):
            return _verified(state, step, most, {"first_step": step}, now)
        case on.CheckpointWritten(_, step):
            return _checkpoint_written(rules, state, step, now)


def unverified(state: State, held_up: str = "") -> Step:
    """Handle a missing first step; ``held_up`` says who may be blocking the start."""
    detail = f"{UNSEEN}; {held_up}" if held_up else UNSEEN
    state = move(state, Phase.RUNNING, due_s=NEVER_S, kept=frozenset(), regroup_due_s=NEVER_S)
    return state, [to.Say("unverified", {"detail": detail})]


def ranks_ended(rules: Rules, state: State, ended: on.RanksEnded, now: on.Moment) -> Step:
    """Process the exit of a node's ranks: the attempt has failed, or finished once all have ended with success."""
    if not ended.success:
        early = state.raised.early or state.phase in (Phase.STARTING, Phase.VERIFYING)
        code = next((code for _, code in ended.exits if code != -signal.SIGTERM), 0)
        raised = state.raised.and_also(ended.node, ended.detail, code, early=early)
        state = replace(state, raised=raised, failed=state.failed | {ended.node})
        state = note_end(state, ended, now)
        state, killed = _note_killed(state, ended)
        exits = {str(rank): code for rank, code in ended.exits}
        reported = to.Say("ranks_failed", {"node": ended.node, "exit_codes": exits, "detail": ended.detail})
        if state.phase is not Phase.STARTING and state.phase not in UP:
            if not ended.in_touch:  # what other ranks wait for is already known, and no report can be expected
                state = replace(state, due_s=min(state.due_s, now.monotonic_s + pause_s(rules, state.restarts)))
            return state, [reported, *killed]
        wait_s = word_within_s(rules, state, now, in_touch=ended.in_touch)
        if raised.hopeless and len(state.members) > 1:  # whether on others as well, they say at once
            wait_s = max(wait_s, SETTLE_S)
        first = f"rank {ended.exits[0][0]} ended with {ended.exits[0][1]}" if ended.exits else "its ranks ended"
        state, orders = attempt_failed(rules, state, f"{ended.node}: {first}", now, wait_s)
        return state, [reported, *killed, *orders]
    state = replace(state, succeeded=state.succeeded | {ended.node}, started={ended.node: (), **state.started})
    state = ranks_done(state, frozenset(state.started[ended.node]), now)
    state, orders = running_yet(rules, state, now)
    if state.phase in UP and state.succeeded.issuperset(state.members):
        state, more = end(state, Phase.FINISHED, "every rank ended with success", 0)
        return state, orders + more
    return state, orders


def ranks_done(state: State, ranks: frozenset[int], now: on.Moment) -> State:
    """Note that ranks exited with 0; if others still go on after DONE_ALONE_S, that is said."""
    return replace(state, done=state.done | ranks, done_due_s=min(state.done_due_s, now.monotonic_s + DONE_ALONE_S))


def done_alone(state: State) -> Step:
    """Say which ranks have exited with 0 while others go on; whether these hang is for Eagle Eye to find."""
    new = sorted(state.done - state.done_told)
    state = replace(state, done_told=state.done, done_due_s=NEVER_S)
    going_on = sum(len(ranks) for ranks in state.started.values()) - len(state.done)
    if state.phase not in UP or not new or going_on <= 0:
        return state, []
    nodes = sorted(node for node, ranks in state.started.items() if not state.done.isdisjoint(ranks))
    detail = "exited with 0; the others go on, and wait for ever in an operation that needs all"
    said = {"ranks": new, "nodes": nodes, "before_s": DONE_ALONE_S, "going_on": going_on, "detail": detail}
    return state, [to.Say("ranks_done", said), to.TellServer("running", state.attempt, state.members)]


def _note_killed(state: State, ended: on.RanksEnded) -> Step:
    """Tell the server of ranks that a signal ended: their agent may not know of them yet, nor read an exit code."""
    killed = {rank: code for rank, code in ended.exits if code < 0 and -code not in AFTERMATH}
    if not killed or len(state.killed) >= KILLED_MAX or state.phase is Phase.GATHERING:
        return state, []
    state = replace(state, killed={**state.killed, **killed})
    return state, [to.TellServer("running", state.attempt, state.members)]


def word_within_s(rules: Rules, state: State, now: on.Moment, *, in_touch: bool) -> float:
    """Return how long to wait for Eagle Eye's report on an attempt that fails now."""
    if not in_touch:
        return 0.0
    unseen = state.phase is Phase.STARTING or now.monotonic_s - state.up_since_s < UNSEEN_S
    return min(rules.verdict_wait_s, UNSEEN_WAIT_S) if unseen else rules.verdict_wait_s


def attempt_failed(rules: Rules, state: State, reason: str, now: on.Moment, wait_s: float) -> Step:
    """Leave the rest of the attempt untouched as evidence, while waiting for Eagle Eye and in the backoff."""
    orders: list[to.Order] = [
        to.Answer(request, False, f"attempt {state.attempt} failed as it started: {reason}")
        for request in state.requests
    ]
    if state.restarts < rules.restarts_max:
        wait_s = max(wait_s, pause_s(rules, state.restarts))
    state = move(
        state, Phase.DECIDING,
        requests=(), up_since_s=NEVER_S, settled_due_s=NEVER_S, due_s=now.monotonic_s + wait_s,
        kept=frozenset(), regroup_due_s=NEVER_S,
    )  # fmt: skip
    left = max(0, rules.restarts_max - state.restarts)
    fields = {"reason": reason, "waits_s": wait_s, "restarts_left": left}
    state, asked = ask_reach(state, state.members, now)
    return state, [*orders, *asked, to.Say("attempt_failed", fields)]


def restart_alone(rules: Rules, state: State, reason: str, now: on.Moment) -> Step:
    """Restart without Eagle Eye, or end the job where this happened too often."""
    if state.restarts >= rules.restarts_max:
        return end(state, Phase.FAILED, f"{reason}; {state.restarts} restarts are used up", 1)
    raised = replace(state.raised, step=state.step_max)
    if own := scripts_own(state.raised_before, raised, len(state.members)):
        return end(state, Phase.FAILED, f"{own}; the script is at fault, and a restart does not help", 1)
    state = replace(state, restarts=state.restarts + 1)
    given_up: list[to.Order] = []
    if state.stuck_again and next_nodes(rules, state, state.stuck_again) is not None:
        why = "it held up two starts in a row"
        state, given_up = abandon(rules, state, dict.fromkeys(state.stuck_again, why), now)
    text = f"{reason}; restart {state.restarts} of {rules.restarts_max} by the launcher itself"
    # The surviving nodes and processes are not suspect: Eagle Eye would have said so.
    state, orders = gather(rules, state, text, now, "process_group")
    return state, given_up + orders


def _checkpoint_chosen(rules: Rules, state: State, chosen: on.CheckpointChosen, now: on.Moment) -> Step:
    if state.phase is not Phase.STARTING or state.chosen:
        return state, []
    known = [step for step in (chosen.step, state.step_max) if step is not None]
    state = replace(
        state,
        chosen=True, resumed_step=chosen.step, resumed_s=chosen.written_s, step_max=max(known, default=None),
        due_s=now.monotonic_s + rules.started_within_s,
    )  # fmt: skip
    if state.kept and not chosen.path.startswith(MEMORY_PREFIX):
        return gather(rules, state, "no step is whole in the nodes' memory, from which processes could go on", now)
    return state, [to.StartRanks(state.attempt, state.members, chosen.path, chosen.step, state.kept)]


def _verified(state: State, step: int, most: int, fields: dict[str, object], now: on.Moment) -> Step:
    if state.phase is not Phase.VERIFYING:
        return state, []
    resumed = state.resumed_step or 0
    wrong = ""
    if step <= resumed:
        wrong = f"it was at step {step} when first heard of: it did not resume from step {resumed}, and repeats work"
    elif step > most:
        wrong = (
            f"it was at step {step} when first heard of, and could have come from step {resumed} to {most} at most:"
            " it resumed from something else than it was told to"
        )
    starts = state.starts
    if not state.kept:  # processes that continued do not show how long a start takes
        took_s = now.monotonic_s - state.up_since_s
        starts = starts.after(state.members, took_s, resumed=state.resumed_step is not None)
    state = move(
        state, Phase.RUNNING,
        due_s=NEVER_S, starts=starts, stuck=frozenset(), stuck_again=frozenset(), stepped=True,
        kept=frozenset(), regroup_due_s=NEVER_S,
    )  # fmt: skip
    if wrong:
        return state, [
            to.Persist(),
            to.Say("resumed_wrongly", {"resumed_step": state.resumed_step, **fields, "detail": wrong}),
        ]
    return state, [to.Persist(), to.Say("verified", {"resumed_step": state.resumed_step, **fields})]


def _checkpoint_written(rules: Rules, state: State, step: int, now: on.Moment) -> Step:
    if state.phase not in UP:
        return state, []
    state, orders = _verified(state, step, step, {"checkpoint_step": step}, now)
    state = replace(state, resumed_s=None, doubted_s=None)
    if state.step_max is None or step > state.step_max:
        state = replace(state, step_max=step, advanced=True)
        orders.append(to.Persist())
    state, more = settle(rules, state, now)
    orders += more
    plan = next_nodes(rules, state)
    grows = plan is not None and len(plan) > len(state.members) and state.ready.issuperset(plan)
    # Only after settling: a node that comes and goes must not restart the job each time.
    if rules.grow_at_checkpoint and plan and grows and now.monotonic_s >= state.up_since_s + rules.settled_after_s:
        text = f"grows from {len(state.members)} to {len(plan)} nodes at the checkpoint of step {step}"
        state, more = gather(rules, state, text, now)
        orders += more
    return state, orders
