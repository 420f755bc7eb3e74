"""Matches silences against incidents. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from eagle_eye.server.model.records import Incident, NewsSilence
from eagle_eye.server.model.subscription_filters import fits
from eagle_eye.server.model.timestamps import rfc3339


def covering(silences: Iterable[NewsSilence], fault: str, job: str, nodes: Sequence[str]) -> NewsSilence | None:
    """Return the silence that covers such an incident and ends last, or None.

    All that a silence names must hold. One of nodes covers an incident only if it covers every node of it: the trouble
    of another node is not silenced.
    """
    found = (
        one
        for one in silences
        if (not one.faults or fault in one.faults)
        and (not one.jobs or fits(one.jobs, job))
        and (not one.nodes or (bool(nodes) and all(fits(one.nodes, node) for node in nodes)))
    )
    return max(found, key=lambda one: (one.until_s, one.id), default=None)


def covering_incident(silences: Iterable[NewsSilence], incident: Incident) -> NewsSilence | None:
    """Return the silence that covers the incident and ends last, or None."""
    return covering(silences, incident.fault, incident.job, incident.nodes)


def described(silence: NewsSilence) -> str:
    """Return which silence it is, who made it, until when, and why."""
    return f"{silence.id} of {silence.by} until {rfc3339(silence.until_s)}: {silence.reason}"
