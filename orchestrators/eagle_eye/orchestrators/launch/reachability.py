"""Nodes that cannot reach the launcher's store: the next attempt does without them where it can. Pure.

When an attempt fails or is replaced its nodes are asked, and again those that have not started their ranks soon. What
counts is the node's own answer, twice in a row, and only if most nodes do reach the store or all others say so. Such a
node is not excluded, and is asked until it reaches the store again.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from eagle_eye.orchestrators.launch import events as on
from eagle_eye.orchestrators.launch import orders as to
from eagle_eye.orchestrators.launch.state import State, Step

AGAIN_S = 2.0  # until a node is asked again; a connection is given up sooner (runner.CONNECTED_WITHIN_S)
ASKED_MAX = 256  # at once: many connections in one moment would be late for that reason


def ask(state: State, nodes: Collection[str], now: on.Moment) -> Step:
    """Ask the nodes whether they reach the store."""
    asked = tuple(sorted(set(nodes) - state.lost)[:ASKED_MAX])
    if not asked:
        return state, []
    state = replace(state, reaching=state.reaching.difference(asked), reach_due_s=now.monotonic_s + AGAIN_S)
    return state, [to.AskReach(asked)]


def answered(state: State, said: on.NodeReached, now: on.Moment) -> Step:
    """Record a node's answer; the first that it does not reach the store is asked for again."""
    node = frozenset({said.node})
    if said.reaches:
        state = replace(state, doubted=state.doubted - node, out_of_reach=state.out_of_reach - node)
        return replace(state, reaching=state.reaching | node), []
    if node <= state.out_of_reach or node <= state.lost:
        return state, []
    if not node <= state.doubted:
        return ask(replace(state, doubted=state.doubted | node), node, now)
    state = replace(
        state,
        doubted=state.doubted - node, out_of_reach=state.out_of_reach | node,
        reach_due_s=now.monotonic_s + AGAIN_S,
    )  # fmt: skip
    detail = "it does not reach the launcher's store; it is used again once it does"
    return state, [to.Say("node_out_of_reach", {"node": said.node, "detail": detail})]
