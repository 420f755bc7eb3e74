"""Opaque pagination cursors, each valid for one list."""

from __future__ import annotations

import base64

from eagle_eye.server.model.errors import BadCursor


def cursor_of(list_name: str, position: int) -> str:
    """Return the cursor of a position in a list."""
    return base64.urlsafe_b64encode(f"{list_name}:{position}".encode()).decode().rstrip("=")


def position_of(cursor: str, list_name: str) -> int:
    """Return the position that a cursor of this list represents. Raises BadCursor."""
    try:
        text = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode()
        name, _, position = text.partition(":")
        number = int(position)
    except ValueError:
        name, number = "", 0
    if name != list_name or not 0 < number < 1 << 62:
        raise BadCursor(
            f"cursor {cursor[:80]!r} is none of this list's; use the next of a page of the same list, unchanged"
        )
    return number
