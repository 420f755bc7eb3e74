"""The demo's output: one line per stage, with the time since the start and since the fault."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console


@dataclass(slots=True)
class DemoTimeline:
    """Writes stages to stdout as they are reached; keeps the measured times for the summary.

    ``as_json`` prints one JSON object a line instead: {"since_start_s", "since_fault_s", "stage", "text"}.
    """

    as_json: bool
    told_s: float = 2.0  # a shorter wait is worth no line
    began_s: float = field(default_factory=time.time)
    fault_s: float | None = None
    measured_s: dict[str, float] = field(default_factory=dict)
    _console: Console = field(default_factory=lambda: Console(highlight=False))

    def tell(self, stage: str, text: str, at_s: float | None = None, style: str = "") -> None:
        """Report a stage reached at ``at_s`` (Unix seconds, None: now)."""
        at_s = time.time() if at_s is None else at_s
        since_fault_s = None if self.fault_s is None else at_s - self.fault_s
        if self.as_json:
            line = {"since_start_s": round(at_s - self.began_s, 3), "since_fault_s": _rounded(since_fault_s)}
            sys.stdout.write(json.dumps({**line, "stage": stage, "text": text}) + "\n")
            sys.stdout.flush()
            return
        fault = "" if since_fault_s is None else f"fault {since_fault_s:+.1f} s"
        self._console.print(
            f"[dim]{at_s - self.began_s:7.1f} s  {fault:<14}[/dim] [bold]{stage:<10}[/bold] ", end="", soft_wrap=True
        )
        self._console.print(text, style=style or None, markup=False, soft_wrap=True)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Say until exited what is being awaited: on a terminal at once, elsewhere in a line if it takes ``told_s``."""
        if self.as_json:
            yield
        elif self._console.is_terminal:
            with self._console.status(f"waiting: {what}"):
                yield
        else:
            timer = threading.Timer(self.told_s, self._waits, (what,))
            timer.start()
            try:
                yield
            finally:
                timer.cancel()

    def _waits(self, what: str) -> None:
        passed_s = time.time() - self.began_s
        self._console.print(f"{passed_s:7.1f} s  {'':<14} waiting    {what}", markup=False, soft_wrap=True)

    def measure(self, what: str, at_s: float) -> None:
        """Record how long after the fault something happened."""
        if self.fault_s is not None:
            self.measured_s[what] = at_s - self.fault_s

    def finish(self, success: bool, text: str, **more: Any) -> None:
        """Write the last line: what the demo showed, or the stage that failed."""
        if self.as_json:
            measured = {name: round(value, 3) for name, value in self.measured_s.items()}
            sys.stdout.write(json.dumps({"success": success, "text": text, "measured_s": measured, **more}) + "\n")
            sys.stdout.flush()
            return
        for name, value in self.measured_s.items():
            self._console.print(f"{'':>27} {name:<34} {value:6.2f} s", markup=False, soft_wrap=True)
        word = "[bold green]shown[/bold green]" if success else "[bold red]failed[/bold red]"
        self._console.print(f"{word}  ", end="")
        self._console.print(text, markup=False, soft_wrap=True)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
