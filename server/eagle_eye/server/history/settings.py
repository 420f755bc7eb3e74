"""How much of the past is kept."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from eagle_eye.server.model.bounds import Count, Positive


class HistorySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How much of the past is kept: at most ``retention_s`` and at most ``retention_bytes``, of each level its own."""

    segment_s: Annotated[float, Meta(ge=10, le=3_600)] = 300.0  # what was received in this time becomes segments
    retention_s: Positive = 7 * 86_400.0
    retention_bytes: Annotated[int, Meta(ge=1 << 20)] = 20 << 30
    minutes_retention_s: Positive = 90 * 86_400.0  # downsampled to a minute
    minutes_retention_bytes: Annotated[int, Meta(ge=1 << 20)] = 10 << 30
    hours_retention_s: Positive = 730 * 86_400.0  # downsampled to an hour
    hours_retention_bytes: Annotated[int, Meta(ge=1 << 20)] = 5 << 30
    merge_below_bytes: Annotated[int, Meta(ge=0, le=64 << 20)] = 4 << 20  # of earlier versions, without a meaning
    replay_frames_max: Count = 500_000  # newest frames read back into the window at start
    query_frames_max: Count = 100_000  # frames that one query may read
    records_retention_s: Positive = 90 * 86_400.0  # delivered events and their deliveries


def without_meaning(settings: HistorySettings) -> list[str]:
    """Return a line about each key that is set and means nothing any more."""
    plain = HistorySettings()
    return [
        f"history.{key} = {getattr(settings, key)!r} has no effect: {why}; remove it"
        for key, why in _WITHOUT_MEANING.items()
        if getattr(settings, key) != getattr(plain, key)
    ]


_WITHOUT_MEANING = {"merge_below_bytes": "segments are not merged any more"}
