"""Writes a result while it grows: whole at any moment, so that an interrupted run keeps what it had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec


def write_result(file: Path, result: Any) -> None:
    """Replace the file by the result as indented JSON; its folder is made."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(".new")
    new.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    new.replace(file)
