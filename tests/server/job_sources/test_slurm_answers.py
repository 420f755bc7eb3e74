"""Slurm's words as ours: every state, the JSON of several versions, columns, and what cannot be used."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.server.jobs import slurm_answers
from eagle_eye.server.jobs.slurm_answers import jobs_of_json, jobs_of_text, nodes_of_json, nodes_of_text
from eagle_eye.server.jobs.source import ScheduledJob, ScheduledNode, SourceFailed


def number(value: float, *, infinite: bool = False, given: bool = True) -> dict[str, Any]:
    return {"set": given, "infinite": infinite, "number": value}


OLD = {"job_id": 17, "job_state": "RUNNING", "restart_cnt": 2, "nodes": "n[1-2]", "start_time": 1000, "end_time": 4600}
OLD |= {"time_limit": 60, "preempt_time": 0, "het_job_id": 0, "name": "x" * 5000, "user_name": "ada"}
NEW = {"job_id": 17, "job_state": ["RUNNING"], "restart_cnt": 2, "nodes": "n[1-2]", "start_time": number(1000)}
NEW |= {"end_time": number(4600), "time_limit": number(60), "preempt_time": number(0), "het_job_id": number(0)}
NEW |= {"user_name": "ada", "comment": None}
LINE = "17|N/A|RUNNING|2|1000|4600|1:00:00|N/A|ada|n[1-2]|"


def one_job(body: object) -> ScheduledJob:
    left_out: Counter[str] = Counter()
    (job,) = jobs_of_json(json.dumps({"jobs": [body]}).encode(), left_out)
    assert not left_out
    return job


EXPECTED = ScheduledJob("17", "17", "running", 2, ("n1", "n2"), 1000.0, 4600.0, "RUNNING", "ada")


@pytest.mark.parametrize("body", [OLD, NEW], ids=["v0.0.38", "v0.0.42"])
def test_both_forms_of_json_say_the_same(body: object) -> None:
    assert one_job(body) == EXPECTED


def test_columns_say_what_json_does() -> None:
    assert jobs_of_text(LINE.encode(), Counter()) == (EXPECTED,)


def test_a_job_whose_nodes_still_boot_is_pending() -> None:
    assert one_job({**NEW, "job_state": ["RUNNING", "CONFIGURING"]}).state == "pending"


def test_a_job_in_its_grace_time_is_preempted_though_it_runs() -> None:
    assert one_job({**NEW, "preempt_time": number(1500)}).state == "preempted"


def test_a_time_limit_that_is_none_ends_nothing() -> None:
    assert one_job({**OLD, "time_limit": None}).ends_s is None
    assert one_job({**NEW, "time_limit": number(0, infinite=True)}).ends_s is None
    assert jobs_of_text(LINE.replace("1:00:00", "UNLIMITED").encode(), Counter())[0].ends_s is None


def test_components_of_a_heterogeneous_job_are_one_job() -> None:
    lines = [LINE.replace("17|N/A", "17|17"), LINE.replace("17|N/A", "18|17").replace("n[1-2]", "cpu1")]
    (job,) = jobs_of_text("\n".join(lines).encode(), Counter())
    assert (job.name, job.nodes, job.state) == ("17", ("n1", "n2", "cpu1"), "running")


def test_a_heterogeneous_job_of_which_one_component_was_cancelled_is_cancelled() -> None:
    lines = [LINE.replace("17|N/A", "17|17"), LINE.replace("17|N/A|RUNNING", "18|17|CANCELLED")]
    assert jobs_of_text("\n".join(lines).encode(), Counter())[0].state == "cancelled"


def test_what_cannot_be_used_is_counted_and_the_rest_is_read() -> None:
    lines = [LINE, LINE.replace("n[1-2]", "n[2-1]"), "nonsense", LINE.replace("17", "19").replace("RUNNING", "NEWS")]
    left_out: Counter[str] = Counter()
    jobs = jobs_of_text("\n".join(lines).encode(), left_out)
    assert [(job.id, job.state) for job in jobs] == [("17", "running"), ("19", "")]
    assert left_out == {"host_list": 1, "malformed": 1, "unknown_state": 1}


def test_an_answer_that_is_no_list_of_jobs_is_a_failure_and_not_an_empty_list() -> None:
    for body in (b"", b"{}", b"[]", b'{"jobs": 3}', b'{"jobs": [{}]}', b'{"jobs": []', b"[" * 100_000):
        with pytest.raises(SourceFailed):
            jobs_of_json(body, Counter())


def test_an_error_in_the_answer_is_a_failure() -> None:
    body = {"jobs": [], "errors": [{"error": "slurm_load_jobs error", "description": "Unable to contact\ncontroller"}]}
    with pytest.raises(SourceFailed, match=r"Unable to contact.controller"):
        jobs_of_json(json.dumps(body).encode(), Counter())


def test_more_jobs_than_the_limit_are_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm_answers, "JOBS_MAX", 2)
    with pytest.raises(SourceFailed, match="3 jobs; at most 2"):
        jobs_of_text("\n".join([LINE] * 3).encode(), Counter())


@given(st.binary(max_size=300))
def test_no_bytes_break_the_reader_of_columns(body: bytes) -> None:
    jobs_of_text(body, Counter())
    nodes_of_text(body, Counter())


nasty = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(sorted(NEW)), nasty)
def test_no_value_breaks_the_reader_of_json(key: str, value: Any) -> None:
    try:
        body = json.dumps({"jobs": [{**NEW, key: value}]}, allow_nan=False).encode()
    except ValueError:
        return
    left_out: Counter[str] = Counter()
    assert len(jobs_of_json(body, left_out)) + left_out["malformed"] + left_out["host_list"] == 1


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("idle", ("in_service", False, False)),
        ("mixed*", ("in_service", False, False)),
        ("idle+reboot_issued", ("in_service", False, False)),
        ("idle+drain", ("excluded", True, False)),
        ("allocated+drain", ("draining", True, False)),
        ("down", ("excluded", False, False)),
        ("future", ("excluded", False, False)),
        ("idle+maintenance", ("in_service", False, True)),
        ("unknown", ("", False, False)),
        ("brand_new", ("", False, False)),
    ],
)
def test_a_node_stands_as_its_state_says(state: str, expected: tuple[str, bool, bool]) -> None:
    (node,) = nodes_of_text(f"n1|{state}|none|".encode(), Counter())
    assert (node.state, node.drained, node.maintenance) == expected


def test_a_node_of_which_nobody_can_tell_is_counted() -> None:
    left_out: Counter[str] = Counter()
    nodes_of_text(b"n1|unknown|none|\nn2|idle|none|", left_out)
    assert left_out == {"unknown_state": 1}


def test_nodes_are_read_from_json_and_from_columns_alike() -> None:
    node = ScheduledNode("n3", "draining", "bad | fan", drained=True)
    old = {"name": "n3", "state": "mixed", "state_flags": ["DRAIN"], "reason": "bad | fan"}
    new = {"name": "n3", "state": ["MIXED", "DRAIN"], "reason": "bad | fan"}
    for body in (old, new):
        assert nodes_of_json(json.dumps({"nodes": [body]}).encode(), Counter()) == (node,)
    twice = b"n3|mixed+drain|bad | fan|\nn3|mixed+drain|bad | fan|\nn1|idle|none|"
    assert nodes_of_text(twice, Counter()) == (node, ScheduledNode("n1", "in_service"))
