"""The recovery benchmark's own parts: the plan, and what is reckoned from outcomes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.recovery.figures import Session, figures, passed, percentile, starts
from benchmarks.recovery.harm import Harm
from benchmarks.recovery.keeping import keep, opened
from benchmarks.recovery.newest import newest
from benchmarks.recovery.outcome import Asked, Outcome, scopes_of, stale_done, steps_lost
from benchmarks.recovery.plan import GPU_KINDS, PROCESS_KINDS, SHARES, draw, faults_in
from benchmarks.recovery.site import Lines
from benchmarks.recovery.spent import Spent, spent

SETTINGS = {"repair_after_s": 20.0}


def asked(node: str | None = "n1", **more: Any) -> Asked:
    fields: dict[str, Any] = {
        "id": "act", "incident": "inc", "kind": "exclude_node", "fault": "hang", "node": node,
        "exclude": [node] if node else [],
        "attempt": 1, "state": "done", "restart": True, "expired_when_done": False,
    }  # fmt: skip
    return Asked(**{**fields, **more})


def outcome(number: int = 1, *harms: tuple[str, str], **more: Any) -> Outcome:
    fields: dict[str, Any] = {
        "shape": "single", "result": "recovered", "took_s": 30.0, "first_step_s": 8.0, "restarts": 1,
        "restarts_explained": 1, "steps_lost": 3, "asked": [asked()],
    }  # fmt: skip
    return Outcome(number=number, harms=[Harm(kind, node, 0.0) for kind, node in harms], **{**fields, **more})


def session(**more: Any) -> Session:
    return Session(**{"calm_s": 30.0, "calm_steps": 90, "fire_s": 100.0, "fire_steps": 150, **more})


def test_a_seed_is_a_plan_and_another_one_another() -> None:
    assert draw(100, 1, gpus=True) == draw(100, 1, gpus=True)
    assert draw(100, 1, gpus=True) != draw(100, 2, gpus=True)


def test_a_hundred_faults_are_of_every_kind_and_shape() -> None:
    items = draw(100, 3, gpus=True)
    assert faults_in(items) in (100, 101)
    assert {kind for item in items for kind in item.kinds} == {*PROCESS_KINDS, *GPU_KINDS}
    assert {item.shape for item in items} == set(SHARES)


def test_a_longer_plan_begins_as_the_shorter_one() -> None:
    short = draw(10, 1, gpus=False)
    assert draw(100, 1, gpus=False)[: len(short)] == short
    assert {kind for item in short for kind in item.kinds} <= set(PROCESS_KINDS)


def test_a_plan_may_have_one_shape_alone() -> None:
    items = draw(16, 1, gpus=True, only=("during_recovery",))
    assert {item.shape for item in items} == {"during_recovery"}
    assert (len(items), faults_in(items)) == (8, 16)
    assert {kind for item in items for kind in item.kinds} == {*PROCESS_KINDS, *GPU_KINDS}


def test_a_plan_may_have_some_kinds_alone() -> None:
    items = draw(8, 1, gpus=True, only=("single",), kinds_only=("crash", "kill"))
    assert [sorted(kind for item in items[at : at + 2] for kind in item.kinds) for at in (0, 2, 4, 6)] == [
        ["crash", "kill"]
    ] * 4


def test_a_restart_has_the_scope_to_which_it_was_widened_and_times_are_told_by_scope() -> None:
    reported = [
        {"event": "stopping", "attempt": 2, "scope": "process_group"},
        {"event": "stopping", "attempt": 3, "scope": "rank"},
        {"event": "widened", "attempt": 3, "to": "job"},
        {"event": "stopping", "attempt": 4, "scope": "job"},
    ]
    assert scopes_of(reported, 1, 3) == ["process_group", "job"]
    found = figures([outcome(1, ("crash", "n1"), scopes=["process_group"], first_step_s=2.0)], [session()])
    assert found["first_step"]["by_scope"]["process_group"]["p50_s"] == 2.0


def test_a_harm_that_anothers_restart_ended_is_neither_named_nor_missed() -> None:
    found = outcome(1, ("hang", "n1"), ("hang", "n2"))
    assert [one.node for one in found.named] == ["n1"]
    assert [one.node for one in found.overtaken] == ["n2"]
    assert found.missed == []
    stuck = outcome(1, ("hang", "n1"), ("hang", "n2"), result="stuck", first_step_s=None)
    assert [one.node for one in stuck.missed] == ["n2"]


def test_a_harm_that_lasts_beyond_a_restart_must_be_named() -> None:
    found = outcome(1, ("hang", "n1"), ("nan", "n2"))
    assert [one.node for one in found.missed] == ["n2"]


def test_a_healthy_node_that_was_excluded_is_said() -> None:
    found = figures([outcome(4, ("hang", "n1"), asked=[asked("n2")])], [session()])
    assert found["healthy_nodes_excluded"] == ["item 4: n2"]
    assert found["right_node"]["missed"] == ["item 4: hang on n1"]
    assert not passed(found)


def test_of_two_faults_the_time_since_the_second_is_told_apart() -> None:
    two = outcome(1, ("slow", "n1"), ("kill", "n2"))
    two.harms[1] = msgspec.structs.replace(two.harms[1], at_s=two.harms[0].at_s + 5)
    found = figures([two, outcome(2, ("hang", "n1"))], [session()])["first_step"]
    assert (found["all"]["max_s"], found["from_the_second_fault"]["max_s"]) == (8.0, 3.0)
    assert found["from_the_second_fault"]["runs"] == 1


def test_an_aborted_run_counts() -> None:
    runs = [outcome(n, ("hang", "n1")) for n in range(1, 10)]
    found = figures([*runs, outcome(10, ("hang", "n1"), result="stuck", first_step_s=None)], [session()])
    times = found["first_step"]["by_kind"]["hang"]
    assert (times["runs"], times["aborted"], times["p50_s"], times["p95_s"]) == (10, 1, 8.0, None)
    assert not passed(found)


def test_an_attempt_begun_for_nothing_is_a_double_restart() -> None:
    found = figures([outcome(2, ("hang", "n1"), restarts=2)], [session()])
    assert found["restarts_double"] == ["item 2: 1"]
    assert passed(figures([outcome(2, ("hang", "n1"))], [session()]))


def test_a_second_restart_of_one_attempt_and_a_late_one_are_stale() -> None:
    first, second = asked(id="a"), asked(id="b")
    assert stale_done([outcome(1, ("hang", "n1"), asked=[first, second])]) == ["b"]
    late = asked(id="c", attempt=2, expired_when_done=True)
    assert stale_done([outcome(1, ("hang", "n1"), asked=[first, late])]) == ["c"]
    void = outcome(3, shape="stale_alarm", alarm="carried_out", asked=[])
    assert stale_done([void]) == ["by hand in item 3"]


def test_training_time_is_effective_as_far_as_the_job_got_at_its_own_pace() -> None:
    found = figures([outcome(1, ("hang", "n1"))], [session(), session(fire_s=100.0, fire_steps=150)])
    assert found["steps_per_hour"] == {"undisturbed": 10_800, "under_fire": 5_400}
    assert found["effective_training_ratio"] == 0.5


def test_where_ranks_came_from_is_counted_by_node_over_all_sessions() -> None:
    reported: list[dict[str, Any]] = [
        {"event": "warming", "nodes": ["n1", "n2", "n3"]},
        {"event": "running", "nodes": ["n1", "n2"], "standbys": []},
        {"event": "running", "nodes": ["n1", "n3"], "standbys": ["n1", "n3"]},
    ]
    assert starts(reported) == {"standby": 2, "kept": 0, "spawned": 2}
    both = figures([outcome()], [session(starts=starts(reported)), session(starts={"standby": 3, "spawned": 0})])
    assert both["starts"] == {"standby": 5, "spawned": 2}


def test_steps_lost_are_those_beyond_the_next_beginning() -> None:
    steps = [
        {"attempt": attempt, "step": step, "resumed_from": resumed}
        for attempt, step, resumed in ((1, 17, 0), (2, 11, 10), (2, 14, 10), (3, 11, 10))
    ]
    assert steps_lost(steps, 1, 3) == 7 + 4
    assert steps_lost(steps, 2, 3) == 4


def made(*steps: tuple[float, int, int], kept_s: float = 0.0) -> list[dict[str, Any]]:
    return [{"time_s": at_s, "attempt": attempt, "step": step, "kept_s": kept_s} for at_s, attempt, step in steps]


def stopped(*moments: tuple[int, float]) -> list[dict[str, Any]]:
    return [{"event": "stopping", "attempt": attempt, "time": at_s} for attempt, at_s in moments]


def rounded(found: Spent) -> dict[str, float]:
    return {name: round(value, 3) for name, value in msgspec.structs.asdict(found).items() if round(value, 3)}


class TestSpent:
    def test_a_restart_is_detection_until_the_launcher_acts_and_steps_made_again_are_rework(self) -> None:
        steps = made((0.0, 1, 10), (0.3, 1, 11), (5.3, 2, 11), (5.6, 2, 12))
        found = spent(steps, [*stopped((2, 2.3)), *stopped((2, 2.4))], [0.4])
        assert rounded(found) == {"steps_s": 0.6, "rework_s": 0.3, "detection_s": 2.0, "restart_s": 2.7}

    def test_all_of_the_time_is_accounted_for(self) -> None:
        found = spent(made((0.0, 1, 10), (0.7, 1, 11), (9.0, 3, 11), kept_s=0.1), stopped((2, 3.0), (3, 5.0)), [2.0])
        assert sum(msgspec.structs.astuple(found)) == pytest.approx(9.0)

    def test_a_fault_in_a_start_is_detected_from_when_it_came(self) -> None:
        found = spent(made((0.0, 1, 10), (12.3, 3, 11)), stopped((2, 2.0), (3, 10.0)), [1.0, 4.0])
        assert rounded(found) == {"steps_s": 0.3, "detection_s": 8.0, "restart_s": 4.0}

    def test_a_step_is_longer_by_its_checkpoint_and_by_the_rest(self) -> None:
        found = spent(made((0.0, 1, 10), (0.5, 1, 11), kept_s=0.15), [], [])
        assert rounded(found) == {"steps_s": 0.3, "capture_s": 0.15, "slower_s": 0.05}

    def test_steps_that_a_fault_makes_slow_are_detection_until_it_is_found_out(self) -> None:
        steps = made((0.0, 1, 10), (1.3, 1, 11), (3.3, 2, 12), (4.6, 2, 13))
        found = spent(steps, stopped((2, 2.0)), [0.1])
        assert rounded(found) == {"steps_s": 0.9, "detection_s": 1.7, "restart_s": 1.0, "slower_s": 1.0}


def test_shares_of_the_time_are_of_all_sessions() -> None:
    both = [session(spent=Spent(steps_s=3.0)), session(spent=Spent(steps_s=3.0, restart_s=2.0))]
    found = figures([outcome()], both)["time_spent"]
    assert (found["steps"], found["restart"], found["rework"]) == (0.75, 0.25, 0.0)


@pytest.mark.parametrize(("share", "value"), [(0.5, 2.0), (0.95, 4.0)])
def test_a_percentile_is_one_of_the_values(share: float, value: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], share) == value


def test_an_interrupted_run_is_gone_on_with_and_another_plan_is_refused(tmp_path: Path) -> None:
    file, items = tmp_path / "out.json", draw(10, 1, gpus=False)
    kept = opened(file, items, 1, SETTINGS)
    kept.outcomes.append(outcome(1, ("hang", "n1")))
    kept.sessions.append(session())
    keep(file, kept)
    assert opened(file, items, 1, SETTINGS).outcomes == kept.outcomes
    with pytest.raises(ValueError, match="another plan"):
        opened(file, draw(10, 2, gpus=False), 2, SETTINGS)
    file.write_text("{}")
    with pytest.raises(ValueError, match="no result of this benchmark"):
        opened(file, items, 1, SETTINGS)


def test_a_growing_file_is_read_once_and_never_by_halves(tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    lines = Lines(file)
    assert lines.all() == []
    file.write_text('not one of ours\n{"step": 1}\n{"st')
    assert lines.all() == [{"step": 1}]
    with file.open("a") as more:
        more.write('ep": 2}\n')
    assert lines.all() == [{"step": 1}, {"step": 2}]


def test_the_newest_checkpoint_is_the_complete_one_of_the_highest_step(tmp_path: Path) -> None:
    for step in (9, 10, 20):
        (tmp_path / f"step_{step}").mkdir()
    for step in (9, 10):
        (tmp_path / f"step_{step}" / ".metadata").touch()
    assert newest(tmp_path) == str(tmp_path / "step_10")
    assert newest(tmp_path / "none") == ""
