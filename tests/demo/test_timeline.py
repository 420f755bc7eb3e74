"""The demo's output: what people see while it waits, and what a file gets."""

from __future__ import annotations

import io

from rich.console import Console

from eagle_eye.demo.timeline import DemoTimeline


def written(*, terminal: bool) -> str:
    out = io.StringIO()
    timeline = DemoTimeline(as_json=False, _console=Console(file=out, force_terminal=terminal, width=100))
    with timeline.waiting("for step 12 of the job"):
        pass
    return out.getvalue()


def test_a_terminal_says_what_is_waited_for() -> None:
    assert "waiting: for step 12 of the job" in written(terminal=True)


def test_a_file_gets_stages_alone() -> None:
    assert written(terminal=False) == ""
