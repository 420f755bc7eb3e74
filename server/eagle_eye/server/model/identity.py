"""Which machine a name means: one rule for agents, schedulers, remote write, tokens and imports. Pure.

A series says where it comes from in several labels: ``named`` finds the machine's name among them. Names that differ in
case or domain mean one machine (``NodeNames``), names of different clusters never do (``Clusters``). Whether only one
machine speaks under a name shows in what only one machine can have (``NameClaims``).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from eagle_eye.schema.names import is_name

# Labels with the machine's address rather than its name: the port is cut off.
ADDRESS_LABELS = ("instance",)
# Labels that may name the pod that a series comes from.
POD_LABELS = frozenset({"pod", "k8s_pod_name", "kubernetes_pod_name", "pod_name"})
# What Kubernetes calls a DaemonSet's pod: five of the characters that it draws (apimachinery, util/rand).
_EXPORTER_POD = re.compile(r".*exporter.*-[bcdfghjklmnpqrstvwxz2456789]{5}")
_EVERY_HOST = frozenset({"localhost", "localhost4", "localhost6", "localhost.localdomain", "ip6-localhost"})
CLUSTER_MARK = "@"
CLUSTERS_MAX = 64  # other clusters that are remembered by name
SETTLED_S = 600.0  # a name is disputed until only one machine has spoken under it for this long
MISSED = 3.0  # intervals without a word of the holder, after which another machine may have its name...
MISSED_S_MIN = 15.0  # ...and at least this: agents that failed try again within 5 s, and no machine boots faster


class NoName(Exception):
    """No label names the machine, or the name that one has is none."""


class NamedMachine(NamedTuple):
    """A machine's name, and the label that it was found in."""

    name: str
    label: str


def named(labels: Mapping[str, str], node_labels: Sequence[str]) -> NamedMachine | None:
    """Return what the first of ``node_labels`` with a machine's name has; None if none has one.

    "localhost" is the name of every machine, and an exporter's pod is not the machine it runs on.
    """
    for label in node_labels:
        value = labels.get(label, "")
        if not value:
            continue
        if label in ADDRESS_LABELS:
            value = _host(value)
        elif value.casefold() in _EVERY_HOST or _is_exporter_pod(value, labels):
            continue
        if value:
            return NamedMachine(value, label)
    return None


def with_plain_names(labels: Mapping[str, str]) -> Mapping[str, str]:
    """Return the labels, and those with dots in their names also as OpenTelemetry translates them: with underscores.

    A Prometheus that allows any name (UTF-8) has "k8s.node.name" where others have "k8s_node_name".
    """
    if not any("." in name for name in labels):
        return labels
    return {**{name.replace(".", "_"): value for name, value in labels.items()}, **labels}


def _is_exporter_pod(value: str, labels: Mapping[str, str]) -> bool:
    """Return whether a host name is that of a pod which the series comes from."""
    if not POD_LABELS.isdisjoint(labels) and any(labels.get(label) == value for label in POD_LABELS):
        return True
    return "exporter" in value and _EXPORTER_POD.fullmatch(value) is not None


def _host(instance: str) -> str:
    """Return the host of "host:port", "[v6]:port" or a bare host."""
    if instance.startswith("["):
        return instance[1:].partition("]")[0]
    host, colon, port = instance.rpartition(":")
    return host if colon and port.isdigit() and ":" not in host else instance


class NodeNames:
    """Our nodes' names, looked up by anybody's.

    Two names match when they are equal except for case, or one is the other without its domain, in one cluster. If
    several match, the result is ambiguous and none is returned.
    """

    def __init__(self, ours: Iterable[str] = ()) -> None:
        self._whole: dict[str, str] = {}
        self._bare: dict[str, dict[str, None]] = {}
        for name in ours:
            self.add(name)

    def add(self, name: str) -> None:
        """Add one of our names."""
        folded = name.casefold()
        if folded not in self._whole:
            self._whole[folded] = name
            self._bare.setdefault(_bare(folded), {})[name] = None

    def discard(self, name: str) -> None:
        """Remove one of our names if it is there."""
        folded = name.casefold()
        if self._whole.get(folded) == name:
            del self._whole[folded]
            alike = self._bare[_bare(folded)]
            del alike[name]
            if not alike:
                del self._bare[_bare(folded)]

    def ours(self, theirs: str) -> str | None:
        """Return our name of the node that they name, None if it was never heard of or several may be meant."""
        found = self.matching(theirs)
        return found[0] if len(found) == 1 else None

    def matching(self, theirs: str) -> list[str]:
        """Return those of our names that may mean the node that they name."""
        folded = theirs.casefold()
        name = self._whole.get(folded)
        if name is not None:
            return [name]
        bare = _bare(folded)
        return [one for one in self._bare.get(bare, ()) if folded == bare or one.casefold() == bare]


def _bare(folded: str) -> str:
    """Return a name without its domain; an address has none."""
    if "." not in folded:
        return folded
    host, mark, cluster = folded.partition(CLUSTER_MARK)
    try:
        ipaddress.ip_address(host)
    except ValueError:
        host = host.partition(".")[0]
    return f"{host}{mark}{cluster}"


class Clusters:
    """The clusters that series name. Names of the home cluster are as they are, those of others have its name added.

    ``home`` "": the first cluster that is named.
    """

    def __init__(self, home: str = "") -> None:
        self.configured = bool(home)
        self.home = home
        self.others: dict[str, None] = {}

    def qualified(self, name: str, cluster: str) -> str:
        """Return the name of a node or job in a cluster, "" for one that is not named: the home cluster."""
        self.home = self.home or cluster
        if not cluster or cluster == self.home:
            return name
        if len(self.others) < CLUSTERS_MAX:
            self.others[cluster] = None
        return f"{name}{CLUSTER_MARK}{cluster}"


class Naming:
    """Names the node that a series tells of.

    ``matching`` returns those of the names known elsewhere that a name may mean; ``add`` one that becomes known here.
    """

    def __init__(
        self,
        node_labels: Sequence[str],
        cluster_labels: Sequence[str],
        clusters: Clusters,
        matching: Callable[[str], Sequence[str]] = lambda _name: (),
    ) -> None:
        self.node_labels = node_labels
        self.cluster_labels = cluster_labels
        self._clusters = clusters
        self._matching = matching
        self._names = NodeNames()

    def node(self, labels: Mapping[str, str]) -> NamedMachine:
        """Return our name of the node, or the name that it gets. Raises NoName."""
        found = named(labels, self.node_labels)
        if found is None:
            raise NoName(f"no label names the node; expected one of {', '.join(self.node_labels)}")
        if not is_name(found.name):
            raise NoName(f"label {found.label} has {found.name[:80]!r}, which is no name of a node")
        name = self.in_cluster(found.name, labels)
        known = self.matching(name)
        if len(known) > 1:
            several = ", ".join(sorted(known)[:4])
            raise NoName(f"label {found.label} has {found.name[:80]!r}, which may be any of {several}: name it in full")
        return NamedMachine(known[0] if known else name, found.label)

    def matching(self, name: str) -> Sequence[str]:
        """Return the known names that a name may mean."""
        return self._matching(name) or self._names.matching(name)

    def knowing(self) -> Naming:
        """Return a naming that knows these names for good."""
        return Naming(self.node_labels, self.cluster_labels, self._clusters, self.matching)

    def in_cluster(self, name: str, labels: Mapping[str, str]) -> str:
        """Return the name of a node or job in the cluster that the labels name. Raises NoName."""
        cluster = next((labels[label] for label in self.cluster_labels if labels.get(label)), "")
        qualified = self._clusters.qualified(name, cluster)
        if not is_name(qualified):
            raise NoName(f"the name {name[:80]!r} in the cluster {cluster[:80]!r} is no name")
        return qualified

    def add(self, name: str) -> None:
        """Add a name."""
        self._names.add(name)

    def discard(self, name: str) -> None:
        """Remove a name if it is there."""
        self._names.discard(name)


class Dispute(NamedTuple):
    """A name of two machines, the ``holder`` of which was there first. They differ in ``what``: "boot id", "GPU 3"."""

    node: str
    what: str
    holder: str
    rival: str

    def __str__(self) -> str:
        """Return it as a clause."""
        return f"two machines report as {self.node}: {self.what} is {self.holder} and {self.rival} by turns"


@dataclass(slots=True)
class _Claim:
    holder: str
    since_s: float
    heard_s: float
    rival: str = ""
    rival_since_s: float = 0.0
    rival_heard_s: float = 0.0


class NameClaims:
    """Who holds each node's name, by what only one machine has at a time: a boot id, the UUID of a GPU.

    A value that follows another after a gap is the same machine after a boot or a repair, or one that took its place.
    Two that are heard by turns are two machines. The first holds the name until it was silent for a while.
    """

    def __init__(self) -> None:
        self._nodes: dict[str, dict[str, _Claim]] = {}
        self._disputed_s: dict[str, float] = {}  # when two machines were last heard under a name

    def heard(self, node: str, what: str, value: str, time_s: float, interval_s: float) -> bool:
        """Take a value heard under a node's name; return whether it is the holder's.

        ``what`` says what the value is, ``interval_s`` how often it is reported.
        """
        claims = self._nodes.setdefault(node, {})
        claim = claims.get(what)
        if claim is None:
            claims[what] = _Claim(value, time_s, time_s)
            return True
        if claim.holder == value:
            claim.heard_s = max(claim.heard_s, time_s)
            if claim.rival:
                self._compare(node, claim)
            return True
        if time_s < claim.since_s:
            return False  # late, of the one that had the name before
        patience_s = SETTLED_S if self._compare(node, claim) else max(MISSED * interval_s, MISSED_S_MIN)
        if time_s - claim.heard_s > patience_s:
            claims[what] = _Claim(value, time_s, time_s)
            return True
        if claim.rival != value:
            claim.rival, claim.rival_since_s = value, time_s
        claim.rival_heard_s = max(claim.rival_heard_s, time_s)
        self._compare(node, claim)
        return False

    def is_rival(self, node: str, what: str, value: str) -> bool:
        """Return whether another machine holds the name against this value."""
        claim = self._nodes.get(node, {}).get(what)
        return claim is not None and claim.rival == value

    def is_disputed(self, node: str, now_s: float) -> bool:
        """Return whether two machines were heard under the name lately."""
        disputed_s = self._disputed_s.get(node)
        return disputed_s is not None and now_s - disputed_s <= SETTLED_S

    def dispute(self, node: str, now_s: float) -> Dispute | None:
        """Return the first thing that shows that two machines have the node's name; None if they do not."""
        claims = self._nodes.get(node, {}) if self.is_disputed(node, now_s) else {}
        for what, claim in sorted(claims.copy().items()):
            if _by_turns(claim):
                return Dispute(node, what, claim.holder, claim.rival)
        return None

    def disputes(self, now_s: float) -> Iterator[Dispute]:
        """Yield the disputed names in order."""
        for node in sorted(self._disputed_s.copy()):
            found = self.dispute(node, now_s)
            if found is not None:
                yield found

    def forget(self, nodes: Iterable[str]) -> None:
        """Forget who holds the names."""
        for node in nodes:
            self._nodes.pop(node, None)
            self._disputed_s.pop(node, None)

    def _compare(self, node: str, claim: _Claim) -> bool:
        """Return whether holder and rival were heard by turns; let go of a rival that was silent for long."""
        if claim.heard_s - claim.rival_heard_s > SETTLED_S:
            claim.rival = ""
        if not _by_turns(claim):
            return False
        self._disputed_s[node] = min(claim.heard_s, claim.rival_heard_s)
        return True


def _by_turns(claim: _Claim) -> bool:
    return bool(claim.rival) and claim.heard_s > claim.rival_since_s
