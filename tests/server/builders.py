"""What the server's tests share: a clock that moves when told to, frames, records, and a server that listens."""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import ssl
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from eagle_eye.detectors.signs.learned_model import LearnedModel
from eagle_eye.schema.frame import CONTENT_TYPE, Frame, Rank, block, encode_frame, encode_request
from eagle_eye.schema.metrics import Scope
from eagle_eye.schema.rows import decode_template, read_row, template_of_row
from eagle_eye.server import config as configuration
from eagle_eye.server.app import create_app
from eagle_eye.server.command import connection_options
from eagle_eye.server.config import ServerConfig
from eagle_eye.server.engine.judgement import AttemptCheckpoints, SchedulerReports
from eagle_eye.server.engine.policy import Weighing
from eagle_eye.server.engine.settings import PolicySettings
from eagle_eye.server.history.history import Recorded, RecordedRow
from eagle_eye.server.ingest.fleet import Resends
from eagle_eye.server.model.batch import Batch, StreamRef
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.model.records import Action, Incident, Job, NewsSilence, OutboundEvent, Subscription
from eagle_eye.server.monitor.watcher import IncidentCounts, JobProgress, JobShare, Latest, StepProgress
from eagle_eye.server.parts import Services, WatcherFactory, build_watcher
from eagle_eye.server.store.sql_store import RECORDS_FILE, SqlStore, open_file
from eagle_eye.server.telemetry import logs
from eagle_eye.server.telemetry.counters import Latencies
from eagle_eye.server.transport.connections import AcceptingServer
from eagle_eye.server.web.dispatcher import Dispatcher
from tests.server.described import check_answer

NOW = 1_700_000_000.0
SECRET = "whsec_" + "A" * 43 + "="

UNREAD_LOG = "12,300 lines of the job's log, none read since step 7"


@dataclass
class FakeClock:
    """Moves only when told to."""

    time_s: float = NOW

    def now_s(self) -> float:
        return self.time_s

    def monotonic_s(self) -> float:
        return self.time_s

    def advance(self, seconds: float) -> None:
        self.time_s += seconds


class Reached:
    """The records, which cannot be used while they are ``away``."""

    def __init__(self, store: SqlStore) -> None:
        self.away = False
        self._store = store

    def __getattr__(self, name: str) -> Any:
        if self.away:
            raise StoreUnavailable("the database is away")
        return getattr(self._store, name)


@dataclass
class FakeWatcher:
    """Judges nothing; remembers what it was told."""

    clock: Clock
    frames: list[tuple[Frame, float, float]] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    recovered: list[tuple[Frame, float]] = field(default_factory=list)
    words: list[SchedulerReports] = field(default_factory=list)
    ask_schedulers: Callable[[], None] = lambda: None
    fleet_size: Callable[[], int] = lambda: 0
    models: list[LearnedModel | str] = field(default_factory=list)
    policies: list[PolicySettings] = field(default_factory=list)
    course: list[JobProgress] = field(default_factory=list)
    stuck: bool = False
    weighing: Weighing | None = None
    tick_seconds: Latencies = field(default_factory=lambda: Latencies("eagle_eye_detection_seconds", "", (1.0,)))

    def observe(self, frame: Frame, received_s: float, offset_s: float) -> None:
        self.frames.append((frame, received_s, offset_s))

    def observe_rows(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            self.frames.extend((frame, received_s, 0.0) for frame, received_s in frames_of(batch))

    def observe_job(self, job: Job) -> None:
        self.jobs.append(job)

    def judge_share(self, share: JobShare) -> None:
        self.share = share

    def take_over(self, job: str) -> None:
        self.taken_over = job

    def give_up(self, job: str) -> None:
        self.given_up = job

    def observe_scheduler(self, word: SchedulerReports) -> None:
        self.words.append(word)

    def call_schedulers(self, ask: Callable[[], None]) -> None:
        self.ask_schedulers = ask

    def count_fleet(self, count: Callable[[], int]) -> None:
        self.fleet_size = count

    def follow(self, resends: Resends, past: Any) -> None:
        self.resends, self.past = resends, past

    def recover(self, past: Iterable[tuple[Frame, float] | Batch]) -> None:
        for one in past:
            self.recovered.extend(frames_of(one) if isinstance(one, Batch) else [one])

    def use_model(self, model: LearnedModel | str) -> None:
        self.models.append(model)

    def use_policy(self, policy: PolicySettings) -> None:
        self.policies.append(policy)

    async def run(self) -> None:
        await asyncio.Event().wait()

    def ticked_s(self) -> float | None:
        return None if self.stuck else self.clock.monotonic_s()

    def judged_s(self) -> float | None:
        return self.ticked_s()

    def latest(self) -> list[Latest]:
        return [
            Latest("gpu_power_watts", "job", "n1", 0, 400.0),
            Latest("gpu_ecc_corrected_total", "job", "n1", 0, 3.0),
            Latest("node_blocked_tasks", "job", "n1", None, 1.0),
        ]

    def blind(self) -> dict[str, str]:
        return {"straggler": "no compute time"}

    def drops(self) -> dict[str, int]:
        return {"late_row": 3}

    def incident_counts(self) -> IncidentCounts:
        return IncidentCounts(2, 1)

    def policy(self) -> PolicySettings:
        return self.policies[-1] if self.policies else PolicySettings()

    def explain(self, _incident: Incident) -> Weighing | None:
        return self.weighing

    def courses(self) -> list[JobProgress]:
        return self.course

    def progress(self, job: str) -> StepProgress | None:
        kept = AttemptCheckpoints(6, NOW, 1.0, copies=2, copies_wanted=4, nodes=("n1",), persisted=((5, NOW),))
        return StepProgress(7.0, NOW, 1.5, kept, log=UNREAD_LOG) if job == "job" else None


def frames_of(batch: Batch) -> list[tuple[Frame, float]]:
    times_s, received_s = batch.server_time_s.tolist(), batch.received_s.tolist()
    return [
        (resolved.frame(1, time_s, numbers.tobytes()), at_s)
        for resolved, time_s, at_s, numbers in zip(batch.resolved, times_s, received_s, batch.numbers, strict=True)
    ]


def acknowledged(answer: httpx.Response) -> dict[str, Any]:
    """Return what the answer to frames says of them."""
    return {key: said for key, said in answer.json().items() if key != "journal"}


def replayed(history: Any, since_s: float = 0.0, most: int = 100) -> list[Recorded]:
    """Return what a restart reads back, rows as frames."""

    def whole(row: RecordedRow) -> Frame:
        template, _ = decode_template(history.template(template_of_row(row.raw)))
        return read_row(template, row.raw).frame

    return [
        Recorded(whole(one), one.received_s, one.offset_s) if isinstance(one, RecordedRow) else one
        for one in history.replay(since_s, most)
    ]


def batch_of(
    node: str,
    stream: str,
    received_s: float,
    offset_s: float,
    entries: Iterable[tuple[int, float, bytes]],
    templates: Mapping[bytes, bytes] | None = None,
) -> Batch:
    """Return frames of one stream, each as its sequence, its time and its bytes, as the history takes them."""
    ref = StreamRef(node, stream)
    return Batch.of(((ref, n, time_s, received_s, offset_s, raw) for n, time_s, raw in entries), templates or {})


def frame(sequence: int = 1, node: str = "n1", time_s: float = NOW, **more: Any) -> Frame:
    """Return a small valid frame."""
    fields: dict[str, Any] = {
        "version": 1,
        "node": node,
        "boot_id": "boot",
        "stream": f"stream-{node}",
        "sequence": sequence,
        "time_s": time_s,
        "interval_s": 1.0,
        "agent_version": "1.2",
        "job": "job",
        "ranks": [Rank("job", 0, 1, 0)],
        "blocks": [block(Scope.DEVICE, {0: {"gpu_power_watts": 100.0 + sequence}})],
    }
    return Frame(**{**fields, **more})


def body(*frames: Frame, sent_s: float = NOW) -> bytes:
    """Return the frames as one request's body."""
    return encode_request([encode_frame(one) for one in frames], sent_s)


def incident(id_: str = "inc_1", **more: Any) -> Incident:
    """Return an open incident."""
    fields: dict[str, Any] = {
        "id": id_,
        "job": "job",
        "attempt": 0,
        "fault": "hang",
        "nodes": ["n1"],
        "node": "n1",
        "device": 0,
        "confidence": 0.95,
        "state": "confirmed",
        "onset_s": NOW - 10,
        "detected_s": NOW,
        "updated_s": NOW,
        "ended_s": None,
        "detectors": ["hang"],
        "summary": "n1 hangs",
        "evidence": [],
        "action": "exclude_node",
    }
    return Incident(**{**fields, **more})


def action(id_: str = "act_1", state: str = "requested", **more: Any) -> Action:
    """Return an action that excludes n1."""
    fields: dict[str, Any] = {
        "id": id_,
        "incident_id": "inc_1",
        "kind": "exclude_node",
        "job": "job",
        "attempt": 0,
        "exclude": ["n1"],
        "restart": True,
        "fault": "hang",
        "confidence": 0.95,
        "onset_s": NOW - 10,
        "detected_s": NOW,
        "expires_s": NOW + 600,
        "repair": "reset_gpu",
        "summary": "n1 hangs",
        "evidence": [],
        "ranks": [],
        "state": state,
        "created_s": NOW,
        "updated_s": NOW,
    }
    return Action(**{**fields, **more})


def event(id_: str = "evt-1", **more: Any) -> OutboundEvent:
    """Return an event of incident inc_1."""
    fields: dict[str, Any] = {
        "id": id_,
        "type": "eagle_eye.incident.opened",
        "subject": "inc_1",
        "job": "job",
        "time_s": NOW,
        "group": "inc_1",
        "data": {"fault": "hang"},
    }
    return OutboundEvent(**{**fields, **more})


def silence(id_: str = "sil-1", **more: Any) -> NewsSilence:
    """Return a silence of node n1 for half an hour."""
    fields: dict[str, Any] = {
        "id": id_,
        "state": "active",
        "faults": [],
        "jobs": [],
        "nodes": ["n1"],
        "reason": "its fan is being replaced",
        "by": "alice",
        "created_s": NOW,
        "until_s": NOW + 1_800,
    }
    return NewsSilence(**{**fields, **more})


def subscription(id_: str = "sub-1", url: str = "https://example.com/hook", **more: Any) -> Subscription:
    """Return an active subscription to everything."""
    fields: dict[str, Any] = {
        "id": id_,
        "url": url,
        "format": "cloudevents",
        "types": [],
        "jobs": [],
        "secrets": [SECRET],
        "active": True,
        "created_s": NOW,
    }
    return Subscription(**{**fields, **more})


@dataclass
class Running:
    """A server that listens, a client of it, and its parts."""

    dispatcher: Dispatcher[Services]
    client: httpx.Client
    watcher: FakeWatcher
    url: str

    def send(self, content: bytes, **headers: str) -> httpx.Response:
        """Post a body of frames."""
        kind = {"content-type": CONTENT_TYPE, **{name.replace("_", "-"): value for name, value in headers.items()}}
        return self.client.post("/api/v1/frames", content=content, headers=kind)

    def metric(self, name: str, **labels: str) -> float:
        """Return one of the server's own metrics, 0.0 when it was never counted."""
        return self.dispatcher.services.telemetry.registry.get_sample_value(f"eagle_eye_{name}", labels) or 0.0


def settings(folder: Path, **flags: Any) -> ServerConfig:
    """Return a configuration with its files in ``folder``; dots in keys are written as two underscores."""
    dotted = {name.replace("__", "."): value for name, value in flags.items()}
    return configuration.load(None, {}, {"data_dir": str(folder), "webhooks.heartbeat_s": 0.0, **dotted})


@contextmanager
def logging_put_back() -> Iterator[None]:
    """Have the process log afterwards as it did before, whatever was configured meanwhile."""
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    hooks = sys.excepthook, sys.unraisablehook, threading.excepthook
    levels = {name: logging.getLogger(name).level for name in logs.QUIET}
    try:
        yield
    finally:
        root.handlers = handlers
        root.setLevel(level)
        sys.excepthook, sys.unraisablehook, threading.excepthook = hooks
        logging.captureWarnings(capture=False)
        for name, before in levels.items():
            logging.getLogger(name).setLevel(before)


class _PromptServer(AcceptingServer):
    """Looks 200 times a second whether it is to end, not ten: hundreds of tests wait for that."""

    async def main_loop(self) -> None:
        """Serve until it is to end."""
        counter = 0
        while not await self.on_tick(counter):
            for _ in range(20):
                await asyncio.sleep(0.005)
                if self.should_exit:
                    return
            counter += 1


@functools.cache
def _new_records() -> bytes:
    """Return the file of a server that has no records yet: to migrate an empty one takes a twentieth of a second."""
    with tempfile.TemporaryDirectory() as folder:
        open_file(Path(folder) / RECORDS_FILE).close()
        return (Path(folder) / RECORDS_FILE).read_bytes()


def _with_new_records(folder: Path) -> None:
    """Put the file into a folder without records, as the server would."""
    file = folder / RECORDS_FILE
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
        file.write_bytes(_new_records())


@contextmanager
def running(
    folder: Path,
    clock: Clock | None = None,
    jitter: Callable[[], float] = lambda: 0.5,
    verify: ssl.SSLContext | bool = True,
    reread: Callable[[], ServerConfig] | None = None,
    port: int = 0,
    judging: bool = False,
    watching: WatcherFactory | None = None,
    **flags: Any,
) -> Iterator[Running]:
    """Run a server on a free port of loopback, or on ``port``; ``verify`` is the client's.

    Its watcher judges nothing, unless ``judging``: then it is the real one, or with ``watching`` that one, and
    ``Running.watcher`` is idle.
    """
    clock = clock or FakeClock()
    with socket.socket() as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", port))
        bound.listen(64)
        listen = f"127.0.0.1:{bound.getsockname()[1]}"
        watcher = FakeWatcher(clock)
        config = settings(folder, listen=listen, **flags)
        if not config.records.url:
            _with_new_records(Path(config.data_dir))
        factory = watching or (build_watcher if judging else lambda _config, _store, _clock: watcher)
        front = create_app(config, clock, factory, jitter=jitter, reread=reread)
        options = connection_options(front)
        server = _PromptServer(
            uvicorn.Config(front, log_config=None, access_log=False, timeout_graceful_shutdown=2, **options),
            bound,
            front.connections,
        )
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            url = config.public_url
            hooks = {"response": [check_answer]}
            # Without TLS nobody is verified, and to read the authorities takes a tenth of a second.
            verify = verify if url.startswith("https") else False
            with httpx.Client(base_url=url, timeout=10.0, trust_env=False, verify=verify, event_hooks=hooks) as client:
                # The socket listens already: the first request waits until the server has started.
                client.get("/healthz").raise_for_status()
                yield Running(front, client, watcher, url)
        finally:
            front.stop()
            server.should_exit = True
            thread.join(10.0)
            assert not thread.is_alive()
