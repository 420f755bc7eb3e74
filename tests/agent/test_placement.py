from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.agent.processes import environment
from eagle_eye.agent.processes.environment import (
    BadEnvironment,
    cohort,
    identity,
    is_elastic_worker,
    launch,
    may_name_a_rank,
    variables,
)
from eagle_eye.agent.processes.process_files import is_launcher
from eagle_eye.agent.processes.rank_tracker import Candidate, Cgroup, choose, parse_cgroup
from eagle_eye.agent.training_hook.sender import Identity
from tests.agent.fakes import REPOSITORY


def block(environ: dict[str, str]) -> bytes:
    return b"".join(f"{name}={value}".encode("utf-8", "surrogateescape") + b"\0" for name, value in environ.items())


def who(environ: dict[str, str], slurm_job: str = "") -> tuple[str, int, int, int, int]:
    found = identity(variables(block(environ)), slurm_job)
    assert found is not None
    return found.job, found.attempt, found.rank, found.world_size, found.local_rank


TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
SRUN = {"SLURM_JOB_ID": "70", "SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}, ("default", 0, 5, 8, 1)),
        (TORCHRUN | {"TORCHELASTIC_RUN_ID": "r", "TORCHELASTIC_RESTART_COUNT": "2"}, ("r", 2, 5, 8, 1)),
        (SRUN, ("70", 0, 3, 4, 1)),
        (SRUN | {"SLURM_RESTART_COUNT": "1", "TORCHELASTIC_RESTART_COUNT": "9"}, ("70", 1, 3, 4, 1)),
        (SRUN | TORCHRUN, ("70", 0, 5, 8, 1)),  # srun torchrun: the task's number is the node's
        (SRUN | TORCHRUN | {"EAGLE_EYE_JOB": "j", "EAGLE_EYE_ATTEMPT": "4"}, ("j", 4, 5, 8, 1)),
        # an array's task and a requeued one have SLURM_JOB_ID of their own; a heterogeneous job has its leader's
        (SRUN | {"SLURM_ARRAY_JOB_ID": "60", "SLURM_ARRAY_TASK_ID": "2"}, ("70", 0, 3, 4, 1)),
        (
            SRUN | {"OMPI_COMM_WORLD_RANK": "9", "OMPI_COMM_WORLD_SIZE": "16", "OMPI_COMM_WORLD_LOCAL_RANK": "2"},
            ("70", 0, 9, 16, 2),
        ),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"}, ("default", 0, 1, 2, 1)),
        ({"JOB_COMPLETION_INDEX": "3", "WORLD_SIZE": "4", "EAGLE_EYE_JOB": "k"}, ("k", 0, 3, 4, 0)),
        (TORCHRUN | {"NVRX_CURRENT_CYCLE_INFO": "/l/nvrx/cycle_info.my.job.current"}, ("my.job", 0, 5, 8, 1)),
        ({"RANK": "5", "WORLD_SIZE": "2"}, ("default", 0, 5, 6, 0)),
        ({"RANK": "", "SLURM_PROCID": "2"}, ("default", 0, 2, 3, 0)),
    ],
)
def test_who_a_process_is(environ: dict[str, str], expected: tuple[str, int, int, int, int]) -> None:
    assert who(environ) == expected


@pytest.mark.parametrize("environ", [{}, {"PATH": "/bin"}, {"JOB_COMPLETION_INDEX": "3"}, {"LOCAL_RANK": "0"}])
def test_without_a_rank_there_is_none(environ: dict[str, str]) -> None:
    assert identity(variables(block(environ))) is None


def test_the_cgroup_names_the_job_only_where_the_environment_does_not() -> None:
    assert who(TORCHRUN, "81")[0] == "81"
    assert who(TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}, "81")[0] == "81"
    assert who(TORCHRUN | {"TORCHELASTIC_RUN_ID": "r"}, "81")[0] == "r"
    assert who(SRUN, "81")[0] == "70"


def test_the_role_is_ours_or_torchrun_s_where_it_has_a_name() -> None:
    roles = [
        identity(variables(block(TORCHRUN | more)))
        for more in ({"ROLE_NAME": "default"}, {"ROLE_NAME": "actor"}, {"ROLE_NAME": "a", "EAGLE_EYE_ROLE": "b"})
    ]
    assert [role.role for role in roles if role] == ["", "actor", "b"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("RANK", "99999999999"),
        ("RANK", "-1"),
        ("RANK", "1e3"),
        ("RANK", "٣"),
        ("WORLD_SIZE", "99999999"),
        ("LOCAL_RANK", "1024"),
        ("SLURM_RESTART_COUNT", "soon"),
        ("EAGLE_EYE_ATTEMPT", "999999999"),
        ("EAGLE_EYE_JOB", "a\nb"),
        ("EAGLE_EYE_JOB", "j" * 254),
        ("EAGLE_EYE_JOB", "\udcff"),
        ("EAGLE_EYE_ROLE", "\x1b[2J"),
    ],
)
def test_a_value_that_is_not_what_it_should_be_refuses_the_process(name: str, value: str) -> None:
    with pytest.raises(BadEnvironment):
        identity(variables(block(TORCHRUN | {name: value})))


@given(st.binary(max_size=300), st.sampled_from([b"", b"RANK=", b"RANK=1\0EAGLE_EYE_JOB="]))
def test_any_bytes_are_an_identity_none_or_refused(data: bytes, before: bytes) -> None:
    try:
        found = identity(variables(before + data))
    except BadEnvironment:
        return
    assert found is None or (found.job.isprintable() and 0 < len(found.job) <= 253 and 0 <= found.rank < 1 << 24)
    assert found is None or may_name_a_rank(before + data)


def test_of_two_values_the_first_counts_as_in_the_process_itself() -> None:
    assert variables(b"XRANK=3\0RANK=1\0RANK=2\0") == {"RANK": "1"}


def test_a_launcher_is_not_of_its_ranks_cohort() -> None:
    ranks = [SRUN | TORCHRUN | {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"} for rank in (0, 1)]
    assert launch(ranks[0]) != launch(ranks[1])
    assert cohort(ranks[0]) == cohort(ranks[1]) != cohort(SRUN)
    assert cohort(SRUN) == cohort(SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    for other in ({"WORLD_SIZE": "4"}, {"SLURM_STEP_ID": "1"}, {"TORCHELASTIC_RUN_ID": "r"}):
        assert cohort(ranks[0] | other) != cohort(ranks[0])


def test_only_an_elastic_launcher_proves_a_rank_without_a_gpu() -> None:
    elastic = TORCHRUN | {"TORCHELASTIC_RUN_ID": "none"}
    assert is_elastic_worker(elastic)
    assert not is_elastic_worker(SRUN | TORCHRUN)  # as programs set them for the processes that they start
    assert not is_elastic_worker(SRUN | {"TORCHELASTIC_RUN_ID": "r", "RANK": "1"})
    assert not is_elastic_worker(elastic | {"CUDA_VISIBLE_DEVICES": ""})
    assert not is_elastic_worker(elastic | {"CUDA_VISIBLE_DEVICES": "-1"})
    assert is_elastic_worker(elastic | {"CUDA_VISIBLE_DEVICES": "0,1"})


def test_a_launch_is_what_launchers_change_and_ranks_do_not() -> None:
    assert launch(SRUN) != launch(SRUN | TORCHRUN)
    assert launch(TORCHRUN) == launch(TORCHRUN | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})


POD = "f81d4fae-7dec-11d0-a765-00a0c91e6bf6"
UNIT = POD.replace("-", "_")  # as systemd's slices write it
CONTAINER = "9" * 64


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n", Cgroup("7")),
        ("0::/system.slice/n1_slurmstepd.scope/job_7/step_batch/user/task_special", Cgroup("7")),
        ("11:cpuset:/slurm/uid_1000/job_81/step_extern\n1:name=systemd:/x", Cgroup("81")),
        ("4:memory:/slurm_n1/uid_0/job_81\n", Cgroup("81")),
        (f"0::/kubepods/burstable/pod{POD}/{CONTAINER}", Cgroup("", POD)),
        (
            f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UNIT}.slice/crio-{CONTAINER}.scope",
            Cgroup("", POD),
        ),
        (f"5:devices:/kubepods.slice/kubepods-pod{UNIT}.slice:cri-containerd:abc", Cgroup("", POD)),
        (f"0::/../../pod{POD}/{CONTAINER}", Cgroup("", POD)),
        ("0::/kubepods/podaaaabbbbccccddddaaaabbbbccccdddd/x", Cgroup("", "aaaabbbbccccddddaaaabbbbccccdddd")),
        ("0::/user.slice/user-1000.slice/session-3.scope", Cgroup()),
        ("0::/user.slice/job_7/step_0", Cgroup()),
        (f"0::/machine.slice/libpod-{CONTAINER}.scope", Cgroup()),
        ("", Cgroup()),
        (":::::\n0::", Cgroup()),
    ],
)
def test_who_owns_a_control_group(text: str, expected: Cgroup) -> None:
    assert parse_cgroup(text) == expected


@given(st.text(alphabet="/:_-.0123456789jobpdslurmuite\n", max_size=200))
def test_any_control_group_is_an_owner_or_none(text: str) -> None:
    found = parse_cgroup(text)
    assert found.slurm_job == "" or found.slurm_job.isdecimal()


def candidate(
    pid: int, parent: int = 1, rank: int = 0, *, certain: bool = False, trains: bool = True, launched: bool = False
) -> Candidate:
    environ = TORCHRUN | {"RANK": str(rank)}
    return Candidate(
        *(pid, parent, pid, Identity.of(environ), launch(environ), cohort(environ)),
        elastic=launched, certain=certain, trains=trains, launched=launched, waited=not launched,
    )  # fmt: skip


def test_parents_that_form_a_ring_are_no_endless_way_up() -> None:
    ring = {1: candidate(1, 2), 2: candidate(2, 1), 3: candidate(3, 3)}
    choice = choose(ring)
    assert [item.pid for item in choice.ranks.values()] == [1]


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(0, 3), st.booleans(), st.booleans())),
    st.booleans(),
)
def test_no_two_processes_are_one_rank_and_none_is_another_s_child(
    items: list[tuple[int, int, int, bool, bool]], launched: bool
) -> None:
    candidates = {
        pid: candidate(pid, parent, rank, certain=certain and launched, trains=trains, launched=launched)
        for pid, parent, rank, certain, trains in items
    }
    choice = choose(candidates)
    chosen = list(choice.ranks.values())
    assert len({item.key for item in chosen}) == len(chosen)
    assert launched or len({item.certain for item in chosen}) <= 1
    assert len({item.launch for item in chosen if not item.certain}) == len([i for i in chosen if not i.certain])
    for item in chosen:
        assert candidates.get(item.parent) not in chosen or item.parent >= item.pid


def test_an_empty_command_line_is_no_launcher() -> None:
    assert not is_launcher([])
    assert not is_launcher(["python", "-m"])
    assert not is_launcher(["python3.11", "-c", "torchrun"])
    assert is_launcher(["/opt/bin/python3.11", "-X", "dev", "/opt/bin/torchrun"])


def test_the_page_names_every_variable_that_is_read() -> None:
    page = (REPOSITORY / "docs" / "explanation" / "who-runs-here.md").read_text(encoding="utf-8")
    assert [name for name in environment._WANTED if f"`{name}`" not in page] == []
