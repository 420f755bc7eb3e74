"""Goodput: how much of a job's time was training that counted, and where the rest went. Pure.

``ettr_ratio`` (effective training time ratio: time of steps that counted over wall-clock time since the first attempt
started) is the quantity that operators of large clusters publish (MegaScale, NSDI 2024; ByteRobust, SOSP 2025; Kokolis
et al., HPCA 2025). ``goodput_ratio`` also deducts what slow nodes cost. Time of unknown use is in neither's
denominator; it is summed separately. Nor is what was lost in a run of which no step was ever seen.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from eagle_eye.server.accounts.timeline import LossCause, TimelineSpan

By = Literal["job", "node", "fault"]
# Where time went other than training; slow is the part of training lost to slowness.
LOST_PARTS = ("down", "startup", "redone", "stopped", "slow", "ending")


@dataclass(slots=True)
class Amount:
    """Wall-clock seconds, and GPU-seconds where the number of GPUs is known; the rest is ``uncounted_s``."""

    seconds: float = 0.0
    gpu_seconds: float = 0.0
    uncounted_s: float = 0.0

    def add(self, seconds: float, gpus: int | None) -> None:
        """Add ``seconds`` of ``gpus`` GPUs (None: unknown number)."""
        self.seconds += seconds
        if gpus is None:
            self.uncounted_s += seconds
        else:
            self.gpu_seconds += seconds * gpus

    def merge(self, other: Amount) -> None:
        """Add another amount."""
        self.seconds += other.seconds
        self.gpu_seconds += other.gpu_seconds
        self.uncounted_s += other.uncounted_s


class GoodputLoss(NamedTuple):
    """A loss of one kind due to one cause."""

    part: str
    cause: LossCause
    amount: Amount


@dataclass(slots=True)
class Account:
    """The sums of some spans: ``training`` at full speed, ``lost`` by part, and ``unknown``.

    Together they make ``wall``.
    """

    wall: Amount = field(default_factory=Amount)
    training: Amount = field(default_factory=Amount)
    lost: dict[str, Amount] = field(default_factory=dict)
    unknown: dict[str, Amount] = field(default_factory=dict)  # by reason
    known_s: float = 0.0  # of runs of which steps were seen, time of known use

    @property
    def ettr_ratio(self) -> float | None:
        """Time of steps that counted, slow ones included, over the known time; None when nothing is known."""
        return self._share(self.training.seconds + self._slow_s)

    @property
    def goodput_ratio(self) -> float | None:
        """The time that the counted steps would have taken without slowness, over the known time; None likewise."""
        return self._share(self.training.seconds)

    @property
    def _slow_s(self) -> float:
        slow = self.lost.get("slow")
        return 0.0 if slow is None else slow.seconds

    def _share(self, seconds: float) -> float | None:
        return min(seconds / self.known_s, 1.0) if self.known_s > 0 else None


def clipped(spans: Iterable[TimelineSpan], since_s: float, until_s: float) -> list[TimelineSpan]:
    """Return the parts of the spans between two times."""
    found = []
    for span in spans:
        start_s, end_s = max(span.start_s, since_s), min(span.end_s, until_s)
        if end_s > start_s:
            found.append(span._replace(start_s=start_s, end_s=end_s))
    return found


def account(spans: Iterable[TimelineSpan]) -> Account:
    """Return the sums of the spans."""
    sums = Account()
    for span in spans:
        sums.wall.add(span.seconds, span.gpus)
        if span.part == "unknown":
            sums.unknown.setdefault(span.reason, Amount()).add(span.seconds, span.gpus)
            continue
        sums.known_s += span.seconds if span.stepping else 0.0
        if span.part == "training":
            sums.training.add(span.seconds * (1 - span.slow_ratio), span.gpus)
        for part, _, seconds in _losses(span):
            sums.lost.setdefault(part, Amount()).add(seconds, span.gpus)
    return sums


def losses(spans: Iterable[TimelineSpan]) -> list[GoodputLoss]:
    """Return the losses by part and cause, the costliest first."""
    found: dict[tuple[str, LossCause], Amount] = defaultdict(Amount)
    for span in spans:
        for part, cause, seconds in _losses(span):
            found[part, cause].add(seconds, span.gpus)
    by_cost = [GoodputLoss(part, cause, amount) for (part, cause), amount in found.items()]
    return sorted(by_cost, key=lambda loss: (-loss.amount.gpu_seconds, -loss.amount.seconds, loss.part, loss.cause))


def grouped(found: Sequence[GoodputLoss], by: By) -> dict[str, dict[str, Amount]]:
    """Return losses summed by node or by fault, and by part in each; node "": no single node is to blame."""
    name: Callable[[LossCause], str] = (lambda cause: cause.node) if by == "node" else (lambda cause: cause.fault)
    sums: dict[str, dict[str, Amount]] = defaultdict(lambda: defaultdict(Amount))
    for loss in found:
        sums[name(loss.cause)][loss.part].merge(loss.amount)
    return {key: dict(parts) for key, parts in sums.items()}


def _losses(span: TimelineSpan) -> list[tuple[str, LossCause, float]]:
    """Return the span's losses: part, cause and seconds."""
    if span.part == "unknown":
        return []
    if span.part == "training":
        if span.cause is None or span.slow_ratio <= 0:
            return []
        return [("slow", span.cause, span.seconds * span.slow_ratio)]
    return [(span.part, span.cause or LossCause("ending"), span.seconds)]
