"""The client of a server: its records, its changes, and its history as data frames."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import quote

import msgspec

from eagle_eye.client import ranges
from eagle_eye.client.http_client import (
    DataLacking,
    EventStream,
    HttpClient,
    LimitReached,
    MissingExtra,
    ServerEvent,
    Unreachable,
    UnreadableAnswer,
)
from eagle_eye.schema import metrics as catalogue
from eagle_eye.schema.frame import BadFrame
from eagle_eye.schema.metrics import MetricSpec, Scope
from eagle_eye.schema.names import did_you_mean
from eagle_eye.schema.recording import BrokenStream, messages
from eagle_eye.schema.times import option_time

if TYPE_CHECKING:
    from types import ModuleType

    import pandas as pd

    from eagle_eye.client.records import ActionDict, IncidentDict, IncidentInFullDict, JobDict, NodeDict


Moment = datetime | float | str


def unix_time(name: str, moment: Moment, now_s: float) -> float:
    """Return Unix seconds. Raises ValueError naming the argument, for a datetime without a time zone too."""
    if isinstance(moment, datetime):
        if moment.tzinfo is None:
            raise ValueError(f"{name}: {moment!r} has no time zone; datetime.now(timezone.utc) has one")
        moment = moment.timestamp()
    try:
        return option_time(repr(float(moment)) if isinstance(moment, (int, float)) else moment, now_s)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{name}: {error}") from None


def interval(start: Moment, end: Moment, now_s: float) -> tuple[float, float]:
    """Return start and end as Unix seconds. Raises ValueError, also where start is not before end."""
    start_s, end_s = unix_time("start", start, now_s), unix_time("end", end, now_s)
    if not start_s < end_s:
        raise ValueError(f"start: expected a time before end, {end!r}, got {start!r}")
    return start_s, end_s


ITEMS_MAX = 50_000  # of a list that is asked for whole
ROWS_MAX = 100_000  # of one frame of samples
PATIENCE_S = 300.0

Statistic = Literal["last", "min", "max", "mean", "increase"]


class Client(HttpClient):
    """A server's API. Lists are newest first; without ``limit`` they are whole, or LimitReached.

    All methods raise ClientError: Refused where the server says no, Unreachable where it does not answer. Arguments
    that cannot be meant are a ValueError. Times are aware datetimes, Unix seconds, or texts: RFC 3339, "-2h", "now".
    """

    def jobs(
        self,
        *,
        state: str | None = None,
        node: str | None = None,
        search: str | None = None,
        members: bool = True,
        limit: int | None = None,
    ) -> list[JobDict]:
        """Return jobs; ``search`` is a part of the name. Without ``members`` their ranks and nodes are left out."""
        return self._list("jobs", limit, state=state, node=node, search=search, members=None if members else "false")

    def nodes(self, *, state: str | None = None, limit: int | None = None) -> list[NodeDict]:
        """Return nodes with their standing and what their agents last said."""
        return self._list("nodes", limit, state=state)

    def incidents(
        self,
        *,
        state: str | None = None,
        job: str | None = None,
        node: str | None = None,
        fault: str | None = None,
        since: Moment | None = None,
        limit: int | None = None,
    ) -> list[IncidentDict]:
        """Return incidents, of state "open" those suspected or confirmed, "live" also those that are acted on."""
        since_s = None if since is None else repr(unix_time("since", since, time.time()))
        return self._list("incidents", limit, state=state, job=job, node=node, fault=fault, since=since_s)

    def incident(self, incident: str) -> IncidentInFullDict:
        """Return one incident with its evidence, what agents gathered, and its history."""
        record: IncidentInFullDict = self.call("GET", f"/api/v1/incidents/{quote(incident, safe='')}")
        return record

    def actions(
        self,
        *,
        state: str | None = None,
        job: str | None = None,
        node: str | None = None,
        kind: str | None = None,
        incident: str | None = None,
        limit: int | None = None,
    ) -> list[ActionDict]:
        """Return what was asked of subscribers, with their reports."""
        return self._list("actions", limit, state=state, job=job, node=node, kind=kind, incident=incident)

    def events(self, after: int | None = None, *, patience_s: float = PATIENCE_S) -> Iterator[ServerEvent]:
        """Yield changes as they happen, from now on or from behind the event ``after``; it does not end by itself.

        A lost connection is made again and nothing is missed; when the server stays away for ``patience_s`` it is
        Unreachable, and the text says the id to go on from. An event of kind "reset": too much happened meanwhile.
        """
        return EventStream(self, after, patience_s).follow()

    def query_range(
        self,
        metric: str,
        *,
        job: str | None = None,
        node: str | None = None,
        start: Moment = "-1h",
        end: Moment = "now",
        step: float = 1.0,
        statistic: Statistic = "last",
        wide: bool = False,
    ) -> pd.DataFrame:
        """Return a metric over time: the statistic of each step of ``step`` seconds that has an observation.

        Columns are time (the step's begin, UTC), node, device (-1: the node itself) or link, and value. With ``wide``
        the index is every step and there is a column for each (node, device), NaN where nothing was observed. They
        begin at multiples of ``step``, so that frames of several queries join. Needs the extra ``client``.
        """
        frames = _frames()
        steps = ranges.RangeSteps.between(*interval(start, end, time.time()), float(step))
        query = {"metric": metric, "job": job, "node": node, "statistic": statistic}
        found: pd.DataFrame = frames.of_range(metric, ranges.parts(self, query, steps), steps, wide=wide)
        if found.empty:
            self._check_known(job, node)
            if not found.attrs["problems"]:
                who = "`eagle-eye nodes show NODE` names what a node's agent cannot read"
                warnings.warn(f"no node reported {metric} in this range; {who}", DataLacking, stacklevel=2)
        return found

    def samples(
        self,
        job: str,
        start: Moment,
        end: Moment = "now",
        columns: Sequence[str] | None = None,
        *,
        rows_max: int = ROWS_MAX,
    ) -> Iterator[pd.DataFrame]:
        """Yield what a job's nodes sent as frames: time (UTC), node, device (-1: the node itself), and ``columns``.

        ``columns`` are metrics, by default all of devices and nodes; those of links are asked for alone, and come with
        a column link. What was not observed is NaN. A frame has at most ``rows_max`` rows, and one is in memory at a
        time. Rows come by part of the history, then by node, then by time. Needs the extra ``client``.
        """
        frames = _frames()
        if rows_max < 1:
            raise ValueError(f"rows_max: expected at least 1, got {rows_max!r}")
        specs, key = _specs(columns)
        start_s, end_s = interval(start, end, time.time())
        return self._samples(frames, job, {"start": repr(start_s), "end": repr(end_s)}, specs, key, rows_max)

    def _samples(
        self, frames: Any, job: str, query: dict[str, str], specs: Sequence[MetricSpec], key: str, rows_max: int
    ) -> Iterator[pd.DataFrame]:
        empty = True
        try:
            with self.stream(f"/api/v1/jobs/{quote(job, safe='')}/recording", query) as answer:
                stream = messages(answer.read)
                opening = frames.opening_of(stream)
                for frame in frames.of_recording(stream, specs, key, rows_max):
                    empty = False
                    yield frame
        except BrokenStream as error:
            raise Unreachable(f"{self.server}: {error}") from None
        except (BadFrame, msgspec.DecodeError, UnicodeDecodeError) as error:
            raise UnreadableAnswer(f"the recording of job {job!r} is not readable: {error}") from None
        if empty and not opening.known:
            self._check_known(job, None)

    def _list(self, noun: str, limit: int | None, **filters: str | None) -> list[Any]:
        items, more = self.pages(f"/api/v1/{noun}", filters, ITEMS_MAX if limit is None else limit)
        if more and limit is None:
            raise LimitReached(f"there are more than {ITEMS_MAX} {noun}; filter them, or say how many (limit)")
        return items

    def _check_known(self, job: str | None, node: str | None) -> None:
        """Raise Refused (404) where a name is one that the server never heard: nothing was found because of it."""
        for noun, name in (("jobs", job), ("nodes", node)):
            if name is not None:
                self.call("GET", f"/api/v1/{noun}/{quote(name, safe='')}")


def _specs(columns: Sequence[str] | None) -> tuple[list[MetricSpec], str]:
    """Return the metrics, and what their rows are told apart by. Raises ValueError."""
    if columns is None:
        return [spec for spec in catalogue.METRICS if spec.scope is not Scope.LINK], "device"
    if isinstance(columns, str) or not columns:
        raise ValueError(f"columns: expected a list of metrics, got {columns!r}")
    unknown = [name for name in columns if name not in catalogue.BY_NAME]
    if unknown:
        near = did_you_mean(unknown[0], catalogue.BY_NAME)
        raise ValueError(f"columns: {unknown[0]!r} is no metric (docs/reference/metrics.md){near}")
    specs = [catalogue.BY_NAME[name] for name in dict.fromkeys(columns)]
    links = [spec.name for spec in specs if spec.scope is Scope.LINK]
    if links and len(links) < len(specs):
        raise ValueError(f"columns: {links[0]} is of links; ask for metrics of links in a call of their own")
    return specs, "link" if links else "device"


def _frames() -> ModuleType:
    """Return the module that makes data frames. Raises MissingExtra."""
    try:
        from eagle_eye.client import frames
    except ModuleNotFoundError as error:
        lacking = f"no module {error.name}"
        raise MissingExtra(f'data frames need: pip install "eagle-eye[client]" ({lacking})', name=error.name) from None
    return frames
