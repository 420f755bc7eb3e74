"""The parts of one running server, as the API sees them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from eagle_eye.server.accounts.archive import Archive
from eagle_eye.server.accounts.bookkeeper import Bookkeeper
from eagle_eye.server.charts.reading import Turns
from eagle_eye.server.config import ServerConfig
from eagle_eye.server.delivery.notifiers.guard import Guard
from eagle_eye.server.history.history import History
from eagle_eye.server.history.remote_store.remote_store import RemoteStore
from eagle_eye.server.ingest.fleet import Fleet
from eagle_eye.server.jobs.keeper import JobSources
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.monitor.known_nodes import KnownNodes
from eagle_eye.server.monitor.readiness import Doctor
from eagle_eye.server.monitor.watcher import Outlook, Watcher
from eagle_eye.server.requests.evidence import EvidenceRequests
from eagle_eye.server.requests.idle_checks import IdleChecks
from eagle_eye.server.requests.missing_gpus import MissingGpus
from eagle_eye.server.requests.node_checks import NodeChecks
from eagle_eye.server.security.auth import Tokens
from eagle_eye.server.security.limits import Limits
from eagle_eye.server.security.tls import Certificates
from eagle_eye.server.site_files.topology import Places
from eagle_eye.server.store.changes import Signal
from eagle_eye.server.store.store import Store
from eagle_eye.server.telemetry.counters import Telemetry


@dataclass(slots=True)
class OpenStreams:
    """How many readers of a streaming endpoint are connected; counted on the event loop."""

    count: int = 0


@dataclass(frozen=True)
class Services:
    """Everything that a request may need."""

    config: ServerConfig
    clock: Clock
    store: Store
    history: History
    fleet: Fleet
    known_nodes: KnownNodes
    tokens: Tokens
    limits: Limits
    certificates: Certificates | None  # None: plain HTTP
    telemetry: Telemetry
    watcher: Watcher
    outlook: Outlook
    doctor: Doctor
    guard: Guard
    signal: Signal
    evidence_requests: EvidenceRequests
    remote_store: RemoteStore
    node_checks: NodeChecks
    idle_checks: IdleChecks
    missing_gpus: MissingGpus
    bookkeeper: Bookkeeper
    archive: Archive
    job_sources: JobSources
    places: Places = field(default_factory=Places)  # as the site's file had them at the start
    turns: Turns = field(default_factory=Turns)  # of those who have pictures drawn
    open_streams: OpenStreams = field(default_factory=OpenStreams)
    open_recordings: OpenStreams = field(default_factory=OpenStreams)
    open_uploads: OpenStreams = field(default_factory=OpenStreams)
    # Set when the server is asked to stop: readers of /api/v1/events are let go then, or it would wait for them.
    stopping: threading.Event = field(default_factory=threading.Event)
