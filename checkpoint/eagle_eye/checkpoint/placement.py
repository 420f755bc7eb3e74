"""Places the copies of every node's shards: Gemini's placement (SOSP 2023, section 4), spread over failure domains.

Every node with the same names and domains computes the same placement, without communication. Pure.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from itertools import combinations
from math import comb
from operator import and_, or_
from pathlib import Path

import msgspec

from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.schema.names import natural_order

REPLICAS_MAX = 32  # each one costs every node its shards' memory again: more is a typo
TRIALS_MAX = 50_000  # exchanges of two nodes that are tried to part copies: half a second

_Domains = Mapping[str, frozenset[str]]  # the failure domains of each node


@dataclass(frozen=True, slots=True)
class ShardPlacement:
    """Which nodes hold which shards.

    ``holders`` are, for every node, the nodes that hold its shards, itself first. The members of each of ``groups`` all
    hold one another's; a node of ``ring`` has its copies on itself and on those that follow it there.
    ``shared_domains`` are, for each node whose copies all lie in one failure domain, these domains: empty where no
    node's do, and for one copy, which has no other to share with. ``without_domain`` are nodes that no domain names:
    each is taken to stand alone.
    """

    replicas: int
    groups: tuple[tuple[str, ...], ...]
    ring: tuple[str, ...]
    holders: Mapping[str, tuple[str, ...]]
    shared_domains: Mapping[str, tuple[str, ...]]
    without_domain: tuple[str, ...]


def place(nodes: Sequence[str], replicas: int, domains: Mapping[str, Collection[str]] | None = None) -> ShardPlacement:
    """Return where ``replicas`` copies of every node's shards lie, the node's own being one of them.

    ``domains`` are the nodes that fail together, by the domain's name. A node may be in several of them (its switch,
    its rack); those that are not of ``nodes`` count for nothing. Where ``replicas`` divides the number of nodes and
    domains do not cross (a rack of two switches' nodes does), no other groups leave fewer copies together; elsewhere
    nodes are exchanged until no exchange of two leaves fewer. The order of nodes and domains does not matter. Raises
    ValueError.
    """
    _check(nodes, replicas)
    domains_of = _domains_of(nodes, domains or {})
    everywhere = frozenset.intersection(*domains_of.values())  # nothing parts what lies there
    parting = {node: found - everywhere for node, found in domains_of.items()}
    order = _together(nodes, parting)
    rest_nodes = len(nodes) % replicas
    ring_nodes = replicas + rest_nodes if rest_nodes else 0
    ring = _for_the_ring(order, ring_nodes, parting)
    others = [node for node in order if node not in ring]
    groups = len(others) // replicas
    # Domains are contiguous in the order: so few of one as can be come into one group.
    slots = [*ring, *(node for group in range(groups) for node in others[group::groups])]
    windows = _windows(len(ring), groups, replicas)
    if replicas > 1:
        _part(slots, windows, parting)
    holders = {slots[window[0]]: tuple(slots[slot] for slot in window) for window in windows}
    in_order = sorted(nodes, key=_counted)
    return ShardPlacement(
        replicas,
        tuple(tuple(slots[at : at + replicas]) for at in range(len(ring), len(slots), replicas)),
        tuple(slots[: len(ring)]),
        {node: holders[node] for node in in_order},
        {
            node: tuple(sorted(shared, key=_counted))
            for node in in_order
            if replicas > 1 and (shared := _shared(holders[node], domains_of))
        },
        tuple(node for node in in_order if domains and not domains_of[node]),
    )


def _check(nodes: Sequence[str], replicas: int) -> None:
    if not nodes:
        raise ValueError("nodes: expected one or more, got none")
    twice = [node for node, times in Counter(nodes).items() if times > 1]
    if twice:
        raise ValueError(f"nodes: {twice[0]} is named {nodes.count(twice[0])} times; name each node once")
    if not 1 <= replicas <= REPLICAS_MAX:
        raise ValueError(f"replicas: expected 1 to {REPLICAS_MAX}, got {replicas}; 2 survive the loss of any one node")
    if replicas > len(nodes):
        raise ValueError(
            f"replicas: {replicas} copies need as many nodes, got {len(nodes)}; ask for fewer copies or name more nodes"
        )


def _domains_of(nodes: Sequence[str], domains: Mapping[str, Collection[str]]) -> _Domains:
    found = defaultdict[str, set[str]](set)
    for domain, members in domains.items():
        for node in members:
            found[node].add(domain)
    return {node: frozenset(found[node]) for node in nodes}


def _counted(name: str) -> tuple[tuple[tuple[int, int | str], ...], str]:
    """Return what sorts names as people count them; n1 and n01 are two names."""
    return natural_order(name), name


def _together(nodes: Sequence[str], domains_of: _Domains) -> list[str]:
    """Return the nodes so that those of one domain stand together, the largest first, and within it smaller ones."""
    size = Counter(domain for node in nodes for domain in domains_of[node])

    def place_of(node: str) -> tuple[object, ...]:
        of_it = sorted((-size[domain], _counted(domain)) for domain in domains_of[node])
        return not of_it, of_it, _counted(node)

    return sorted(nodes, key=place_of)


def _for_the_ring(order: list[str], ring_nodes: int, domains_of: _Domains) -> list[str]:
    """Return the ring's nodes: of the domains that are hardest to part, and of none so many that the ring cannot."""
    if not ring_nodes:
        return []
    left = Counter(domain for node in order for domain in domains_of[node])
    taken = Counter[str]()
    stride = len(order) // ring_nodes  # neighbours by name often share an undocumented failure domain
    candidates = [node for start in range(stride) for node in order[start::stride]]
    chosen: list[str] = []

    def fitness(node: str) -> tuple[bool, list[int]]:
        of_it = domains_of[node]
        # Two others in the ring cut any domain's run below ``replicas``, as it has fewer than twice as many nodes.
        return all(taken[one] < ring_nodes - 2 for one in of_it), sorted((left[one] for one in of_it), reverse=True)

    for _ in range(ring_nodes):
        node = max(candidates, key=fitness)
        candidates.remove(node)
        chosen.append(node)
        left.subtract(domains_of[node])
        taken.update(domains_of[node])
    return chosen


def _windows(ring_nodes: int, groups: int, replicas: int) -> list[tuple[int, ...]]:
    """Return, for the node in each slot, the slots of its copies, its own first. The ring's slots come first."""
    ring = [tuple((slot + more) % ring_nodes for more in range(replicas)) for slot in range(ring_nodes)]
    grouped = [
        tuple(ring_nodes + group * replicas + (member + more) % replicas for more in range(replicas))
        for group in range(groups)
        for member in range(replicas)
    ]
    return ring + grouped


def _shared(holders: Sequence[str], domains_of: _Domains) -> frozenset[str]:
    """Return the domains in which all of them lie."""
    return frozenset.intersection(*(domains_of[node] for node in holders))


def _part(slots: list[str], windows: Sequence[tuple[int, ...]], domains_of: _Domains) -> None:
    """Exchange two nodes as long as that leaves fewer copies in one domain, after ``TRIALS_MAX`` tries at most."""
    touched = [set[int]() for _ in slots]  # by slot, the owners (by their own slots) that have a copy there
    for owner, window in enumerate(windows):
        for slot in window:
            touched[slot].add(owner)

    def together(owners: Collection[int]) -> int:
        return sum(len(_shared([slots[slot] for slot in windows[owner]], domains_of)) for owner in owners)

    budget = iter(range(TRIALS_MAX))

    def parted(slot: int) -> bool:
        for other in range(len(slots)):
            if domains_of[slots[slot]] == domains_of[slots[other]]:
                continue
            if next(budget, None) is None:
                break
            owners = touched[slot] | touched[other]
            before = together(owners)
            slots[slot], slots[other] = slots[other], slots[slot]
            if together(owners) < before:
                return True
            slots[slot], slots[other] = slots[other], slots[slot]
        return False

    better = 1
    while better:
        better = sum(parted(slot) for slot in range(len(slots)) if together(touched[slot]))


# The probability that simultaneous losses leave every shard a copy: counted exactly, in integers.
#
# A group loses a shard when all of its members are lost, a ring when as many neighbours as there are copies are; what
# is lost in one of them matters to no other.
SUBSETS_MAX = 200_000  # of failure domains that are tried one by one: a second


def survival_ratio(placement: ShardPlacement, lost: int) -> Fraction:
    """Return which part of all sets of ``lost`` nodes leaves every shard a copy. Raises ValueError."""
    nodes = len(placement.holders)
    _check_settings("lost", lost, nodes, "nodes of the placement")
    found = surviving_sets(len(placement.groups), len(placement.ring), placement.replicas, lost)
    return Fraction(found, comb(nodes, lost))


def surviving_sets(groups: int, ring_nodes: int, replicas: int, lost: int) -> int:
    """Return how many sets of ``lost`` nodes leave every shard a copy in groups of ``replicas`` beside one ring."""
    return sum(
        _of_the_ring(ring_nodes, replicas, in_ring) * _of_groups(groups, replicas, lost - in_ring)
        for in_ring in range(min(ring_nodes, lost) + 1)
    )


def closed_form_ratio(nodes: int, replicas: int, lost: int) -> Fraction:
    """Return the same by the formula of Gemini (SOSP 2023, section 4), which holds where all nodes are in groups.

    Raises ValueError where it says too much (``replicas`` does not divide ``nodes``) or too little (``lost`` is twice
    ``replicas`` or more: two groups may then be lost, which it subtracts twice).
    """
    if nodes % replicas:
        raise ValueError(f"nodes: expected a multiple of {replicas} replicas, got {nodes}; survival_ratio counts these")
    if not lost < 2 * replicas:
        raise ValueError(
            f"lost: expected fewer than {2 * replicas} for {replicas} replicas, got {lost}; survival_ratio counts these"
        )
    if lost < replicas:
        return Fraction(1)
    return 1 - Fraction(nodes // replicas * comb(nodes - replicas, lost - replicas), comb(nodes, lost))


def domain_survival_ratio(
    placement: ShardPlacement, domains: Mapping[str, Collection[str]], lost: int
) -> Fraction | None:
    """Return which part of all sets of ``lost`` failure domains, lost whole, leaves every shard a copy.

    Domains without a node of the placement are none of them; a node in no domain is never lost. None where there are
    more than ``SUBSETS_MAX`` such sets: they are not counted. Raises ValueError.
    """
    fatal = _planes(placement, domains)
    _check_settings("lost", lost, len(fatal), "failure domains with nodes of the placement")
    subsets = comb(len(fatal), lost)
    if subsets > SUBSETS_MAX:
        return None
    if lost == 0:
        return Fraction(1)
    survived = 0
    for chosen in combinations(fatal, lost):
        # Of each shard, by its bit: is its first copy lost, and its second, and ...
        survived += not reduce(and_, (reduce(or_, copy) for copy in zip(*chosen, strict=True)))
    return Fraction(survived, subsets)


def _of_groups(groups: int, replicas: int, lost: int) -> int:
    """Count the sets of ``lost`` nodes in which no group is whole: by inclusion and exclusion."""
    nodes = groups * replicas
    return sum(
        (-1) ** whole * comb(groups, whole) * comb(nodes - whole * replicas, lost - whole * replicas)
        for whole in range(min(groups, lost // replicas) + 1)
    )


def _of_the_ring(nodes: int, replicas: int, lost: int) -> int:
    """Count the sets of ``lost`` nodes in which no ``replicas`` neighbours are.

    With one of the ``kept`` others marked, such a set is a place for the mark and, from there on, how many are lost
    between one kept node and the next: each time fewer than ``replicas``. Each set is counted once for each mark.
    """
    kept = nodes - lost
    if kept == 0:
        return int(nodes == 0)
    gaps: int = sum(
        (-1) ** wide * comb(kept, wide) * comb(lost - wide * replicas + kept - 1, kept - 1)
        for wide in range(min(kept, lost // replicas) + 1)
    )
    return nodes * gaps // kept


def _planes(placement: ShardPlacement, domains: Mapping[str, Collection[str]]) -> list[list[int]]:
    """Return, of each domain and for each copy in turn, the shards (bits) of which the copy lies in the domain."""
    domains_of: dict[str, list[int]] = {node: [] for node in placement.holders}
    there = [found for members in domains.values() if (found := domains_of.keys() & set(members))]
    for domain, members in enumerate(there):
        for node in members:
            domains_of[node].append(domain)
    planes = [[0] * placement.replicas for _ in there]
    for shard, holders in enumerate(placement.holders.values()):
        for copy, node in enumerate(holders):
            for domain in domains_of[node]:
                planes[domain][copy] |= 1 << shard
    return planes


def _check_settings(what: str, value: int, most: int, of: str) -> None:
    if not 0 <= value <= most:
        raise ValueError(f"{what}: expected 0 to {most}, the {of}, got {value}")


FILE_BYTES_MAX = 64 << 20  # as the server's

Kinds = Mapping[str, Mapping[str, frozenset[str]]]  # nodes by kind and name of what they fail with


class _File(msgspec.Struct, frozen=True):
    switch_of_node: dict[str, str] = {}
    rack_of_node: dict[str, str] = {}


def read_failure_domains(path: Path) -> Kinds:
    """Return the nodes of each switch and rack under "switch" and "rack", where the file has any.

    A link's switch (``switch_of_link``) is not included: the node's memory survives its failure. Raises
    ConfigurationError for a file that is missing, too large or malformed.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(FILE_BYTES_MAX + 1)
        if len(raw) > FILE_BYTES_MAX:
            raise ConfigurationError(f"--topology: {path} is larger than {FILE_BYTES_MAX} bytes")
        read = msgspec.json.decode(raw, type=_File)
    except OSError as error:
        raise ConfigurationError(f"--topology: {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f'--topology: {path}: {error}; expected {{"switch_of_node": {{"n1": "leaf1"}}, "rack_of_node": {{}}}}'
        ) from None
    kinds = {"switch": read.switch_of_node, "rack": read.rack_of_node}
    return {kind: _members(of_node) for kind, of_node in kinds.items() if of_node}


def together(kinds: Kinds) -> dict[str, frozenset[str]]:
    """Return the domains of all kinds by names that distinguish switches from racks: "rack r12"."""
    return {f"{kind} {name}": nodes for kind, domains in kinds.items() for name, nodes in domains.items()}


def _members(of_node: Mapping[str, str]) -> dict[str, frozenset[str]]:
    found = defaultdict[str, set[str]](set)
    for node, domain in of_node.items():
        found[domain].add(node)
    return {domain: frozenset(nodes) for domain, nodes in found.items()}
