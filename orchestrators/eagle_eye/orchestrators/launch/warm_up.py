"""From the ranks' start to the attempt's first step: time limits, and who blocks it. Pure.

The duration of a start is learned from this job's earlier ones. A start is ended only if it is longer than any known
one and a few ranks are stopped or missing at the rendezvous while the others are there: a missing step alone is not
enough, since it may have gone unreported. A start is ended sooner for what persists from one look to the next: stopped
ranks, since no start stops a process; and, while the ranks of all other nodes have arrived, the ranks of a node that
cannot reach the store (an earlier connection proves nothing), or, once the start is longer than any known one, of a
node that does not answer.
"""

from __future__ import annotations

import math
from collections.abc import Set as AbstractSet
from dataclasses import replace

import msgspec

from eagle_eye.orchestrators.launch import events as on
from eagle_eye.orchestrators.launch import orders as to
from eagle_eye.orchestrators.launch.attempt import LOOK_EVERY_S, attempt_failed, start_within_s, unverified
from eagle_eye.orchestrators.launch.state import Rules, State, Step

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
