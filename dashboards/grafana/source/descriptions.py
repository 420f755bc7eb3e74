"""The description of a panel that has none of its own: what its metrics mean, in the words of their documentation."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from eagle_eye.schema.metrics import BY_NAME

PREFIX = "eagle_eye_"
GAP = "A gap is time in which nothing was observed, which is never zero."
# Of panels that count, derive or list something else than their metrics mean.
OWN: Mapping[str, str] = MappingProxyType({
    "Actions in this range": "Actions of the time shown, by kind, whatever became of them.",
    "Actions of the last hour, by outcome": "In mode observe they would have been asked for: would_act.",
    "CPU": "Cores that the server uses.",
    "Flapping": "Open incidents that recover and return: people hear less of them.",
    "Confirmed or acting": "Open incidents that are certain enough to act on.",
    "GPUs": "GPUs of the running attempt.",
    "GPUs seen": "GPUs of this node that report a temperature. Fewer than it has: one is lost, or was never seen.",
    "Goodput": "Shares of the present run's time: training at full speed, and on steps that counted.",
    "Incidents of this job": "Open incidents, and for a quarter of an hour those that have recovered.",
    "Incidents of this node": "Open incidents that accuse it, and for a quarter of an hour those that have recovered.",
    "Memory": "Memory that the server holds.",
    "Nodes": "Nodes known, and those heard of just now.",
    "Failing for": "For how long no delivery has reached a subscription: its receiver is down, or refuses.",
    "Oldest open": "How long ago the oldest critical one began.",
    "Oldest undelivered": "How long the oldest event waits for a subscription.",
    "Open files": "Files and connections that the server has open.",
    "Open incidents by fault": "Open incidents, and for a quarter of an hour those that have recovered.",
    "Free disk space": "Free share of the file system that holds the server's data.",
    "Steps per second": "How fast the furthest rank's step number grows.",
    "Awaiting approval": "Actions that nobody has approved or rejected yet; they expire.",
    "Oldest waiting delivery": "How long the oldest event of each subscription waits.",
})  # fmt: skip
_DOCUMENTED = Path(__file__).parents[3] / "docs/reference/metrics.md"
_METRIC = re.compile(rf"\b{PREFIX}\w+")
_ROW = re.compile(r"^\| (?P<names>`[^|]+`) \|[^|]*\| (?P<what>.+) \|$")
_LINKS = (re.compile(r" ?\(\[[^]]+\]\([^)]+\)\)"), ""), (re.compile(r"\[([^]]+)\]\([^)]+\)"), r"\1")
_ALWAYS_THERE = {f"{PREFIX}build_info"}  # stands for zero where nothing was counted
_HISTOGRAM = re.compile(r"_(bucket|sum|count)$")


def described(panel: Mapping[str, Any]) -> str:
    """Return the description. Raises ValueError for a metric that is documented nowhere."""
    title, over_time = panel["title"], panel["type"] == "timeseries"
    if title in OWN:
        return OWN[title]
    found = dict.fromkeys(
        name for target in panel["targets"] for name in _METRIC.findall(target["expr"]) if name not in _ALWAYS_THERE
    )
    texts = {name: _meaning(name) for name in found}
    if len(texts) == 1:
        sentences = [_sentence(next(iter(texts.values())))]
    else:
        sentences = [f"- `{name.removeprefix(PREFIX)}`: {text}" for name, text in texts.items()]
    observed = over_time and any(name.removeprefix(PREFIX) in BY_NAME for name in texts)
    return "\n".join([*sentences, *(["", GAP] if observed else [])])


def _meaning(name: str) -> str:
    known = BY_NAME.get(name.removeprefix(PREFIX))
    if known is not None:
        return known.help.rstrip(".")
    documented = _documented()
    text = documented.get(name) or documented.get(_HISTOGRAM.sub("", name))
    if text is None:
        raise ValueError(f"{name}: expected a metric of the catalogue or of {_DOCUMENTED.name}; document it there")
    return text


@functools.cache
def _documented() -> Mapping[str, str]:
    """Return the server's own metrics by name: a row of several names has as many texts, or one for all."""
    found: dict[str, str] = {}
    for line in _DOCUMENTED.read_text(encoding="utf-8").splitlines():
        row = _ROW.match(line)
        if row is None:
            continue
        text = row["what"].removeprefix("histogram: ").removeprefix("histogram, ")
        for link, replacement in _LINKS:
            text = link.sub(replacement, text)
        names = re.findall(r"`(\w+)`", row["names"])
        texts = _split(text, len(names))
        found.update(zip(names, texts, strict=True))
    return found


def _split(text: str, parts: int) -> Iterable[str]:
    texts = text.split("; ")
    return texts if len(texts) == parts else [text] * parts


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."
