"""Creates the schedulers' sources that are configured."""

from __future__ import annotations

from collections.abc import Mapping

from eagle_eye.server.jobs.kubernetes import Kubernetes
from eagle_eye.server.jobs.settings import JobSourceSettings
from eagle_eye.server.jobs.slurm_rest import SlurmRest
from eagle_eye.server.jobs.slurm_squeue import Squeue
from eagle_eye.server.jobs.source import JobSource
from eagle_eye.server.model.clock import Clock


def sources_of(settings: JobSourceSettings, clock: Clock, environ: Mapping[str, str]) -> list[tuple[JobSource, str]]:
    """Return the configured sources, each with the restart owner of its jobs; [] for none."""
    found: list[tuple[JobSource, str]] = []
    slurm, kubernetes = settings.slurm, settings.kubernetes
    if slurm.use == "squeue":
        found.append((Squeue(slurm, clock), slurm.restart_owner))
    elif slurm.use == "rest":
        found.append((SlurmRest(slurm, clock), slurm.restart_owner))
    if kubernetes.use == "watch":
        found.append((Kubernetes(kubernetes, clock, environ), kubernetes.restart_owner))
    return found
