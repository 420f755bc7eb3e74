"""The job sources put together from a server's parts."""

from __future__ import annotations

import os
from collections.abc import Mapping

from eagle_eye.server.clock import Clock
from eagle_eye.server.fleet import Fleet
from eagle_eye.server.job_sources.keeper import JobSources
from eagle_eye.server.job_sources.kubernetes import Kubernetes
from eagle_eye.server.job_sources.settings import JobSourceSettings
from eagle_eye.server.job_sources.slurm_rest import SlurmRest
from eagle_eye.server.job_sources.slurm_squeue import Squeue
from eagle_eye.server.job_sources.source import JobSource
from eagle_eye.server.store import Store
from eagle_eye.server.telemetry import JobSourceCollector, Telemetry
from eagle_eye.server.watching import Watcher


def build(
    settings: JobSourceSettings, store: Store, clock: Clock, fleet: Fleet, watcher: Watcher, telemetry: Telemetry
) -> JobSources:
    """Return the sources that the configuration asks for, with their metrics."""
    found = sources_of(settings, clock, os.environ)
    sources = JobSources(found, settings.patience_s, store, clock, fleet, watcher, telemetry)
    if found:
        telemetry.registry.register(JobSourceCollector(sources.ages_s, sources.counts))
    return sources


def sources_of(settings: JobSourceSettings, clock: Clock, environ: Mapping[str, str]) -> list[tuple[JobSource, str]]:
    """Return the sources that the configuration asks for, each with whoever restarts its jobs; [] for none."""
    found: list[tuple[JobSource, str]] = []
    slurm, kubernetes = settings.slurm, settings.kubernetes
    if slurm.use == "squeue":
        found.append((Squeue(slurm, clock), slurm.restart_owner))
    elif slurm.use == "rest":
        found.append((SlurmRest(slurm, clock), slurm.restart_owner))
    if kubernetes.use == "watch":
        found.append((Kubernetes(kubernetes, clock, environ), kubernetes.restart_owner))
    return found
