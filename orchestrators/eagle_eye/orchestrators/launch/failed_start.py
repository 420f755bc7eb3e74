"""An attempt that ended before its first step because one node's ranks could not reach the others. Pure.

If the ranks of exactly one node could not connect while those of every other node reached the rendezvous, the job
continues without that node, and the server is told which ranks block the first step. Otherwise the cause is unknown.
"""

from __future__ import annotations

from dataclasses import replace

from eagle_eye.orchestrators.launch import events as on
from eagle_eye.orchestrators.launch import orders as to
from eagle_eye.orchestrators.launch.blame import cannot_connect, followed
from eagle_eye.orchestrators.launch.state import NEVER_S, Phase, State, Step

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
