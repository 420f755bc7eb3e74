"""``eagle-eye simulate``: a labelled trace of a training job with one fault, or with one that only looks like it."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.simulator.names import FAULTS, SITUATIONS
from eagle_eye.simulator.scenario import PHYSICS, STRENGTHS, Scenario, WrongScenario
from eagle_eye.simulator.simulate import Recording, simulate
from eagle_eye.simulator.sites import PROFILES, profile, visible_faults
from eagle_eye.simulator.writer import FolderTaken, check_free, write

DONE = 0
DEFAULT_MINUTES, DEFAULT_ROWS = 8.0, 60  # a trace is long enough for both


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("out", nargs="?", type=Path, metavar="OUT", help="the folder to write the trace to")
    parser.add_argument("--fault", metavar="NAME", default="none", help="a fault or situation (--list), or none")
    parser.add_argument("--nodes", type=int, default=8, metavar="N", help="nodes of the job (8)")
    parser.add_argument("--gpus", type=int, default=8, metavar="G", help="GPUs a node (8)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="the same seed gives the same trace")
    parser.add_argument("--minutes", type=float, metavar="M", help="length (8, and no less than 60 rows)")
    parser.add_argument("--step-seconds", type=float, default=2.0, metavar="T", help="nominal length of a step (2)")
    parser.add_argument("--interval", type=float, default=1.0, metavar="I", help="seconds between rows (1)")
    parser.add_argument("--profile", default="full", metavar="P", help=f"{', '.join(p.name for p in PROFILES)} (full)")
    parser.add_argument("--strength", default="medium", metavar="X", help=f"{', '.join(STRENGTHS)} (medium)")
    parser.add_argument("--creeping", action="store_true", help="the fault grows over minutes")
    parser.add_argument("--variant", metavar="V", help="one way in which the fault shows; the seed chooses by default")
    parser.add_argument("--background", metavar="NAME", help="a situation that goes on at the same time")
    parser.add_argument(
        "--physics", metavar="P", default="own", help=f"{' or '.join(PHYSICS)}: drawn by the seed (own)"
    )
    parser.add_argument("--no-habits", action="store_true", help="no checkpoints or packed data by chance of the seed")
    parser.add_argument("--overwrite", action="store_true", help="replace the trace that OUT holds; nothing else")
    parser.add_argument("--list", action="store_true", help="list faults, situations and profiles, and end")
    parser.add_argument("--json", action="store_true", help="say what was written, or listed, as JSON")


def run(args: argparse.Namespace) -> int:
    """Write one trace. Raises ConfigurationError for wrong usage, OSError as the disk does."""
    if args.list:
        sys.stdout.write(_listing(as_json=args.json))
        return DONE
    if args.out is None:
        raise ConfigurationError("OUT is missing; expected a folder to write the trace to, or --list")
    try:
        profile(args.profile)
        check_free(args.out, overwrite=args.overwrite)
        minutes = args.minutes
        if minutes is None:
            minutes = max(DEFAULT_MINUTES, DEFAULT_ROWS * args.interval / 60.0)
        recording = simulate(
            Scenario(
                fault=args.fault,
                nodes=args.nodes,
                gpus=args.gpus,
                seed=args.seed,
                minutes=minutes,
                step_s=args.step_seconds,
                interval_s=args.interval,
                strength=args.strength,
                creeping=args.creeping,
                variant=args.variant,
                background=args.background,
                habits=not args.no_habits,
                physics=args.physics,
            )
        )
        write(recording, args.out, args.profile, overwrite=args.overwrite)
    except (WrongScenario, FolderTaken) as error:
        raise ConfigurationError(str(error)) from None
    except OSError as error:
        raise OSError(f"{args.out}: {error.strerror}") from None
    sys.stdout.write(_summary(recording, args.out, args.profile, as_json=args.json))
    return DONE


def _summary(recording: Recording, folder: Path, profile_name: str, *, as_json: bool) -> str:
    labels = [label._asdict() for label in recording.labels]
    if as_json:
        facts = {
            "trace": str(folder),
            "profile": profile_name,
            "job": recording.job,
            "slowdown": round(recording.slowdown, 5),
            "labels": labels,
        }
        return json.dumps(facts) + "\n"
    lines = [f"{folder}: {recording.scenario.minutes:g} minutes of {recording.layout.nodes} nodes, job {recording.job}"]
    for label in recording.labels:
        who = ", ".join(label.nodes[:8]) + (", ..." if len(label.nodes) > 8 else "")
        lines.append(
            f"  {label.fault} from +{label.start - recording.start:.1f} s on {who or 'no node'}; expect {label.expect}"
        )
    if not labels:
        lines.append(f"  {recording.scenario.fault}: nothing to find")
    return "\n".join(lines) + "\n"


def _listing(*, as_json: bool) -> str:
    if as_json:
        return (
            json.dumps(
                {
                    "faults": {t.name: t.help for t in FAULTS.values()},
                    "situations": {t.name: t.help for t in SITUATIONS.values()},
                    "profiles": {p.name: {"help": p.help, "shows": visible_faults(p.name)} for p in PROFILES},
                }
            )
            + "\n"
        )
    lines = []
    for title, tellers in (("faults", FAULTS), ("situations that only look guilty", SITUATIONS)):
        lines += [f"{title}:", *(f"  {t.name:<24}{t.help}" for t in tellers.values())]
    lines += ["profiles:", *(f"  {p.name:<24}{p.help}" for p in PROFILES)]
    return "\n".join(lines) + "\n"
