"""RFC 3339 at the edge, Unix seconds inside."""

from __future__ import annotations

from datetime import UTC, datetime

# What datetime can hold and what a sane clock can say: 1970 to 2100.
TIME_S_MAX = 4_102_444_800.0


def rfc3339(time_s: float) -> str:
    """Return Unix seconds as RFC 3339 in UTC with milliseconds."""
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def unix_seconds(text: str) -> float:
    """Return the Unix seconds of an RFC 3339 time, or of a plain number of seconds.

    Raises ValueError for anything else, for a time without an offset and for times outside 1970 to 2100.
    """
    try:
        time_s = float(text)
    except ValueError:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None:
            raise ValueError(f"{text!r} has no offset from UTC; write 2026-01-31T12:00:00Z") from None
        time_s = moment.timestamp()
    if not 0.0 <= time_s < TIME_S_MAX:
        raise ValueError(f"{text!r} is not between 1970 and 2100")
    return time_s
