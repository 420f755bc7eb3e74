"""What a job source is: its settings, its protocol, and a scheduler's reports on its jobs and nodes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Annotated, Literal, Protocol

import msgspec
from msgspec import Meta

from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.server.model import Positive
from eagle_eye.server.model.errors import ServerError
from eagle_eye.server.model.records import NodeState

# Section [job_sources] of the server's configuration.

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


def check_settings(settings: JobSourceSettings) -> None:
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


# A scheduler's reports.

KnownState = Literal[
    "pending",
    "running",
    "suspended",
    "completing",
    "cancelled",
    "preempted",
    "timeout",
    "failed",
    "finished",
]
# "" if a source cannot tell: then the earlier state stays.
ScheduledState = Literal["", KnownState]
HELD_STATES = frozenset({"running", "suspended", "completing"})  # in which a job has its nodes
OVER_STATES = frozenset({"cancelled", "preempted", "timeout", "failed", "finished"})

JOBS_MAX = 100_000  # per answer; a larger answer is refused
NODES_MAX = 100_000
TEXT_CHARS_MAX = 256  # of a reason, or a user's name


class SourceFailed(ServerError):
    """A scheduler could not be queried, or its answer is unusable; it never means that there are no jobs.

    ``reason`` is one stable word for counters: missing, timeout, refused, unauthorised, oversized, malformed, status.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ScheduledJob:
    """One job. ``id`` is the scheduler's, ``name`` the one agents would use, ``said`` the scheduler's word for it.

    ``attempt`` counts its restarts. ``nodes`` are the scheduler's names, () if it holds none. ``started_s`` and
    ``ends_s`` are when this run began and when its time limit ends it; None: not begun, no limit, or unknown. ``owner``
    is the user who owns the job, "" if unknown.
    """

    id: str
    name: str
    state: ScheduledState
    attempt: int = 0
    nodes: tuple[str, ...] = ()
    started_s: float | None = None
    ends_s: float | None = None
    said: str = ""
    owner: str = ""


@dataclass(frozen=True, slots=True)
class ScheduledNode:
    """One node: whether it is in service with the scheduler ("" if unknown), and why not.

    ``drained``: somebody drained it; it did not just fail. ``maintenance``: it is reserved for that.
    """

    name: str
    state: NodeState | Literal[""]
    reason: str = ""
    drained: bool = False
    maintenance: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All jobs that a scheduler knows, at ``asked_s`` (the server's clock) or later.

    A job that is missing is gone. ``nodes`` None: not queried this time. ``left_out`` counts unusable parts of the
    answer, by reason.
    """

    asked_s: float
    jobs: tuple[ScheduledJob, ...]
    nodes: tuple[ScheduledNode, ...] | None = None
    left_out: dict[str, int] = field(default_factory=dict)


class JobSource(Protocol):
    """A scheduler that can be queried."""

    @property
    def name(self) -> str:
        """The source's name in records, metrics and logs."""
        ...

    @property
    def patience_s(self) -> float:
        """How long it may be silent before the server counts as not knowing its state."""
        ...

    def snapshots(self, sooner: asyncio.Event) -> AsyncGenerator[Snapshot, None]:
        """Yield the scheduler's reports at the source's own interval, and at once when ``sooner`` is set.

        Raises SourceFailed; the caller then starts it again after a delay.
        """
        ...
