"""DCGM's diagnostics, where the site has installed them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from eagle_eye.agent import external_tool as tool
from eagle_eye.checks.check import (
    NO_GPU,
    Check,
    CheckOptions,
    Measured,
    Result,
    could_not_check,
    passed,
    printable,
    sick,
)
from eagle_eye.checks.child import bounded_command

PROGRAM = "dcgmi"
OUTPUT_BYTES_MAX = 4 << 20  # level 2 on 16 GPUs says some ten kilobytes
LEVELS = (1, 2)
TESTS_MAX = 1_000
REASONS_MAX = 8

# What DCGM recommends for an error. Source: DCGM, Diagnostic Errors, Error Severity Enum. Isolating, examining or
# resetting the GPU count against the node; monitoring, configuring and "unknown" do not.
_SICK = {2: "isolate", 4: "triage", 6: "reset"}
_CONFIGURATION = 5
# DCGM before 3.2 gives no severity. Its deployment tests check software and settings.
_SETTINGS_CATEGORY = "deployment"


class FailedTest(NamedTuple):
    """One test that failed on one device: its severity, as far as DCGM says, and its text."""

    where: str
    text: str
    of_the_node: bool


class DcgmReport(NamedTuple):
    """The diagnostics' result: how many tests passed, and what failed. ``problem``: why they could not run."""

    passes: int
    failures: tuple[FailedTest, ...]
    problem: str


def absent(asked: CheckOptions) -> str:
    """Return why it cannot run here."""
    if tool.find(PROGRAM) is None:
        return f"{PROGRAM} is not installed"
    return "" if asked.host.has_gpus else NO_GPU


def run(asked: CheckOptions) -> Result:
    """Return DCGM's verdict on the node."""
    path = tool.find(PROGRAM) or PROGRAM
    command = bounded_command(path, ("diag", "-r", str(asked.site.dcgm_level), "-j"), asked.until_s)
    begin_s = time.monotonic()
    try:
        ran = tool.run(command, asked.until_s, OUTPUT_BYTES_MAX)
    except OSError as error:
        return could_not_check(f"{path}: {error.strerror or error}")
    if ran.cut:
        return could_not_check(f"{PROGRAM} said more than {OUTPUT_BYTES_MAX >> 20} MiB and was stopped")
    if ran.status is None:
        return could_not_check(f"{PROGRAM} did not finish within {time.monotonic() - begin_s:.0f} s")
    return judge(parse(ran.output), ran.status, ran.complaint)


def judge(report: DcgmReport, status: int, complaint: str) -> Result:
    """Judge a report. dcgmi also exits with a nonzero status for mere settings: the report decides."""
    figures = (Measured(name="tests_passed", value=float(report.passes), unit="1"),)
    own = [failure for failure in report.failures if failure.of_the_node]
    if own:
        return sick(_texts(own), *figures)
    if report.failures:
        return could_not_check(f"a setting, not the hardware, failed: {_texts(report.failures)}", *figures)
    if report.problem or report.passes == 0:
        why = report.problem or f"no test was made ({PROGRAM} ended with {status}: {complaint or 'no reason given'})"
        return could_not_check(why, *figures)
    if status != 0:
        return could_not_check(f"{PROGRAM} ended with {status} although no test failed: {complaint}", *figures)
    return passed(f"{report.passes} tests passed", *figures)


def parse(output: bytes) -> DcgmReport:
    """Parse a report of any version; an invalid one is a problem.

    Versions 2 to 4 name the outermost object and the devices differently; the tree of categories, tests and results
    is the same.
    """
    text = output.decode("utf-8", "replace")
    try:
        # Libraries print around it.
        whole = json.loads(text[text.index("{") : text.rindex("}") + 1])
    except (ValueError, RecursionError):
        return DcgmReport(0, (), f"{PROGRAM} gave no report: {printable(text) or 'nothing at all'}")
    diagnostic = next((whole[key] for key in whole if "Diagnostic" in key and isinstance(whole[key], dict)), whole)
    if error := diagnostic.get("runtime_error"):
        return DcgmReport(0, (), f"{PROGRAM}: {printable(str(error))}")
    passes, failures = 0, list[FailedTest]()
    for number, (category, test, result) in enumerate(_results(diagnostic)):
        if number >= TESTS_MAX:
            return DcgmReport(0, tuple(failures), f"the report has more than {TESTS_MAX} results")
        state = str(result.get("status", "")).strip().lower()
        if state == "pass":
            passes += 1
        elif state == "fail":
            failures += _failures(category, test, result)
        elif state not in ("skip", "not run", "notrun", "warn"):
            return DcgmReport(0, tuple(failures), f"the status {printable(state)[:40]!r} of a test is unknown")
    return DcgmReport(passes, tuple(failures), "")


def _results(diagnostic: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for category in _objects(diagnostic.get("test_categories")):
        for test in _objects(category.get("tests")):
            for result in _objects(test.get("results")):
                yield str(category.get("category", "")), printable(str(test.get("name", "a test"))), result


def _failures(category: str, test: str, result: dict[str, Any]) -> Iterator[FailedTest]:
    device = result.get("entity_id", result.get("gpu_ids", result.get("gpu_id")))
    where = f"{test} on gpu {printable(str(device))[:40]}" if device is not None else test
    warnings = result.get("warnings")
    reported = [warning for warning in warnings if warning] if isinstance(warnings, list) else [warnings or {}]
    for warning in reported[:REASONS_MAX] or [{}]:
        severity = warning.get("error_severity") if isinstance(warning, dict) else None
        text = warning.get("warning", "") if isinstance(warning, dict) else warning
        if isinstance(severity, int):
            of_the_node = severity in _SICK
            wanted = f" ({_SICK[severity]})" if of_the_node else " (a setting)" if severity == _CONFIGURATION else ""
        else:
            of_the_node, wanted = category.strip().lower() != _SETTINGS_CATEGORY, ""
        yield FailedTest(where, f"{printable(str(text)) or 'failed'}{wanted}", of_the_node)


def _objects(value: object) -> Iterator[dict[str, Any]]:
    if isinstance(value, list):
        yield from (each for each in value if isinstance(each, dict))


def _texts(failures: list[FailedTest] | tuple[FailedTest, ...]) -> str:
    return "; ".join(f"{failure.where}: {failure.text}" for failure in failures[:REASONS_MAX])


CHECK = Check(
    name="dcgm",
    needs="dcgmi (DCGM), and the host engine that it asks",
    measures="DCGM's diagnostics: level 1, or 2 with --dcgm-level 2",
    limit_s=60.0,
    quick_limit_s=None,
    absent=absent,
    run=run,
    loads_gpus=True,
)
