"""The detection suite as it is started: what it writes, and that an interrupted one ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
ENDS_WITHIN_S = 120.0
OPTIONS = "--alone --faults 40 --node-days 0.01 --quiet-nodes 2 --quiet-minutes 2 --jobs 1 --profiles full"


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Have processes that are started end when they are interrupted, also where this one ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_suite_writes_what_it_has_judged_and_ends(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    options = [*OPTIONS.split(), "--work", str(tmp_path), "--out", str(out)]
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.detection", *options],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as suite:
        try:
            deadline_s = time.monotonic() + ENDS_WITHIN_S
            while not any(kept.stat().st_size for kept in tmp_path.glob("*/outcomes.jsonl")):
                assert suite.poll() is None
                assert time.monotonic() < deadline_s
                time.sleep(0.1)
            suite.send_signal(signal.SIGINT)
            table, _ = suite.communicate(timeout=ENDS_WITHIN_S)
        finally:
            if suite.poll() is None:
                os.killpg(suite.pid, signal.SIGKILL)
    figures = json.loads(out.read_text(encoding="utf-8"))
    assert suite.returncode == 130
    assert 0 < figures["judged"] < figures["planned"]
    assert not figures["complete"]
    assert table.startswith(f"Judged: {figures['judged']} of {figures['planned']} traces and profiles")
