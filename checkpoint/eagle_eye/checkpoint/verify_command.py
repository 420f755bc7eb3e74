"""``eagle-eye checkpoint verify``: checks that every copy on this node is unchanged."""

from __future__ import annotations

import argparse
import json
import sys

from eagle_eye.checkpoint.sizes import reported
from eagle_eye.checkpoint.status_command import configure, folder_of, shown

__all__ = ["HELP", "NAME", "configure", "run"]

NAME = "verify"
HELP = "compare every copy on this node with its checksums"


def run(args: argparse.Namespace) -> int:
    """Print the result; return 0, or 1 where a copy is damaged or no store answers. Damaged copies are dropped."""
    from eagle_eye.checkpoint.store import ask_verify

    folder = folder_of(args.folder)
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
