"""A node's way out of service and back: its phases, who set its standing, and what a return needs. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from eagle_eye.detectors.faults import BY_NAME
from eagle_eye.server.engine.maintenance import moment
from eagle_eye.server.engine.probation import probation
from eagle_eye.server.engine.settings import PolicySettings
from eagle_eye.server.model.records import Action, Node

# Shown to people: the standing, and the node's progress on its way back.
Phase = Literal["in_service", "watched", "draining", "excluded", "checking"]
Way = Literal["return", "check", "refuse"]

SERVER = "server"  # the author of our own actions
BY_HAND = frozenset({"silent_data_corruption"})  # no check clears a node of it


@dataclass(frozen=True, slots=True)
class Offer:
    """Whether the node's agent makes checks: it offers them, used to but cannot now (``why``), or never did."""

    state: Literal["ready", "unable", "none"]
    why: str = ""


@dataclass(frozen=True, slots=True)
class ReturnRequest:
    """How a return is requested. ``who`` asks; ``check``: by a check, whatever the settings; ``force``: at once."""

    who: str
    reason: str = ""
    check: bool = False
    force: bool = False


@dataclass(frozen=True, slots=True)
class ReturnRequirement:
    """What a return needs: nothing, a passed check, or it is refused.

    ``word`` and ``detail`` give the reason of a refusal; of a return ``detail`` says why no check goes before it.
    """

    way: Way
    word: str = ""
    detail: str = ""


def phase(node: Node, now_s: float) -> Phase:
    """Return the node's phase."""
    if node.state == "in_service":
        return "watched" if is_watched(node, now_s) else "in_service"
    return "checking" if node.check_id else node.state


def is_watched(node: Node, now_s: float) -> bool:
    """Return whether the node has returned so recently that a fault of the same family counts as a relapse."""
    return node.state == "in_service" and node.watched_until_s is not None and now_s < node.watched_until_s


def fault_of(node: Node) -> str:
    """Return the fault that took the node out, "" if none of ours did. Old records have it only in their reason."""
    if node.fault or node.by:
        return node.fault
    named = node.reason.partition(":")[0]
    return named if named in BY_NAME else ""


def is_ours(node: Node) -> bool:
    """Return whether one of our actions set the node's standing, and nothing has changed it or its reason since."""
    return node.by == SERVER or (not node.by and bool(fault_of(node)))


def returning(
    node: Node, asking: ReturnRequest, offer: Offer, actions: Iterable[Action], settings: PolicySettings, now_s: float
) -> ReturnRequirement:
    """Return what a node that is out needs to come back; of ``actions``, those that took it out count."""
    fault = fault_of(node)
    if asking.force:
        if fault in BY_HAND and not asking.reason:
            return ReturnRequirement(
                "refuse", "reason", f"{node.node} is a suspect of {fault}: say why it may return (reason)"
            )
        return ReturnRequirement("return", detail=f"forced by {asking.who}")
    if fault in BY_HAND:
        detail = (
            f"{node.node} is a suspect of {fault}, which no check rules out: it returns by hand alone,"
            " with force=true and a reason; have its GPUs replaced or tested for hours first"
        )
        return ReturnRequirement("refuse", "by_hand", detail)
    if node.by and node.by not in (SERVER, asking.who):
        detail = (
            f"{node.node} is {node.state} by {node.by} ({node.reason or 'no reason given'}), not by Eagle Eye or you:"
            " ask there, or readmit it with force=true"
        )
        return ReturnRequirement("refuse", "not_ours", detail)
    found = probation(node.node, actions, settings, now_s, node.relapsed)
    if found.until_s is not None:
        relapses = f", and {found.relapses} times while it was still watched" if found.relapses else ""
        detail = (
            f"{node.node} was excluded {found.exclusions} times lately{relapses}, and is on probation until"
            f" {moment(found.until_s)} (policy.probation_s); wait, or readmit it with force=true"
        )
        return ReturnRequirement("refuse", "probation", detail)
    return _checked(node, asking, offer, settings)


def _checked(node: Node, asking: ReturnRequest, offer: Offer, settings: PolicySettings) -> ReturnRequirement:
    required = asking.check or settings.readmit_check == "required"
    if not required and settings.readmit_check == "off":
        return ReturnRequirement("return", detail="policy.readmit_check is off")
    # A node taken out by a person may be put back by that person, unless a check is requested.
    if not required and not fault_of(node):
        return ReturnRequirement("return", detail=f"{node.by or 'a person'} had taken it out by hand")
    if not required and offer.state == "none":
        return ReturnRequirement("return", detail=offer.why)
    if offer.state == "ready":
        return ReturnRequirement("check")
    detail = f"{node.node} cannot be checked: {offer.why}; mend that, or readmit it with force=true"
    return ReturnRequirement("refuse", "cannot_check", detail)
