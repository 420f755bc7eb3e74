"""The command's output: lines for people, JSON for machines. Plain writes: a GPU host does not have rich."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import TextIO

from eagle_eye.checks.catalogue import SDC
from eagle_eye.checks.check import Check, CheckResult
from eagle_eye.checks.verdict import Verdict

_COLOURS = {"passed": "32", "sick": "31", "could_not_check": "33", "healthy": "32", "cannot_tell": "33"}
_WORDS = {"could_not_check": "could not check", "cannot_tell": "cannot tell"}
_NAME_CHARS = 14


class Lines:
    """One line per check. On a terminal its beginning is shown while it runs."""

    def __init__(self, out: TextIO, *, terminal: bool, colours: bool) -> None:
        self._out = out
        self._terminal = terminal
        self._colours = colours

    def begins(self, check: Check) -> None:
        """Show which check runs now."""
        if self._terminal:
            self.write(f"{check.name:<{_NAME_CHARS}} …")

    def ended(self, outcome: CheckResult) -> None:
        """Show the check's outcome."""
        back = "\r" if self._terminal else ""
        state = self._coloured(outcome.state, f"{_WORDS.get(outcome.state, outcome.state):<15}")
        self.write(f"{back}{outcome.name:<{_NAME_CHARS}} {state} {outcome.duration_s:5.1f} s  {outcome.reason}\n")

    def verdict(self, verdict: Verdict, reason: str) -> None:
        """Show the verdict."""
        self.write(f"{self._coloured(verdict, _WORDS.get(verdict, verdict))}: {reason}\n")

    def write(self, text: str) -> None:
        """Write the text; after the reader (head, grep -q) has closed its end, output is discarded."""
        try:
            self._out.write(text)
            self._out.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._out.fileno())

    def _coloured(self, state: str, text: str) -> str:
        return f"\033[{_COLOURS[state]}m{text}\033[0m" if self._colours else text


def table(checks: Sequence[Check], out: TextIO) -> None:
    """Write the available checks, and what each needs."""
    indent = " " * (_NAME_CHARS + 1)
    out.writelines(f"{each.name:<{_NAME_CHARS}} {each.measures}\n{indent}needs {each.needs}\n" for each in checks)


def reason(verdict: Verdict, outcomes: Sequence[CheckResult], refused: str) -> str:
    """Return the verdict's reason in one line."""
    if refused:
        return refused
    open_questions = [each.name for each in outcomes if each.state == "could_not_check" and each.expected]
    if verdict == "sick":
        return ", ".join(each.name for each in outcomes if each.state == "sick")
    if verdict == "healthy":
        ran = [each for each in outcomes if each.state == "passed"]
        if all(each.name in SDC for each in ran):
            return "; ".join(each.reason for each in ran) + "; beyond that it says nothing"
        return f"nothing stands against this host ({', '.join(each.name for each in ran)})"
    return f"could not check {', '.join(open_questions)}" if open_questions else "nothing could be checked"


def document(
    node: str, began_s: float, duration_s: float, verdict: Verdict, outcomes: Sequence[CheckResult], refused: str
) -> str:
    """Return the report as JSON. A figure that is not finite is null."""
    checks = [asdict(outcome) for outcome in outcomes]
    for check in checks:
        for figure in check["values"]:
            figure["value"] = figure["value"] if math.isfinite(figure["value"]) else None
    return json.dumps(
        {
            "verdict": verdict,
            "reason": reason(verdict, outcomes, refused),
            "refused": bool(refused),
            "node": node,
            "began": datetime.fromtimestamp(began_s, timezone.utc).isoformat(timespec="seconds"),
            "duration_s": round(duration_s, 3),
            "checks": checks,
        },
        indent=2,
        ensure_ascii=False,
        allow_nan=False,
    )
