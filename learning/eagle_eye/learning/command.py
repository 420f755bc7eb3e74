"""``eagle-eye train``: trains a model of healthy nodes from history; ``--refresh`` replaces one by a better one."""

from __future__ import annotations

import argparse
from pathlib import Path

from eagle_eye.schema.record_types import prepare_record_types
from eagle_eye.schema.times import SHORT_FORMS


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.add_argument("traces", nargs="*", metavar="TRACE", help="trace folders to learn from")
    parser.add_argument("--out", type=Path, metavar="MODEL", help="where to write the model")
    parser.add_argument("--refresh", type=Path, metavar="MODEL", help="learn again as the model was, replace it if fit")
    parser.add_argument("--show", type=Path, metavar="MODEL", help="print what a model was learned from, and end")
    parser.add_argument("--server", metavar="URL", help="learn from a server's history instead of traces")
    parser.add_argument("--job", help="the job to take from the server's history")
    parser.add_argument("--since", metavar="TIME", help=f"from when on (default 7d): {SHORT_FORMS}")
    parser.add_argument("--until", metavar="TIME", help="until when (default now), written likewise")
    parser.add_argument("--token-file", metavar="FILE", help="bearer token for the server")
    parser.add_argument("--config", metavar="FILE", help="the server's configuration file")
    parser.add_argument("--seed", type=int, help="of everything random (default 0)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: argparse.Namespace) -> int:
    """Train and write; 0 done, 1 when no model was made or may replace the old one. Raises ConfigurationError."""
    # Imported late: the learning libraries take seconds to load, which --help does not need.
    from eagle_eye.learning.training import run as learn

    prepare_record_types()
    return learn(args)
