"""A real Slurm of four nodes on this machine, and what becomes of its jobs and nodes under our hands.

It runs with make test-full alone (tests/real_slurm.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from eagle_eye.orchestrators.protocol import CannotCarryOutError
from eagle_eye.orchestrators.slurm.cluster import Cluster, Commands, environment
from eagle_eye.orchestrators.slurm.decisions import drain_of
from eagle_eye.orchestrators.slurm.orchestrator import SlurmOrchestrator
from eagle_eye.orchestrators.slurm.restarting import RestartTimeouts
from eagle_eye.planning.plan import Plan, variable
from tests.docs.pages import blocks
from tests.orchestrators.slurm.builders import Server, exclusion, orchestrator, restart
from tests.planning.jobs import plan
from tests.real_slurm import TIME_LIMIT_SEEN_S, running_with_preemption, skip_reason, until
from tests.real_slurm import Slurm as Machines

NODES = ("n1", "n2", "n3", "n4")
HET = """#!/bin/sh
#SBATCH --nodes=1 --requeue --output=/dev/null
#SBATCH hetjob
#SBATCH --nodes=2
srun --het-group=0,1 sleep 300
"""

pytestmark = pytest.mark.skipif(bool(skip_reason()), reason=skip_reason() or "-")


class Slurm(Machines):
    """The cluster, and what is asked about it here."""

    def cluster(self) -> Cluster:
        return Cluster(Commands(environ=environment(self.environ, str(self.conf))))

    def orchestrator(
        self, folder: Path, server: Server | None = None, follows: Plan | None = None, **limits: float | str
    ) -> SlurmOrchestrator:
        plans = {} if follows is None else {follows.job: follows}
        given = RestartTimeouts(**{"run_s": 60.0, **limits})  # type: ignore[arg-type]
        return orchestrator(self.cluster(), folder, given, server=server, plans=plans)

    def job(self, job: str, field: str) -> str:
        """The field of the job, of all components one after the other."""
        form = (f"--format={field}",) if field.startswith("%") else (f"--Format={field}:|",)
        text = self.run("squeue", "--all", "--states=all", "--noheader", f"--jobs={job}", *form)
        return " ".join(line.strip().rstrip("|") for line in text.splitlines())

    def starts(self, nodes: int, *options: str, script: str = "srun sleep 300") -> str:
        job = self.submit(nodes, script, *options)
        until(lambda: set(self.job(job, "State").split()) == {"RUNNING"})
        return job

    def rested(self) -> bool:
        """Whether all nodes are idle; a resumed one is called until it answers: Slurm's own call may be far off."""
        text = self.run("sinfo", "--noheader", "--Node", "--Format=NodeList:|,StateComplete:|")
        states = dict(line.split("|")[:2] for line in text.splitlines())
        for node in (name for name, state in states.items() if "not_responding" in state):
            self.run("scontrol", "update", f"nodename={node}", "state=drain", "reason=calling")
            self.run("scontrol", "update", f"nodename={node}", "state=resume")
            time.sleep(1)
        return set(states.values()) == {"idle"}

    def node(self, name: str) -> tuple[str, str]:
        """The node's state and reason."""
        text = self.run("sinfo", "--noheader", "--Node", f"--nodes={name}", "--Format=StateComplete:|,Reason:|")
        state, reason = text.splitlines()[0].split("|")[:2]
        return state, reason


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with tempfile.TemporaryDirectory(prefix="eagle-eye-slurm-") as name:
        Path(name).chmod(0o755)
        machines = Slurm(Path(name))
        with running_with_preemption(machines, NODES):
            yield machines


@pytest.fixture(autouse=True)
def _emptied(slurm: Slurm) -> Iterator[None]:
    yield
    slurm.run("scancel", "--user=root")
    gone = ["squeue", "--noheader", "--states=running,pending,completing"]
    until(lambda: not slurm.run(*gone), 120)
    for node in NODES:
        if "drain" in slurm.node(node)[0]:
            slurm.run("scontrol", "update", f"nodename={node}", "state=resume")
    until(slurm.rested, 120)


def test_the_accused_job_runs_again_elsewhere_and_its_node_is_drained_in_our_name(slurm: Slurm, tmp_path: Path) -> None:
    ours = slurm.orchestrator(tmp_path)
    reported: list[str] = []
    job = slurm.starts(2)
    state = ours.state(job)
    assert state is not None
    assert (state.attempt, state.nodes, state.running) == (0, frozenset({"n1", "n2"}), True)
    assert ours.exclude(exclusion(job, "n1")) == "n1 drained"
    drain = drain_of(slurm.node("n1")[1])
    assert drain is not None
    assert (drain.tag, drain.incident_id, drain.owner) == ("node_problem", "inc-1", "eagle-eye")
    said = ours.restart(job, restart("n1", tell=reported.append))
    assert said == f"job {job} requeued; job {job} runs again as attempt 1 on n2, n3"
    assert slurm.job(job, "%x") == "n1"
    assert any("waits in the queue" in word for word in reported)
    state = ours.state(job)
    assert state is not None
    assert (state.attempt, state.nodes) == (1, frozenset({"n2", "n3"}))
    assert ours.readmit(["n1", "elsewhere"]) == "n1 is in service"
    assert "drain" not in slurm.node("n1")[0]


def test_what_was_done_is_not_done_twice_by_the_next_process(slurm: Slurm, tmp_path: Path) -> None:
    job = slurm.starts(2)
    first = slurm.orchestrator(tmp_path)
    first.exclude(exclusion(job, "n1"))
    first.restart(job, restart("n1"))
    reason = slurm.node("n1")[1]
    again = slurm.orchestrator(tmp_path)
    assert again.exclude(exclusion(job, "n1")) == "n1 was drained already for incident inc-1"
    assert f"job {job} runs again as attempt 1 on n2, n3" in again.restart(job, restart("n1"))
    stranger = slurm.orchestrator(tmp_path / "elsewhere")
    assert "was restarted already" in stranger.restart(job, restart("n1"))
    assert (slurm.job(job, "RestartCnt"), slurm.node("n1")[1]) == ("1", reason)


@pytest.mark.parametrize("when", ["requeuehold", "release"])
def test_a_process_killed_on_the_way_leaves_nothing_that_the_next_one_cannot_finish(
    slurm: Slurm, tmp_path: Path, when: str
) -> None:
    job = slurm.starts(2)
    # The subscriber, killed in the command named: its own process, so that nothing of it goes on.
    script = tmp_path / "killed.py"
    script.write_text(f"""
import os, signal, sys
from pathlib import Path
from eagle_eye.orchestrators.slurm import cluster
from tests.orchestrators.slurm.builders import orchestrator, restart
run = cluster.Commands.run
def until_killed(self, *words, **more):
    if words[1:2] == ({when!r},):
        if {when!r} == "requeuehold":
            run(self, *words, **more)
        os.kill(os.getpid(), signal.SIGKILL)
    return run(self, *words, **more)
cluster.Commands.run = until_killed
commands = cluster.Commands(environ=cluster.environment(os.environ, {str(slurm.conf)!r}))
ours = orchestrator(cluster.Cluster(commands), Path({str(tmp_path)!r}))
ours.restart({job!r}, restart("n1"))
""")
    died = subprocess.run(
        [sys.executable, script],
        env={**os.environ, **slurm.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert died.returncode == -signal.SIGKILL
    said = slurm.orchestrator(tmp_path).restart(job, restart("n1"))
    assert said.endswith(f"job {job} runs again as attempt 1 on n2, n3")
    assert (slurm.job(job, "RestartCnt"), slurm.job(job, "%x")) == ("1", "n1")


def test_what_an_administrator_drained_or_wrote_over_is_his(slurm: Slurm, tmp_path: Path) -> None:
    ours = slurm.orchestrator(tmp_path)
    job = slurm.starts(2)
    slurm.run("scontrol", "update", "nodename=n1", "state=drain", "reason=bad fan")
    assert ours.exclude(exclusion(job, "n1", "n2", now=False)).startswith(
        "n1 was drained already, not by us, and is left as it is: bad fan; n2 drained"
    )
    assert ours.readmit(["n1", "n2"]) == "n1 is drained, not by us: bad fan: left as it is; n2 is in service"
    ours.exclude(exclusion(job, "n2", now=False))
    written = slurm.node("n2")[1]
    slurm.run("scontrol", "update", "nodename=n2", f"reason={written}, and its fan - joe")
    assert "its reason is not as we wrote it" in ours.readmit(["n2"])
    assert "drain" in slurm.node("n1")[0]
    assert "drain" in slurm.node("n2")[0]


def test_a_drain_of_another_owner_is_left_to_him(slurm: Slurm, tmp_path: Path) -> None:
    job = slurm.starts(1)
    orchestrator(slurm.cluster(), tmp_path, owner="other").exclude(exclusion(job, "n1", now=False))
    assert "drained by other" in slurm.orchestrator(tmp_path).readmit(["n1"])
    assert "drain" in slurm.node("n1")[0]


def test_the_neighbour_on_the_node_goes_on(slurm: Slurm, tmp_path: Path) -> None:
    ours = slurm.orchestrator(tmp_path)
    accused = slurm.starts(2, "--ntasks-per-node=1", "--mem=10", "--requeue")
    neighbour = slurm.starts(1, "--nodelist=n1", "--ntasks=1", "--mem=10", "--requeue")
    assert slurm.job(neighbour, "NodeList") == "n1"
    said = ours.exclude(exclusion(accused, "n1"))
    assert said == f"n1 drained; other jobs there go on to their end: {neighbour} of root"
    ours.restart(accused, restart("n1"))
    assert slurm.node("n1")[0] in ("mixed+drain", "allocated+drain")
    assert (slurm.job(neighbour, "State"), slurm.job(neighbour, "RestartCnt")) == ("RUNNING", "0")


def test_of_an_array_the_accused_task_alone_is_requeued(slurm: Slurm, tmp_path: Path) -> None:
    ours = slurm.orchestrator(tmp_path)
    array = slurm.submit(1, "srun sleep 300", "--array=1-3", "--requeue", "--exclusive")
    until(lambda: slurm.job(array, "State").split() == ["RUNNING"] * 3)
    # The last task has the array's own id, by which Slurm's commands would mean all of them.
    tasks = dict(zip(slurm.job(array, "JobID").split(), slurm.job(array, "ArrayTaskID").split(), strict=True))
    assert tasks[array] == "3"
    node = slurm.cluster().jobs(int(array))[0].nodes
    ours.exclude(exclusion(array, node))
    assert "runs again as attempt 1" in ours.restart(array, restart(node))
    counts = dict(zip(slurm.job(array, "JobID").split(), slurm.job(array, "RestartCnt").split(), strict=True))
    assert counts == {job: "1" if job == array else "0" for job in tasks}


def test_a_heterogeneous_job_is_restarted_as_one(slurm: Slurm, tmp_path: Path) -> None:
    ours = slurm.orchestrator(tmp_path, run_s=3.0)
    script = slurm.folder / "het.sh"
    script.write_text(HET)
    job = slurm.run("sbatch", "--parsable", str(script))
    until(lambda: slurm.job(job, "State").split() == ["RUNNING"] * 2)
    state = ours.state(job)
    assert state is not None
    assert len(state.nodes) == 3
    (accused,) = slurm.job(job, "NodeList").split()[:1]
    assert ours.exclude(exclusion(job, accused)) == f"{accused} drained"
    said = ours.restart(job, restart(accused))
    # Slurm starts heterogeneous jobs in its slower, second round.
    assert said.startswith(f"job {job} (heterogeneous, 2 components) requeued; ")
    assert slurm.job(job, "RestartCnt") == "1 1"
    assert slurm.job(job, "%x") == f"{accused} {accused}"
    assert slurm.job(job, "PriorityLong").split().count("0") == 0


def test_a_job_that_may_not_be_requeued_is_submitted_again(slurm: Slurm, tmp_path: Path) -> None:
    ours = slurm.orchestrator(tmp_path)
    job = slurm.starts(2, "--no-requeue", "--exclude=n4", "--job-name=a | name", "--time=17", script="sleep 300")
    ours.exclude(exclusion(job, "n1"))
    said = ours.restart(job, restart("n1"))
    new = str(int(job) + 1)
    assert said == (
        f"job {job} cancelled and submitted again as job {new}; job {new} runs again as attempt 0 on n2, n3"
    )
    assert slurm.job(job, "State") == "CANCELLED"
    assert [slurm.job(new, field) for field in ("Name", "TimeLimit", "%x", "Requeue")] == [
        "a | name",
        "17:00",
        "n[1,4]",
        "0",
    ]
    assert slurm.job(new, "NumNodes") == "2"
    assert slurm.orchestrator(tmp_path).restart(job, restart("n1")) == said
    assert slurm.run("squeue", "--noheader", "--states=running,pending", "--format=%A").split() == [new]


def test_an_interactive_job_is_left_alone_with_its_node(slurm: Slurm, tmp_path: Path) -> None:
    ours = slurm.orchestrator(tmp_path)
    allocation = subprocess.Popen(["salloc", "--nodes=1", "sleep", "300"], env=slurm.environ, stderr=subprocess.DEVNULL)
    try:
        job = until(lambda: slurm.run("squeue", "--noheader", "--states=running", "--format=%A"))
        with pytest.raises(CannotCarryOutError, match="interactive"):
            ours.exclude(exclusion(job, "n1"))
        assert slurm.node("n1")[0].startswith(("mixed", "allocated"))
        assert "drain" not in slurm.node("n1")[0]
    finally:
        allocation.kill()
        allocation.wait(20)


def test_a_job_that_nothing_can_take_is_held_until_its_node_is_back(slurm: Slurm, tmp_path: Path) -> None:
    ours = slurm.orchestrator(tmp_path)
    job = slurm.starts(4)
    with pytest.raises(CannotCarryOutError, match="straggler only slows it; nothing was done"):
        ours.exclude(exclusion(job, "n1", fault="straggler"))
    assert slurm.job(job, "State") == "RUNNING"
    ours.exclude(exclusion(job, "n1"))
    with pytest.raises(CannotCarryOutError, match="was stopped and is held: it wants 4 nodes and 3 can be used"):
        ours.restart(job, restart("n1"))
    assert (slurm.job(job, "State"), slurm.job(job, "PriorityLong")) == ("PENDING", "0")
    assert ours.readmit(["n1"]) == f"n1 is in service; job {job} is released"
    until(lambda: slurm.job(job, "State") == "RUNNING", 30)
    assert slurm.job(job, "%x") == ""


def test_a_full_cluster_lets_the_job_wait_and_the_report_says_for_what(slurm: Slurm, tmp_path: Path) -> None:
    job = slurm.starts(2, "--exclusive", "--requeue")
    slurm.starts(2, "--exclusive", "--requeue")
    refusing = slurm.orchestrator(tmp_path / "refusing", when_full="refuse")
    with pytest.raises(CannotCarryOutError, match="wants 2 nodes and 1 would be free"):
        refusing.exclude(exclusion(job, "n1"))
    ours = slurm.orchestrator(tmp_path, run_s=12.0)
    ours.exclude(exclusion(job, "n1"))
    assert "still waits in the queue after 12 s: Resources" in ours.restart(job, restart("n1"))


def test_on_a_full_cluster_a_job_is_held_where_that_is_wanted_until_there_is_room(slurm: Slurm, tmp_path: Path) -> None:
    job = slurm.starts(2, "--exclusive", "--requeue")
    slurm.starts(2, "--exclusive", "--requeue")
    ours = slurm.orchestrator(tmp_path, when_full="hold")
    ours.exclude(exclusion(job, "n1"))
    said = r"was stopped and is held: it wants 2 nodes and 1 are free \(--when-full hold\)"
    with pytest.raises(CannotCarryOutError, match=said):
        ours.restart(job, restart("n1"))
    assert (slurm.job(job, "State"), slurm.job(job, "PriorityLong")) == ("PENDING", "0")
    assert ours.readmit(["n1"]) == f"n1 is in service; job {job} is released"
    until(lambda: slurm.job(job, "State") == "RUNNING", 30)
    assert (slurm.job(job, "NodeList"), slurm.job(job, "RestartCnt")) == ("n[1-2]", "1")


@pytest.fixture
def follows_plan(slurm: Slurm, tmp_path: Path) -> str:
    """The script of docs/how-to/slurm.md, whose ranks write what they were told in place of training."""
    (tmp_path / "plan.json").write_bytes(msgspec.json.encode(plan(4, job="llm7b")))
    command = f"{sys.executable} -c 'from eagle_eye.cli.main import main; raise SystemExit(main())'"
    words = "$SLURM_PROCID of $SLURM_NTASKS on $SLURM_JOB_NUM_NODES: $EAGLE_EYE_LAYOUT"
    (tmp_path / "train.sh").write_text(f'#!/bin/sh\necho "{words}" >> {tmp_path}/said\nsleep 300\n')
    (tmp_path / "train.sh").chmod(0o755)
    (script,) = (block.text for block in blocks("docs/how-to/slurm.md") if block.mark.endswith("slurm/test_real.py"))
    return (
        f"export PYTHONPATH={':'.join(filter(None, sys.path))} HOME=/nonexistent\n"
        f'eagle_eye() {{ {command} "$@"; }}\n'
        + script.replace("eagle-eye plan", "eagle_eye plan")
        .replace("/shared/llm7b/plan.json", f"{tmp_path}/plan.json")
        .replace("torchrun", f"{tmp_path}/train.sh")
    )


@pytest.mark.parametrize("tasks", [(), ("--ntasks-per-node=1",), ("--ntasks=4",)], ids=str)
def test_without_a_spare_a_job_goes_on_by_plan_with_the_layout_in_its_hands(
    slurm: Slurm, tmp_path: Path, follows_plan: str, tasks: tuple[str, ...]
) -> None:
    four = plan(4, job="llm7b")
    job = slurm.starts(4, "--requeue", *tasks, script=follows_plan)
    said = tmp_path / "said"

    def reported(nodes: int) -> bool:
        """Whether each of so many ranks, in this attempt, has the plan's layout for so many nodes."""
        lines = said.read_text().splitlines() if said.exists() else []
        expected = {f"{rank} of {nodes} on {nodes}: {variable(four, nodes)}" for rank in range(nodes)}
        return len(lines) == nodes and set(lines) == expected

    until(lambda: reported(4), 30)
    said.unlink()
    ours = slurm.orchestrator(tmp_path, Server(llm7b=f"slurm:{job}"), follows=four)
    left = four.layout(4).step_s / four.layout(3).step_s
    assert ours.pace_left() == {"llm7b": left}
    loss = f"no spare: 3 nodes by plan, {left:.0%} of the samples/s of 4"
    assert ours.exclude(exclusion("llm7b", "n1")) == f"n1 drained; {loss}"
    assert ours.restart("llm7b", restart("n1")) == (
        f"job {job} requeued; {loss}; job {job} runs again as attempt 1 on n2, n3, n4"
    )
    until(lambda: reported(3), 30)
    said.unlink()
    assert ours.readmit(["n1"]).endswith("runs on 3 of 4 nodes, and by plan on more after its next restart")
    until(lambda: slurm.node("n1")[0] == "idle", 30)
    assert ours.restart("llm7b", restart(over=1, action_id="act-2")).endswith("as attempt 2 on n1, n2, n3, n4")
    until(lambda: reported(4), 30)


def test_below_what_the_plan_covers_the_job_is_held_until_a_node_is_back(slurm: Slurm, tmp_path: Path) -> None:
    four = plan(4, gib=11, job="llm7b")  # all four nodes hold the model, and no fewer
    assert four.nodes_min == 4
    job = slurm.starts(4)
    ours = slurm.orchestrator(tmp_path, Server(llm7b=f"slurm:{job}"), follows=four)
    ours.exclude(exclusion("llm7b", "n1"))
    why = "is held: its plan's layouts need 4 nodes and 3 can be used: it waits for a spare"
    with pytest.raises(CannotCarryOutError, match=why):
        ours.restart("llm7b", restart("n1"))
    assert ours.readmit(["n1"]) == f"n1 is in service; job {job} is released"
    until(lambda: slurm.job(job, "State") == "RUNNING", 30)


def test_a_job_that_may_not_be_requeued_is_submitted_again_on_fewer_nodes(slurm: Slurm, tmp_path: Path) -> None:
    four = plan(4, job="llm7b")
    job = slurm.starts(4, "--no-requeue", "--ntasks=4", script="sleep 300")
    ours = slurm.orchestrator(tmp_path, Server(llm7b=f"slurm:{job}"), follows=four)
    ours.exclude(exclusion("llm7b", "n1"))
    new = str(int(job) + 1)
    assert ours.restart("llm7b", restart("n1")).endswith(f"job {new} runs again as attempt 0 on n2, n3, n4")
    assert (slurm.job(new, "NumNodes"), slurm.job(new, "NumTasks")) == ("3", "3")


@pytest.mark.parametrize("end", ["cancel", "time limit", "preemption"])
def test_a_job_that_was_meant_to_stop_is_not_started_again(slurm: Slurm, tmp_path: Path, end: str) -> None:
    ours = slurm.orchestrator(tmp_path, run_s=3.0)
    job = slurm.starts(2)
    if end == "cancel":
        slurm.run("scancel", job)
    elif end == "time limit":
        slurm.run("scontrol", "update", f"jobid={job}", "endtime=now+1")
        until(lambda: slurm.job(job, "State") == "TIMEOUT", TIME_LIMIT_SEEN_S)
    else:
        slurm.submit(4, "sleep 300", "--partition=urgent", "--exclusive")
        until(lambda: slurm.job(job, "State") == "PENDING")
    before = slurm.job(job, "RestartCnt")
    if end == "preemption":  # Slurm requeued it: our restart has become the past
        assert "was restarted already" in ours.restart(job, restart("n1"))
    else:
        with pytest.raises(CannotCarryOutError, match="nothing was done"):
            ours.exclude(exclusion(job, "n1"))
        with pytest.raises(CannotCarryOutError, match="nothing was done"):
            ours.restart(job, restart("n1"))
    assert slurm.job(job, "RestartCnt") == before
    assert "drain" not in slurm.node("n1")[0]


def test_a_job_that_its_own_loop_restarts_is_only_excluded_from(slurm: Slurm, tmp_path: Path) -> None:
    ours = slurm.orchestrator(tmp_path)
    job = slurm.starts(2)
    assert ours.exclude(exclusion(job, "n1", now=False)) == "n1 drained"
    assert (slurm.job(job, "State"), slurm.job(job, "RestartCnt")) == ("RUNNING", "0")
    slurm.run("scontrol", "requeue", job)  # its owner's doing
    until(lambda: slurm.job(job, "NodeList") == "n[2-3]", 30)


def test_a_failed_job_is_started_again(slurm: Slurm, tmp_path: Path) -> None:
    ours = slurm.orchestrator(tmp_path)
    mark = tmp_path / "mark"
    job = slurm.submit(1, f"test -e {mark} && exec sleep 300; touch {mark}; exit 3")
    until(lambda: slurm.job(job, "State") == "FAILED", 20)
    assert ours.restart(job, restart()).endswith("runs again as attempt 1 on n1")


def test_a_job_of_another_name_is_the_one_that_the_server_found(slurm: Slurm, tmp_path: Path) -> None:
    job = slurm.starts(1)
    ours = slurm.orchestrator(tmp_path, Server(llm7b=f"slurm:{job}", elsewhere="kubernetes:x"))
    state = ours.state("llm7b")
    assert state is not None
    assert state.nodes == frozenset({"n1"})
    assert (ours.state("elsewhere"), ours.state("unheard-of"), ours.state("999999")) == (None, None, None)


def test_json_and_columns_say_the_same(slurm: Slurm) -> None:
    slurm.starts(2)
    array = slurm.submit(1, "sleep 300", "--array=1-2", "--requeue")
    until(lambda: slurm.job(array, "State").split() == ["RUNNING"] * 2)
    text, json = slurm.cluster(), slurm.cluster()
    json._json = True
    for job in (array, str(int(array) + 1)):
        assert text.jobs(int(job)) == json.jobs(int(job))


def test_a_token_stands_in_for_munge(slurm: Slurm, tmp_path: Path) -> None:
    job = slurm.starts(1)
    conf, token = tmp_path / "slurm.conf", tmp_path / "jwt"
    conf.write_text(slurm.conf.read_text().replace("munge.sock", "nobody.sock"))
    token.write_text(slurm.run("scontrol", "token", "username=root", "lifespan=60"))
    environ = environment(slurm.environ, str(conf))
    with pytest.raises(CannotCarryOutError, match="squeue"):
        orchestrator(Cluster(Commands(environ=environ)), tmp_path).state(job)
    ours = orchestrator(Cluster(Commands(environ=environ, jwt_file=token)), tmp_path)
    node = slurm.job(job, "NodeList")
    assert ours.exclude(exclusion(job, node, now=False)) == f"{node} drained"
    assert ours.readmit([node]) == f"{node} is in service"


def test_a_slurm_that_does_not_answer_is_neither_a_job_nor_none(slurm: Slurm, tmp_path: Path) -> None:
    conf = tmp_path / "slurm.conf"
    conf.write_text(slurm.conf.read_text().replace("SlurmctldPort=", "SlurmctldPort=1\n#"))
    cluster = Cluster(Commands(environ=environment(slurm.environ, str(conf)), timeout_s=3.0))
    began_s = time.monotonic()
    with pytest.raises(CannotCarryOutError, match=r"squeue --all: .*Unable to contact|no answer within"):
        orchestrator(cluster, tmp_path).state("1")
    assert time.monotonic() - began_s < 40
