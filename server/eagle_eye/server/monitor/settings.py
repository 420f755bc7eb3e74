"""Settings for the evidence gathered before an action."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from eagle_eye.server.model.bounds import Count, Positive


class EvidenceSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is gathered on the suspects' hosts before an action stops their job, and how much of it is kept."""

    ask: bool = True  # whether agents are asked automatically; requests by hand work either way
    wait_s: Annotated[float, Meta(ge=0, le=60)] = 5.0  # how long an action may be delayed at most; 0: never
    within_s: Annotated[float, Meta(ge=0.5, le=60)] = 3.0  # time given to agents; with network latency below wait_s
    nodes_max: Count = 32  # asked because of one incident
    bundle_bytes_max: Annotated[int, Meta(ge=1024, le=1 << 30)] = 64 << 20
    upload_s: Positive = 120.0  # for one bundle to arrive
    folder_bytes_max: Annotated[int, Meta(ge=1 << 20)] = 10 << 30  # of all bundles; beyond it the oldest are deleted
    bundles_max: Count = 5_000
    retention_s: Positive = 30 * 86_400.0
