"""Settings for how much history is kept."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from eagle_eye.server.model.bounds import Count, Positive


class HistorySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How much history is kept: at most ``retention_s`` and ``retention_bytes``, with separate limits per level."""

    segment_s: Annotated[float, Meta(ge=10, le=3_600)] = 1_800.0  # received frames become segments after this time
    retention_s: Positive = 7 * 86_400.0
    retention_bytes: Annotated[int, Meta(ge=1 << 20)] = 20 << 30
    minutes_retention_s: Positive = 730 * 86_400.0  # downsampled to a minute
    minutes_retention_bytes: Annotated[int, Meta(ge=1 << 20)] = 15 << 30
    hours_retention_s: Positive = 730 * 86_400.0  # downsampled to an hour, by earlier versions only
    hours_retention_bytes: Annotated[int, Meta(ge=1 << 20)] = 5 << 30
    merge_below_bytes: Annotated[int, Meta(ge=0, le=64 << 20)] = 4 << 20  # of earlier versions; has no effect
    replay_frames_max: Count = 500_000  # newest frames replayed into the detection window at start
    query_frames_max: Count = 100_000  # frames that one query may read; ten minutes of a node count as one
    records_retention_s: Positive = 90 * 86_400.0  # delivered events and their deliveries


def of_earlier_versions(settings: HistorySettings) -> list[str]:
    """Return a line about each key that is set but has no effect, or only on data of earlier versions."""
    plain = HistorySettings()
    return [
        f"history.{key} = {getattr(settings, key)!r} {what}"
        for key, what in _OF_EARLIER_VERSIONS.items()
        if getattr(settings, key) != getattr(plain, key)
    ]


_ONLY_LEFT = "limits only the hours that an earlier version left: minutes alone are made now, see minutes_retention"
_OF_EARLIER_VERSIONS = {
    "merge_below_bytes": "has no effect: segments are not merged any more; remove it",
    "hours_retention_s": f"{_ONLY_LEFT}_s",
    "hours_retention_bytes": f"{_ONLY_LEFT}_bytes",
}
