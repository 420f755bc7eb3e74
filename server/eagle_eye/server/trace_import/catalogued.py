"""Selects a Prometheus' usable series and their nodes, from the mapping table and our own metric names."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from eagle_eye.schema.metrics import METRICS, PROMETHEUS_PREFIX
from eagle_eye.schema.names import is_name
from eagle_eye.server.history.remote_history import Labels, any_of, selector
from eagle_eye.server.history.remote_series import JOB, NAME, NODE, SCRAPED_JOB
from eagle_eye.server.ingest.remote_write.mapping import TARGET_UP, Table
from eagle_eye.server.model.identity import POD_LABELS, Naming, NoName

OWN_NAMES = tuple(PROMETHEUS_PREFIX + spec.name for spec in METRICS)
NODES_SHOWN = 20


@dataclass(frozen=True)
class ImportRequest:
    """What to import.

    ``matchers`` as between the braces of PromQL; ``nodes`` are globs, (): those that the job label assigns to the job.
    ``naming`` names the nodes, and learns their names in the order of the census.
    """

    job: str
    nodes: tuple[str, ...]
    matchers: str
    naming: Naming
    job_labels: tuple[str, ...]

    @property
    def by_label(self) -> bool:
        """Whether the nodes are selected by the job label."""
        return not self.nodes and not self.matchers


@dataclass
class ImportedNodes:
    """The nodes to import: for each label that names nodes, its values by node; ``own`` for series with our names.

    The label comes with the values that all others must have which say who is meant. ``seen`` are all nodes, wanted or
    not; ``nameless`` counts label sets that name no node, ``complaint`` says what is wrong with the first.
    """

    by_label: dict[tuple[str, tuple[tuple[str, str], ...]], dict[str, set[str]]] = field(default_factory=dict)
    own: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    seen: set[str] = field(default_factory=set)
    nameless: int = 0
    complaint: str = ""


def foreign_names(table: Table) -> tuple[str, ...]:
    """Return the names of the exporters' series that become metrics or events."""
    return tuple(sorted(name.decode() for name in table.wanted if name != TARGET_UP.encode()))


def census(table: Table, wanted: ImportRequest, window_s: float) -> tuple[str, str]:
    """Return the queries for nodes and their jobs: in exporters' series, and in our own.

    The store groups by the labels that name nodes and jobs: a fleet has a hundred thousand series, but some thousand
    nodes.
    """
    window = f"{round(window_s * 1000.0)}ms"
    of_exporters = with_matchers(selector("", {}, {NAME: any_of(foreign_names(table))}), wanted)
    of_ours = with_matchers(selector("", {}, {NAME: any_of(OWN_NAMES)}), wanted)
    naming = wanted.naming
    labels = ",".join(dict.fromkeys((*naming.node_labels, *POD_LABELS, *naming.cluster_labels, *wanted.job_labels)))
    return (
        f"group by ({labels}) (last_over_time({of_exporters}[{window}]))",
        f"group by ({NODE},{JOB},{SCRAPED_JOB}) (last_over_time({of_ours}[{window}]))",
    )


def with_matchers(of: str, wanted: ImportRequest) -> str:
    """Return the selector with the user's matchers added."""
    return f"{of[:-1]},{wanted.matchers}}}" if wanted.matchers else of


def nodes_of(of_exporters: Iterable[Labels], of_ours: Iterable[Labels], wanted: ImportRequest) -> ImportedNodes:
    """Return the wanted nodes among those in the census."""
    found = ImportedNodes()
    named = [*_by_exporters(of_exporters, wanted, found), *_by_us(of_ours)]
    of_job = {one.node for one in named if one.job == wanted.job}
    for node, label, value, _, fixed in named:
        found.seen.add(node)
        if not (node in of_job if wanted.by_label else _fits(node, wanted.nodes)):
            continue
        found.names.add(node)
        if label:
            found.by_label.setdefault((label, fixed), {}).setdefault(node, set()).add(value)
        else:
            found.own.add(node)
    return found


class _Named(NamedTuple):
    """A node, the label that names it ("": our own series), the label's value, and the job in the series.

    ``fixed`` are the other labels that say who is meant, with their values.
    """

    node: str
    label: str
    value: str
    job: str | None
    fixed: tuple[tuple[str, str], ...] = ()


def _by_exporters(series: Iterable[Labels], wanted: ImportRequest, found: ImportedNodes) -> Iterator[_Named]:
    for labels in sorted(series, key=lambda labels: sorted(labels.items())):
        try:
            node, label = wanted.naming.node(labels)
        except NoName as error:
            found.nameless += 1
            found.complaint = found.complaint or str(error)
            continue
        wanted.naming.add(node)
        job = next((labels[one] for one in wanted.job_labels if labels.get(one)), None)
        others = (*_before(wanted.naming.node_labels, label), *wanted.naming.cluster_labels)
        fixed = tuple((one, labels.get(one, "")) for one in others)
        yield _Named(node, label, labels[label], job, fixed)


def _before(labels: Sequence[str], label: str) -> Sequence[str]:
    return labels[: labels.index(label)]


def _by_us(series: Iterable[Labels]) -> Iterator[_Named]:
    for labels in series:
        node = labels.get(NODE, "")
        if is_name(node):
            yield _Named(node, "", node, labels.get(SCRAPED_JOB) or labels.get(JOB))


def _fits(node: str, globs: Sequence[str]) -> bool:
    return not globs or any(fnmatch.fnmatchcase(node, glob) for glob in globs)


def questions(nodes: ImportedNodes, batch: Sequence[str], table: Table, wanted: ImportRequest) -> list[str]:
    """Return selectors for all series of a batch of nodes, without overlap.

    A series with several labels that name nodes belongs to the first that has a machine's name.
    """
    found = []
    for (label, fixed), by_node in nodes.by_label.items():
        values = sorted({value for node in batch for value in by_node.get(node, ())})
        if values:
            of = selector("", dict(fixed), {NAME: any_of(foreign_names(table)), label: any_of(values)})
            found.append(with_matchers(of, wanted))
    own = sorted(nodes.own.intersection(batch))
    if own:
        of = selector("", {}, {NAME: any_of(OWN_NAMES), NODE: any_of(own)})
        found.append(with_matchers(of, wanted))
    return found


def nothing_found(nodes: ImportedNodes, wanted: ImportRequest) -> str:
    """Return why there is no node to import, and the remedy."""
    if not nodes.seen and not nodes.nameless:
        return (
            "the Prometheus has no series of dcgm-exporter, node_exporter or Eagle Eye in that time"
            + (f" with {wanted.matchers}" if wanted.matchers else "")
            + "; see docs/how-to/prometheus.md for those that are read"
        )
    if not nodes.seen:
        return (
            f"there are series, and their nodes are not known; name the label that has them with --node-label"
            f" ({nodes.complaint})"
        )
    shown = ", ".join(sorted(nodes.seen)[:NODES_SHOWN])
    more = ", ..." if len(nodes.seen) > NODES_SHOWN else ""
    if wanted.nodes:
        return f"no node fits --nodes {' '.join(wanted.nodes)}; there are {shown}{more}"
    return (
        f"no series says by a label ({', '.join(wanted.job_labels)}) that its node works for job {wanted.job!r}; name"
        f" the nodes with --nodes, or the label with --job-label; there are {shown}{more}"
    )
