"""Holds an exclusion back where nodes of other jobs at the node's switch are accused as well. Pure.

A window is one job's, and one cell's; incidents are on record for all. Trouble of the network that begins at one moment
at two nodes of one switch, in jobs that share nothing else, is more likely one switch than two nodes.
"""

from __future__ import annotations

from eagle_eye.server.engine.ruling import NOT_APPLICABLE, PlannedAction, PolicyRule, Ruling, held, passed
from eagle_eye.server.engine.situation import NODE_KINDS, Situation
from eagle_eye.server.model.records import Incident

# What a switch can do to a node. A fact about its GPUs, its processes or its memory is none of it.
OF_THE_NETWORK = frozenset({"network_hang", "hang", "node_unreachable", "nic_degraded", "straggler", "switch_down"})
STATES = frozenset({"suspected", "confirmed", "acting"})
TOGETHER_S = 120.0  # between the onsets of one trouble, as two jobs see it: a step of each, and the floor of a verdict


def _witnesses(incident: Incident, switch: str, situation: Situation) -> list[Incident]:
    """Return those of the other jobs' incidents that accuse another node on the switch of this one's at the time."""
    return [
        other
        for other in situation.elsewhere
        if other.fault in OF_THE_NETWORK
        and other.state in STATES
        and not other.merged_into
        and abs(other.onset_s - incident.onset_s) <= TOGETHER_S
        and incident.node not in _accused(other)
        and any(situation.switch_of.get(node) == switch for node in _accused(other))
    ]


def _accused(incident: Incident) -> tuple[str, ...]:
    return (incident.node,) if incident.node is not None else tuple(incident.nodes)


def _shared_switch(incident: Incident, situation: Situation, plan: PlannedAction) -> Ruling:
    """Hold the exclusion of a node whose switch has other jobs' nodes in the same trouble."""
    switch = situation.switch_of.get(incident.node or "", "")
    if plan.kind not in NODE_KINDS or not switch or incident.fault not in OF_THE_NETWORK:
        return NOT_APPLICABLE
    found = _witnesses(incident, switch, situation)
    named = ", ".join(
        f"{node} ({one.job})" for one in found for node in _accused(one) if situation.switch_of.get(node) == switch
    )
    values = {"switch": switch, "accused": named}
    if not found:
        return passed(values)
    why = (
        f"{named} at the same switch {switch} began within {TOGETHER_S:.0f} s of it, in other jobs: what may be the"
        " switch is reported; look at the switch, or exclude by hand"
    )
    return held(why, values)


RULE = PolicyRule("shared_switch", _shared_switch)
