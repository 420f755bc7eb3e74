"""A hang on the real detection loop, counted: from frames to lost GPU time with its cause."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from eagle_eye.detectors.types import WindowEvent
from eagle_eye.server.accounts import goodput
from eagle_eye.server.accounts.archive import Archive
from eagle_eye.server.accounts.bookkeeper import Bookkeeper
from eagle_eye.server.accounts.trust import AccountSettings
from eagle_eye.server.engine.job_track import EVENTS_KEPT, JobTrack
from eagle_eye.server.ingest import fleet
from eagle_eye.server.store.store import ATTEMPTS
from tests.server.engine.frames import START_S
from tests.server.test_watch import Site


class CountedSite(Site):
    """A site whose past is kept: a look every ten seconds."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.heard = fleet.Fleet(10)
        self.books = Bookkeeper(self.store, self.watch, self.heard, self.clock, AccountSettings(), lambda _: None)
        self.archive = Archive(self.store, self.clock, 172_800.0)

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            super().run(1)
            frame, received_s = self.sent[-1]
            self.heard.heard(frame, received_s)  # type: ignore[arg-type]
            if int(self.clock.now_s()) % 10 == 0:
                self.books.write_changes(self.watch.courses(), self.clock.now_s())


@pytest.fixture
def site(tmp_path: Path) -> Iterator[CountedSite]:
    made = CountedSite(tmp_path)
    yield made
    made.store.close()


def test_a_hang_and_the_restart_after_it_are_counted_with_their_cause(site: CountedSite) -> None:
    site.hang()
    site.run(8)
    site.fleet.stopped, site.fleet.silent_s = False, {}
    site.fleet.attempt, site.fleet.step = 1, 20.0  # from an earlier checkpoint: ten steps are done again
    site.run(30)
    first, second = sorted(site.store.all(ATTEMPTS), key=lambda attempt: attempt.attempt)
    assert (first.end, first.last_step, first.gpus, first.nodes) == ("superseded", 30, 3, 3)
    assert (second.run, second.prior_step, second.first_step) == (first.id, 30, 21)
    spans = site.archive.jobs("j").jobs["j"]
    causes = {(loss.part, loss.cause.fault, loss.cause.node): loss.amount for loss in goodput.losses(spans)}
    assert causes["stopped", "hang", "n1"].seconds == pytest.approx(20, abs=2)
    assert causes["redone", "hang", "n1"].seconds == pytest.approx(10, abs=2)
    assert causes["redone", "hang", "n1"].gpu_seconds == pytest.approx(30, abs=6)
    assert goodput.account(spans).ettr_ratio == pytest.approx(50 / 80, abs=0.05)


def test_the_inventory_of_a_large_job_leaves_room_for_what_is_judged() -> None:
    track = JobTrack("j", 0, 1.0, 900.0, START_S)
    track.add_series("n0", 0, 0)
    for number in range(EVENTS_KEPT + 1):
        track.add_event(WindowEvent(START_S, f"n{number}", 0, "inventory", {"uuid": f"GPU-{number}"}))
    track.add_event(WindowEvent(START_S, "n0", 0, "xid", {"code": 79}))
    events = track.window(START_S + 1, np.array([-np.inf]), np.array([False]), START_S).events
    assert ([event.kind for event in events], track.events_dropped_total) == (["xid"], 0)
