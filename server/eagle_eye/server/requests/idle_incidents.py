"""Opens, updates and ends incidents of nodes without a job, by the same rules as the detection loop but outside it."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from eagle_eye.detectors.types import Verdict
from eagle_eye.server.engine.idle_faults import NO_JOB
from eagle_eye.server.engine.incidents import fold
from eagle_eye.server.engine.judgement import Judgement
from eagle_eye.server.engine.respond import Book, Response
from eagle_eye.server.engine.settings import PolicySettings
from eagle_eye.server.model.records import Incident
from eagle_eye.server.monitor.announcements import announcement
from eagle_eye.server.store.store import Change, Store


def claimed(
    store: Store, known: Sequence[Incident], verdict: Verdict, policy: PolicySettings, public_url: str, now_s: float
) -> Change:
    """Return the change that opens an incident for the claim, or adds it to one of ``known``, with its events."""
    return _folded(store, known, (verdict,), policy, public_url, now_s)


def over(store: Store, incident: Incident, policy: PolicySettings, public_url: str, now_s: float) -> Change:
    """Return the change that ends an incident known to be over, with its events."""
    return _folded(store, [replace(incident, seen_s=0.0)], (), policy, public_url, now_s)


def _folded(
    store: Store,
    known: Sequence[Incident],
    verdicts: tuple[Verdict, ...],
    policy: PolicySettings,
    public_url: str,
    now_s: float,
) -> Change:
    judgement = Judgement(job=NO_JOB, attempt=0, now_s=now_s, verdicts=verdicts)
    folded = fold(known, judgement, {}, policy, store.new_id)
    return announcement(Response(tuple(folded), ()), Book(known, ()), policy, public_url, now_s).change
