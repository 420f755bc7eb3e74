from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.agent.processes.environment import BadEnvironment, identity, may_name_a_rank, variables
from eagle_eye.agent.training_hook.launch_variables import ATTEMPTS, JOBS, RANK_SOURCES, RankPlace, job, place
from eagle_eye.agent.training_hook.sender import Identity

SLURM = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}
NAMES = sorted({name for source in RANK_SOURCES for name in source[:3] if name} | {*JOBS, *ATTEMPTS})
VALUES = st.one_of(
    st.integers(0, 1_100).map(str), st.sampled_from(["", "none", "x", "-1", "007", "9999999999", "٣", " 5", "a\nb"])
)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, RankPlace(None, None, None)),
        ({"WORLD_SIZE": "4", "LOCAL_RANK": "1"}, RankPlace(None, 4, 1)),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"} | SLURM, RankPlace(5, 8, 1)),
        (SLURM, RankPlace(1, 2, 0)),
        (
            {"OMPI_COMM_WORLD_RANK": "9", "OMPI_COMM_WORLD_SIZE": "16", "OMPI_COMM_WORLD_LOCAL_RANK": "3"} | SLURM,
            RankPlace(9, 16, 3),
        ),
        (
            {"MV2_COMM_WORLD_RANK": "9", "MV2_COMM_WORLD_SIZE": "16", "MV2_COMM_WORLD_LOCAL_RANK": "3"} | SLURM,
            RankPlace(9, 16, 3),
        ),
        ({"PMI_RANK": "9", "PMI_SIZE": "16", "MPI_LOCALRANKID": "3"} | SLURM, RankPlace(9, 16, 3)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"} | SLURM, RankPlace(1, 2, 0)),  # srun --mpi=pmi2
        ({"PMIX_RANK": "1"} | SLURM, RankPlace(1, 2, 0)),  # srun --mpi=pmix
        ({"PMIX_RANK": "7", "OMPI_COMM_WORLD_RANK": "9", "OMPI_COMM_WORLD_SIZE": "16"}, RankPlace(9, 16, None)),
        ({"PMIX_RANK": "3"}, RankPlace(3, None, None)),
        ({"JOB_COMPLETION_INDEX": "3", "WORLD_SIZE": "4"}, RankPlace(3, 4, None)),
        ({"JOB_COMPLETION_INDEX": "3"}, RankPlace(None, None, None)),
        ({"RANK": "", "OMPI_COMM_WORLD_RANK": "-1", **SLURM}, RankPlace(1, 2, 0)),
        ({"RANK": "٣"}, RankPlace(None, None, None)),
    ],
)
def test_the_first_that_numbers_the_process_counts(environ: dict[str, str], expected: RankPlace) -> None:
    assert place(environ) == expected


@pytest.mark.parametrize("source", RANK_SOURCES, ids=lambda source: source.rank)
def test_hook_and_observer_know_every_launcher(source: tuple[str, str, str, bool]) -> None:
    rank, size, local, _ = source
    environ = {name: value for name, value in ((rank, "3"), (size, "8"), (local, "1")) if name}
    hook = Identity.of(environ)
    assert (hook.rank, hook.world_size, hook.local_rank) == (3, 8 if size else 4, 1 if local else 0)
    block = b"".join(f"{name}={value}\0".encode() for name, value in environ.items())
    assert may_name_a_rank(block)
    assert identity(variables(block)) == hook


@given(st.dictionaries(st.sampled_from(NAMES), VALUES))
def test_what_the_observer_believes_the_hook_says_too(environ: dict[str, str]) -> None:
    try:
        found = identity(environ)
    except BadEnvironment:
        return
    assert found in (None, Identity.of(environ))
    assert (found is None) == (place(environ).rank is None)


def test_none_is_torchrun_s_word_for_no_name_and_nobody_else_s() -> None:
    assert job({"TORCHELASTIC_RUN_ID": "none"}) == ""
    assert job({"TORCHELASTIC_RUN_ID": "none", "EAGLE_EYE_JOB": "none"}) == "none"


def test_the_names_bring_nothing_into_a_training_process() -> None:
    script = (
        "import sys, typing, collections.abc; before = set(sys.modules)\n"
        "import eagle_eye.agent.training_hook.launch_variables\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [
        "__future__",
        "eagle_eye",
        "eagle_eye.agent",
        "eagle_eye.agent.training_hook",
        "eagle_eye.agent.training_hook.launch_variables",
    ]
