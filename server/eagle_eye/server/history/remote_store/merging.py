"""Merges a query's answer with older data from the remote store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from eagle_eye.schema.metrics import Scope
from eagle_eye.server.history.history import UnreadableRange
from eagle_eye.server.history.remote_store.remote_history import RemoteHistory, Series, SeriesQuery
from eagle_eye.server.model.timestamps import rfc3339

EMBEDDED = "embedded"
REMOTE_STORE = "remote_store"

Body = dict[str, Any]


def with_past(
    body: Body,
    past: RemoteHistory | None,
    begins_s: float | None,
    asked: SeriesQuery,
    steps: int,
    shown: Callable[[float], object],
    gaps: Sequence[UnreadableRange] = (),
) -> Body:
    """Return the answer with the steps before ``begins_s`` (None: all) from the store, and the sources named.

    ``body["series"]`` is the embedded history's answer for the first ``steps`` steps; ``shown`` converts a value to
    JSON. Each step of a series comes from one source. A store that does not answer is listed among the sources with its
    problem; so is each of ``gaps``, ranges in which the embedded history lost data.
    """
    end_s = asked.start_s + steps * asked.step_s
    if past is None:
        return {**body, "sources": _embedded(asked.start_s, end_s, gaps)}
    reach = past.before(begins_s, asked, steps)
    sources = _embedded(reach.seam_s, end_s, gaps) if reach.seam_s < end_s else []
    if asked.start_s < reach.seam_s:
        sources.insert(0, _source(REMOTE_STORE, asked.start_s, reach.seam_s, reach.problem))
    if not reach.series:
        return {**body, "sources": sources}
    return {**body, "series": _merged(body["series"], reach.series, reach.seam_s, asked, shown), "sources": sources}


def _embedded(start_s: float, end_s: float, gaps: Sequence[UnreadableRange]) -> list[Body]:
    """Return the embedded history's entries among the sources, in order, with a problem where data was lost."""
    parts = []
    at_s = start_s
    for gap in gaps:
        low_s, high_s = max(gap.start_s, at_s), min(gap.end_s, end_s)
        if low_s <= high_s:
            if at_s < low_s:
                parts.append(_source(EMBEDDED, at_s, low_s))
            parts.append(_source(EMBEDDED, low_s, high_s, gap.problem))
            at_s = high_s
    if at_s < end_s or not parts:
        parts.append(_source(EMBEDDED, at_s, end_s))
    return parts


def _source(source: str, start_s: float, end_s: float, problem: str | None = None) -> Body:
    return {"source": source, "start": rfc3339(start_s), "end": rfc3339(end_s), "problem": problem}


def _merged(
    embedded: list[Body], earlier: Series, seam_s: float, asked: SeriesQuery, shown: Callable[[float], object]
) -> list[Body]:
    seam = rfc3339(seam_s)  # all times are UTC texts of equal length, so they compare as text
    found: dict[tuple[str, object], Body] = {}
    for (node, key), points in earlier.items():
        device = None if asked.spec.scope is Scope.NODE else key
        answered = [[rfc3339(asked.start_s + at * asked.step_s), shown(value)] for at, value in sorted(points.items())]
        found[node, device] = {"node": node, "device": device, "points": answered}
    for series in embedded:
        before = found.get((series["node"], series["device"]))
        if before is not None:
            own = [point for point in series["points"] if point[0] >= seam]
            series = {**series, "points": before["points"] + own}  # noqa: PLW2901 - the same series, longer
        found[series["node"], series["device"]] = series
    in_order = sorted(found.items(), key=lambda item: (item[0][0], str(item[0][1])))
    return [series for _, series in in_order if series["points"]]
