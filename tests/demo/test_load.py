"""How busy others keep the machine: when the demo begins, and when it declines."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable

import pytest

from eagle_eye.cli.main import main
from eagle_eye.demo import command
from eagle_eye.demo.command import LOOK_EVERY_S, WITHIN_S, MachineLoad, TooBusy, measured_load

CORES = 2


def machine(runnable: Iterable[int], average: float = 0.5) -> Callable[[], str]:
    """Return what reads /proc/loadavg of a machine on which so many threads of others are runnable, look by look."""
    seen = iter(runnable)
    return lambda: f"{average:.2f} 0.40 0.30 {next(seen) + 1}/312 4711\n"


def load(runnable: Iterable[int], average: float = 0.5) -> MachineLoad:
    return measured_load(read=machine(runnable, average), cores=CORES, sleep=lambda _s: None)


def test_two_busy_processes_a_processor_are_no_reason_to_decline() -> None:
    assert load(itertools.repeat(4)) == MachineLoad(4.0, CORES, 0.5)


def test_more_decline_with_value_limit_and_remedy() -> None:
    with pytest.raises(TooBusy) as declined:
        load(itertools.repeat(5), average=1.25)
    said = str(declined.value)
    assert said.startswith("5.0 processes of others want this machine's 2 processors (load average 1.2); ")
    assert "up to 4, 2 a processor" in said
    assert "--load-max" in said


def test_a_burst_that_passes_is_no_reason_to_decline() -> None:
    assert load(itertools.chain([20] * 30, itertools.repeat(1))).runnable <= 4.0


def test_work_that_has_ended_counts_no_longer() -> None:
    assert load(itertools.repeat(0), average=15.0).runnable == 0.0


def test_declines_within_ten_seconds() -> None:
    slept_s: list[float] = []
    with pytest.raises(TooBusy):
        measured_load(read=machine(itertools.repeat(9)), cores=CORES, sleep=slept_s.append)
    assert sum(slept_s) == pytest.approx(WITHIN_S, abs=LOOK_EVERY_S)
    assert WITHIN_S < 8.0  # a busy machine sleeps longer than it is told to


def test_this_machine_can_be_read() -> None:
    assert measured_load(per_core_max=1_000.0).runnable >= 0.0


def test_a_declined_demo_starts_nothing_and_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def too_busy(_per_core_max: float) -> MachineLoad:
        raise TooBusy("9.0 processes of others want this machine's 2 processors")

    monkeypatch.setattr(command, "measured_load", too_busy)
    monkeypatch.setattr(command, "open_site", lambda: pytest.fail("a site was made"))
    assert main(["demo", "--json"]) == 1
    [line] = capsys.readouterr().out.splitlines()
    assert json.loads(line) == {
        "success": False,
        "text": "9.0 processes of others want this machine's 2 processors",
        "measured_s": {},
    }


def test_the_limit_is_refused_where_it_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--load-max", "nan"]) == 2
    assert "expected processes a processor from 0 to 1000, got 'nan'" in capsys.readouterr().err
