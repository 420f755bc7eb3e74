"""Runs the demo as a user does."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

DEMO_WITHIN_S = 300


def demo_of(*flags: str) -> list[dict[str, Any]]:
    """Return what the demo says, which must end well."""
    done = subprocess.run(
        [sys.executable, "-m", "eagle_eye.cli.main", "demo", *flags, "--json"],
        capture_output=True,
        text=True,
        timeout=DEMO_WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
