"""Who may begin an action: of several subscribers one, and nobody once it is over or withdrawn. Pure."""

from __future__ import annotations

from msgspec.structs import replace

from eagle_eye.schema.action import ActionClaim
from eagle_eye.server.model.errors import IllegalTransition
from eagle_eye.server.model.records import Action


def claimed(action: Action, claim: ActionClaim, who: str, now_s: float) -> Action:
    """Return the action with the claim; the same object if its subscriber has it already.

    The epoch is kept with the claim and decides nothing: what a former leader asked for is in the records that the
    present one acts by. Raises IllegalTransition with why the action must not begin.
    """
    held = next((report["claim"] for report in action.reports if report.get("claim")), "")
    if action.state in ("accepted", "running") and held == claim.claim:
        return action
    if action.state not in ("requested", "accepted"):
        raise IllegalTransition(f"action {action.id} is {action.state}; it cannot be claimed any more")
    if held:
        raise IllegalTransition(f"action {action.id} is claimed by {held}; another subscriber must not begin it")
    entry = {
        "state": "accepted",
        "detail": claim.detail,
        "time_s": now_s,
        "who": who,
        "claim": claim.claim,
        "epoch": claim.epoch,
    }
    return replace(action, state="accepted", updated_s=now_s, reports=[*action.reports, entry])
