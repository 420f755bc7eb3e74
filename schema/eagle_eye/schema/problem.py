"""Problem details for HTTP errors (RFC 9457)."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

CONTENT_TYPE = "application/problem+json"
LEADER_HEADER = "Eagle-Eye-Leader"  # of a standby's answers: the URL of the server that leads
# Likewise where the leader of another cell is meant: a standby passes this one on as the leader.
CELL_LEADER_HEADER = "Eagle-Eye-Cell-Leader"
# Of what a standby reads from the records, since it has no answer of the leader: why not.
STANDBY_HEADER = "Eagle-Eye-Standby"
# Of an answer for several cells: those that gave none, so that what they alone know is missing.
WITHOUT_CELLS_HEADER = "Eagle-Eye-Without-Cells"


def problem(status: int, reason: str, detail: str, **extra: Any) -> dict[str, Any]:
    """Return a problem document: ``type`` is stable per reason, ``detail`` says what to do."""
    return {
        "type": f"urn:eagle-eye:problem:{reason}",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "reason": reason,
        **extra,
    }
