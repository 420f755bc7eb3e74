"""squeue's and sinfo's answers read: strictly, and never half."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.orchestrators.slurm.answers import (
    JOB_FIELDS,
    SlurmError,
    jobs_of_json,
    jobs_of_text,
    nodes_of_text,
)

RUNNING = "17|17|N/A|N/A|RUNNING|2|1|1|2|n[1-2]||all|ann|4294901759|N/A|None|"
JSON = """{"jobs": [{"job_id": 17, "array_job_id": {"set": true, "number": 0},
 "array_task_id": {"set": false, "number": 0},
 "het_job_id": {"set": true, "number": 0}, "job_state": ["RUNNING"], "restart_cnt": 2, "requeue": true,
 "batch_flag": true, "node_count": {"set": true, "number": 2}, "nodes": "n[1-2]", "required_nodes": "",
 "partition": "all", "user_name": "ann", "priority": {"set": true, "number": 4294901759},
 "preempt_time": {"set": false, "number": 0}, "state_reason": "None"}]}"""


def job_line(**changes: str) -> str:
    values = dict(zip(JOB_FIELDS, RUNNING.split("|")[:-1], strict=True))
    return "|".join({**values, **changes}.values()) + "|"


def test_a_job_is_read_from_columns_and_from_json_alike() -> None:
    (job,) = jobs_of_text(RUNNING)
    assert (job.id, job.name, job.restarts, job.phase, job.nodes, job.nodes_wanted) == (
        17,
        "17",
        2,
        "running",
        "n[1-2]",
        2,
    )
    assert (job.requeues, job.batch, job.held, job.partitions, job.user) == (
        True,
        True,
        False,
        frozenset({"all"}),
        "ann",
    )
    assert jobs_of_json(JSON) == (job,)


def test_a_task_of_an_array_goes_by_array_and_task_also_where_it_has_the_arrays_id() -> None:
    (task,) = jobs_of_text(job_line(ArrayJobID="17", ArrayTaskID="3"))
    assert task.name == "17_3"
    (waiting,) = jobs_of_text(job_line(ArrayJobID="17", ArrayTaskID="4-9%1", State="PENDING"))
    assert (waiting.name, waiting.phase) == ("17", "pending")


@pytest.mark.parametrize(
    ("changes", "what"),
    [({"PriorityLong": "0"}, "held"), ({"Requeue": "0"}, "not requeues"), ({"PreemptTime": "1795343878"}, "preempted")],
)
def test_what_decides_over_a_restart_is_seen(changes: dict[str, str], what: str) -> None:
    (job,) = jobs_of_text(job_line(**changes))
    assert {"held": job.held, "not requeues": not job.requeues, "preempted": job.phase == "preempted"}[what]


@pytest.mark.parametrize(
    "line",
    [
        "\n", "17|RUNNING|", RUNNING.replace("17", "x", 1), RUNNING.replace("17", "0", 1), RUNNING[:-1],
        job_line(RestartCnt="-1"), job_line(Requeue="yes"), job_line(State=""), f"{RUNNING}\nslurm_load: garbage",
    ],
)  # fmt: skip
def test_a_line_that_is_not_understood_spoils_the_answer(line: str) -> None:
    with pytest.raises(SlurmError, match="not understood"):
        jobs_of_text(line)


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"jobs": 1}', '{"jobs": [{}]}', '{"jobs": [{"job_id": []}]}', "\udcff"]
)
def test_json_that_is_not_understood_is_an_error(text: str) -> None:
    with pytest.raises(SlurmError, match="not understood"):
        jobs_of_json(text)


@given(st.text())
def test_no_text_breaks_the_reader(text: str) -> None:
    for read in (jobs_of_text, jobs_of_json, nodes_of_text):
        with contextlib.suppress(SlurmError):
            read(text)


@given(
    st.lists(
        st.tuples(st.integers(1, 1 << 31), st.integers(0, 99), st.sampled_from(["RUNNING", "FAILED"]), st.text("|: x"))
    )
)
def test_columns_are_read_back_whatever_the_reason_says(jobs: list[tuple[int, int, str, str]]) -> None:
    lines = [job_line(JobID=str(n), RestartCnt=str(r), State=s, Reason=why) for n, r, s, why in jobs]
    read = jobs_of_text("\n".join(lines))
    assert [(job.id, job.restarts, job.words) for job in read] == [(n, r, (s,)) for n, r, s, _ in jobs]


def test_a_nodes_reason_may_hold_anything_and_its_partitions_are_gathered() -> None:
    assert nodes_of_text("n1|idle|all*|")[0].reason == ""
    (node,) = nodes_of_text("n3|mixed+drain|all*|bad | fan|\nn3|mixed+drain|gpu|bad | fan|")
    assert (node.name, node.reason, node.partitions) == ("n3", "bad | fan", frozenset({"all", "gpu"}))
    assert (node.drained, node.usable, node.free) == (True, False, False)


def recorded(name: str) -> list[str]:
    folder = os.environ.get("EAGLE_EYE_TEST_DATA")
    if not folder:
        pytest.skip("EAGLE_EYE_DATA does not name the folder with the recorded Slurm outputs")
    text = (Path(folder) / "real/fixtures/gcm/gcm/tests/data" / name).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line.strip()]


def test_recorded_jobs_of_a_real_fleet_are_read() -> None:
    """Their columns are another choice, put into our order; each line is a job."""
    lines = recorded("sample-squeue-output.txt")
    said = []
    for line in lines:
        field = line.split("|#")
        array, _, task = field[2].partition("_")
        said.append(
            job_line(
                JobID=field[3],
                ArrayJobID=array,
                ArrayTaskID=task or "N/A",
                State=field[9],
                NumNodes=field[12],
                NodeList=field[15],
                Partition=field[24],
                UserName=field[10],
                Reason=field[27],
            )
        )
    jobs = jobs_of_text("\n".join(said))
    assert [job.phase for job in jobs] == ["running", "running", "running", "pending", "pending"]
    assert [job.name for job in jobs] == ["45704744", "42953390_320", "42956774_3", "22783212", "42271120"]
    assert jobs[2].nodes == "node[1281-1288,1301-1304,1309-1312,1365-1372,1377-1384]"


def test_recorded_nodes_of_a_real_fleet_are_read() -> None:
    header, *lines = recorded("sample-sinfo-output.txt")
    names = [name.strip() for name in header.split("|")]
    rows = [dict(zip(names, [part.strip() for part in line.split("|")], strict=False)) for line in lines]
    nodes = nodes_of_text(
        "\n".join(f"{row['NODELIST']}|{row['STATE']}|{row['PARTITION']}|{row['REASON']}|" for row in rows)
    )
    assert [(node.name, node.drained, node.usable) for node in nodes] == [
        ("node0201", True, False),
        ("node1537", False, True),
        ("node4180", False, True),
    ]
    assert nodes[0].reason == "replace"
