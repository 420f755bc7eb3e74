"""Parses event attributes, which come from logs, exporters and third-party recorders and may have any type."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def whole(attributes: Mapping[str, Any], name: str) -> int | None:
    """Return an attribute as an integer, given as int, float or text ("79", "0x4f"); None if it is none of these."""
    value = attributes.get(name)
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return int(value) if math.isfinite(value) and value == int(value) else None
    if isinstance(value, str):
        try:
            return int(value.strip(), 0)
        except ValueError:
            return _of_float_text(value)
    return None


def text(attributes: Mapping[str, Any], *names: str) -> str:
    """Return the texts of the named attributes in one line, "" if there are none."""
    found = (attributes.get(name) for name in names)
    return " ".join(value for value in found if isinstance(value, str))


def _of_float_text(value: str) -> int | None:
    try:
        number = float(value)
    except ValueError:
        return None
    return int(number) if math.isfinite(number) and number == int(number) else None
