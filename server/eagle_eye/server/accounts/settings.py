"""How the past is counted."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class AccountSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the past is counted, and how long what is counted is kept."""

    # How long after what would have been done it is looked at what happened.
    hindsight_s: Annotated[float, Meta(ge=3_600, le=30 * 86_400)] = 2 * 86_400.0
    # Attempts, tickets, driver errors, and GPUs that are no longer heard of.
    retention_s: Annotated[float, Meta(ge=60 * 86_400)] = 400 * 86_400.0
