"""The allowed values of list filters, shared by the API and the commands."""

from __future__ import annotations

from typing import Final, Literal

from eagle_eye.detectors.faults import FAULTS
from eagle_eye.server.jobs.source import KnownState
from eagle_eye.server.model.records import IncidentState

FAULT_NAMES: Final = tuple(fault.name for fault in FAULTS)
# open: suspected and confirmed ones; live: also those being acted on.
ListedIncidentState = Literal[IncidentState, "open", "live"]
# observed: agents report the job, no scheduler does; ended: they did.
ListedJobState = Literal["observed", "ended", KnownState, "maintenance"]
