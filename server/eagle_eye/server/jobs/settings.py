"""Settings for job sources: section [job_sources] of the server's configuration."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.server.model.bounds import Positive

Word = Annotated[str, Meta(min_length=1, max_length=256)]

SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


class SlurmSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How Slurm is queried. ``use`` "off": not at all; "squeue": with its commands; "rest": through slurmrestd."""

    use: Literal["off", "squeue", "rest"] = "off"
    every_s: Annotated[float, Meta(ge=1, le=600)] = 10.0  # between queries for jobs, each for all of them
    nodes_every_s: Annotated[float, Meta(ge=1, le=3_600)] = 60.0  # between queries for nodes
    timeout_s: Positive = 30.0  # for one answer
    format: Literal["auto", "json", "text"] = "auto"  # of squeue; auto: JSON from Slurm 23.02 on
    squeue: Word = "squeue"  # the command, or its path
    sinfo: Word = "sinfo"
    conf: str = ""  # SLURM_CONF for the commands; "": the server's own environment
    url: str = ""  # of slurmrestd: http(s)://HOST:PORT or unix:/PATH
    user: str = ""  # X-SLURM-USER-NAME; "": from the token
    token_file: str = ""  # a JWT, reread for each query; "": none, as over a Unix socket
    ca_file: str = ""  # CA certificates to verify slurmrestd's; "": the system's
    version: str = ""  # of slurmrestd's API, such as v0.0.42; "": its newest
    restart_owner: str = ""  # who restarts Slurm's jobs unless declared otherwise; "": we request it


class KubernetesSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which pods are watched. ``use`` "off": none; "watch": those of the API server at ``url``."""

    use: Literal["off", "watch"] = "off"
    url: str = ""  # "": as in a pod, https://$KUBERNETES_SERVICE_HOST:$KUBERNETES_SERVICE_PORT
    token_file: str = f"{SERVICE_ACCOUNT}/token"  # reread for each request; "": none
    ca_file: str = f"{SERVICE_ACCOUNT}/ca.crt"  # "": the system's certificates
    namespaces: Annotated[list[Word], Meta(max_length=64)] = []  # []: all, which requires a ClusterRole
    label_selector: str = ""  # which pods; "": those that have one of job_labels
    nodes: bool = True  # whether to watch for cordoned nodes as well
    # The first of these labels that a pod has names its job, as the agents' EAGLE_EYE_JOB does.
    job_labels: tuple[Word, ...] = (
        "eagle_eye_job",
        "jobset.sigs.k8s.io/jobset-name",
        "training.kubeflow.org/job-name",
        "volcano.sh/job-name",
        "leaderworkerset.sigs.k8s.io/name",
        "batch.kubernetes.io/job-name",
        "job-name",
    )
    # Likewise its attempt, as the agents' EAGLE_EYE_ATTEMPT; annotations count too.
    attempt_labels: tuple[Word, ...] = (
        "eagle_eye_attempt",
        "jobset.sigs.k8s.io/restart-attempt",
        "volcano.sh/job-version",
    )
    # Likewise its owner. Kubernetes itself does not know who created a pod.
    owner_labels: tuple[Word, ...] = ("eagle_eye_owner",)
    timeout_s: Positive = 30.0  # for an answer to begin
    watch_s: Annotated[float, Meta(ge=5, le=3_600)] = 300.0  # duration of one watch before the next
    restart_owner: str = ""  # who restarts these jobs unless declared otherwise; "": we request it


class JobSourceSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The schedulers, and how long a fault waits for their report."""

    # A fault that a scheduler may have caused is reported after this even without the scheduler's report.
    patience_s: Annotated[float, Meta(ge=1, le=600)] = 30.0
    slurm: SlurmSettings = SlurmSettings()
    kubernetes: KubernetesSettings = KubernetesSettings()


def check(settings: JobSourceSettings) -> None:
    """Raise ConfigurationError, naming the first inconsistent key, unless the settings are consistent."""
    slurm, kubernetes = settings.slurm, settings.kubernetes
    if slurm.use == "rest" and not slurm.url.startswith(("http://", "https://", "unix:/")):
        expected = "expected http(s)://HOST:PORT or unix:/PATH of slurmrestd"
        raise ConfigurationError(f"job_sources.slurm.url: {expected}, got {slurm.url!r}")
    if slurm.version and not re.fullmatch(r"v0\.0\.\d{2}", slurm.version):
        raise ConfigurationError(f"job_sources.slurm.version: expected one such as v0.0.42, got {slurm.version!r}")
    if kubernetes.url and not kubernetes.url.startswith(("http://", "https://")):
        raise ConfigurationError(f"job_sources.kubernetes.url: expected http(s)://HOST:PORT, got {kubernetes.url!r}")
    for key in ("job_labels", "attempt_labels", "owner_labels"):
        labels: tuple[str, ...] = getattr(kubernetes, key)
        for label in labels:
            if not re.fullmatch(r"([a-z0-9.-]+/)?[A-Za-z0-9][A-Za-z0-9_.-]*", label):
                raise ConfigurationError(f"job_sources.kubernetes.{key}: expected names of labels, got {label!r}")
