"""A restart that keeps processes: they reach their restart points and continue, or the restart is widened. Pure.

A rank waiting at its restart point has lost its peers, so its attempt has failed. A restart that keeps processes has a
limit (``regroup_within_s``), both for reaching the restart points and then for the attempt's first step. Beyond it, or
where anything else fails meanwhile, more is renewed: the processes that are missing or have exited, then all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from eagle_eye.orchestrators.launch import events as on
from eagle_eye.orchestrators.launch import orders as to
from eagle_eye.orchestrators.launch.attempt import attempt_failed, first_step_within_s, word_within_s
from eagle_eye.orchestrators.launch.gathering import consider, gather, renew, renew_all
from eagle_eye.orchestrators.launch.scopes import late
from eagle_eye.orchestrators.launch.state import NEVER_S, UP, Phase, Rules, State, Step

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


def overdue(rules: Rules, state: State, now: on.Moment) -> Step:
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
