"""The values that lists may be filtered by, where not every text is one. The API and the commands share them."""

from __future__ import annotations

from typing import Final, Literal

from eagle_eye.detectors.faults import FAULTS
from eagle_eye.server.jobs.source import KnownState
from eagle_eye.server.model.records import IncidentState

FAULT_NAMES: Final = tuple(fault.name for fault in FAULTS)
# open: suspected and confirmed ones; live: also those that are acted on.
ListedIncidentState = Literal[IncidentState, "open", "live"]
# observed: agents speak of the job, no scheduler does.
ListedJobState = Literal["observed", KnownState, "maintenance"]
