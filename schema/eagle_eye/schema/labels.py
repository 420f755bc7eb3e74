"""What people read for a state: one word for each, wherever it is shown. Pure.

The web page has the same table: ``.venv/bin/python -m tests.page.api_types`` writes it from this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

AWAITING = "awaiting"

# States whose label is their name with spaces are left out.
STATE_LABELS: Mapping[str, str] = MappingProxyType(
    {
        # incidents
        "acting": "action under way",
        "false": "false alarm",
        # actions
        "would_act": "would have acted",
        AWAITING: "awaiting approval",
        # jobs
        "observed": "running",
        "timeout": "timed out",
    }
)


def label(state: str) -> str:
    """Return what people read for the state."""
    return STATE_LABELS.get(state, state.replace("_", " "))


def shown_state(incident_state: str, action_state: str) -> str:
    """Return the state that an incident is shown in, given that of its newest action ("" for none).

    One whose action awaits a person's word is not under way.
    """
    return action_state if incident_state == "acting" and action_state == AWAITING else incident_state
