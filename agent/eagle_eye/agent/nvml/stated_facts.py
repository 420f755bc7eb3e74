"""Turns what NVML states of GPUs, by return codes or by itself, into events: each fact once until it changes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from eagle_eye.agent.nvml.connection import OPENING
from eagle_eye.agent.nvml.device import GpuReading
from eagle_eye.agent.nvml.fields import NvmlFailure
from eagle_eye.schema.driver_facts import GPU_REPAIRED, NVML_FACTS, NVML_OPENING_FACTS
from eagle_eye.schema.events import WHOLE_NODE, Event

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
