"""``eagle-eye plan``: pipeline templates, a layout for each number of nodes, and what happens when a node is lost."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from eagle_eye.checkpoint.shared_memory import size_bytes
from eagle_eye.planning.files import check_hardware, read_plan, read_profile
from eagle_eye.planning.measuring import measure
from eagle_eye.planning.plan import Hardware, Plan, variable
from eagle_eye.planning.planner import NODES_MAX, check_names, make_plan
from eagle_eye.planning.telling import gantt, next_lines, plan_lines
from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.schema.slurm import BadHostList, expand_hosts

ROUNDS_MAX = 10_000


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags, and the verbs with theirs."""
    add = parser.add_argument
    add("--profile", type=Path, metavar="FILE", help="what the layers cost: eagle-eye plan profile writes it")
    add("--nodes", metavar="NODES", help="how many, or which: gpu[01-16],gpu20")
    add("--gpus-per-node", type=int, default=1, metavar="N", help="GPUs of a node (1)")
    add("--gpus-per-stage", type=int, default=1, metavar="N", help="GPUs of a node that hold a stage together (1)")
    add("--gpu-memory", metavar="SIZE", help="what training may use of a GPU's memory: 72GiB")
    add("--tolerate", type=int, default=1, metavar="N", help="losses at once that leave a copy in memory (1)")
    add("--global-batch", type=int, metavar="N", help="samples of a step, the same in every layout")
    add("--micro-batch", type=int, metavar="N", help="samples of a micro-batch: those of the profile")
    add("--job", default="", metavar="JOB", help="the only job that may follow the plan (any)")
    add("--svg", type=Path, metavar="FILE", help="draw a step of the layout for all nodes")
    add("--json", action="store_true", help="print the plan as JSON: its file")
    verbs = parser.add_subparsers(dest="verb", metavar="[VERB]")
    lost = verbs.add_parser("lost", help="what a plan says when a node goes")
    lost.add_argument("node", metavar="NODE", help="the one that is lost")
    lost.add_argument("--plan", type=Path, required=True, metavar="FILE", help="what eagle-eye plan --json printed")
    lost.add_argument("--nodes", metavar="NODES", help="those that trained, by their places in the layout (all)")
    lost.add_argument("--gpus-per-node", type=int, metavar="N", help="refuse a plan for other nodes")
    lost.add_argument("--gpu-memory", metavar="SIZE", help="refuse a plan for more memory")
    lost.add_argument("--json", action="store_true", help="print JSON")
    layout = verbs.add_parser("layout", help="which rank has what on so many nodes, as EAGLE_EYE_LAYOUT says it")
    layout.add_argument("--plan", type=Path, required=True, metavar="FILE", help="what eagle-eye plan --json printed")
    layout.add_argument("--nodes", required=True, metavar="NODES", help="how many the job has, or which")
    layout.add_argument("--job", default="", metavar="JOB", help="refuse another job's plan")
    layout.add_argument("--gpus-per-node", type=int, metavar="N", help="refuse a plan for other nodes")
    layout.add_argument("--gpu-memory", metavar="SIZE", help="refuse a plan for more memory")
    profile = verbs.add_parser("profile", help="measure a model's layers on this machine")
    profile.add_argument("model", metavar="MODULE:FUNCTION", help="a function that returns layers and inputs")
    profile.add_argument("--device", default="cpu", metavar="DEVICE", help="where to measure: cuda, cuda:1 (cpu)")
    profile.add_argument("--rounds", type=int, default=10, metavar="N", help="passes of each layer (10)")


def run(args: argparse.Namespace) -> int:
    """Compute and print. Raises ConfigurationError for wrong usage, NoLayout where too few nodes are left."""
    return {None: _plan, "lost": _lost, "layout": _layout, "profile": _profile}[args.verb](args)


def _plan(args: argparse.Namespace) -> int:
    needed = {"--profile": args.profile, "--nodes": args.nodes, "--gpu-memory": args.gpu_memory,
              "--global-batch": args.global_batch}  # fmt: skip
    if missing := [flag for flag, value in needed.items() if value is None]:
        raise ConfigurationError(f"{', '.join(missing)}: needed, to plan")
    profile = read_profile(args.profile)
    if args.micro_batch not in (None, profile.micro_batch):
        raise ConfigurationError(
            f"--micro-batch: the profile was measured with {profile.micro_batch} samples, not {args.micro_batch};"
            " measure again"
        )
    try:
        nodes = _nodes(args.nodes)
        hardware = Hardware(
            nodes=len(nodes),
            gpus_per_node=args.gpus_per_node,
            gpus_per_stage=args.gpus_per_stage,
            gpu_memory_bytes=_size(args.gpu_memory),
        )
        plan = make_plan(profile, nodes, hardware, args.tolerate, args.global_batch, args.job)
    except ValueError as error:
        name, colon, rest = str(error).partition(":")
        raise ConfigurationError(f"--{name.replace('_', '-')}{colon}{rest}") from None
    if args.svg:
        try:
            args.svg.write_text(gantt(plan, plan.layouts[-1]), encoding="utf-8")
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigurationError(f"--svg: {args.svg}: {reason}") from None
    _tell(args.json, plan, plan_lines(plan))
    return 0


def _lost(args: argparse.Namespace) -> int:
    plan, nodes = _read(args)
    if args.node not in nodes:
        raise ConfigurationError(f"node {args.node!r} is none of the {len(nodes)} nodes that train")
    following = plan.lost(nodes, args.node)
    document = {
        "lost": args.node,
        "nodes": following.nodes,
        "layout": msgspec.structs.replace(following.layout, losses=()),
        "copies": [
            {
                "to": following.nodes[copy.to],
                "layers": [copy.first, copy.last],
                "from": None if copy.source is None else following.before[copy.source],
                "bytes": copy.copied_bytes,
            }
            for copy in following.loss.copies
        ],
        "rerouted": following.loss.rerouted,
        "reroute": following.loss.reroute,
        "why": following.loss.why,
    }
    _tell(args.json, document, next_lines(plan, args.node, following))
    return 0


def _layout(args: argparse.Namespace) -> int:
    plan, nodes = _read(args)
    if args.job and plan.job not in ("", args.job):
        raise ConfigurationError(f"--plan: it is the plan of job {plan.job!r}, not of {args.job!r}; plan again")
    print(variable(plan, len(nodes)))
    return 0


def _read(args: argparse.Namespace) -> tuple[Plan, Sequence[str]]:
    """Return the plan, checked for this hardware, and the training nodes. Raises ConfigurationError."""
    plan = read_plan(args.plan)
    try:
        check_hardware(plan, args.gpus_per_node, None if args.gpu_memory is None else _size(args.gpu_memory))
        return plan, plan.nodes if args.nodes is None else _nodes(args.nodes)
    except ConfigurationError:
        raise
    except ValueError as error:
        raise ConfigurationError(f"--{str(error).replace('_', '-')}") from None


def _profile(args: argparse.Namespace) -> int:
    if not 1 <= args.rounds <= ROUNDS_MAX:
        raise ConfigurationError(f"--rounds: expected 1 to {ROUNDS_MAX}, got {args.rounds}")
    _tell(True, measure(args.model, args.device, args.rounds), ())
    return 0


def _tell(as_json: bool, document: Any, lines: Iterable[str]) -> None:
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(document), indent=1).decode() + "\n")
        return
    for line in lines:
        print("".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in line))


def _nodes(text: str) -> Sequence[str]:
    """Return the named nodes; for a number n1, n2, ... Raises ValueError."""
    if not (text.isascii() and text.isdigit()):
        try:
            named = expand_hosts(text, NODES_MAX)
        except BadHostList as error:
            raise ValueError(f"nodes: {error}") from None
        if not named:
            raise ValueError("nodes: expected a number or names such as gpu[01-16],gpu20, got none")
        check_names(named)
        return named
    count = int(text) if len(text) < 10 else NODES_MAX + 1
    if not 1 <= count <= NODES_MAX:
        raise ValueError(f"nodes: expected 1 to {NODES_MAX}, got {text[:20]}")
    return [f"n{number}" for number in range(1, count + 1)]


def _size(text: str) -> int:
    try:
        return size_bytes(text)
    except ValueError as error:
        raise ValueError(f"gpu_memory: {error}") from None
