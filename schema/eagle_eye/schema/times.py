"""How times are written: in the API's queries, in options of commands, in arguments of the Python client."""

from __future__ import annotations

import re
from datetime import datetime

# The range of datetime and of plausible clocks: 1970 to 2100.
TIME_S_MAX = 4_102_444_800.0
# How a time of a command's option is written; every command accepts all of them.
FORMS = "RFC 3339 with a zone (2026-01-31T12:00:00Z), an age (-2h, 7d, 90s), now, or Unix seconds"
SHORT_FORMS = "2026-01-31T12:00:00Z, -2h, 7d, now or Unix seconds"  # likewise, for a help text
_AGE = re.compile(r"-?(\d{1,12}(?:\.\d{1,6})?)\s?([smhdw])")
_UNIT_S = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0, "w": 604_800.0}


def unix_seconds(text: str) -> float:
    """Return the Unix seconds of an RFC 3339 time, or of a plain number of seconds.

    Raises ValueError for anything else, for a time without an offset and for times outside 1970 to 2100.
    """
    try:
        time_s = float(text)
    except ValueError:
        # Python 3.10 does not read Z.
        moment = datetime.fromisoformat(text[:-1] + "+00:00" if text.endswith("Z") else text)
        if moment.tzinfo is None:
            raise ValueError(f"{text!r} has no offset from UTC; write 2026-01-31T12:00:00Z") from None
        time_s = moment.timestamp()
    if not 0.0 <= time_s < TIME_S_MAX:
        raise ValueError(f"{text!r} is not between 1970 and 2100{in_seconds(time_s)}")
    return time_s


def in_seconds(time_s: float) -> str:
    """Return a hint for Unix milliseconds, microseconds or nanoseconds mistaken for seconds; "" for others."""
    for unit, divisor in (("milliseconds", 1e3), ("microseconds", 1e6), ("nanoseconds", 1e9)):
        if time_s >= TIME_S_MAX and 1e8 <= time_s / divisor < TIME_S_MAX:
            return f"; it looks like Unix {unit}: write seconds, {time_s / divisor:.0f}"
    return ""


def length_s(text: str) -> float:
    """Return the seconds of a length of time, such as 90m, 4h or 7d. Raises ValueError."""
    found = None if text.startswith("-") else _AGE.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no length of time")
    return float(found[1]) * _UNIT_S[found[2]]


def option_time(text: str, now_s: float) -> float:
    """Return the Unix seconds of a time in one of ``FORMS``. Raises ValueError with what was expected and the value."""
    if text == "now":
        return now_s
    time_s = now_s - length_s(text.removeprefix("-")) if _AGE.fullmatch(text) else None
    shown = repr(text if len(text) <= 80 else text[:80] + "...")
    if time_s is None:
        try:
            time_s = unix_seconds(text)
        except ValueError:
            raise ValueError(f"expected {FORMS}, got {shown}{_slip(text)}") from None
    if not 0.0 <= time_s < TIME_S_MAX:
        raise ValueError(f"expected a time from 1970 to 2100, got {shown}")
    return time_s


def _slip(text: str) -> str:
    """Return what is wrong with a text that is nearly a time."""
    try:
        return in_seconds(float(text))
    except ValueError:
        pass
    try:
        return "; it has no zone: write Z or +01:00 behind it" if datetime.fromisoformat(text).tzinfo is None else ""
    except ValueError:
        return ""
