"""NVIDIA GPUs through the driver's management library (NVML)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pynvml

from eagle_eye.agent.collector import CollectFailed, Observed
from eagle_eye.agent.nvml.connection import OPENING, GuardedCalls, Library, NvmlConnection
from eagle_eye.agent.nvml.device import Device, GpuReading
from eagle_eye.agent.nvml.fields import NEVER, NvmlFailure, reason
from eagle_eye.agent.nvml.pci_presence import Bus
from eagle_eye.schema.driver_facts import GPU_REPAIRED, NVML_FACTS, NVML_OPENING_FACTS
from eagle_eye.schema.events import WHOLE_NODE, Event

# What NVML states of GPUs, by return codes or by itself, as events: each fact once until it changes. Pure.
#
# NVML also calls a GPU lost, or to be reset, during a reset or a diagnosis: those are over by then.
STATED_S = 60.0

# A GPU by its row; one that has none by what the failure names it; and the fact's name.
_Key = tuple[int, str, str]


class StatedFacts:
    """The facts that hold, since when, and which of them have been told.

    ``patience_s``: a return code must have been given for this long. What the driver states as the GPU's state, such as
    its recovery action, is told at once. ``good_news``: that a GPU asks for no repair is told even if it never did.
    """

    def __init__(self, patience_s: float, *, good_news: bool) -> None:
        self._patience_s = patience_s
        self._good_news = good_news
        self._since_s: dict[_Key, float] = {}
        self._told: set[_Key] = set()

    def news(
        self, readings: Mapping[int, GpuReading], unopened: Sequence[NvmlFailure], now_s: float, monotonic_s: float
    ) -> list[Event]:
        """Return the events to tell now, of the GPUs' readings by row and of those that could not be opened."""
        holds = dict(_stated(readings, unopened))
        self._since_s = {key: self._since_s.get(key, monotonic_s) for key in holds}
        asked = {key[0] for key in self._told}
        self._told &= holds.keys() | {key for key in self._told if key[0] != WHOLE_NODE and key[0] not in readings}
        events = []
        for key, (text, waits) in holds.items():
            row, part, name = key
            ripe = not waits or monotonic_s - self._since_s[key] >= self._patience_s
            wanted = name != GPU_REPAIRED or self._good_news or row in asked
            if key not in self._told and ripe and wanted:
                self._told.add(key)
                attributes = {"what": name, "device": part, "text": text}
                events.append(Event(now_s, "host_error", row, {k: v for k, v in attributes.items() if v}))
        return events


def _stated(
    readings: Mapping[int, GpuReading], unopened: Sequence[NvmlFailure]
) -> Iterator[tuple[_Key, tuple[str, bool]]]:
    """Yield each fact with its text, and whether it must last before it is told."""
    for row, reading in readings.items():
        for name, text in reading.facts.items():
            yield (row, "", name), (text, False)
        for failure in reading.failed:
            if failure.code in NVML_FACTS:
                yield (row, "", NVML_FACTS[failure.code]), (f"NVML: {failure.describe()}", True)
    for failure in unopened:
        if failure.code in NVML_OPENING_FACTS:
            place = "" if failure.name == OPENING else failure.name
            yield (WHOLE_NODE, place, NVML_OPENING_FACTS[failure.code]), (f"NVML: {failure.describe()}", True)


# The GPU inventory of this node: reported when it changes, and periodically.
AGAIN_S = 3_600.0  # a server may have lost it
LINKS_S = 60.0  # the minimum interval for links that come and go


class InstalledGpu(NamedTuple):
    """One GPU: its row, UUID, product name, bus address, and its board's serial ("": unknown).

    ``nvlinks`` is how many are up, None where unknown.
    """

    device: int
    uuid: str
    model: str
    pci_address: str = ""
    serial: str = ""
    nvlinks: int | None = None


class Inventory:
    """Reports all GPUs when one is added, removed or moved or its links have changed, and every AGAIN_S."""

    def __init__(self) -> None:
        self._reported: tuple[InstalledGpu, ...] = ()
        self._reported_s = 0.0

    def news(self, seats: Iterable[InstalledGpu], now_s: float, monotonic_s: float) -> list[Event]:
        """Return an event per GPU, or nothing while all is unchanged. An empty list of GPUs is never reported."""
        seen = tuple(sorted(seats))
        patience_s = AGAIN_S
        if seen != self._reported:
            patience_s = LINKS_S if _without_links(seen) == _without_links(self._reported) else 0.0
        if not seen or monotonic_s - self._reported_s < patience_s:
            return []
        self._reported, self._reported_s = seen, monotonic_s
        return [Event(now_s, "inventory", s.device, _attributes(s, len(seen))) for s in seen]


def _without_links(seats: Iterable[InstalledGpu]) -> list[InstalledGpu]:
    return [seat._replace(nvlinks=None) for seat in seats]


def _attributes(seat: InstalledGpu, gpus: int) -> dict[str, Any]:
    reported = {"uuid": seat.uuid, "model": seat.model, "pci_address": seat.pci_address, "serial": seat.serial}
    links = {} if seat.nvlinks is None else {"nvlinks": seat.nvlinks}
    return {name: text for name, text in reported.items() if text or name in ("uuid", "model")} | {"gpus": gpus} | links


LIMIT_S = 0.6  # for all GPUs together: within the 0.8 s that an agent with 1 s frames waits

_XIDS, _BUS = -2, -3  # keys of guarded calls; a GPU's key is its row

_log = logging.getLogger("eagle_eye.agent")


class NvmlCollector:
    """A row for each GPU, keyed by NVML's index when the GPU was first seen; the key stays with the GPU's UUID.

    A reading that a GPU never supports is omitted permanently and logged once; one that fails is omitted this time,
    named in ``problem``, and does not affect the rest. Nor does a GPU whose driver call hangs: the others' rows are
    unaffected. The library is reopened when its handles are stale or the driver's GPUs have changed.

    ``devices_by_uuid`` also knows MIG instances, each mapped to its GPU's row, under both forms of their UUID: CUDA's
    form does not say that it is a MIG instance's.
    """

    name = "nvml"

    def __init__(
        self,
        kernel_log_is_read: Callable[[], bool] = lambda: False,
        sys: Path = Path("/sys"),
        monotonic_s: Callable[[], float] = time.monotonic,
        *,
        for_verdict: bool = False,
    ) -> None:
        """``kernel_log_is_read``: the kernel log reports XIDs, so NVML's would be duplicates.

        ``for_verdict``: one look decides, so that what NVML says is told at once, good news included.
        """
        self._stated = StatedFacts(0.0 if for_verdict else STATED_S, good_news=for_verdict)
        self.devices_by_uuid: dict[str, int] = {}  # filled when NVML answers; others look up their GPU in it
        self.devices_by_bus_id: dict[str, int] = {}  # likewise, by PCI address as NVML writes it
        self._kernel_log_is_read = kernel_log_is_read
        self._monotonic_s = monotonic_s
        self._calls: GuardedCalls[object] = GuardedCalls("nvml", monotonic_s=monotonic_s)
        self._bus = Bus(sys, monotonic_s)
        self._connection = NvmlConnection(self._calls, self._bus, monotonic_s)
        self._library: Library | None = None
        self._devices: tuple[Device, ...] = ()  # those in the tables
        self._described = ""
        self._bus_ids: dict[str, str] = {}  # of all GPUs seen so far, by UUID
        self._instances: dict[str, int] = {}  # the part of devices_by_uuid that changes
        self._answered_s: dict[str, float] = {}  # by UUID
        self._without_row: set[str] = set()  # UUIDs
        self._gone: set[str] = set()  # UUIDs of GPUs that have fallen off the bus; set in a guarded call
        self._reported_lost: set[str] = set()
        self._reported_left_out: set[tuple[str, NvmlFailure]] = set()
        self._inventory = Inventory()

    def collect(self, now_s: float) -> Observed:
        """Return the GPUs' rows. Raises Unsupported without the library, CollectFailed while it cannot be opened.

        Takes a few milliseconds, up to LIMIT_S more when a GPU stops answering, and longer the first time.
        """
        begin_s = self._monotonic_s()
        try:
            library = self._connection.library(begin_s)
        except CollectFailed as error:
            stated = self._stated.news({}, self._connection.refused_with, now_s, begin_s)
            if not stated:
                raise
            return Observed(events=stated, problem=str(error))
        if library is not self._library or library.devices != self._devices:
            self._adopt(library)
        calls: dict[int, Callable[[], object]] = {device.index: device.read for device in self._devices}
        calls[_XIDS] = library.xids.poll
        if self._without_row:
            calls[_BUS] = self._look_at_bus
        answers = self._calls.run(calls, LIMIT_S)

        observed = Observed()
        answered = 0
        left_out: list[tuple[Device, list[NvmlFailure]]] = []
        for device in self._devices:
            answer = answers.get(device.index)
            if isinstance(answer, GpuReading):
                self._answered_s[device.uuid] = begin_s
                answered += 1
                if answer.row:
                    observed.devices[device.index] = answer.row
                if answer.left_out:
                    left_out.append((device, answer.left_out))
        rows = dict(self._connection.rows)
        self._without_row = {uuid for uuid in self._bus_ids if rows[uuid] not in observed.devices}
        observed.simulated = library.simulated
        observed.problem = "; ".join(self._problems(library, calls, answers))
        # A GPU has no row although the driver answers: reopening the library may help.
        stale = len(observed.devices) < answered or self._lacks_gpus(library)
        self._connection.record_collection(begin_s, stale=stale, answered=bool(observed.devices))
        readings = {d.index: one for d in self._devices if isinstance(one := answers.get(d.index), GpuReading)}
        stated = self._stated.news(readings, library.unopened, now_s, begin_s)
        observed.events = [*self._lost(now_s), *self._xids(library, now_s), *stated]
        if not library.simulated:  # simulated GPUs have the same UUIDs on every node
            seats = (
                InstalledGpu(one.index, one.uuid, one.name, one.bus_id, one.serial, one.nvlinks)
                for one in self._devices
            )
            observed.events += self._inventory.news(seats, now_s, begin_s)
        self._map_instances()
        self._log_left_out(left_out)
        return observed

    def compute_processes(self) -> dict[int, int]:
        """Return the GPU row that each process computes on, by pid, as of some seconds ago. Never waits.

        A process on several GPUs is assigned to the one where it holds most memory: ranks often hold a little on the
        first GPU too. Where the driver does not report the amounts, such a process is left out.
        """
        held: dict[int, list[tuple[int | None, int]]] = {}
        for device in self._devices:
            for pid, held_bytes in device.occupants.processes.items():
                held.setdefault(pid, []).append((held_bytes, device.index))
        found = {}
        for pid, places in held.items():
            known = [(held_bytes, row) for held_bytes, row in places if held_bytes is not None]
            if len(places) == 1:
                found[pid] = places[0][1]
            elif len(known) == len(places):
                found[pid] = max(known)[1]
        return found

    def close(self) -> None:
        """Close the library, unless a call into it hangs."""
        self._connection.close()
        self._calls.close()
        self._library, self._devices = None, ()

    def _adopt(self, library: Library) -> None:
        """Rebuild the tables from a library that was just opened, or that now lists more GPUs."""
        self._library, self._devices = library, library.devices
        described = library.describe()
        if described != self._described:  # else it was only reopened
            self._described = described
            _log.info("NVML: %s", described)
        for failure in library.unopened:
            if failure.code in NEVER and ("", failure) not in self._reported_left_out:
                self._reported_left_out.add(("", failure))
                _log.warning("NVML lists %s; it is left out", failure.describe())
        for device in self._devices:
            self._answered_s.setdefault(device.uuid, self._monotonic_s())
            self._bus_ids[device.uuid] = device.bus_id
        self.devices_by_uuid.update({device.uuid: device.index for device in self._devices})
        self.devices_by_bus_id.update({device.bus_id: device.index for device in self._devices})

    def _problems(self, library: Library, calls: Collection[int], answers: Mapping[int, object]) -> list[str]:
        """Return what could not be read."""
        now_s = self._monotonic_s()
        problems = [failure.describe() for failure in library.unopened if failure.code not in NEVER]
        opening_s = now_s - library.begun_s
        problems += [f"gpu {place}: opening it: no answer for {opening_s:.0f} s" for place in sorted(library.pending)]
        for device in self._devices:
            silent_s = now_s - self._answered_s[device.uuid]
            trouble = _trouble(answers.get(device.index, f"no answer for {silent_s:.0f} s"))
            problems += [f"gpu {device.index}: {trouble}"] if trouble else []
        for key, name in ((_XIDS, "XIDs"), (_BUS, "PCI bus")):
            trouble = _trouble(answers.get(key, "no answer")) if key in calls else ""
            problems += [f"{name}: {trouble}"] if trouble else []
        problems += [f"gpu {self._connection.rows[uuid]}: no longer in NVML's list" for uuid in self._unlisted(library)]
        return problems

    def _lacks_gpus(self, library: Library) -> bool:
        """Whether GPUs could not be opened, or are no longer listed."""
        return any(failure.code not in NEVER for failure in library.unopened) or bool(self._unlisted(library))

    def _unlisted(self, library: Library) -> list[str]:
        """Return the UUIDs of GPUs seen before that NVML no longer lists; none while any listed GPU is unidentified."""
        listed = {device.uuid for device in self._devices}
        unknown = library.pending or library.unopened
        return [] if unknown else [uuid for uuid in self._bus_ids if uuid not in listed]

    def _look_at_bus(self) -> None:
        self._gone = {uuid for uuid in self._without_row if self._bus.gone(self._bus_ids[uuid])}

    def _lost(self, now_s: float) -> list[Event]:
        """Return the GPUs that fell off the bus, each once until it is back."""
        self._reported_lost &= self._without_row
        lost = (self._gone & self._without_row) - self._reported_lost
        self._reported_lost |= lost
        rows = self._connection.rows
        return [Event(now_s, "gpu_lost", rows[uuid], {"uuid": uuid}) for uuid in sorted(lost, key=lambda u: rows[u])]

    def _xids(self, library: Library, now_s: float) -> list[Event]:
        news = library.xids.take_xids()
        if self._kernel_log_is_read():
            return []
        monotonic_s = self._monotonic_s()
        events = []
        for item in news:
            said = item.message
            more = f" ({item.more} more until then)" if item.more else ""
            device = self.devices_by_bus_id.get(said.address, WHOLE_NODE)
            attributes = {"code": said.code, "text": said.text + more}
            events.append(Event(now_s - (monotonic_s - item.at_s), "xid", device, attributes))
        return events

    def _map_instances(self) -> None:
        instances: dict[str, int] = {}
        for device in self._devices:
            for uuid in device.occupants.instances:
                instances[uuid] = device.index
                instances["GPU-" + uuid.removeprefix("MIG-")] = device.index
        for uuid in self._instances.keys() - instances.keys():
            self.devices_by_uuid.pop(uuid, None)
        self.devices_by_uuid.update(instances)
        self._instances = instances

    def _log_left_out(self, left_out: Sequence[tuple[Device, list[NvmlFailure]]]) -> None:
        """Log the readings that GPUs never support, one line for all GPUs that lack the same for the same reason."""
        lines: dict[tuple[int, str], list[int]] = {}
        for device, failures in left_out:
            names: dict[int, list[str]] = {}
            for failure in failures:
                if (device.uuid, failure) not in self._reported_left_out:  # the library may have been reopened
                    self._reported_left_out.add((device.uuid, failure))
                    names.setdefault(failure.code, []).append(failure.name)
            for code, lacking in names.items():
                lines.setdefault((code, ", ".join(lacking)), []).append(device.index)
        for (code, missing), rows in lines.items():
            remedy = "; an agent run as root may see more" if code == pynvml.NVML_ERROR_NO_PERMISSION else ""
            gpus = ", ".join(str(row) for row in rows)
            _log.info("NVML: gpu %s: never given: %s (%s)%s", gpus, missing, reason(code), remedy)


def _trouble(answer: object) -> str:
    """Return what an answer says went wrong, "" for nothing; a text in place of an answer is the error itself."""
    if isinstance(answer, str):
        return answer
    if isinstance(answer, GpuReading) and answer.problem and not answer.failed:
        return answer.problem
    if isinstance(answer, GpuReading) and answer.failed:
        more = len(answer.failed) - 1
        return answer.failed[0].describe() + (f" and {more} more" if more and answer.row else "")
    if isinstance(answer, NvmlFailure):
        return reason(answer.code)
    return repr(answer) if isinstance(answer, Exception) else ""
