"""The interface of the detection loop for the rest of the server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from itertools import islice
from typing import NamedTuple, Protocol, TypeVar

from eagle_eye.detectors.signs.learned_model import LearnedModel
from eagle_eye.schema.frame import Frame
from eagle_eye.server.engine.judgement import NOTHING_REPORTED, AttemptCheckpoints, SchedulerReports
from eagle_eye.server.engine.policy import Weighing
from eagle_eye.server.engine.settings import PolicySettings
from eagle_eye.server.ingest.fleet import Resends
from eagle_eye.server.model.batch import Batch
from eagle_eye.server.model.records import Incident, Job
from eagle_eye.server.store.store import Store
from eagle_eye.server.telemetry.counters import Latencies

ResultT = TypeVar("ResultT")

ANSWER_S = 10.0  # how long a thread waits for the event loop


class Latest(NamedTuple):
    """The newest value of one series; ``device`` is an index, a link's name, or None for a node row."""

    metric: str
    job: str
    node: str
    device: int | str | None
    value: float


class StepProgress(NamedTuple):
    """A job's progress; None means not observed. ``nodes`` are its members as far as they are known."""

    step: float | None
    progressed_s: float | None  # when its last step was seen to finish
    step_s: float | None  # typical duration of a step
    checkpoints: AttemptCheckpoints = NOTHING_REPORTED
    nodes: tuple[str, ...] = ()
    log: str = ""  # that its log goes on and no step is read in it


class JobProgress(NamedTuple):
    """The progress of a job's latest attempt, and who takes part; None means not observed.

    ``state`` is the scheduler's, or "running" for jobs that were not ``declared``. ``gpus`` counts device rows, or
    those of ranks where these are known. ``heard`` of the nodes were heard recently; ``metrics`` are those that any of
    them sent in this attempt. ``restart_owner`` is who restarts it; ``owner`` is the job's user, "" if unknown.
    """

    job: str
    attempt: int
    state: str
    declared: bool
    started_s: float
    first_step: float | None  # the first one that was seen to finish
    step: float | None
    progressed_s: float | None  # when its last step was seen to finish
    step_s: float | None
    nodes: tuple[str, ...]
    gpus: int | None
    heard: int = 0
    metrics: frozenset[str] = frozenset()
    restart_owner: str = ""
    ends_s: float | None = None  # when its time limit ends it
    owner: str = ""


class IncidentCounts(NamedTuple):
    """Counts since the start: incident events held back because of their rate, and escalations."""

    events_kept_back: int
    escalations: int


class JobShare(Protocol):
    """Which jobs a server judges, of those of the site."""

    def mine(self, job: str) -> bool:
        """Return whether the job is judged here, as far as is known; at once. "" are the nodes without a job."""
        ...

    def still_mine(self, store: Store, job: str) -> bool:
        """Return whether the job is judged here by the records, within the transaction that writes its judgement."""
        ...


class AllJobs:
    """All jobs: there are no cells."""

    def mine(self, job: str) -> bool:  # noqa: ARG002
        """Return True."""
        return True

    def still_mine(self, store: Store, job: str) -> bool:  # noqa: ARG002
        """Return True."""
        return True


ALL_JOBS = AllJobs()


class Watcher(Protocol):
    """The detection loop: fed with frames and schedulers' reports, it evaluates jobs and writes to the store.

    Every method but ``ticked_s`` and ``judged_s`` is called on the event loop only (``recover`` before anything else
    runs), so that it needs no locks; each must return at once.
    """

    def observe(self, frame: Frame, received_s: float, offset_s: float) -> None:
        """Take a durable frame. Its times are already corrected by ``offset_s``."""
        ...

    def observe_rows(self, batches: Sequence[Batch], /) -> None:
        """Take durable rows of numbers, each batch of one layout."""
        ...

    def observe_job(self, job: Job) -> None:
        """Take a job's state as its scheduler or launcher reported it."""
        ...

    def judge_share(self, share: JobShare) -> None:
        """Judge only the jobs of this share from now on."""
        ...

    def take_over(self, job: str) -> None:
        """Judge a job from now on that another cell judged."""
        ...

    def give_up(self, job: str) -> None:
        """Drop what is known of a job that another cell judges from now on."""
        ...

    def observe_scheduler(self, word: SchedulerReports) -> None:
        """Take which jobs a scheduler reported, and when."""
        ...

    def call_schedulers(self, ask: Callable[[], None]) -> None:
        """Call ``ask`` whenever a fault needs a scheduler's report."""
        ...

    def count_fleet(self, count: Callable[[], int]) -> None:
        """Have policy call ``count`` for the size of the fleet."""
        ...

    def recover(self, past: Iterable[tuple[Frame, float] | Batch]) -> None:
        """Rebuild what was known before a restart from the recent past's rows and (corrected frame, received_s)."""
        ...

    def follow(self, resends: Resends, past: Callable[[], Iterable[tuple[Frame, float] | Batch]]) -> None:
        """Rebuild the windows from ``past()`` once agents have sent again what another server had of them."""
        ...

    def use_model(self, model: LearnedModel | str) -> None:
        """Use this model of healthy nodes from now on; a text gives the reason why there is none."""
        ...

    def use_policy(self, policy: PolicySettings) -> None:
        """Use these policy settings from the next tick on."""
        ...

    async def run(self) -> None:
        """Evaluate all jobs every tick until cancelled."""
        ...

    @property
    def tick_seconds(self) -> Latencies:
        """Durations of the passes over all jobs."""
        ...

    def ticked_s(self) -> float | None:
        """Return when the last tick ended, by the clock's ``monotonic_s``; None before the first."""
        ...

    def judged_s(self) -> float | None:
        """Return when all jobs were judged last, what follows from it on record or not; None before the first time."""
        ...

    def latest(self) -> Iterable[Latest]:
        """Return the newest value of each series."""
        ...

    def blind(self) -> dict[str, str]:
        """Return the detectors that could evaluate nothing in the last tick, each with its reason."""
        ...

    def drops(self) -> dict[str, int]:
        """Return how much was left out of the windows of jobs in memory, by reason."""
        ...

    def incident_counts(self) -> IncidentCounts:
        """Return the counts of incident events since the start."""
        ...

    def progress(self, job: str) -> StepProgress | None:
        """Return the job's progress, or None for a job that no agent reports."""
        ...

    def courses(self) -> list[JobProgress]:
        """Return the progress of each job evaluated in the last tick."""
        ...

    def explain(self, incident: Incident) -> Weighing | None:
        """Return policy's current assessment of the incident, or None when its attempt is no longer evaluated."""
        ...

    def policy(self) -> PolicySettings:
        """Return the current policy settings."""
        ...


class Outlook:
    """Thread-safe queries of a Watcher for the API and the metrics: each query runs on the event loop."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: int | None = None

    def attach(self) -> None:
        """Bind to the running loop; before this, queries run in the calling thread."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    def latest(self, series_max: int) -> tuple[list[Latest], bool]:
        """Return at most ``series_max`` newest values, and whether there are more."""

        def take() -> list[Latest]:
            return list(islice(self._watcher.latest(), series_max + 1))

        found = self._ask(take)
        return found[:series_max], len(found) > series_max

    def blind(self) -> dict[str, str]:
        """Return the detectors that could evaluate nothing in the last tick, each with its reason."""
        return self._ask(self._watcher.blind)

    def drops(self) -> dict[str, int]:
        """Return how much was left out of the windows of jobs in memory, by reason."""
        return self._ask(self._watcher.drops)

    def incident_counts(self) -> IncidentCounts:
        """Return the counts of incident events since the start."""
        return self._ask(self._watcher.incident_counts)

    def courses(self) -> list[JobProgress]:
        """Return the progress of each job evaluated in the last tick."""
        return self._ask(self._watcher.courses)

    def progress(self, job: str) -> StepProgress | None:
        """Return the job's progress, or None for a job that no agent reports."""
        return self._ask(lambda: self._watcher.progress(job))

    def explain(self, incident: Incident) -> Weighing | None:
        """Return policy's current assessment of the incident, or None when its attempt is no longer evaluated."""
        return self._ask(lambda: self._watcher.explain(incident))

    def policy(self) -> PolicySettings:
        """Return the current policy settings."""
        return self._ask(self._watcher.policy)

    def _ask(self, question: Callable[[], ResultT]) -> ResultT:
        loop = self._loop
        if loop is None or threading.get_ident() == self._thread:
            return question()
        answer: Future[ResultT] = Future()

        def run() -> None:
            try:
                answer.set_result(question())
            except Exception as error:  # noqa: BLE001 - raised again in the calling thread
                answer.set_exception(error)

        loop.call_soon_threadsafe(run)
        return answer.result(ANSWER_S)
