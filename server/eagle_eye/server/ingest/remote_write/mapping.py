"""Loads the mapping table (``mapping.toml``), validated against the catalogue. Reads that one file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

import msgspec
import tomllib

from eagle_eye.schema import events as event_catalogue
from eagle_eye.schema import metrics as catalogue
from eagle_eye.schema.frame import KEYS_MAX
from eagle_eye.schema.metrics import Scope
from eagle_eye.schema.names import is_name

FILE = Path(__file__).with_name("mapping.toml")

Combine = Literal["sum", "max", "first", "ratio", "widest"]


class Exporter(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rows that an exporter describes: GPUs where ``device`` names a label, ports with ``link``, else the node.

    ``model`` is the label with the GPU's NVML name, ``uuid`` the one with its UUID.
    """

    device: str = ""
    device_pattern: str = ""
    model: str = ""
    uuid: str = ""
    without: tuple[str, ...] = ()
    blanks: bool = False
    link: bool = False


class Origin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A series that a metric is made from."""

    series: str
    factor: float = 1.0
    unit: str = ""
    where: dict[str, str] = {}
    rate: bool = False
    over: bool = False


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"origins": "from"}):
    """How a metric of the catalogue is computed; the file's header explains the fields."""

    to: str
    exporter: str
    origins: tuple[Origin, ...]
    combine: Combine = "sum"
    each: tuple[str, ...] = ()
    per: str = ""
    of: tuple[str, ...] = ()
    complement: bool = False
    most: float = float("inf")
    equals: tuple[float, ...] = ()


class EventRule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A gauge that becomes an event on change; ``text`` is a label describing its value.

    ``states``: the last error's code, the recovery action that NVML numbers, or DCGM's health, whose failures ``text``
    names by their error codes.
    """

    kind: str
    exporter: str
    series: str
    text: str = ""
    states: Literal["code", "recovery_action", "health"] = "code"


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    exporter: dict[str, Exporter]
    event: tuple[EventRule, ...]
    metric: tuple[Rule, ...]


class MappedRow(NamedTuple):
    """The row that a series describes: the node, a device (its index) or a link (its name)."""

    scope: Scope
    key: int | str


class Use(NamedTuple):
    """One metric that a series contributes to; ``order`` is its index among the metric's origins."""

    rule: Rule
    scope: Scope
    origin: Origin
    order: int
    exporter: Exporter
    where: tuple[tuple[str, re.Pattern[str]], ...]

    def fits(self, labels: Mapping[str, str]) -> bool:
        """Return whether a series with these labels matches."""
        return all(pattern.fullmatch(labels.get(name, "")) for name, pattern in self.where)


class Table(NamedTuple):
    """The mapping by series name, also by those of ``translated``. ``wanted`` has all, as they are on the wire."""

    metrics: Mapping[str, tuple[Use, ...]]
    events: Mapping[str, EventRule]
    exporters: Mapping[str, Exporter]
    wanted: frozenset[bytes]


TARGET_UP = "up"  # whether Prometheus could scrape the target


def load(file: Path = FILE) -> Table:
    """Return the table. Raises ValueError, KeyError or msgspec.ValidationError for an invalid one."""
    raw = msgspec.convert(tomllib.loads(file.read_text(encoding="utf-8")), _Table)
    metrics: dict[str, list[Use]] = {}
    for rule in raw.metric:
        exporter, scope = raw.exporter[rule.exporter], catalogue.BY_NAME[rule.to].scope
        if scope is not _scope(exporter):
            raise ValueError(f"{rule.to} is a {scope.value} metric; {rule.exporter} has other rows")
        if (rule.combine == "ratio") != any(origin.over for origin in rule.origins):
            raise ValueError(f"{rule.to}: a ratio needs `over`, and nothing else does")
        for order, origin in enumerate(rule.origins):
            where = tuple((name, re.compile(pattern)) for name, pattern in origin.where.items())
            use = Use(rule, scope, origin, order, exporter, where)
            metrics.setdefault(origin.series, []).append(use)
    for event in raw.event:
        if event.kind not in event_catalogue.BY_KIND or not raw.exporter[event.exporter].device:
            raise ValueError(f"{event.series} cannot become an event {event.kind!r} of a device")
    events = {event.series: event for event in raw.event}
    units = {name: uses[0].origin.unit for name, uses in metrics.items()} | dict.fromkeys(events, "")
    for other, name in _other_names(units).items():
        if name in events:
            events[other] = events[name]
        else:
            metrics[other] = metrics[name]
    names = (*metrics, *events, TARGET_UP)
    return Table(
        MappingProxyType({name: tuple(uses) for name, uses in metrics.items()}),
        MappingProxyType(events),
        MappingProxyType(raw.exporter),
        frozenset(name.encode() for name in names),
    )


def translated(series: str, unit: str) -> set[str]:
    """Return the names that a series may have after OpenTelemetry's translation to Prometheus, its own among them.

    A counter gets ``_total`` where it lacks it, or loses it where a receiver trims names; a known unit is appended
    before that. Values stay as they are: a name with another unit is none of these, because nobody knows what scaled
    its values. https://opentelemetry.io/docs/specs/otel/compatibility/prometheus_and_openmetrics/
    """
    stem = series.removesuffix("_total")
    stems = (stem, f"{stem}_{unit}") if unit else (stem,)
    return {series} | {stem + total for stem in stems for total in ("", "_total")}


def _other_names(units: Mapping[str, str]) -> dict[str, str]:
    """Return the mapped series by their other names. Raises ValueError where a name means two of them."""
    found: dict[str, str] = {}
    for series, unit in units.items():
        for other in translated(series, unit) - {series}:
            if other in units or other == TARGET_UP or found.setdefault(other, series) != series:
                raise ValueError(f"{other} may be {series} or {found.get(other, other)}")
    return found


def row_of(exporter: Exporter, labels: Mapping[str, str]) -> MappedRow | None:
    """Return the row for the exporter's series with these labels; None where they do not identify one."""
    if exporter.device:
        match = re.fullmatch(exporter.device_pattern, labels.get(exporter.device, ""))
        return MappedRow(Scope.DEVICE, int(match[1])) if match is not None and int(match[1]) < KEYS_MAX else None
    if exporter.link:
        device, port = labels.get("device", ""), labels.get("port", "1")
        # The same names as agents use, so that a node's links keep their names when it gets an agent.
        name = device if port == "1" else f"{device}:{port}"
        return MappedRow(Scope.LINK, name) if device and is_name(name) else None
    return MappedRow(Scope.NODE, -1)


def _scope(exporter: Exporter) -> Scope:
    if exporter.device:
        return Scope.DEVICE
    return Scope.LINK if exporter.link else Scope.NODE
