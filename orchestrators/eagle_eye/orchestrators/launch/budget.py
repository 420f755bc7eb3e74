"""The launcher's own restarts: how many, their backoff, and when they are forgotten. Pure."""

from __future__ import annotations

from dataclasses import replace

from eagle_eye.orchestrators.launch import events as on
from eagle_eye.orchestrators.launch import orders as to
from eagle_eye.orchestrators.launch.blame import Raised
from eagle_eye.orchestrators.launch.state import NEVER_S, UP, Rules, State, Step
from eagle_eye.schema.backoff import doubled_s

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
