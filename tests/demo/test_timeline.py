"""The demo's output: what people see while it waits, and what a file gets."""

from __future__ import annotations

import io
import time

from rich.console import Console

from eagle_eye.demo.narration import DemoTimeline


def written(*, terminal: bool, told_s: float = 60.0, takes_s: float = 0.0) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100)
    timeline = DemoTimeline(as_json=False, told_s=told_s, _console=console)
    until_s = time.monotonic() + takes_s
    with timeline.waiting("for step 12 of the job"):
        while time.monotonic() < until_s and not out.getvalue():
            time.sleep(0.01)
    return out.getvalue()


def test_a_terminal_says_what_is_waited_for() -> None:
    assert "waiting: for step 12 of the job" in written(terminal=True)


def test_a_file_gets_no_line_of_a_short_wait() -> None:
    assert written(terminal=False) == ""


def test_a_file_gets_a_line_of_a_long_one() -> None:
    (line,) = written(terminal=False, told_s=0.01, takes_s=30.0).splitlines()
    assert line.endswith("waiting    for step 12 of the job")
