"""What NCCL warned of in ranks' logs: which peer and port, in its own words. Evidence, which accuses no node."""

from __future__ import annotations

from eagle_eye.detectors.signs.once import once
from eagle_eye.detectors.types import Evidence, Window
from eagle_eye.schema.attributes import text

RECENT_S = 900.0  # torch's own timeout is ten minutes, and NCCL warns before it
NODES_MAX = 3
CHARS_MAX = 300


@once
def nccl_warnings(window: Window) -> tuple[Evidence, ...]:
    """Return the newest warning of each node that had one lately, newest first."""
    found: dict[str, Evidence] = {}
    for event in sorted(window.events, key=lambda event: -event.time_s):
        if event.kind == "nccl_warning" and event.node is not None and event.time_s >= window.now_s - RECENT_S:
            said = text(event.attributes, "text")[:CHARS_MAX]
            found.setdefault(event.node, Evidence("nccl_warning", event.node, event.device, said))
    return tuple(found.values())[:NODES_MAX]
