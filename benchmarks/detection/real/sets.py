"""Where the recorded sets lie, and what every measurement over one of them shares: arguments, output, skipping.

The sets are public and not part of this project. ``--data``, or the environment variable EAGLE_EYE_DATA, names
the folder that holds them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

VARIABLE = "EAGLE_EYE_DATA"
Figures = dict[str, Any]


def data_folder(given: Path | None) -> Path | None:
    """Return the folder that the option or the environment names; None when neither does."""
    named = given or (Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None)
    return named if named is not None and named.is_dir() else None


def main(measure: Callable[[Path], Figures], needs: str, about: str | None) -> int:
    """Measure over the part ``needs`` of the data folder and print the figures as JSON; say so when it is absent."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help=f"the folder with the recorded sets (default: {VARIABLE})")
    parser.add_argument("--out", type=Path, help="write the figures here too")
    args = parser.parse_args()
    figures = measured(measure, needs, data_folder(args.data))
    if figures is None:
        return 0
    text = json.dumps(figures, indent=1) + "\n"
    sys.stdout.write(text)
    if args.out is not None:
        args.out.write_text(text, encoding="utf-8")
    return 0


def measured(measure: Callable[[Path], Figures], needs: str, data: Path | None) -> Figures | None:
    """Return the figures, None, with a line on stderr that says why, when the set is not there."""
    if data is None or not (data / needs).exists():
        where = data / needs if data is not None else f"--data or {VARIABLE}"
        sys.stderr.write(f"skipped: no recorded set at {where}\n")
        return None
    return measure(data / needs)
