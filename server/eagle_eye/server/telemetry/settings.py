"""Logging settings."""

from __future__ import annotations

from typing import Literal

import msgspec


class LogSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is logged to stderr, one line per event."""

    format: Literal["console", "json"] = "console"
    level: Literal["debug", "info", "warning", "error"] = "info"
