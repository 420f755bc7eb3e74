"""The host's verdict from all checks. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from eagle_eye.checks.check import CheckResult

Verdict = Literal["healthy", "sick", "cannot_tell"]

# As with ``eagle-eye agent --once --check``: 1 and 2 also come from other failures, 3 only from a verdict. A script
# that acts on 3 keeps a host in service that cannot be judged.
EXIT_CODES: Mapping[Verdict, int] = MappingProxyType({"healthy": 0, "cannot_tell": 1, "sick": 3})


def judge(outcomes: Sequence[CheckResult]) -> Verdict:
    """Return "sick" when one check says so, "healthy" when all that this host can answer have passed, and one has."""
    if any(outcome.state == "sick" for outcome in outcomes):
        return "sick"
    unanswered = any(outcome.state == "could_not_check" and outcome.expected for outcome in outcomes)
    if unanswered or not any(outcome.state == "passed" for outcome in outcomes):
        return "cannot_tell"
    return "healthy"
