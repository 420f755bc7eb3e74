"""Whether others' traffic passes, by an interface's count of bytes."""

from __future__ import annotations

import pytest

from eagle_eye.checkpoint.traffic import Carrier, IdleSpans

RATE = 100_000_000  # bytes a second of the link
LOOK_S = 0.002


class Link:
    """A link with a clock, looked at every 2 ms."""

    def __init__(self) -> None:
        self.spans = IdleSpans()
        self.carrier = Carrier(self.spans)
        self.now_s = 10.0
        self.total = 0
        self.carrier.observe_traffic(self.now_s, self.total)

    def passes(self, seconds: float, ratio: float) -> None:
        for _ in range(round(seconds / LOOK_S)):
            self.now_s += LOOK_S
            self.total += int(RATE * ratio * LOOK_S)
            self.carrier.observe_traffic(self.now_s, self.total)

    def own(self, seconds: float, own_ratio: float, others_ratio: float) -> bool:
        self.now_s += seconds
        sent = int(RATE * own_ratio * seconds)
        self.total += int(sent * 1.05 + RATE * others_ratio * seconds)
        return self.carrier.sent(self.now_s, self.total, sent)

    @property
    def busy(self) -> bool:
        return self.spans.sight(self.now_s).busy


@pytest.fixture
def link() -> Link:
    link = Link()
    link.passes(0.1, 1.0)
    link.passes(0.1, 0.0)
    return link


def test_traffic_is_seen_at_the_next_look(link: Link) -> None:
    assert not link.busy
    link.passes(LOOK_S, 1.0)
    assert link.busy


def test_a_pause_between_the_rounds_of_a_collective_ends_nothing(link: Link) -> None:
    link.passes(0.01, 1.0)
    link.passes(LOOK_S, 0.0)
    assert link.busy


def test_traffic_has_ended_when_it_was_last_seen(link: Link) -> None:
    link.passes(0.05, 1.0)
    ended_s = link.now_s
    link.passes(0.02, 0.0)
    assert link.spans.sight(link.now_s).began_s == pytest.approx(ended_s)


@pytest.mark.parametrize("ratio", [0.0, 0.02, 0.05])
def test_acknowledgements_and_words_are_no_traffic(link: Link, ratio: float) -> None:
    link.passes(0.2, ratio)
    assert not link.busy


def test_what_was_sent_by_ourselves_is_no_traffic_of_others(link: Link) -> None:
    assert not link.own(0.02, 0.95, 0.0)
    assert not link.busy
    assert link.carrier.collisions == 0


def test_traffic_that_shares_the_link_with_our_own_is_seen(link: Link) -> None:
    assert link.own(0.02, 0.5, 0.45)
    assert link.busy
    assert link.carrier.collisions == 1


def test_traffic_that_began_while_nobody_looked_began_no_earlier_than_it_can_have(link: Link) -> None:
    link.spans.mark(link.now_s)
    link.now_s += 0.05
    link.total += int(RATE * 0.01)
    link.carrier.observe_traffic(link.now_s, link.total)
    link.passes(0.05, 0.0)
    length_s, _ = link.spans._lengths[0][0]
    assert length_s == pytest.approx(0.04, abs=0.003)


def test_an_interface_that_was_made_anew_counts_from_the_start(link: Link) -> None:
    link.total = 0
    link.passes(0.02, 0.0)
    assert not link.busy


def test_a_link_that_carries_little_is_judged_by_what_it_carries(link: Link) -> None:
    slow = Link()
    slow.passes(0.1, 0.12)  # 100 Mbit/s
    assert slow.busy
