from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from eagle_eye.agent.collector import CollectFailed, Observed
from eagle_eye.agent.collectors.clock_offset import ClockOffsetCollector
from eagle_eye.checks import node_checks, runner
from eagle_eye.checks.check import (
    EXIT_CODES,
    BadThreshold,
    Check,
    CheckOptions,
    CheckResult,
    Host,
    Result,
    against_peers,
    by_the_site,
    could_not_check,
    host_verdict,
    not_here,
    passed,
    sick,
)
from eagle_eye.checks.command import LockTaken, host_lock, verdict_reason
from eagle_eye.checks.runner import CHECKS
from tests.checks.builders import asked, host

CLOCK_S = [0.0]


@pytest.fixture(autouse=True)
def now() -> None:
    CLOCK_S[0] = 0.0


def check(
    name: str, result: Result | Exception, *, takes_s: float = 1.0, absent: str = "", loads: bool = False
) -> Check:
    def run(_asked: CheckOptions) -> Result:
        CLOCK_S[0] += takes_s
        if isinstance(result, Exception):
            raise result
        return result

    return Check(name, "", "", 10.0, None if name == "long" else 10.0, lambda _asked: absent, run, loads)


def ran(*checks: Check, on: Host | None = None, quick: bool = False, unavailable: str = "") -> list[CheckResult]:
    outcomes: list[CheckResult] = []
    runner.run(
        checks,
        on or host(),
        asked().site,
        20.0,
        outcomes,
        quick=quick,
        unavailable=lambda: unavailable,
        monotonic_s=lambda: CLOCK_S[0],
    )
    return outcomes


def states(outcomes: list[CheckResult]) -> dict[str, str]:
    return {outcome.name: outcome.state for outcome in outcomes}


def test_a_check_that_fails_by_itself_stops_no_other_and_accuses_nobody() -> None:
    found = ran(check("broken", ZeroDivisionError("x")), check("good", passed("fine")))
    assert states(found) == {"broken": "could_not_check", "good": "passed"}
    assert found[0].reason == "the check itself failed: ZeroDivisionError: x"
    assert [outcome.duration_s for outcome in found] == [1.0, 1.0]


def test_a_check_for_which_too_little_time_is_left_is_not_begun() -> None:
    late = check("second", sick("was run")), check("none", sick("was run"), absent="no tool")
    found = ran(check("first", passed(""), takes_s=16.0), *late)
    assert states(found) == {"first": "passed", "second": "could_not_check", "none": "could_not_check"}
    assert [outcome.expected for outcome in found] == [True, True, False]


def test_quick_leaves_out_what_takes_long() -> None:
    found = ran(check("long", sick("")), check("short", passed("")), quick=True)
    assert [(outcome.state, outcome.expected) for outcome in found] == [("could_not_check", False), ("passed", True)]


def test_gpus_on_which_a_job_has_begun_meanwhile_are_left_alone() -> None:
    found = ran(check("loads", sick(""), loads=True), check("looks", passed("")), on=host(1), unavailable="gpu 0: busy")
    assert [(outcome.state, outcome.reason) for outcome in found] == [
        ("could_not_check", "gpu 0: busy"),
        ("passed", ""),
    ]


def test_a_check_knows_which_have_passed_before_it() -> None:
    seen: list[frozenset[str]] = []

    def run(known: CheckOptions) -> Result:
        seen.append(known.passed)
        return passed("")

    ran(check("one", passed("")), check("two", sick("")), Check("three", "", "", 1.0, 1.0, lambda _a: "", run))
    assert seen == [frozenset({"one"})]


def verdict(*results: Result) -> str:
    return host_verdict(
        [outcome for n, result in enumerate(results) for outcome in ran(check(str(n), result, takes_s=0.0))]
    )


def test_one_sick_check_makes_the_host_sick() -> None:
    assert verdict(passed(""), could_not_check(""), sick("")) == "sick"


def test_a_host_is_healthy_only_when_all_that_it_can_answer_has_passed() -> None:
    assert verdict(passed(""), not_here("")) == "healthy"
    assert verdict(passed(""), could_not_check("")) == "cannot_tell"
    assert verdict(not_here("")) == "cannot_tell"
    assert verdict() == "cannot_tell"


def test_the_verdicts_reason_names_what_stands_open_or_against_the_host() -> None:
    def outcome(name: str, result: Result) -> CheckResult:
        return CheckResult(name=name, state=result.state, reason="", duration_s=1.0, expected=result.expected)

    open_ones = [outcome("a", passed("")), outcome("b", could_not_check("")), outcome("c", not_here(""))]
    assert verdict_reason("cannot_tell", open_ones, "") == "could not check b"
    assert verdict_reason("cannot_tell", open_ones[2:], "") == "nothing could be checked"
    assert verdict_reason("cannot_tell", open_ones, "another check runs") == "another check runs"
    assert verdict_reason("healthy", [open_ones[0], open_ones[2]], "") == "nothing stands against this host (a)"
    assert verdict_reason("sick", [*open_ones, outcome("d", sick(""))], "") == "d"


def test_only_a_sick_host_ends_with_what_nothing_that_fails_by_itself_ends_with() -> None:
    assert EXIT_CODES == {"healthy": 0, "cannot_tell": 1, "sick": 3}


def test_names_are_unique_and_quick_fits_its_limits() -> None:
    assert len({each.name for each in CHECKS}) == len(CHECKS)
    assert all(each.quick_limit_s is None or each.quick_limit_s <= each.limit_s for each in CHECKS)


def test_devices_are_compared_with_the_others_of_their_group() -> None:
    found = against_peers({"a": 1.0, "b": 2.0, "c": 3.0, "d": 9.0}, {"a": "x", "b": "x", "c": "x", "d": "y"})
    assert found == {"a": 0.4, "b": 1.0, "c": 2.0}


@pytest.mark.parametrize("text", ["x=1", "clock.offset_seconds", "clock.offset_seconds=-1", "clock.offset_seconds=nan"])
def test_a_threshold_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(BadThreshold, match="expected"):
        by_the_site([text])


class Reported(ClockOffsetCollector):
    def __init__(self, offset_s: float | None) -> None:
        super().__init__()
        self._offset_s = offset_s

    def collect(self, now_s: float) -> Observed:
        if self._offset_s is None:
            raise CollectFailed("the clock is not synchronised")
        return Observed(node={"node_clock_offset_seconds": self._offset_s})


@pytest.mark.parametrize(
    ("offset_s", "state"), [(0.01, "passed"), (-2.5, "sick"), (2.5, "sick"), (None, "could_not_check")]
)
def test_a_clock_is_sick_when_it_is_wrong_and_unknown_when_nobody_keeps_it(offset_s: float | None, state: str) -> None:
    assert node_checks.judge_clock(Reported(offset_s), asked()).state == state


def test_a_second_check_at_a_time_is_refused(tmp_path: Path) -> None:
    with (
        host_lock(tmp_path / "lock"),
        pytest.raises(LockTaken, match="another check runs"),
        host_lock(tmp_path / "lock"),
    ):
        pass
    with host_lock(tmp_path / "lock"):
        pass


def test_the_lock_is_no_link_and_no_pipe(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(LockTaken), host_lock(tmp_path / name):
            pass
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("quick", [True, False])
def test_a_check_that_the_site_wants_longer_gets_the_time_for_it(quick: bool) -> None:
    given_s: list[float] = []

    def run(asked: CheckOptions) -> Result:
        given_s.append(asked.until_s)
        return passed("fine")

    site = replace(asked().site, gemm_s=30.0)
    heat = Check("heat", "", "", 10.0, 4.0, lambda _: "", run, longer_s=lambda site: site.gemm_s or 0.0)
    runner.run([heat], host(), site, 200.0, [], quick=quick, unavailable=str, monotonic_s=lambda: 100.0)
    assert given_s == [100.0 + (4.0 if quick else 10.0) + 30.0]


def test_one_that_is_left_out_by_quick_is_left_out_however_long_it_may_take() -> None:
    left_out = Check("long", "", "", 10.0, None, lambda _: "", lambda _: passed("fine"), longer_s=lambda _: 30.0)
    assert states(ran(left_out, quick=True)) == {"long": "could_not_check"}
