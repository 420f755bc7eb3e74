"""Settings for the accounts."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

# Of the lower end of a precision's interval: no number of outcomes reaches 1.
Precision = Annotated[float, Meta(ge=0, le=0.99)]


class AccountSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the past is accounted for, how long the accounts are kept, and when they suffice for another mode."""

    # How long after an action that was not carried out its outcome is examined.
    hindsight_s: Annotated[float, Meta(ge=3_600, le=30 * 86_400)] = 2 * 86_400.0
    # Attempts, tickets, driver errors, and GPUs that are no longer reported.
    retention_s: Annotated[float, Meta(ge=60 * 86_400)] = 400 * 86_400.0
    step_decisions_min: Annotated[int, Meta(ge=1)] = 10  # whose outcome is known; with fewer no statement is made
    approve_precision_min: Precision = 0.5  # what approve needs: people look at each action
    act_precision_min: Precision = 0.8  # what act needs
