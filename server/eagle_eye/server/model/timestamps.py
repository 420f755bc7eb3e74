"""Writes times: RFC 3339 outside, Unix seconds inside. ``schema/times.py`` reads them."""

from __future__ import annotations

from datetime import UTC, datetime


def rfc3339(time_s: float) -> str:
    """Return Unix seconds as RFC 3339 in UTC with milliseconds."""
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
