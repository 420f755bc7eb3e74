"""All checks in execution order, and running them within one deadline. Touches: what the checks touch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from eagle_eye.checks import corruption, node_checks, tools
from eagle_eye.checks.check import (
    Check,
    CheckOptions,
    CheckResult,
    Host,
    Result,
    Site,
    could_not_check,
    not_here,
    printable,
)

CHECKS: tuple[Check, ...] = (
    node_checks.CLOCK,
    node_checks.DISK,
    node_checks.GEMM,
    node_checks.MEMORY,
    node_checks.GPU_FACTS,
    tools.NCCL_TESTS,
    node_checks.ALL_REDUCE,
    tools.IB_WRITE_BW,
    tools.DCGM,
    corruption.SDC_GEMM,
    corruption.SDC_ALL_REDUCE,
)
SDC = (corruption.SDC_GEMM.name, corruption.SDC_ALL_REDUCE.name)  # those that look for silent data corruption


BEGIN_RATIO = 0.5  # of its limit that must be left to start a check

Tell = Callable[[CheckResult], None]


def run(
    checks: Sequence[Check],
    host: Host,
    site: Site,
    deadline_s: float,
    outcomes: list[CheckResult],
    *,
    quick: bool,
    unavailable: Callable[[], str],
    begins: Callable[[Check], None] = lambda _check: None,
    ended: Tell = lambda _outcome: None,
    monotonic_s: Callable[[], float] = time.monotonic,
) -> None:
    """Add every check's outcome, in order; a failing check does not stop the others.

    ``unavailable``: why the GPUs may not be loaded now, "" when they may. Called before each check that loads them: a
    job may have started meanwhile.
    """
    for check in checks:
        begins(check)
        begin_s = monotonic_s()
        limit_s = check.quick_limit_s if quick else check.limit_s
        limit_s = limit_s and limit_s + check.longer_s(site)
        passed = frozenset(outcome.name for outcome in outcomes if outcome.state == "passed")
        until_s = min(deadline_s, begin_s + (limit_s or 0.0))
        asked = CheckOptions(host=host, site=site, quick=quick, until_s=until_s, passed=passed)
        if limit_s is None:
            result = not_here("left out by --quick")
        elif reason := check.absent(asked):
            result = not_here(reason)
        elif deadline_s - begin_s < BEGIN_RATIO * limit_s:
            result = could_not_check(f"no time was left for it: it may take {limit_s:.0f} s (--deadline)")
        elif check.loads_gpus and host.has_gpus and (reason := unavailable()):
            result = could_not_check(reason)
        else:
            result = _one(check, asked)
        outcome = CheckResult(
            name=check.name,
            state=result.state,
            reason=result.reason,
            duration_s=monotonic_s() - begin_s,
            expected=result.expected,
            values=result.values,
        )
        outcomes.append(outcome)
        ended(outcome)


def _one(check: Check, asked: CheckOptions) -> Result:
    try:
        return check.run(asked)
    except Exception as error:  # noqa: BLE001 - a defect of ours says nothing of the host
        return could_not_check(f"the check itself failed: {type(error).__name__}: {printable(str(error))}")
