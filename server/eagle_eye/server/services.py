"""The parts of one running server, as the API sees them."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from eagle_eye.server.accounts.archive import Archive
from eagle_eye.server.accounts.bookkeeper import Bookkeeper
from eagle_eye.server.auth import Tokens
from eagle_eye.server.changes import Signal
from eagle_eye.server.clock import Clock
from eagle_eye.server.config import ServerConfig
from eagle_eye.server.evidence import Desk
from eagle_eye.server.fleet import Fleet
from eagle_eye.server.history import History
from eagle_eye.server.idle_checks import IdleChecks
from eagle_eye.server.job_sources.keeper import JobSources
from eagle_eye.server.limits import Limits
from eagle_eye.server.missing_gpus import MissingGpus
from eagle_eye.server.node_checks import NodeChecks
from eagle_eye.server.notifiers.guard import Guard
from eagle_eye.server.pictures.reading import Turns
from eagle_eye.server.readiness import Doctor
from eagle_eye.server.remote_store.remote_store import RemoteStore
from eagle_eye.server.store import Store
from eagle_eye.server.telemetry import Telemetry
from eagle_eye.server.tls import Certificates
from eagle_eye.server.topology_file import Places
from eagle_eye.server.watching import Outlook, Watcher


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
    tokens: Tokens
    limits: Limits
    certificates: Certificates | None  # None: plain HTTP
    telemetry: Telemetry
    watcher: Watcher
    outlook: Outlook
    doctor: Doctor
    guard: Guard
    signal: Signal
    desk: Desk
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
