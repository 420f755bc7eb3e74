"""The agent's /metrics: the newest frame's rows and the agent's own state, in Prometheus' text format 0.0.4.

Hand-written: it is a few lines, and the client library would add 10 MiB to an agent of 25 MiB. Touches: /proc/self for
its own memory.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from eagle_eye.agent.files.bounded import content
from eagle_eye.agent.loop.drops import Drops
from eagle_eye.agent.loop.tick_result import TickFrame
from eagle_eye.schema.frame import Rank
from eagle_eye.schema.metrics import METRICS, PROMETHEUS_PREFIX, MetricKind, MetricSpec, Scope

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STALE_INTERVALS = 3.0  # rows are left out after this many intervals without a tick,
STALE_S_MIN = 5.0  # but not before this
RENDER_EVERY_S = 0.5  # one page serves all scrapes within it: frequent scrapes cost the agent no more than this

Labels = tuple[tuple[str, str], ...]


class FrameDelivery(NamedTuple):
    """State of frame delivery: waiting in the spool, acknowledged since the start, whether the server accepts them.

    ``in_memory``: new frames are only in memory, because the spool's disk fails. None: unknown, as ``server_ok`` before
    the first attempt. ``server_changes``: how often another server than before took them. ``kept``: acknowledged
    frames that are kept, ``resent``: those of them that another server was sent.
    """

    frames_waiting: int
    bytes_waiting: int | None
    in_memory: bool | None
    frames_sent: int
    server_ok: bool | None
    server_changes: int
    kept: int = 0
    resent: int = 0


class OwnMetric(NamedTuple):
    """A metric about the agent itself: its name without the prefix, and its meaning."""

    name: str
    kind: str
    help: str


OWN = {
    spec.name: spec
    for spec in (
        OwnMetric("agent_info", "gauge", "1; the labels say which agent."),
        OwnMetric("agent_cpu_seconds_total", "counter", "CPU time of the agent and of the programs it ran."),
        OwnMetric("agent_resident_memory_bytes", "gauge", "Memory of the agent."),
        OwnMetric("agent_start_time_seconds", "gauge", "When the agent started, Unix time."),
        OwnMetric("agent_frames_total", "counter", "Frames made."),
        OwnMetric("agent_last_frame_timestamp_seconds", "gauge", "When the newest frame at a tick ended, Unix time."),
        OwnMetric("agent_frames_sent_total", "counter", "Frames that the server has acknowledged."),
        OwnMetric("agent_spool_frames", "gauge", "Frames that wait for the server."),
        OwnMetric("agent_spool_bytes", "gauge", "Bytes of frames that wait for the server."),
        OwnMetric(
            "agent_spool_kept_frames", "gauge", "Acknowledged frames that are kept for a server that lacks them."
        ),
        OwnMetric("agent_frames_resent_total", "counter", "Kept frames that another server was sent."),
        OwnMetric("agent_spool_in_memory", "gauge", "1 while new frames wait in memory alone: the disk fails."),
        OwnMetric("agent_server_ok", "gauge", "1 while the server takes frames, 0 while it does not."),
        OwnMetric("agent_server_changes_total", "counter", "How often another server than before took frames."),
        OwnMetric("agent_dropped_total", "counter", "What the agent had to drop, by reason."),
        OwnMetric("agent_collector_ok", "gauge", "1 when a collector saw all that it looks at."),
        OwnMetric("agent_collector_supported", "gauge", "0 for a collector whose source this host does not have."),
        OwnMetric("agent_collector_duration_seconds", "gauge", "How long a collector's last answer took."),
        OwnMetric("agent_collector_failures_total", "counter", "Intervals in which a collector saw less than all."),
        OwnMetric("gpu_info", "gauge", "1; which GPU a device is."),
        OwnMetric("rank_info", "gauge", "1; which rank of which job uses a device."),
    )
}


class Exposition:
    """Keeps the newest tick and renders the page; the loop calls ``show``, any thread ``page``."""

    def __init__(
        self,
        node: str,
        version: str,
        drops: Drops,
        delivery: Callable[[], FrameDelivery | None] = lambda: None,
        devices_by_uuid: Mapping[str, int] | None = None,
        monotonic_s: Callable[[], float] = time.monotonic,
        started_s: float | None = None,
    ) -> None:
        """``delivery`` returns None where frames go to no server; ``started_s`` is Unix time."""
        self._node = node
        self._version = version
        self._drops = drops
        self._delivery = delivery
        self._devices_by_uuid = {} if devices_by_uuid is None else devices_by_uuid
        self._monotonic_s = monotonic_s
        self._started_s = time.time() if started_s is None else started_s
        self._shown: tuple[TickFrame, float] | None = None
        self._page = b""
        self._page_s = -math.inf
        self._lock = threading.Lock()

    def show(self, tick: TickFrame) -> None:
        """Take the newest tick."""
        self._shown = (tick, self._monotonic_s())  # one assignment: a page sees either the old or the new one

    def page(self) -> bytes:
        """Return the page, at most RENDER_EVERY_S old."""
        with self._lock:
            now_s = self._monotonic_s()
            if now_s - self._page_s >= RENDER_EVERY_S:
                self._page = self._render(now_s).encode("utf-8", "replace")
                self._page_s = now_s
            return self._page

    def _render(self, now_s: float) -> str:
        families: list[str] = []
        shown = self._shown
        if shown is not None:
            tick, shown_s = shown
            if now_s - shown_s <= max(STALE_S_MIN, STALE_INTERVALS * tick.interval_s):
                families += rows(self._node, tick, dict(self._devices_by_uuid))
            families += collectors(self._node, tick)
        families += self._own()
        return "".join(families)

    def _own(self) -> Iterator[str]:
        node = (("node", self._node),)
        yield own("agent_info", [((*node, ("version", self._version)), 1.0)])
        yield own("agent_start_time_seconds", [(node, self._started_s)])
        times = os.times()
        yield own("agent_cpu_seconds_total", [(node, sum(times[:4]))])
        resident_bytes = _resident_bytes()
        if resident_bytes is not None:
            yield own("agent_resident_memory_bytes", [(node, resident_bytes)])
        drops = sorted(self._drops.snapshot().items())
        yield own("agent_dropped_total", [((*node, ("reason", reason)), count) for reason, count in drops])
        delivery = self._delivery()
        if delivery is not None:
            yield own("agent_frames_sent_total", [(node, delivery.frames_sent)])
            yield own("agent_spool_frames", [(node, delivery.frames_waiting)])
            if delivery.bytes_waiting is not None:
                yield own("agent_spool_bytes", [(node, delivery.bytes_waiting)])
            if delivery.in_memory is not None:
                yield own("agent_spool_in_memory", [(node, delivery.in_memory)])
            if delivery.server_ok is not None:
                yield own("agent_server_ok", [(node, delivery.server_ok)])
            yield own("agent_server_changes_total", [(node, delivery.server_changes)])
            yield own("agent_spool_kept_frames", [(node, delivery.kept)])
            yield own("agent_frames_resent_total", [(node, delivery.resent)])


def rows(node: str, tick: TickFrame, devices_by_uuid: Mapping[str, int]) -> Iterator[str]:
    """Yield the families of a tick's rows.

    A GPU's series have the labels node and device, unchanged while jobs come and go; a rank's also have its job and
    rank, and ``rank_info`` joins the two.
    """
    ranks = _rank_by_device(tick.seen.ranks)
    job = {device: (("eagle_eye_job", rank.job), ("rank", str(rank.rank))) for device, rank in ranks.items()}
    place = {device: (("node", node), ("device", str(device))) for device in {*tick.seen.devices, *ranks}}
    link = {name: (("node", node), ("link", name)) for name in tick.seen.links}
    for spec in METRICS:
        series: list[tuple[Labels, float]] = []
        if spec.scope is Scope.NODE:
            if spec.name in tick.seen.node:
                series.append(((("node", node),), tick.seen.node[spec.name]))
        elif spec.scope is Scope.LINK:
            series += [(link[name], row[spec.name]) for name, row in tick.seen.links.items() if spec.name in row]
        else:
            more = job if spec.name.startswith(("train_", "nccl_")) else {}
            for device, row in tick.seen.devices.items():
                if spec.name in row:
                    series.append(((*place[device], *more.get(device, ())), row[spec.name]))
        yield _family(spec.name, _kind(spec), spec.help, series)
    gpus = sorted((device, uuid) for uuid, device in devices_by_uuid.items())
    yield own("gpu_info", [((("node", node), ("device", str(gpu)), ("uuid", uuid)), 1.0) for gpu, uuid in gpus])
    yield own("rank_info", [((*place[device], *labels), 1.0) for device, labels in job.items()])


def collectors(node: str, tick: TickFrame) -> Iterator[str]:
    """Yield the families of collector states: a collector this host cannot support is not a failing one."""
    labels = {each.name: (("node", node), ("collector", each.name)) for each in tick.collectors}
    asked = [each for each in tick.collectors if each.supported]
    yield own("agent_frames_total", [((("node", node),), tick.frames)])
    yield own("agent_last_frame_timestamp_seconds", [((("node", node),), tick.time_s)])
    yield own("agent_collector_supported", [(labels[each.name], each.supported) for each in tick.collectors])
    yield own("agent_collector_ok", [(labels[each.name], each.ok) for each in asked])
    yield own("agent_collector_duration_seconds", [(labels[each.name], each.duration_s) for each in asked])
    yield own("agent_collector_failures_total", [(labels[each.name], each.failures) for each in asked])


def own(name: str, series: Iterable[tuple[Labels, float]]) -> str:
    """Return a family about the agent itself."""
    spec = OWN[name]
    return _family(spec.name, spec.kind, spec.help, series)


def _family(name: str, kind: str, text: str, series: Iterable[tuple[Labels, float]]) -> str:
    """Return a family with its help and type, empty without series; NaN means not observed."""
    full = PROMETHEUS_PREFIX + name
    lines = [f"{full}{_labels(labels)} {_number(value)}\n" for labels, value in series if not math.isnan(value)]
    return f"# HELP {full} {_escaped(text)}\n# TYPE {full} {kind}\n{''.join(lines)}" if lines else ""


def _kind(spec: MetricSpec) -> str:
    return "counter" if spec.kind is MetricKind.COUNTER else "gauge"  # a sequence may restart, a mask is not a number


def _labels(labels: Labels) -> str:
    inside = ",".join(f'{name}="{_escaped(value, quotes=True)}"' for name, value in labels)
    return f"{{{inside}}}"


def _escaped(text: str, *, quotes: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(float(value))


def _rank_by_device(ranks: Iterable[Rank]) -> dict[int, Rank]:
    """Return the rank that each device's row belongs to: the newest attempt's where two claim it."""
    return {rank.device: rank for rank in sorted(ranks, key=lambda rank: rank.attempt)}


def _resident_bytes() -> float | None:
    try:
        words = content("/proc/self/statm", 256).split()
        return float(int(words[1]) * os.sysconf("SC_PAGE_SIZE"))
    except (OSError, IndexError, ValueError):
        return None
