"""``eagle-eye checkpoint status``: which copies of which step are on this node, and what is left over."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

from eagle_eye.checkpoint.sizes import reported
from eagle_eye.schema.checkpoint_files import store_folder

SHOWN_MAX = 200  # letters of a path
NAME = "status"
SPANS_REPORTED_MAX = 8
HELP = "which copies of which step this node holds"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a verb that asks this node's store."""
    parser.add_argument("--folder", type=Path, default=None, metavar="DIR", help="of the store (the user's own)")
    parser.add_argument("--json", action="store_true", help="for machines")


def run(args: argparse.Namespace) -> int:
    """Print what the store holds; return 0, or 1 where none answers."""
    from eagle_eye.checkpoint.store import ask_status

    folder = folder_of(args.folder)
    try:
        jobs = ask_status(folder)
    except OSError as error:
        print(f"no store answers in {shown(folder)} ({error}); `eagle-eye checkpoint store` is one", file=sys.stderr)
        return 1
    print(json.dumps({"folder": str(folder), "jobs": jobs}, indent=2) if args.json else "\n".join(lines(jobs)))
    return 0


def folder_of(given: Path | None) -> Path:
    """Return the folder of the store that is meant: the given one, else this node's."""
    return given or store_folder(os.environ.get("EAGLE_EYE_NODE") or socket.gethostname())


def shown(folder: Path) -> str:
    """Return a folder as a message tells it: in one short line, whatever was typed."""
    text = "".join(letter if letter.isprintable() else "?" for letter in str(folder))
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}..."


def lines(jobs: list[dict[str, Any]]) -> list[str]:
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
        found += [_idle(link) for link in job["links"] if link["idle_spans_s"]]
        found += [f"  {what.replace('_', ' ')}: {count:,}" for what, count in job["counts"].items()]
        found += [f"  {text}" for text in job["troubles"]]
    return found


def _idle(link: dict[str, Any]) -> str:
    spans = " + ".join(f"{length:.2f}" for length in link["idle_spans_s"][:SPANS_REPORTED_MAX])
    more = " + ..." if len(link["idle_spans_s"]) > SPANS_REPORTED_MAX else ""
    return (
        f"  {link['interface']} is idle for {spans}{more} s of a step; copies pass at {reported(link['bytes_per_s'])}/s"
    )
