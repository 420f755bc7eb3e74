"""What tests on a GPU have shown, out of pytest's own report. Pure."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree as ET

import msgspec

FORMAT = "eagle-eye-gpu-results/1"
REASON_CHARS_MAX = 2_000


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """What the tests ran on; ``gpus`` are NVML's names, ``torch`` the version that computed on them ("": none did)."""

    gpus: list[str]
    driver: str
    cuda: str
    python: str
    torch: str
    processors: int


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one test: ``state`` "passed", "failed" or "skipped", why, and the figures that it kept."""

    test: str
    state: str
    seconds: float
    reason: str = ""
    figures: dict[str, Any] = {}


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """One run; ``commit`` ends in "+" where the sources were changed since."""

    format: str = FORMAT
    time: str
    commit: str
    machine: Machine
    outcomes: list[Outcome]


class BadReport(ValueError):
    """Not what pytest writes; the message says what was expected."""


def outcomes(xml: str) -> list[Outcome]:
    """Return what came of each test by pytest's JUnit report. Raises BadReport."""
    try:
        cases = list(ET.fromstring(xml).iter("testcase"))
    except ET.ParseError as error:
        raise BadReport(f"expected pytest's report, got no XML: {error}") from None
    return [_outcome(case) for case in cases]


def has_shown(found: Sequence[Outcome]) -> bool:
    """Whether any test ran at all: a run in which all were skipped shows nothing, and is no result."""
    return any(one.state != "skipped" for one in found)


def table(found: Sequence[Outcome]) -> str:
    """Return one line a test with its figures that are numbers, and what it all comes to."""
    lines = []
    for one in found:
        numbers = {name: value for name, value in one.figures.items() if isinstance(value, int | float)}
        said = ", ".join(f"{name} {value:.4g}" for name, value in numbers.items())
        why = one.reason.splitlines()[0] if one.reason else said
        lines.append(f"{one.state:<8} {one.seconds:7.1f} s  {one.test}{f': {why}' if why else ''}\n")
    counts = Counter(one.state for one in found)
    return "".join(lines) + ", ".join(f"{count} {state}" for state, count in sorted(counts.items())) + "\n"


def file_name(machine: Machine) -> str:
    """Return what results of such a machine are called: "nvidia-h100-80gb-hbm3-x8"."""
    kinds = "-".join(sorted({name.lower() for name in machine.gpus}))
    plain = "".join(letter if letter.isalnum() and letter.isascii() else "-" for letter in kinds)
    return f"{plain or 'unknown'}-x{len(machine.gpus)}"


def _outcome(case: ET.Element) -> Outcome:
    state, reason = "passed", ""
    for tag, meaning in (("skipped", "skipped"), ("failure", "failed"), ("error", "failed")):
        reported = case.find(tag)
        if reported is not None:
            state = meaning
            reason = (reported.get("message") or reported.text or "").strip()[:REASON_CHARS_MAX]
    figures = {kept.get("name", ""): _value(kept.get("value", "")) for kept in case.iter("property")}
    where = case.get("classname", "").rpartition(".")[2]
    return Outcome(
        test=f"{where}.{case.get('name', '')}",
        state=state,
        seconds=float(case.get("time", 0.0)),
        reason=reason,
        figures=figures,
    )


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
