"""From observe to act: what is counted as evidence, when it suffices, and the lines that take the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomllib

from eagle_eye.detectors.faults import FAULTS
from eagle_eye.server import config
from eagle_eye.server.accounts.goodput import TimelineSpan, timeline
from eagle_eye.server.accounts.trust import (
    KINDS,
    AccountSettings,
    HoursAtStake,
    JudgedDecision,
    Precision,
    Standing,
    asked_decision,
    assess,
    evidence,
    faults_of,
    of_incidents,
    step,
)
from eagle_eye.server.engine.settings import PolicySettings, mode_of
from eagle_eye.server.model.records import RuleWord
from tests.server.accounts.past import attempt
from tests.server.builders import NOW, action, incident

SETTINGS = AccountSettings()
WINDOW = 1_000.0
APPROVED = [RuleWord("mode", "hold", "approve mode", {"mode": "approve"})]
COSTS = PolicySettings(lost_work_s=300.0, restart_s=240.0, queue_s=60.0)

# What a site may have in [policy], and jobs of which the rules speak.
POLICIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "nothing": ("", ()),
    "all approve": ('mode = "approve"', ()),
    "the fault approves": ('[[policy.modes]]\nfaults = ["hang"]\nmode = "approve"', ()),
    "one of several faults": ('[[policy.modes]]\nfaults = ["hang", "gpu_lost"]\nmode = "approve"', ()),
    "one kind acts": ('[[policy.modes]]\nkinds = ["restart_job"]\nmode = "act"', ()),
    "one kind is observed": ('mode = "approve"\n[[policy.modes]]\nkinds = ["exclude_node"]\nmode = "observe"', ()),
    "a kind of the fault": (
        (
            '[[policy.modes]]\nfaults = ["hang"]\nkinds = ["restart_job"]\nmode = "act"\n'
            '[[policy.modes]]\nfaults = ["hang"]\nmode = "approve"'
        ),
        (),
    ),
    "some jobs act": ('[[policy.modes]]\njobs = ["canary-*"]\nmode = "act"', ("canary-1",)),
    "some jobs are observed": (
        'mode = "approve"\n[[policy.modes]]\njobs = ["prod-*", "llm"]\nmode = "observe"',
        ("prod-7", "llm"),
    ),
    "every job by a pattern": ('[[policy.modes]]\njobs = ["*"]\nfaults = ["hang"]\nmode = "approve"', ()),
    "as close as can be": (
        f'[[policy.modes]]\njobs = ["*"]\nfaults = ["hang", "gpu_lost"]\nkinds = {list(KINDS)}\nmode = "approve"',
        (),
    ),
}
NO_LINES = "as close as can be"  # which only a change of that table changes


def read(folder: Path, text: str) -> PolicySettings:
    """Return the policy that the server reads of a file with this in [policy]."""
    file = folder / "server.toml"
    file.write_text(f"[policy]\n{text}\n", encoding="utf-8")
    return config.load(file, {}, {}).policy


@pytest.mark.parametrize("name", [name for name in POLICIES if name != NO_LINES])
def test_the_lines_take_the_step_by_the_servers_own_reader_and_change_nothing_else(tmp_path: Path, name: str) -> None:
    text, jobs = POLICIES[name]
    before = read(tmp_path, text)
    found = step(before, "hang")
    assert found.next is not None
    kept = text
    if found.in_place_of:
        head, *tables = text.split("[[policy.modes]]")
        del tables[int(found.in_place_of.removeprefix("policy.modes[").removesuffix("]"))]
        kept = "[[policy.modes]]".join([head, *tables])
    after = read(tmp_path, f"{kept}\n{found.toml}")

    def modes(policy: PolicySettings, job: str, fault: str) -> dict[str, str]:
        return {kind: mode_of(policy.mode, policy.modes, job, fault, kind).mode for kind in KINDS}

    stepped = {kind: found.next if kind in found.kinds else mode for kind, mode in modes(before, "j", "hang").items()}
    assert modes(after, "j", "hang") == stepped
    assert {job: modes(after, job, "hang") for job in jobs} == {job: modes(before, job, "hang") for job in jobs}
    others = [fault.name for fault in FAULTS if fault.name != "hang"]
    assert [modes(after, "j", fault) for fault in others] == [modes(before, "j", fault) for fault in others]


def test_a_line_that_would_not_take_the_step_is_not_given(tmp_path: Path) -> None:
    found = step(read(tmp_path, POLICIES[NO_LINES][0]), "hang")
    assert (found.mode, found.next, found.toml, found.where) == ("approve", "act", "", "policy.modes[0].mode")


def test_every_fault_has_a_line_by_default() -> None:
    lines = [step(PolicySettings(), fault).toml for fault in faults_of([])]
    assert [tomllib.loads(text)["policy"]["modes"][0]["mode"] for text in lines] == ["approve"] * len(lines)


def test_jobs_with_a_mode_of_their_own_are_named(tmp_path: Path) -> None:
    (only,) = step(read(tmp_path, POLICIES["some jobs act"][0]), "hang").elsewhere
    assert (only.where, only.rule.jobs, only.rule.mode) == ("policy.modes[0]", ["canary-*"], "act")


def test_where_policy_acts_there_is_no_further_step() -> None:
    found = step(PolicySettings(mode="act"), "hang")
    assert (found.mode, found.next, found.toml) == ("act", None, "")


@pytest.mark.parametrize(
    ("right", "wrong", "mode", "verdict", "detail"),
    [
        (0, 0, "observe", "cannot_tell", "0 decisions with a known outcome, 10 needed"),
        (2, 0, "observe", "cannot_tell", "2 decisions with a known outcome, 10 needed"),
        (9, 1, "observe", "suffices", "9 of 10 right: at least 0.60 with 95% confidence"),
        (10, 0, "approve", "falls_short", "and act needs 0.80; 6 more right and none wrong would do"),
        (16, 0, "approve", "suffices", "16 of 16 right: at least 0.81 with 95% confidence, and act needs 0.80"),
        (5, 5, "observe", "falls_short", "5 of 10 right: at least 0.24"),
        (3, 0, "act", "acts", "3 decisions with a known outcome, 10 needed"),
    ],
)
def test_few_outcomes_or_wrong_ones_never_suffice(right: int, wrong: int, mode: Any, verdict: str, detail: str) -> None:
    found = assess(Precision(right, wrong, 50, 50), mode, SETTINGS)
    assert found.verdict == verdict
    assert detail in found.detail


def test_the_number_of_further_right_decisions_is_the_least_that_suffices() -> None:
    assert assess(Precision(15, 0, 0, 0), "approve", SETTINGS).verdict == "falls_short"
    assert "; 1 more right" in assess(Precision(15, 0, 0, 0), "approve", SETTINGS).detail


@pytest.mark.parametrize(
    ("state", "incident_state", "policy", "now_s", "standing"),
    [
        ("done", "closed", APPROVED, NOW + WINDOW, "right"),
        ("done", "closed", APPROVED, NOW + WINDOW - 1, "pending"),
        ("failed", "false", APPROVED, NOW + WINDOW, "wrong"),
        ("done", "closed", [], NOW + WINDOW, "cannot_tell"),
        ("done", "false", [], NOW + 1, "wrong"),
    ],
)
def test_of_what_was_carried_out_only_people_can_tell(
    state: str, incident_state: str, policy: list[RuleWord], now_s: float, standing: str
) -> None:
    asked = action(state=state, policy=policy)
    assert asked_decision(asked, incident(state=incident_state), now_s, WINDOW).standing == standing


def decided(standing: Standing, id_: str = "act_1", state: str = "would_act", **more: Any) -> JudgedDecision:
    return JudgedDecision(action(id_, state, **more), standing)


def test_an_incident_counts_once_and_the_worst_of_it_counts() -> None:
    twice = [decided("right"), decided("wrong", "act_2", created_s=NOW + 60), decided("pending", incident_id="inc_2")]
    assert [one.standing for one in of_incidents(twice)] == ["wrong", "pending"]


def stopped(**more: Any) -> dict[str, list[TimelineSpan]]:
    """Return the timeline of a job of eight GPUs that stood from NOW - 10 to NOW + 3600 because of inc_1."""
    first = attempt(0, -5_000, 3_600, end="failed", first_step=1, first_step_s=-4_900, last_step=9, last_step_s=-10)
    hang = incident(onset_s=NOW - 10, detected_s=NOW, seen_s=NOW + 3_600, ended_s=NOW + 3_600, **more)
    return {"job": timeline([first], [hang], NOW + 4_000)}


def test_a_stop_would_have_been_shorter_by_the_time_that_the_job_stood_after_the_decision() -> None:
    shown = evidence([decided("right")], stopped(), COSTS)
    assert shown.saved == HoursAtStake(8 * (3_600 - 60), 0)
    assert shown.cost == HoursAtStake(None, 0)


def test_a_slow_job_would_have_paid_a_whole_restart() -> None:
    going = attempt(0, -5_000, 7_200, end="finished", first_step=1, first_step_s=-4_900, last_step=9, last_step_s=7_200)
    slow = incident(
        fault="straggler", family="slow", slowdown_ratio=1.0, onset_s=NOW - 600, seen_s=NOW + 7_200, ended_s=NOW + 7_200
    )
    spans = {"job": timeline([going], [slow], NOW + 8_000)}
    shown = evidence([decided("right", fault="straggler")], spans, COSTS)
    assert shown.saved.gpu_seconds == pytest.approx(8 * (7_200 / 2 - 600))


def test_a_wrong_one_would_have_cost_a_restart() -> None:
    shown = evidence([decided("wrong")], stopped(), COSTS)
    assert (shown.saved, shown.cost) == (HoursAtStake(None, 0), HoursAtStake(8 * 600, 0))


@pytest.mark.parametrize(
    "more",
    [
        {"restart": False, "kind": "drain_node"},
        {"job": "of which nothing is on record"},
        {"incident_id": "to which no time is put down"},
    ],
)
def test_hours_that_nobody_can_tell_are_counted_as_such(more: dict[str, Any]) -> None:
    assert evidence([decided("right", **more)], stopped(), COSTS).saved == HoursAtStake(None, 1)


def test_what_was_carried_out_would_have_saved_nothing() -> None:
    assert evidence([decided("right", state="done")], stopped(), COSTS).saved == HoursAtStake(None, 0)
