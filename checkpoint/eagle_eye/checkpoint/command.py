"""``eagle-eye checkpoint``: a node's store, its status, the check of its copies, and plans of where copies lie.

Extras are imported on run: help and planning need none.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import json
import logging
import math
import os
import signal
import socket
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from eagle_eye.checkpoint.placement import (
    Kinds,
    ShardPlacement,
    domain_survival_ratio,
    place,
    read_failure_domains,
    survival_ratio,
    together,
)
from eagle_eye.checkpoint.shared_memory import MemoryPlan, plan_memory, reported, size_bytes
from eagle_eye.schema.checkpoint_files import COPY_RATE_VARIABLE, store_folder
from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.schema.names import is_name, natural_order
from eagle_eye.schema.service import NotifySocket
from eagle_eye.schema.slurm import HOSTS_MAX, BadHostList, expand_hosts

if TYPE_CHECKING:
    from eagle_eye.checkpoint.store import CheckpointStore, StoreSettings

_log = logging.getLogger(__name__)


# ``store``: the process that owns a node's copies.
SECONDS_MAX, PORT_MAX = 1e8, 65535


def configure_store(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    node = os.environ.get("EAGLE_EYE_NODE") or socket.gethostname()
    parser.add_argument("--folder", type=Path, default=None, metavar="DIR", help="in shared memory (the user's own)")
    parser.add_argument("--node", type=_node_name, default=node, metavar="NAME", help=f"this node ({node})")
    parser.add_argument(
        "--listen",
        type=_address,
        default="0.0.0.0:0",
        metavar="HOST:PORT",
        help="for other nodes (0.0.0.0:0: any port)",
    )
    parser.add_argument("--free-after", type=_seconds, default=3600.0, metavar="S", help="without ranks (3600)")
    parser.add_argument(
        "--persist-rate", type=_rate, default=None, metavar="SIZE", help="most bytes a second to storage (no limit)"
    )
    parser.add_argument(
        "--copy-rate",
        type=_rate,
        default=os.environ.get(COPY_RATE_VARIABLE),
        metavar="SIZE",
        help=f"most bytes a second to other nodes ({COPY_RATE_VARIABLE}, else no limit)",
    )
    parser.add_argument(
        "--copy-at-once", action="store_true", help="do not wait until training leaves the network idle"
    )
    parser.add_argument("--exit-when-idle", type=_seconds, default=None, metavar="S", help="without any job (never)")
    parser.add_argument("--scrub-every", type=_seconds, default=600.0, metavar="S", help="verify all copies (600)")


def run_store(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code. Copies stay."""
    from eagle_eye.checkpoint.store import StoreSettings

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    settings = StoreSettings(
        folder=args.folder or store_folder(args.node),
        node=args.node,
        listen=args.listen,
        free_after_s=args.free_after,
        persist_bytes_per_s=args.persist_rate,
        copy_bytes_per_s=args.copy_rate,
        paced=not args.copy_at_once,
        scrub_every_s=args.scrub_every,
        exit_when_idle_s=args.exit_when_idle,
    )
    try:
        return _own_store(settings)
    except OSError as error:
        print(f"the store cannot serve {shown(settings.folder)}: {error.strerror or error}", file=sys.stderr)
        return 1


def _own_store(settings: StoreSettings) -> int:
    """Serve the folder, unless another store does. Raises OSError."""
    from eagle_eye.checkpoint.store import LOCK, CheckpointStore

    settings.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (settings.folder / LOCK).open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"a store serves {shown(settings.folder)} already", file=sys.stderr)
            return 0
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        return asyncio.run(_serve_store(CheckpointStore(settings)))


async def _serve_store(store: CheckpointStore) -> int:
    loop = asyncio.get_running_loop()
    serving = asyncio.ensure_future(store.run(lambda: _say_ready(store.address)))
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, serving.cancel)
    try:
        await serving
    except asyncio.CancelledError:
        return 0
    return 0


def _say_ready(address: str) -> None:
    """Log the address, and notify systemd that ranks can connect, where it waits for that."""
    _log.info("listening on %s", address)
    NotifySocket(os.environ, _log).send("READY=1")


def _address(text: str) -> tuple[str, int]:
    """Return host and port; port 0 is any."""
    host, _, port = text.rpartition(":")
    if not is_name(host) or not (port.isascii() and port.isdecimal() and int(port) <= PORT_MAX):
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, port 0 for any, got {text[:80]!r}")
    return host.strip("[]"), int(port)


def _node_name(text: str) -> str:
    """Return the name, which is a folder's as well."""
    if not is_name(text) or "/" in text or text in {".", ".."}:
        raise argparse.ArgumentTypeError(f"expected a node's name, got {text[:80]!r}")
    return text


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= SECONDS_MAX:
        raise argparse.ArgumentTypeError(
            f"expected seconds, more than 0 and at most {SECONDS_MAX:g}, got {text[:80]!r}"
        )
    return seconds


def _rate(text: str) -> float:
    try:
        rate = size_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if rate < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1 byte a second, got {text[:80]!r}")
    return float(rate)


# ``status`` and ``verify``: what this node's store holds, and whether every copy is unchanged.
SHOWN_MAX = 200  # letters of a path
SPANS_REPORTED_MAX = 8


def configure_status(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a verb that asks this node's store."""
    parser.add_argument("--folder", type=Path, default=None, metavar="DIR", help="of the store (the user's own)")
    parser.add_argument("--json", action="store_true", help="for machines")


def run_status(args: argparse.Namespace) -> int:
    """Print what the store holds; return 0, or 1 where none answers."""
    from eagle_eye.checkpoint.store import ask_status

    folder = folder_of_store(args.folder)
    try:
        jobs = ask_status(folder)
    except OSError as error:
        print(f"no store answers in {shown(folder)} ({error}); `eagle-eye checkpoint store` is one", file=sys.stderr)
        return 1
    print(json.dumps({"folder": str(folder), "jobs": jobs}, indent=2) if args.json else "\n".join(status_lines(jobs)))
    return 0


def folder_of_store(given: Path | None) -> Path:
    """Return the folder of the store that is meant: the given one, else this node's."""
    return given or store_folder(os.environ.get("EAGLE_EYE_NODE") or socket.gethostname())


def shown(folder: Path) -> str:
    """Return a folder as a message tells it: in one short line, whatever was typed."""
    text = "".join(letter if letter.isprintable() else "?" for letter in str(folder))
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}..."


def status_lines(jobs: list[dict[str, Any]]) -> list[str]:
    """Return what a store holds, for people."""
    if not jobs:
        return ["This store holds nothing of any job."]
    found = []
    for job in jobs:
        whole = (
            "no step is whole yet" if job["whole_step"] is None else f"step {job['whole_step']} is whole on all nodes"
        )
        found.append(f"{job['job']}, attempt {job['attempt']}: {whole}; {reported(job['reserved_bytes'])} reserved")
        if job["older_steps"]:
            found.append(f"  further back: step {', '.join(map(str, job['older_steps']))}")
        if job["capture_every"] > 1:
            found.append(f"  one of {job['capture_every']} captures is made: of all, fewer than half became whole")
        if job["without_ranks_for_s"] is not None:
            found.append(
                f"  its ranks left {job['without_ranks_for_s']:.0f} s ago; the copies wait for the next attempt"
            )
        if job["persisting_step"] is not None:
            found.append(f"  step {job['persisting_step']} is being written to storage")
        elif job["persisted_step"] is not None:
            found.append(f"  step {job['persisted_step']} is on storage")
        for copy in job["copies"]:
            whose = "this node's" if copy["of_this_node"] else "another node's"
            found.append(f"  step {copy['step']:<8} rank {copy['rank']:<6} {reported(copy['bytes']):>10}  {whose}")
        found += [_idle_spans(link) for link in job["links"] if link["idle_spans_s"]]
        found += [f"  {what.replace('_', ' ')}: {count:,}" for what, count in job["counts"].items()]
        found += [f"  {text}" for text in job["troubles"]]
    return found


def _idle_spans(link: dict[str, Any]) -> str:
    spans = " + ".join(f"{length:.2f}" for length in link["idle_spans_s"][:SPANS_REPORTED_MAX])
    more = " + ..." if len(link["idle_spans_s"]) > SPANS_REPORTED_MAX else ""
    return (
        f"  {link['interface']} is idle for {spans}{more} s of a step; copies pass at {reported(link['bytes_per_s'])}/s"
    )


def run_verify(args: argparse.Namespace) -> int:
    """Print the result; return 0, or 1 where a copy is damaged or no store answers. Damaged copies are dropped."""
    from eagle_eye.checkpoint.store import ask_verify

    folder = folder_of_store(args.folder)
    try:
        verified = ask_verify(folder)
    except OSError as error:
        print(f"no store answers in {shown(folder)} ({error})", file=sys.stderr)
        return 1
    if args.json:
        figures = {"copies": verified.copies, "bytes": verified.total_bytes, "damaged": list(verified.damaged)}
        print(json.dumps(figures, indent=2))
    else:
        print(f"{verified.copies} copies are what was written ({reported(verified.total_bytes)} read)")
        for text in verified.damaged:
            print(f"damaged, and removed: {text}")
    return 1 if verified.damaged else 0


# ``plan``: where copies would be placed, which losses they survive, and their memory.
_PLURALS = {"node": "nodes", "switch": "switches", "rack": "racks", "copy": "copies"}
LOST_DOMAINS_MAX = 3  # at once; of nodes, one more than the copies


def configure_plan(parser: argparse.ArgumentParser) -> None:
    """Add the verb's flags."""
    parser.add_argument("--nodes", required=True, metavar="NODES", help="how many, or which: gpu[01-16],gpu20")
    parser.add_argument("--replicas", type=int, default=2, metavar="N", help="copies of each shard, one its own (2)")
    parser.add_argument("--topology", type=Path, metavar="FILE", help="switches and racks: the server's topology_file")
    parser.add_argument("--shard-bytes", metavar="SIZE", help="what one node has of the job's state: 24GiB")
    parser.add_argument("--keep", type=int, default=2, metavar="N", help="checkpoints that are kept whole (2)")
    parser.add_argument("--reach", type=float, default=0.0, metavar="S", help="seconds that older ones reach back (0)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_plan(args: argparse.Namespace) -> int:
    """Compute and print. Raises ConfigurationError for wrong usage."""
    kinds = read_failure_domains(args.topology) if args.topology else {}
    try:
        placement = place(_chosen_nodes(args.nodes, kinds), args.replicas, together(kinds))
        memory = _planned_memory(args)
    except ValueError as error:
        raise ConfigurationError(_by_flag(str(error))) from None
    nodes = len(placement.holders)
    of_nodes = {lost: survival_ratio(placement, lost) for lost in range(1, min(nodes, args.replicas + 2) + 1)}
    of_domains = {kind: _of_domains(placement, domains) for kind, domains in kinds.items()}
    if args.json:
        json.dump(_plan_document(placement, of_nodes, of_domains, memory), sys.stdout, indent=2, ensure_ascii=False)
        print()
    else:
        for line in _plan_lines(placement, of_nodes, of_domains, memory):
            print("".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line))
    return 0


_Ratios = Mapping[int, Fraction | None]


def _chosen_nodes(text: str, kinds: Kinds) -> list[str]:
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


def _planned_memory(args: argparse.Namespace) -> MemoryPlan | None:
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


def _plan_document(
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


def _plan_lines(
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
        yield from (f"{_many(lost, kind):<14}  {_percent(ratio)}" for lost, ratio in ratios.items())
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


def _percent(ratio: Fraction | None) -> str:
    """Return a ratio in percent; only certainty is 100%, and only impossibility 0%."""
    if ratio is None:
        return "not counted: too many sets"
    if ratio in (0, 1):
        return f"{int(ratio) * 100}%"
    return next(
        (reported for digits in range(1, 6) if 0 < float((reported := f"{float(ratio):.{digits}%}")[:-1]) < 100),
        "over 99.99999%" if ratio > 0.5 else "under 0.00001%",
    )


class CheckpointVerb(NamedTuple):
    """A verb of ``eagle-eye checkpoint``; ``configure`` adds its flags, ``run`` returns the exit code."""

    name: str
    help: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


VERBS = (
    CheckpointVerb("store", "own this node's copies of checkpoints in shared memory", configure_store, run_store),
    CheckpointVerb("status", "which copies of which step this node holds", configure_status, run_status),
    CheckpointVerb("verify", "compare every copy on this node with its checksums", configure_status, run_verify),
    CheckpointVerb(
        "plan", "where copies lie, what losses they outlive, what memory they take", configure_plan, run_plan
    ),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verbs and their flags."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb in VERBS:
        verb.configure(verbs.add_parser(verb.name, help=verb.help))


def run(args: argparse.Namespace) -> int:
    """Run the chosen verb. Raises ConfigurationError."""
    return {verb.name: verb for verb in VERBS}[args.verb].run(args)
