"""A metric's value as people write it, such as 1.56 GHz. Pure, and without numpy: commands need it on any machine."""

from __future__ import annotations

import math

from eagle_eye.schema.labels import throttled_by

_UNITS = {
    "seconds": "s",
    "bytes": "B",
    "bytes_per_second": "B/s",
    "hertz": "Hz",
    "watts": "W",
    "celsius": "°C",
    "ratio": "",
    "1": "",
    "bool": "",
    "bitmask": "",
    "steps": "",
}
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_SCALED = frozenset({"bytes", "bytes_per_second", "hertz"})
_COUNTED = frozenset({"collectives", "errors", "ranks"})  # one of them is singular


def number(value: float, unit: str) -> str:
    """Return the value in common notation, with its unit."""
    word = _UNITS.get(unit, unit.replace("_", " "))
    if unit in _COUNTED and value == 1:
        word = word.removesuffix("s")
    if not math.isfinite(value):
        return "not finite"
    for size, prefix in _PREFIXES if unit in _SCALED else ():
        if abs(value) >= size:
            return f"{_short(value / size)} {prefix}{word}"
    return f"{_short(value)} {word}".rstrip()


def figure(value: float | str, unit: str) -> str:
    """Return an observed value with its unit; a bit mask, also one in hexadecimal, as the reasons that it holds."""
    if unit == "bitmask" and isinstance(value, str) and value.startswith("0x"):
        value = int(value, 16)
    if isinstance(value, str):
        return value
    return throttled_by(int(value)) if unit == "bitmask" else number(value, unit)


def _short(value: float) -> str:
    return f"{value:.0f}" if value == round(value) and abs(value) < 1e15 else f"{value:.4g}"
