"""Handles requests of Eagle Eye or an operator to the launcher. Pure."""

from __future__ import annotations

from dataclasses import replace

from eagle_eye.orchestrators.fallback_layouts import no_spare
from eagle_eye.orchestrators.launch import events as on
from eagle_eye.orchestrators.launch import orders as to
from eagle_eye.orchestrators.launch.gathering import consider, gather, possible_nodes, renew_all, too_few
from eagle_eye.orchestrators.launch.state import UP, Phase, Rules, State, Step

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
