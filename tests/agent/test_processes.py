from __future__ import annotations

from pathlib import Path

import pytest

from eagle_eye.agent.collector import Observed
from eagle_eye.agent.collectors.processes import (
    LOOK_S,
    MAPS_S_MAX,
    SETTLE_S,
    SETTLE_WITH_GPUS_S,
)
from eagle_eye.agent.processes.process_files import ProcessFiles
from eagle_eye.agent.processes.process_registry import TrainingProcess
from eagle_eye.agent.processes.rank_tracker import FAMILY_MAX, Ranks
from eagle_eye.schema.events import Event
from tests.agent.fakes import FakeClock
from tests.agent.process_tree import Node, ProcessTree, rank

SRUN = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}
UUIDS = {"GPU-aa": 0, "GPU-bb": 1, "MIG-cc": 5}


@pytest.fixture
def node(tmp_path: Path, clock: FakeClock) -> Node:
    return Node(ProcessTree(tmp_path / "proc"), clock)


def test_the_process_that_holds_the_gpu_is_the_rank(node: Node) -> None:
    node.tree.starts(10, rank(0), torch=True)
    node.tree.starts(11, rank(0), parent=10, torch=True)  # a data loader
    node.tree.starts(12, rank(0), parent=10)
    node.tree.starts(20, rank(1), torch=True)
    node.on_gpu = {10: 3, 20: 4}
    seen = node.look()
    assert [(r.job, r.rank, r.world_size, r.device, r.attempt, r.pid) for r in seen.ranks] == [
        ("llm", 0, 2, 3, 0, 10),
        ("llm", 1, 2, 4, 0, 20),
    ]
    assert seen.problem == ""
    assert node.pids() == [10, 20]
    assert [(p.rank, p.device, p.local_rank) for p in node.processes.all()] == [(0, 3, 0), (1, 4, 1)]


def test_a_helper_that_holds_the_rank_s_gpu_too_is_no_rank(node: Node) -> None:
    node.tree.starts(10, rank(0))
    node.tree.starts(11, rank(0), parent=10)
    node.tree.starts(12, rank(1), parent=11)  # an inference engine gives its workers ranks of their own
    node.on_gpu = {10: 0, 11: 0, 12: 0}
    assert [r.pid for r in node.look().ranks] == [10]
    assert "process_rank_conflicts" not in node.drops.snapshot()


def test_gpu_work_that_names_no_rank_is_no_rank(node: Node) -> None:
    node.tree.starts(10, {"PATH": "/bin"})
    node.on_gpu = {10: 0}
    assert node.look().ranks == []


def test_a_rank_stays_one_when_its_gpu_falls_off_the_bus(node: Node) -> None:
    node.tree.starts(10, rank(0))
    node.on_gpu = {10: 3}
    node.look()
    node.on_gpu = {}
    (seen,) = node.look().ranks
    assert (seen.pid, seen.device) == (10, 3)


def test_without_gpus_the_topmost_process_with_torch_is_the_rank(node: Node) -> None:
    slurm = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
    node.tree.starts(5, slurm, arguments="/bin/bash run.sh")
    node.tree.starts(6, slurm, parent=5, torch=True, arguments="/opt/python3 launch.py")  # no launcher that we know
    node.tree.starts(10, slurm | rank(2, 4), parent=6, torch=True)
    node.tree.starts(11, slurm | rank(2, 4), parent=10, torch=True)
    node.tree.starts(20, slurm | rank(3, 4), parent=6, torch=True)
    seen = node.settled()
    assert [(r.job, r.rank, r.world_size, r.device, r.pid) for r in seen.ranks] == [
        ("7", 2, 4, 2, 10),
        ("7", 3, 4, 3, 20),
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        "/usr/bin/python3 /usr/bin/torchrun --nnodes 2 train.py",
        "torchrun train.py",
        "python -W ignore -m torch.distributed.run train.py",
        "python -u -m accelerate.commands.launch train.py",
        "srun python train.py",
    ],
)
def test_a_launcher_that_waits_for_its_peers_is_no_rank(node: Node, arguments: str) -> None:
    node.tree.starts(6, {"SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}, torch=True, arguments=arguments)
    assert node.settled().ranks == []


def test_a_script_is_no_launcher_for_its_arguments(node: Node) -> None:
    node.tree.starts(6, rank(0), torch=True, arguments="python -u train.py --launcher torchrun")
    assert len(node.settled().ranks) == 1


def test_a_shell_with_a_rank_is_never_one(node: Node) -> None:
    node.tree.starts(6, rank(0), arguments="bash -c sleep")
    assert node.settled().ranks == []


def test_a_process_counts_from_when_it_has_loaded_torch(node: Node) -> None:
    node.tree.starts(10, rank(0))
    assert node.settled().ranks == []
    node.tree.loads_torch(10)
    assert len(node.look(MAPS_S_MAX).ranks) == 1


def test_where_there_are_gpus_others_count_only_after_a_while(node: Node) -> None:
    node.uuids.update(UUIDS)
    node.tree.starts(10, SRUN, torch=True)
    node.tree.starts(20, rank(1), torch=True)
    node.look()
    assert node.look(SETTLE_S + LOOK_S).ranks == []
    assert node.pids() == [20]
    assert len(node.look(SETTLE_WITH_GPUS_S).ranks) == 2


def test_a_rank_is_followed_at_once_and_reported_on_its_gpu(node: Node) -> None:
    node.uuids.update(UUIDS)
    node.tree.starts(10, rank(1), torch=True)
    assert node.look() == Observed()
    (process,) = node.processes.all()
    assert (process.pid, process.device, process.starting) == (10, 1, True)
    node.on_gpu = {10: 0}
    seen = node.look()
    assert [(r.pid, r.device) for r in seen.ranks] == [(10, 0)]
    assert seen.events == []
    assert [(p.device, p.starting) for p in node.processes.all()] == [(0, False)]
    assert node.drops.snapshot() == {}


def test_a_rank_that_fails_without_a_gpu_has_ended(node: Node) -> None:
    node.tree.starts(10, rank(0), torch=True)
    node.tree.starts(20, rank(1), torch=True)
    node.on_gpu = {10: 0}
    node.look()
    node.tree.starts(30, rank(2), torch=True)  # between two looks, ten seconds before its end
    assert [r.pid for r in node.look().ranks] == [10]
    node.tree.ends(20, 1)
    node.tree.ends(30, 1)
    seen = node.look()
    assert [(r.rank, r.device) for r in seen.ranks] == [(0, 0), (1, 1), (2, 2)]
    assert [(e.device, e.attributes["rank"], e.attributes["exit_code"]) for e in seen.events] == [(1, 1, 1), (2, 2, 1)]
    assert [r.pid for r in node.look().ranks] == [10]


def test_a_good_end_without_a_gpu_is_no_event(node: Node) -> None:
    node.tree.starts(10, rank(0), torch=True)
    node.look()
    assert node.pids() == [10]
    node.tree.ends(10, 0)
    assert node.look() == Observed()


def test_ranks_of_the_next_attempt_are_followed_from_their_start(node: Node) -> None:
    node.tree.starts(6, SRUN, torch=True, arguments="torchrun train.py")
    node.tree.starts(10, SRUN | rank(0, 1), parent=6, torch=True)
    node.look()
    assert node.pids() == [10]
    node.on_gpu = {10: 0}
    node.look()
    node.tree.ends(10, 1)
    node.look()
    node.tree.starts(20, SRUN | rank(0, 1, TORCHELASTIC_RESTART_COUNT="1"), parent=6, torch=True)
    node.look()
    assert node.pids() == [20]


def test_tasks_of_a_step_whose_others_hold_gpus_are_ranks(node: Node) -> None:
    step = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "3", "SLURM_STEP_ID": "0"}
    for number in range(3):
        node.tree.starts(10 + number, step | {"SLURM_PROCID": str(number)}, torch=True)
    node.tree.starts(20, step | {"SLURM_PROCID": "2", "SLURM_STEP_ID": "1"}, torch=True)  # another program's
    assert node.look() == Observed()
    assert node.pids() == []
    node.on_gpu = {10: 0}
    node.look()
    assert node.pids() == [10, 11, 12]


HELPERS = {
    "a data loader": (rank(1, 8), 20),
    "a data loader that looks for no GPU": (rank(1, 8, CUDA_VISIBLE_DEVICES=""), 20),
    "an inference engine's worker, with a rank of its own": (rank(5, 8), 20),
    "the same, of a rank that holds a GPU": (rank(5, 8), 10),
    "preprocessing that a script runs before the training": (rank(2, 8), 30),
    "what left its parent": (rank(1, 8), 1),
    "what left a script that waits": (rank(2, 8), 1),
    "one whose rank holds a GPU already": (rank(0, 8), 1),
    "preprocessing by torchrun beside the training": (rank(3, 4), 1),
    "what a program made a rank of its own": ({"RANK": "3", "LOCAL_RANK": "3", "EAGLE_EYE_JOB": "llm"}, 1),
    "a launcher that we do not know": ({"SLURM_PROCID": "3", "EAGLE_EYE_JOB": "llm"}, 1),
}


@pytest.mark.parametrize(("environ", "parent"), HELPERS.values(), ids=HELPERS)
def test_what_fails_beside_ranks_that_start_is_no_rank(node: Node, environ: dict[str, str], parent: int) -> None:
    node.uuids.update(UUIDS)
    node.tree.starts(10, rank(0, 8), torch=True)
    node.on_gpu = {10: 0}
    node.tree.starts(20, rank(1, 8), torch=True)
    node.tree.starts(30, rank(2, 8), arguments="bash run.sh")
    node.tree.starts(40, environ, parent=parent, torch=True)
    for _ in range(20):
        node.look()
        assert node.pids()[:1] == [10]
        assert 40 not in node.pids()
    node.tree.ends(40, 1)
    assert node.look().events == []


def test_what_scripts_run_in_their_tasks_place_is_no_rank(node: Node) -> None:
    for number in range(2):
        task = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": str(number)}
        stated = task | {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": "2"}
        node.tree.starts(10 + number, task, arguments="bash run.sh")
        node.tree.starts(20 + number, stated, parent=10 + number, torch=True)
    node.on_gpu = {20: 0}
    assert [r.pid for r in node.settled().ranks] == [20]
    assert node.pids() == [20]


def test_a_launch_inside_a_rank_is_not_believed_before_it_computes(node: Node) -> None:
    node.uuids.update(UUIDS)
    node.tree.starts(10, rank(0), torch=True)
    node.tree.starts(40, rank(0, 1, TORCHELASTIC_RUN_ID="evaluation"), parent=10, torch=True)
    node.look()
    assert node.pids() == [10]
    node.on_gpu = {10: 0}
    node.look()
    assert node.pids() == [10]
    node.tree.ends(40, 1)
    assert node.look().events == []


def test_what_an_unseen_end_leaves_behind_is_no_rank(node: Node) -> None:
    node.tree.starts(10, rank(0), torch=True)
    node.look()
    node.tree.starts(11, rank(0), parent=10, torch=True)  # since the look
    node.tree.ends(10, 1)
    node.tree.starts(11, rank(0), torch=True)  # nobody's child any more
    assert len(node.look().events) == 1
    node.settled()
    assert node.pids() == []
    node.tree.ends(11, 1)
    assert node.look().events == []


def test_the_process_that_comes_to_hold_the_gpu_takes_over_silently(node: Node) -> None:
    node.tree.starts(10, rank(0), torch=True, arguments="python wrapper.py")
    node.look()
    assert node.pids() == [10]
    node.tree.starts(11, rank(0), parent=10, torch=True)
    node.on_gpu = {11: 1}
    seen = node.look()
    assert [(r.pid, r.device) for r in seen.ranks] == [(11, 1)]
    assert seen.problem == ""
    assert node.pids() == [11]
    node.tree.ends(10, 1)
    assert node.look().events == []
    node.tree.ends(11, 1)
    assert [event.attributes["pid"] for event in node.look().events] == [11]
    assert node.pids() == []


def test_a_rank_that_turns_out_to_launch_others_is_none(node: Node) -> None:
    node.tree.starts(10, rank(1), torch=True, arguments="python my_launcher.py")
    node.look()
    assert node.pids() == [10]
    node.tree.starts(20, rank(8, 16), parent=10, torch=True)
    node.on_gpu = {20: 0}
    assert [r.pid for r in node.look().ranks] == [20]
    node.tree.ends(10, 1)
    assert node.look().events == []


def test_a_rank_without_a_gpu_is_told_no_work_of(node: Node) -> None:
    node.tree.starts(10, rank(0), torch=True)
    node.tree.starts(20, rank(1, CUDA_VISIBLE_DEVICES="0"), torch=True)  # in a device group, as all others
    node.bus_ids.update({"0000:01:00.0": 0, "0000:02:00.0": 1})
    node.on_gpu = {10: 0}
    for pid, cpu_s in ((10, 5.0), (20, 7.0)):
        node.tree.works(pid, cpu_s=cpu_s, io_bytes=1)
    assert {device: row["rank_cpu_seconds_total"] for device, row in node.look().devices.items()} == {0: 5.0}


def test_in_a_job_on_gpus_nothing_else_is_a_rank_also_between_its_attempts(node: Node) -> None:
    slurm = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0"}
    node.tree.starts(6, slurm, torch=True)  # a launcher that we don't know
    node.tree.starts(10, slurm | rank(0), parent=6, torch=True)
    node.on_gpu = {10: 0}
    assert [r.pid for r in node.settled().ranks] == [10]
    node.tree.ends(10, 1)
    node.on_gpu = {}
    node.look()
    assert node.settled().ranks == []


def test_on_a_shared_host_only_processes_that_name_the_node_are_its_ranks(tmp_path: Path, clock: FakeClock) -> None:
    node = Node(ProcessTree(tmp_path / "proc"), clock, shared_host=True)
    node.tree.starts(10, rank(0, EAGLE_EYE_NODE="node17"), torch=True)
    node.tree.starts(20, rank(1, EAGLE_EYE_NODE="node18"), torch=True)
    node.tree.starts(30, rank(1), torch=True)
    node.on_gpu = {10: 0, 20: 1, 30: 1}
    assert [r.pid for r in node.look().ranks] == [10]


def test_several_jobs_and_mig_instances_are_told_apart(node: Node) -> None:
    node.uuids.update(UUIDS)
    node.tree.starts(10, rank(0, 1, EAGLE_EYE_JOB="a", CUDA_VISIBLE_DEVICES="MIG-cc"))
    node.tree.starts(20, rank(0, 1, EAGLE_EYE_JOB="b", CUDA_VISIBLE_DEVICES="GPU-b"))
    node.on_gpu = {10: 0, 20: 0}  # NVML names the whole GPU
    assert [(r.job, r.rank, r.device) for r in node.look().ranks] == [("a", 0, 5), ("b", 0, 1)]
    assert [(p.job, p.pid) for p in node.processes.all()] == [("a", 10), ("b", 20)]


def test_a_rank_moves_to_its_gpu_s_row_when_the_gpus_become_known(node: Node) -> None:
    node.tree.starts(10, rank(3, 4, CUDA_VISIBLE_DEVICES="GPU-bb"))
    node.hooked = {10}
    node.look()
    assert [process.device for process in node.processes.all()] == [3]
    node.uuids.update(UUIDS)
    node.look()
    assert [process.device for process in node.processes.all()] == [1]


def test_the_older_of_two_that_claim_a_rank_has_it_and_both_are_named(node: Node) -> None:
    node.tree.starts(10, rank(0))
    node.tree.starts(20, rank(0))
    node.on_gpu = {10: 0, 20: 1}
    seen = node.look()
    assert [r.pid for r in seen.ranks] == [10]
    assert "20 (rank 0 of 'llm')" in seen.problem
    assert "EAGLE_EYE_JOB" in seen.problem
    node.look()
    assert node.drops.snapshot() == {"process_rank_conflicts": 1}
    node.tree.ends(10)
    assert [r.pid for r in node.look().ranks if r.pid != 10] == [20]


def test_ranks_with_a_hook_are_published_and_not_reported(node: Node) -> None:
    node.tree.starts(10, rank(0))
    node.hooked = {10}
    assert node.look().ranks == []
    assert node.pids() == [10]
    node.hooked = set()  # the hook's reader saw the end first
    node.tree.ends(10, -11)
    assert node.look().events == []
    assert node.pids() == []
    assert node.drops.snapshot() == {}


def test_a_process_that_went_on_in_the_next_attempt_is_of_the_one_that_its_hook_reports(node: Node) -> None:
    node.tree.starts(10, rank(0, EAGLE_EYE_ATTEMPT="1"))
    node.hooked, node.attempts = {10}, {10: 1}
    node.look()
    node.attempts = {10: 2}
    node.look()
    assert [process.attempt for process in node.processes.all()] == [2]


def test_a_hook_that_reports_makes_its_process_a_rank_at_once(node: Node) -> None:
    node.tree.starts(10, rank(0))
    node.look()
    assert node.pids() == []
    node.hooked = {10}
    node.look()
    assert node.pids() == [10]


def test_an_end_is_told_with_its_code_and_the_rank_once_more(node: Node) -> None:
    node.tree.starts(10, rank(3, 8, EAGLE_EYE_ATTEMPT="2"))
    node.on_gpu = {10: 3}
    node.look()
    node.tree.ends(10, -11)
    assert node.wakes == 1
    seen = node.collector.happened()
    assert [r.rank for r in seen.ranks] == [3]
    attributes = {"exit_code": -11, "pid": 10, "goodbye": False, "rank": 3, "job": "llm", "attempt": 2}
    assert seen.events == [Event(node.clock.now_s(), "process_exit", 3, attributes)]
    assert node.look() == Observed()
    assert node.pids() == []


def test_an_end_whose_code_nobody_can_read_is_counted_and_no_event(node: Node) -> None:
    node.tree.starts(10, rank(0))
    node.on_gpu = {10: 0}
    node.look()
    node.tree.ends(10, None)
    assert node.look(1.0) == Observed()
    assert node.drops.snapshot() == {"exit_code_unread": 1}


def test_what_a_rank_leaves_behind_does_not_become_the_rank(node: Node) -> None:
    node.tree.starts(10, rank(0), torch=True)
    node.tree.starts(11, rank(0), parent=10, torch=True)
    assert [r.pid for r in node.settled().ranks] == [10]
    node.tree.becomes_zombie(10)
    node.tree.watcher.tells(10, 1)
    node.look()
    assert node.settled().ranks == []
    node.tree.starts(20, rank(0, TORCHELASTIC_RESTART_COUNT="1"), torch=True)
    assert [(r.pid, r.attempt) for r in node.settled().ranks] == [(20, 1)]


def test_an_id_that_another_process_took_over_is_that_process(node: Node) -> None:
    node.tree.starts(10, rank(0))
    node.on_gpu = {10: 0}
    node.look()
    node.tree.ends(10, 0)
    node.tree.starts(10, rank(1))
    node.look()
    (seen,) = node.look().ranks
    assert (seen.rank, seen.pid) == (1, 10)


def test_a_process_that_became_another_program_is_looked_at_again(node: Node) -> None:
    node.tree.starts(10, {"PATH": "/bin"})  # a wrapper script that execs the training
    node.look()
    (node.tree.root / "10" / "environ").write_bytes(b"RANK=0\0WORLD_SIZE=1\0")
    node.on_gpu = {10: 0}
    assert len(node.look().ranks) == 1


def test_a_rank_that_became_another_program_is_none_and_has_not_ended(node: Node) -> None:
    node.tree.starts(10, rank(0))
    node.on_gpu = {10: 0}
    node.look()
    (node.tree.root / "10" / "environ").write_bytes(b"PATH=/bin\0")
    assert node.look() == Observed()
    assert node.pids() == []
    assert node.drops.snapshot() == {"ranks_reconsidered": 1}
    assert node.tree.watcher.watched == set()


def test_a_zombie_is_no_rank(node: Node) -> None:
    node.tree.starts(10, rank(0))
    node.tree.becomes_zombie(10)
    node.on_gpu = {10: 0}
    assert node.look().ranks == []
    files = ProcessFiles(node.tree.root)
    stat = files.stat(10)
    assert stat is not None
    ranks = Ranks(node.processes, node.drops, files, set, node.wake, node.clock.now_s, node.tree.watcher)
    ranks.set_ranks([(TrainingProcess(10, "j", 0, 1, 0), stat.started)], {10})  # it ended since the look
    assert ranks.happened() == Observed()
    assert node.tree.watcher.watched == set()


def test_a_child_between_fork_and_exec_is_looked_at_again_soon(node: Node) -> None:
    for pid in range(100, 400):
        node.tree.starts(pid)
    node.look()
    node.tree.starts(900, {"PATH": "/bin"})  # its parent's environment
    node.look()
    (node.tree.root / "900" / "environ").write_bytes(b"RANK=0\0")
    node.look()
    assert list(node.collector._census.members) == [900]


def test_a_rank_s_work_is_that_of_its_process_and_of_all_that_descends_from_it(node: Node) -> None:
    node.tree.starts(10, rank(0))
    node.tree.starts(11, rank(0), parent=10)  # compiles for it
    node.tree.starts(12, rank(0), parent=11)
    node.tree.starts(20, rank(1))
    node.on_gpu = {10: 3, 20: 4}
    for pid, cpu_s in ((10, 5.0), (11, 2.0), (12, 1.5), (20, 7.0)):
        node.tree.works(pid, cpu_s=cpu_s, io_bytes=100 * pid, state="D" if pid == 20 else "S")
    seen = node.look()
    assert seen.devices == {
        3: {"rank_blocked_ratio": 0.0, "rank_cpu_seconds_total": 8.5, "rank_io_bytes_total": 3300.0},
        4: {"rank_blocked_ratio": 1.0, "rank_cpu_seconds_total": 7.0, "rank_io_bytes_total": 2000.0},
    }
    assert node.collector.collect(node.clock.now_s()).devices == {}


def test_of_a_family_too_large_to_be_read_nothing_is_told(node: Node) -> None:
    node.tree.starts(10, rank(0))
    for pid in range(11, 11 + FAMILY_MAX):
        node.tree.starts(pid, rank(0), parent=10)
    node.on_gpu = {10: 3}
    assert node.look().devices == {}
