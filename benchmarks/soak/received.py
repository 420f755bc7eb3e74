"""What the subscriber got: in order within an incident, signed, and nothing again that it had answered."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

RETOLD_S = 15.0  # what was answered so shortly before the server was killed may not have been written down yet


class Received:
    """The subscriber's log, read as it grows."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._read_bytes = 0
        self.events: dict[str, dict[str, Any]] = {}
        self.order: list[str] = []
        self._answered_s: dict[str, float] = {}
        self._last_s: dict[str, str] = {}
        self.faults: Counter[str] = Counter()
        self.repeated = 0

    def news(self, killed_s: Iterable[float]) -> list[dict[str, Any]]:
        """Return the events that came for the first time since the last call; ``killed_s``: when the server was."""
        deaths = list(killed_s)
        fresh = []
        for line in self._lines():
            id_ = line["id"]
            if line["what"] == "unsigned":
                self.faults["unsigned"] += 1
            elif line["what"] == "answered":
                self._answered_s[id_] = line["time_s"]
            elif id_ in self.events:
                self._again(id_, line, deaths)
            else:
                event = line["event"]
                self.events[id_] = event
                self._in_order(event)
                fresh.append(event)
        return fresh

    def _lines(self) -> list[dict[str, Any]]:
        if not self._log.exists():
            return []
        with self._log.open("rb") as file:
            file.seek(self._read_bytes)
            whole, newline, _ = file.read().rpartition(b"\n")
        self._read_bytes += len(whole) + len(newline)
        return [json.loads(line) for line in whole.split(b"\n") if line]

    def _again(self, id_: str, line: dict[str, Any], deaths: list[float]) -> None:
        """At least once: again only what was not answered, or answered when the server was about to die."""
        self.repeated += 1
        if line["event"] != self.events[id_]:
            self.faults["changed"] += 1
        answered_s = self._answered_s.get(id_)
        if answered_s is None:
            return
        if not any(answered_s - 1.0 <= death_s <= min(answered_s + RETOLD_S, line["time_s"]) for death_s in deaths):
            self.faults["repeated"] += 1

    def _in_order(self, event: dict[str, Any]) -> None:
        group = event["data"].get("incident_id") or event["subject"]
        if event["time"] < self._last_s.get(group, ""):
            self.faults["out_of_order"] += 1
        self._last_s[group] = event["time"]
