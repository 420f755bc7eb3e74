"""``eagle-eye checkpoint plan``: where copies would be placed, which losses they survive, and their memory."""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

from eagle_eye.checkpoint.placement import (
    Kinds,
    ShardPlacement,
    domain_survival_ratio,
    place,
    read_failure_domains,
    survival_ratio,
    together,
)
from eagle_eye.checkpoint.shared_memory import MemoryPlan, plan_memory
from eagle_eye.checkpoint.sizes import size_bytes
from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.schema.names import natural_order
from eagle_eye.schema.slurm import HOSTS_MAX, BadHostList, expand_hosts

NAME = "plan"
HELP = "where copies lie, what losses they outlive, what memory they take"
_PLURALS = {"node": "nodes", "switch": "switches", "rack": "racks", "copy": "copies"}
LOST_DOMAINS_MAX = 3  # at once; of nodes, one more than the copies


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    parser.add_argument("--nodes", required=True, metavar="NODES", help="how many, or which: gpu[01-16],gpu20")
    parser.add_argument("--replicas", type=int, default=2, metavar="N", help="copies of each shard, one its own (2)")
    parser.add_argument("--topology", type=Path, metavar="FILE", help="switches and racks: the server's topology_file")
    parser.add_argument("--shard-bytes", metavar="SIZE", help="what one node has of the job's state: 24GiB")
    parser.add_argument("--keep", type=int, default=2, metavar="N", help="checkpoints that are kept whole (2)")
    parser.add_argument("--reach", type=float, default=0.0, metavar="S", help="seconds that older ones reach back (0)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Compute and print. Raises ConfigurationError for wrong usage."""
    kinds = read_failure_domains(args.topology) if args.topology else {}
    try:
        placement = place(_nodes(args.nodes, kinds), args.replicas, together(kinds))
        memory = _memory(args)
    except ValueError as error:
        raise ConfigurationError(_by_flag(str(error))) from None
    nodes = len(placement.holders)
    of_nodes = {lost: survival_ratio(placement, lost) for lost in range(1, min(nodes, args.replicas + 2) + 1)}
    of_domains = {kind: _of_domains(placement, domains) for kind, domains in kinds.items()}
    if args.json:
        json.dump(_document(placement, of_nodes, of_domains, memory), sys.stdout, indent=2, ensure_ascii=False)
        print()
    else:
        for line in _lines(placement, of_nodes, of_domains, memory):
            print("".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line))
    return 0


_Ratios = Mapping[int, Fraction | None]


def _nodes(text: str, kinds: Kinds) -> list[str]:
    """Return the nodes that are named; of a number, the topology's first in the order of names, else n1, n2, ..."""
    if not (text.isascii() and text.isdigit()):
        try:
            named = list(expand_hosts(text))
        except BadHostList as error:
            raise ValueError(f"nodes: {error}") from None
        if not named:
            raise ValueError("nodes: expected a number or names such as gpu[01-16],gpu20, got none")
        return named
    count = int(text) if len(text) < 10 else HOSTS_MAX + 1
    if not 1 <= count <= HOSTS_MAX:
        raise ValueError(f"nodes: expected 1 to {HOSTS_MAX}, got {text[:20]}")
    if not kinds:
        return [f"n{number}" for number in range(1, count + 1)]
    known = {node for domains in kinds.values() for members in domains.values() for node in members}
    if len(known) < count:
        raise ValueError(f"nodes: --topology names {len(known)} nodes, not {count}; say which, by name")
    return sorted(known, key=lambda node: (natural_order(node), node))[:count]


def _memory(args: argparse.Namespace) -> MemoryPlan | None:
    if args.shard_bytes is None:
        return None
    try:
        shard_bytes = size_bytes(args.shard_bytes)
    except ValueError as error:
        raise ValueError(f"shard_bytes: {error}") from None
    return plan_memory(shard_bytes, args.replicas, args.keep, persists=True, reach_s=args.reach)


def _by_flag(message: str) -> str:
    """Return an error that begins with a parameter's name as one that begins with its flag."""
    name, colon, rest = message.partition(":")
    return f"--{'keep' if name == 'kept' else name.replace('_', '-')}{colon}{rest}"


def _of_domains(placement: ShardPlacement, domains: Mapping[str, frozenset[str]]) -> _Ratios:
    there = {name: nodes for name, nodes in domains.items() if nodes & placement.holders.keys()}
    return {
        lost: domain_survival_ratio(placement, there, lost) for lost in range(1, min(len(there), LOST_DOMAINS_MAX) + 1)
    }


def _document(
    placement: ShardPlacement, of_nodes: _Ratios, of_domains: Mapping[str, _Ratios], memory: MemoryPlan | None
) -> dict[str, Any]:
    return {
        "nodes": len(placement.holders),
        "replicas": placement.replicas,
        "groups": placement.groups,
        "ring": placement.ring,
        "holders": placement.holders,
        "shared_domains": placement.shared_domains,
        "without_domain": placement.without_domain,
        "node_losses": [_loss(lost, ratio) for lost, ratio in of_nodes.items()],
        "domain_losses": [
            {"kind": kind, **_loss(lost, ratio)}
            for kind, ratios in of_domains.items()
            for lost, ratio in ratios.items()
        ],
        "memory": None if memory is None else {**asdict(memory), "total_bytes": memory.total_bytes},
    }


def _loss(lost: int, ratio: Fraction | None) -> dict[str, Any]:
    return {"lost": lost, "survival_ratio": None if ratio is None else float(ratio)}


def _lines(
    placement: ShardPlacement, of_nodes: _Ratios, of_domains: Mapping[str, _Ratios], memory: MemoryPlan | None
) -> Iterator[str]:
    yield f"{_many(len(placement.holders), 'node')}, {_many(placement.replicas, 'copy')} of each one's shards"
    yield ""
    if placement.groups:
        yield "groups, in which each holds the shards of all:"
        yield from (f"  {' '.join(group)}" for group in placement.groups)
    if placement.ring:
        yield f"ring, in which each holds its own shards and those of the {placement.replicas - 1} before it:"
        yield f"  {' '.join(placement.ring)}"
    if placement.shared_domains:
        yield "all copies in one failure domain:"
        yield from (f"  {domain}: {' '.join(nodes)}" for domain, nodes in _by_domain(placement).items())
    if placement.without_domain:
        yield f"not in the topology, each taken to stand alone: {' '.join(placement.without_domain)}"
    yield ""
    yield f"{'lost at once':<14}  every shard has a copy left"
    for kind, ratios in {"node": of_nodes, **of_domains}.items():
        yield from (f"{_many(lost, kind):<14}  {_reported(ratio)}" for lost, ratio in ratios.items())
    if memory is not None:
        yield ""
        yield f"memory of a node: {memory}"


def _by_domain(placement: ShardPlacement) -> dict[str, list[str]]:
    found = defaultdict[str, list[str]](list)
    for node, domains in placement.shared_domains.items():
        for domain in domains:
            found[domain].append(node)
    return found


def _many(count: int, what: str) -> str:
    return f"{count} {what if count == 1 else _PLURALS[what]}"


def _reported(ratio: Fraction | None) -> str:
    """Return a ratio in percent; only certainty is 100%, and only impossibility 0%."""
    if ratio is None:
        return "not counted: too many sets"
    if ratio in (0, 1):
        return f"{int(ratio) * 100}%"
    return next(
        (reported for digits in range(1, 6) if 0 < float((reported := f"{float(ratio):.{digits}%}")[:-1]) < 100),
        "over 99.99999%" if ratio > 0.5 else "under 0.00001%",
    )
