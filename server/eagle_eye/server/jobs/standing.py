"""Tracks nodes that a scheduler took out of service or returned to service. Pure.

Nodes that an administrator drained in the scheduler belong to the administrator: nothing of ours changes them, and they
return only through the scheduler. Nodes that we drained and somebody drained again for another reason belong to that
person from then on. A node taken out by us or by a person does not return because the scheduler has it in service.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from eagle_eye.server.engine import ledger
from eagle_eye.server.engine.ledger import is_ours
from eagle_eye.server.jobs.source import ScheduledNode
from eagle_eye.server.model.identity import NodeNames
from eagle_eye.server.model.records import Node

OUR_REASONS = ("eagle-eye", "eagle_eye", "eagle eye")  # prefixes of the drain reasons that our subscribers use


def standing(
    source: str, nodes: Iterable[ScheduledNode], known: Mapping[str, Node], names: NodeNames, now_s: float
) -> tuple[Node, ...]:
    """Return the nodes whose standing changes according to the scheduler ``source``."""
    changed = []
    for said in nodes:
        name = names.ours(said.name)
        old = known.get(name) if name is not None else None
        if old is None:
            continue
        new = _stands(source, said, old, now_s)
        if new is not old:
            changed.append(new)
    return tuple(changed)


def is_our_reason(reason: str) -> bool:
    """Return whether the reason of a drain is one of ours."""
    return reason.casefold().startswith(OUR_REASONS)


def _stands(source: str, said: ScheduledNode, old: Node, now_s: float) -> Node:
    theirs = old.by == source
    if said.state == "in_service":
        back = theirs and old.state != "in_service"
        return ledger.stand(old, "in_service", f"in service in {source}", now_s, source) if back else old
    if not said.state or is_our_reason(said.reason):
        return old
    reason = said.reason or f"out of service in {source}"
    if old.state == "in_service" or theirs:
        return ledger.stand(old, said.state, reason, now_s, source)
    if is_ours(old) and said.drained and said.reason:
        return ledger.stand(old, said.state, reason, now_s, source)
    return old
