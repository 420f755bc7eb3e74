"""Makes nodes' samples durable as frames, and passes them to the fleet and the detection loop like agents' frames.

While one group of requests is being written the next gathers, so that a scrape split over many requests is written once
or twice rather than once per request. A request is answered when its group is durable.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping

import msgspec

from eagle_eye.schema.frame import WIRE_VERSION, Frame, encode_frame
from eagle_eye.server.history.history import Appended, History
from eagle_eye.server.ingest.decoding import belated
from eagle_eye.server.ingest.fleet import Fleet, Heard
from eagle_eye.server.ingest.remote_write.intake import INTERVAL_UNKNOWN_S, NodeRows, NodeSample
from eagle_eye.server.model.batch import Batch, StreamRef
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import HistoryUnavailable, StoreUnavailable
from eagle_eye.server.model.records import LastCodes, Watched
from eagle_eye.server.store.store import LAST_CODES, Change, Store
from eagle_eye.server.telemetry.counters import Telemetry

_log = logging.getLogger(__name__)

# Each device's last error code is kept across restarts, to report changes in between but no old codes. Codes become
# durable after their event: after a crash an event may be repeated but is never lost.


class CodeMemory:
    """The devices of all nodes, as stored or about to be; ``failed`` is called when they cannot be written.

    Raises StoreUnavailable when the store cannot be read. For the event loop.
    """

    def __init__(self, store: Store, failed: Callable[[], None]) -> None:
        self._store = store
        self._failed = failed
        self._nodes = {record.node: record.devices for record in store.all(LAST_CODES)}
        self._unwritten: set[str] = set()

    def of(self, node: str) -> Mapping[int, Watched]:
        """Return the node's devices as last known."""
        return self._nodes.get(node, {})

    def queue_devices(self, node: str, devices: Mapping[int, Watched]) -> None:
        """Have these devices of the node written by the next ``keep``."""
        if devices:
            self._nodes[node] = {**self.of(node), **devices}
            self._unwritten.add(node)

    def forget(self, nodes: Collection[str]) -> None:
        """Forget the nodes' devices; the store has deleted them already."""
        for node in nodes:
            self._nodes.pop(node, None)
        self._unwritten.difference_update(nodes)

    async def keep(self) -> None:
        """Return once what was taken is durable; if the store fails, the next call retries."""
        names, self._unwritten = self._unwritten, set()
        if not names:
            return
        records = tuple(LastCodes(node=name, devices=dict(self._nodes[name])) for name in sorted(names))
        try:
            await asyncio.to_thread(self._store.commit, Change(last_codes=records))
        except StoreUnavailable:
            self._unwritten |= names
            self._failed()
            _log.warning("devices' last error codes could not be written down; the next samples try again")


# The agent version in such frames. Until a node's interval is known its rows are stored but not used for detection: the
# loop sizes its window by the first interval that it gets.
STREAM_PREFIX = "remote-write-"
SENDER = "remote write"
SENDER_UNPACED = "remote write, interval not known yet"
BOOT_UNKNOWN = "unknown"
# Samples older than this many intervals (and seconds) on arrival are stored but not passed to detection: Prometheus
# resends an outage in order, and hour-old rows must not be evaluated as current.
LATE_INTERVALS = 4.0
LATE_S = 60.0
FRAMES_AT_ONCE = 50  # built without a pause: a few milliseconds
SUBMITTED_AT_ONCE = 1_000  # frames in one transaction


class Keeper:
    """Stores what ``Intake`` took. ``observe`` and ``found`` are as for ``Ingest``; ``job_of`` returns nodes' jobs."""

    def __init__(
        self,
        history: History,
        fleet: Fleet,
        telemetry: Telemetry,
        clock: Clock,
        observe: Callable[[Frame, float, float], None],
        found: Callable[[list[str]], Awaitable[None]],
        job_of: Callable[[str], str | None],
        codes: CodeMemory,
    ) -> None:
        self._history = history
        self._fleet = fleet
        self._telemetry = telemetry
        self._clock = clock
        self._observe = observe
        self._found = found
        self._job_of = job_of
        self._codes = codes
        self._stream = f"{STREAM_PREFIX}{secrets.token_hex(8)}"
        self._sequences: dict[str, int] = {}
        self._refs: dict[str, StreamRef] = {}
        self._gathered: dict[NodeSample, None] = {}
        self._durable: asyncio.Future[None] | None = None
        self._work: asyncio.Task[None] | None = None

    async def keep(self, moments: Iterable[NodeSample]) -> None:
        """Return once the moments are durable. Raises HistoryBusy, HistoryUnavailable: some may not be."""
        self._gathered.update(dict.fromkeys(moments))
        if not self._gathered:
            return
        if self._durable is None:
            self._durable = asyncio.get_running_loop().create_future()
        durable = self._durable
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._write(), name="remote write")
        await asyncio.shield(durable)

    async def _write(self) -> None:
        while self._durable is not None:
            moments, durable = list(self._gathered), self._durable
            self._gathered, self._durable = {}, None
            try:
                await self._write_group(moments)
            except Exception as error:  # noqa: BLE001 - every waiter must get the error
                durable.set_exception(error)
                durable.exception()  # there may be no waiters left
            else:
                durable.set_result(None)

    async def _write_group(self, moments: list[NodeSample]) -> None:
        received_s = self._clock.now_s()
        moments.sort(key=lambda moment: moment.time_s)
        frames: list[Frame] = []
        versions: list[tuple[int, int, dict[int, Watched]]] = []
        for moment in moments:
            if len(frames) % FRAMES_AT_ONCE == FRAMES_AT_ONCE - 1:
                await asyncio.sleep(0)  # let the event loop serve others
            frames.append(self._frame(moment, received_s))
            versions.append((moment.version, len(moment.events), dict(moment.watched)))
        await self._submit(frames, received_s)
        for moment, (version, events, watched) in zip(moments, versions, strict=True):
            moment.kept = version
            del moment.events[:events]
            self._codes.queue_devices(moment.node.name, watched)
            moment.watched = {device: now for device, now in moment.watched.items() if watched.get(device) is not now}
        await self._codes.keep()
        self._telemetry.frames.inc(len(frames))
        await self._show(moments, frames, received_s)

    async def _submit(self, frames: list[Frame], received_s: float) -> None:
        """Return once all frames are durable. Raises HistoryUnavailable once the result of each is known."""
        futures: list[asyncio.Future[Appended]] = []
        failed: BaseException | None = None
        for first in range(0, len(frames), SUBMITTED_AT_ONCE):
            # Prometheus' own timestamps: no offset is added.
            batch = Batch.of(
                (self._ref(frame.node), frame.sequence, frame.time_s, received_s, 0.0, encode_frame(frame))
                for frame in frames[first : first + SUBMITTED_AT_ONCE]
            )
            try:
                futures.append(asyncio.wrap_future(self._history.submit(batch)))
            except HistoryUnavailable as error:
                failed = error
                break
            await asyncio.sleep(0)
        for outcome in await asyncio.gather(*futures, return_exceptions=True):
            if isinstance(outcome, BaseException):
                failed = outcome
        if failed is not None:
            raise failed

    def _ref(self, node: str) -> StreamRef:
        return self._refs.get(node) or self._refs.setdefault(node, StreamRef(node, self._stream))

    def _frame(self, moment: NodeSample, now_s: float) -> Frame:
        node = moment.node
        sequence = self._sequences[node.name] = self._sequences.get(node.name, 0) + 1
        return Frame(
            version=WIRE_VERSION,
            node=node.name,
            boot_id=BOOT_UNKNOWN,
            stream=self._stream,
            sequence=sequence,
            time_s=moment.time_s,
            interval_s=node.interval_s or INTERVAL_UNKNOWN_S,
            agent_version=SENDER if node.interval_s is not None else SENDER_UNPACED,
            job=moment.job or node.labelled_job(now_s) or self._job_of(node.name),
            blocks=list(moment.blocks()),
            events=list(moment.events),
            collectors=dict(_collector(target, up) for target, up in node.targets.items()),
        )

    async def _show(self, moments: list[NodeSample], frames: list[Frame], received_s: float) -> None:
        """Pass durable frames to the fleet and detection; record new nodes first."""
        fresh: list[Frame] = []
        unknown: dict[str, None] = {}
        for moment, frame in zip(moments, frames, strict=True):
            new, late = not self._fleet.is_known(frame.node), _is_late(moment.node, frame, received_s)
            if late:
                self._show_late(frame)
            else:
                self._fleet.heard(frame, received_s, vouched=False)
                fresh.append(frame)
            if new:
                unknown[frame.node] = None
        if unknown:
            await self._found(list(unknown))
        for place, frame in enumerate(fresh):
            if place % FRAMES_AT_ONCE == FRAMES_AT_ONCE - 1:
                await asyncio.sleep(0)
            self._observe(judged(frame), received_s, 0.0)

    def _show_late(self, frame: Frame) -> None:
        self._telemetry.late.inc()
        self._fleet.know(frame.node)
        newest = self._fleet.last(frame.node)
        lasting = belated(frame, newest) if newest is not None else None
        if newest is not None and lasting is not None:
            self._observe(lasting, newest.received_s, 0.0)


def _is_late(node: NodeRows, frame: Frame, received_s: float) -> bool:
    late_s = max(LATE_S, LATE_INTERVALS * (node.interval_s or INTERVAL_UNKNOWN_S))
    return received_s - frame.time_s > late_s


def judged(frame: Frame) -> Frame:
    """Return the part of a frame for detection: all of it, except rows with unknown interval."""
    return msgspec.structs.replace(frame, blocks=[]) if frame.agent_version == SENDER_UNPACED else frame


def is_ours(heard: Heard | Frame) -> bool:
    """Return whether a node's last report, or a frame, came by remote write and not from an agent."""
    return heard.agent_version in (SENDER, SENDER_UNPACED)


def known_interval_s(heard: Heard | None) -> float | None:
    """Return the interval of a node's last report; None if unknown."""
    return heard.interval_s if heard is not None and heard.agent_version == SENDER else None


def _collector(target: str, up: bool) -> tuple[str, str]:
    return f"scrape {target[:200]}", "ok" if up else "failed: Prometheus cannot scrape it (up is 0)"
