"""Maps a row's metric to a series of the store and back. Pure.

A series is ``eagle_eye_<metric>`` with the labels ``node``, ``job`` (where the row belongs to one), and ``device`` or
``link``; a node's own row has neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from eagle_eye.schema import metrics as catalogue
from eagle_eye.schema.events import WHOLE_NODE
from eagle_eye.schema.frame import KEYS_MAX
from eagle_eye.schema.metrics import PROMETHEUS_PREFIX, MetricSpec, Scope
from eagle_eye.schema.names import is_name

NAME, JOB, NODE, DEVICE, LINK = "__name__", "job", "node", "device", "link"
# Where Prometheus scrapes our /metrics, it sets ``job`` itself and renames ours to this.
SCRAPED_JOB = "exported_job"


class SeriesSubject(NamedTuple):
    """The subject of a series in the store; ``job`` None means no job."""

    spec: MetricSpec
    node: str
    key: int | str
    job: str | None


def labels_of(place: SeriesSubject, external: Mapping[str, str]) -> dict[str, str]:
    """Return the series' labels; ``external`` ones do not override its own."""
    labels = {**external, NAME: PROMETHEUS_PREFIX + place.spec.name, NODE: place.node, JOB: place.job or ""}
    if place.spec.scope is Scope.LINK:
        labels[LINK] = str(place.key)
    elif place.spec.scope is Scope.DEVICE:
        labels[DEVICE] = str(place.key)
    return labels


def place_of(labels: Mapping[str, str]) -> SeriesSubject | None:
    """Return the subject of a series; None where it is none of ours or its labels are incomplete."""
    spec = catalogue.BY_NAME.get(labels.get(NAME, "").removeprefix(PROMETHEUS_PREFIX))
    node, job = labels.get(NODE, ""), labels.get(SCRAPED_JOB) or labels.get(JOB) or None
    if spec is None or not is_name(node) or (job is not None and not is_name(job)):
        return None
    if spec.scope is Scope.NODE:
        return SeriesSubject(spec, node, WHOLE_NODE, job)
    if spec.scope is Scope.LINK:
        link = labels.get(LINK, "")
        return SeriesSubject(spec, node, link, job) if is_name(link) else None
    device = labels.get(DEVICE, "")
    if not (device.isascii() and device.isdigit() and len(device) < 5 and int(device) < KEYS_MAX):
        return None
    return SeriesSubject(spec, node, int(device), job)
