"""Settings for the accounts."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta


class AccountSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the past is accounted for, and how long the accounts are kept."""

    # How long after an action that was not carried out its outcome is examined.
    hindsight_s: Annotated[float, Meta(ge=3_600, le=30 * 86_400)] = 2 * 86_400.0
    # Attempts, tickets, driver errors, and GPUs that are no longer reported.
    retention_s: Annotated[float, Meta(ge=60 * 86_400)] = 400 * 86_400.0
