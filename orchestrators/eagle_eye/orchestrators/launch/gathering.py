"""Between attempts: stops what runs, waits for nodes, starts the next attempt. Pure."""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import replace

from eagle_eye.orchestrators import fallback_layouts
from eagle_eye.orchestrators.launch import events as on
from eagle_eye.orchestrators.launch import orders as to
from eagle_eye.orchestrators.launch.blame import Raised
from eagle_eye.orchestrators.launch.checkpoints import Span
from eagle_eye.orchestrators.launch.reachability import AGAIN_S, ask
from eagle_eye.orchestrators.launch.state import ENDED, NEVER_S, Phase, Rules, State, Step, choose_nodes, lay_out, move
from eagle_eye.schema.action import RestartScope


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
    rest = _chosen(rules, state, unusable | away)
    return rest if rest and (few or state.reaching.issuperset(rest)) else _chosen(rules, state, unusable)


def possible_nodes(rules: Rules, state: State, without: AbstractSet[str] = frozenset()) -> tuple[str, ...] | None:
    """Return the nodes of the next attempt including those expected back soon; None where too few are left."""
    return _chosen(rules, state, state.hopeless | without)


def _chosen(rules: Rules, state: State, unusable: AbstractSet[str]) -> tuple[str, ...] | None:
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
        ready_due_s=NEVER_S, reach_due_s=now.monotonic_s + AGAIN_S, due_s=now.monotonic_s + rules.started_within_s,
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
    state, asked = ask(state, plan, now)
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
