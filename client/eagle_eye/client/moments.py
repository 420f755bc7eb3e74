"""Times as arguments: aware datetimes, Unix seconds, and the texts that commands take."""

from __future__ import annotations

from datetime import datetime

from eagle_eye.schema.times import option_time

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
