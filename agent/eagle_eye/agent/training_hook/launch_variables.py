"""The environment variables by which launchers give processes their job and rank, in order of precedence.

One table for the training hook, which reads its own environment, and for the agent, which reads other processes': both
agree about a process. It is imported into training processes, so it contains only names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

DIGITS_MAX = 9  # of a number


class RankSource(NamedTuple):
    """One launcher's numbering: the variables of the rank, the world size and the local rank; "": none."""

    rank: str
    size: str
    local: str
    sized: bool = False  # whether the rank counts only if the size is also set


_TORCHRUN = RankSource("RANK", "WORLD_SIZE", "LOCAL_RANK")  # and its imitators
_SLURM = RankSource("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
RANK_SOURCES = (
    _TORCHRUN,
    # MPI's before Slurm's: mpirun's daemon is a Slurm task itself, and its ranks inherit the daemon's SLURM_PROCID.
    RankSource("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),  # Open MPI
    RankSource("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK"),  # MVAPICH2's mpirun_rsh
    RankSource("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),  # MPICH's Hydra, Intel MPI, srun --mpi=pmi2
    RankSource("PMIX_RANK", "", ""),  # PRRTE, srun --mpi=pmix: the rest is behind PMIx's own socket
    _SLURM,
    # An indexed Kubernetes job: its manifest gives the size where the indexes are ranks.
    RankSource("JOB_COMPLETION_INDEX", "WORLD_SIZE", "LOCAL_RANK", sized=True),
)
JOBS = ("EAGLE_EYE_JOB", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID")
ATTEMPTS = ("EAGLE_EYE_ATTEMPT", "SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")


class RankPlace(NamedTuple):
    """The process's place among the job's, from the environment; None: unknown."""

    rank: int | None
    size: int | None
    local_rank: int | None


def place(environ: Mapping[str, str]) -> RankPlace:
    """Return the first source's numbers, completed from torchrun or Slurm. Invalid numbers count as unset."""
    source = next((item for item in RANK_SOURCES if _numbers(item, environ)), None) or RankSource("", "", "")
    return RankPlace(
        _number(environ, source.rank),
        _number(environ, _TORCHRUN.size, source.size, _SLURM.size),
        _number(environ, _TORCHRUN.local, source.local, _SLURM.local),
    )


def attempt(environ: Mapping[str, str]) -> int:
    """Return how often the job was restarted, as far as the environment says."""
    return _number(environ, *ATTEMPTS) or 0


def job(environ: Mapping[str, str]) -> str:
    """Return the job's name; "": unnamed."""
    run = environ.get("TORCHELASTIC_RUN_ID", "")
    named = environ.get("EAGLE_EYE_JOB") or environ.get("SLURM_JOB_ID")
    return named or (run if run != "none" else "")  # torchrun's default id is the word none


def is_number(text: str) -> bool:
    """Whether a variable holds a number as launchers write them."""
    return text.isascii() and text.isdecimal() and len(text) <= DIGITS_MAX


def _numbers(source: RankSource, environ: Mapping[str, str]) -> bool:
    return _number(environ, source.rank) is not None and (not source.sized or _number(environ, source.size) is not None)


def _number(environ: Mapping[str, str], *names: str) -> int | None:
    return next((int(text) for name in names if is_number(text := environ.get(name, ""))), None)
