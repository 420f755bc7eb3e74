"""Runs the demo as a user does."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import sys
import time
from typing import Any

DEMO_WITHIN_S = 300
BESIDE_OTHER_TESTS = ("--load-max", "1000")  # they keep the machine as busy as they like


def demo_of(*flags: str) -> list[dict[str, Any]]:
    """Return what the demo says, which must end well."""
    done = subprocess.run(
        [sys.executable, "-m", "eagle_eye.cli.main", "demo", *flags, *BESIDE_OTHER_TESTS, "--json"],
        capture_output=True,
        text=True,
        timeout=DEMO_WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def longest_silence_s(*flags: str) -> float:
    """Return for how long at most the demo, which must end well, shows nothing new on a terminal once it began."""
    ours, its = pty.openpty()
    command = [sys.executable, "-m", "eagle_eye.cli.main", "demo", *flags, *BESIDE_OTHER_TESTS]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=its, stderr=its, env={**os.environ, "TERM": "xterm"}
    )
    os.close(its)
    longest_s, shown = 0.0, b""
    seen_s: float | None = None
    try:
        until_s = time.monotonic() + DEMO_WITHIN_S
        while (left_s := until_s - time.monotonic()) > 0 and select.select([ours], [], [], left_s)[0]:
            try:
                shown += os.read(ours, 65_536)
            except OSError:
                break  # nobody writes to it any more
            now_s = time.monotonic()
            longest_s, seen_s = max(longest_s, now_s - (seen_s or now_s)), now_s
        assert process.wait(10.0) == 0, shown[-1_000:].decode(errors="replace")
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return longest_s
