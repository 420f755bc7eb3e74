"""Detects a node that computes wrong numbers without errors, before the reduction spreads them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eagle_eye.detectors.signs.broken_numbers import BrokenNumbers, broken_numbers, first_broken
from eagle_eye.detectors.signs.peers import SIGMA_PER_MAD
from eagle_eye.detectors.signs.progress import typical_step_s
from eagle_eye.detectors.signs.role_medians import medians, roles_of
from eagle_eye.detectors.types import Blind, Evidence, Floats, Integers, Verdict, Window

PEERS_MIN = 3  # with fewer, one rank's different data looks like different arithmetic
RECENT_STEPS = 10  # newest steps in which a deviation must recur...
RECURRENCES_MIN = 3  # ...this often: defects recur on their host (37 incidents on 7 hosts, FT-HSDP, 2026)
HISTORY_STEPS, HISTORY_STEPS_MIN = 64, 10  # a rank's own past: shards of unlike parameters always differ
RATIO_MIN = 3.0  # a flipped exponent bit changes a norm by much more, other data by less
SIGMAS = 8.0  # of the spread between ranks and steps: local norms are lognormal with tails
SIGMA_FLOOR = 0.05  # of a log ratio: data differ between ranks by at least a few percent
SCREEN_LINES = 2  # newest lines examined in every pass
SUSPECTS_MAX = 16
PEERS_SAMPLED = 256  # of a large role, enough for its spread
CHECKSUM_LINES = 32  # newest lines with checksums that are compared
ALONE_MAX = 8  # more ranks than this without a match: parameters are sharded, checksums do not compare
BUCKET_BITS = 4  # at least sixteen buckets per checksum
SPREAD = np.uint64(0x9E3779B97F4A7C15)  # Fibonacci hashing (Knuth, TAOCP 3, 6.4)
LOSS_SHARE = 0.5  # of the gradient's deviation; if the rank's own loss shows as much, its data explain it
CONFIDENCE_FIRST, CONFIDENCE_NORM, CONFIDENCE_CHECKSUM = 0.98, 0.95, 0.97
CONFIDENCE_DATA, CONFIDENCE_PAIR = 0.7, 0.8  # the rank's data may explain it; one of two, undecided which


class _Alone(NamedTuple):
    """A rank whose checksum no other rank shares: in how many compared lines, since which, and the ranks in doubt."""

    column: int
    lines: int
    since: int
    rival: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SilentCorruption:
    """Names the node whose numbers are wrong before the reduction makes all ranks' wrong.

    Three methods; a corrupted loss shows none of this, since it is the same on all ranks:

    - the loss broke and one node's gradient before the reduction was not finite in the step before (a fact);
    - one rank's ``train_local_grad_norm`` is more than ``RATIO_MIN`` times and ``SIGMAS`` robust sigmas off the value
      expected from its role's median and its own past, in ``RECURRENCES_MIN`` of the newest ``RECENT_STEPS`` steps, and
      no other rank's is (pre-reduction norms as in the injection study of TU Berlin, 2026);
    - its ``train_parameter_checksum``, which replicas share, matches no other rank's, step after step, although it once
      did.

    Data that all ranks share is no corruption, and if the rank's own loss moves with its gradient, its data may explain
    it: then it is only reported. Blind if no rank reports a gradient norm before the reduction or a checksum. Cannot
    see: corruption that scales the gradient by less; a rank that was wrong from its first step (unlike shards look the
    same); which of two replicas is wrong; checksums where steps are shorter than the interval, since each rank then
    reports another step's; anything in a role with fewer than four ranks.
    """

    name: str = "silent_corruption"

    def detect(self, window: Window) -> list[Verdict]:
        """Return at most one verdict."""
        metrics = {"train_local_grad_norm", "train_parameter_checksum"} & window.device.keys()
        if not metrics:
            raise Blind("no rank reports its gradient norm before the reduction or a checksum of its parameters")
        broken = broken_numbers(window)
        if broken is not None and broken.lost:
            first = first_broken(window) if broken.settled else []
            return [self._first(window, first, broken)] if first else []
        return self._checksums(window) or self._norms(window)

    def _first(self, window: Window, columns: list[int], broken: BrokenNumbers) -> Verdict:
        column = columns[0]
        local = window.device.get("train_local_grad_norm")
        line = int(np.searchsorted(window.times_s, broken.onset_s))
        around = np.zeros(0)
        if local is not None:
            around = np.delete(local[max(line - 2, 0) : line + 1], columns, axis=1)
            around = around[np.isfinite(around)]
        series = window.series[column]
        return self._verdict(
            window,
            column,
            CONFIDENCE_FIRST,
            broken.sound_until_s,
            f"the gradient of rank {series.rank} on {series.node} was not finite before the reduction,"
            " in a step whose loss was; its peers' gradients were",
            (
                Evidence(
                    "train_local_grad_norm",
                    series.node,
                    series.device,
                    "not finite",
                    float(np.median(around)) if len(around) else None,
                ),
                Evidence("train_loss", series.node, series.device, "finite in that step"),
            ),
            frozenset({"local_gradient", "peers_gradient"}),
            fact=len(around) > 0,
        )

    def _norms(self, window: Window) -> list[Verdict]:
        local = window.steps.values.get("train_local_grad_norm")
        if local is None or len(local) < HISTORY_STEPS_MIN + RECURRENCES_MIN:
            return []
        found = []
        for column in _screened(local[-SCREEN_LINES:], window.role_of):
            lines, expected = _recurrences(local, window.role_of, column)
            if lines is not None:
                found.append((column, lines, expected))
        if len({window.series[column].node for column, _, _ in found}) != 1:
            return []  # none, or several nodes at once: the data or the program, not a node
        column, lines, expected = max(found, key=lambda item: (len(item[1]), -item[0]))
        series, steps = window.series[column], window.steps
        value, usual = float(local[lines[-1], column]), expected[-1]
        limit = usual * (RATIO_MIN if value > usual else 1 / RATIO_MIN)
        by_data = _loss_moves_too(window, column, lines, abs(math.log(value / usual)))
        summary = (
            f"the gradient norm of rank {series.rank} on {series.node} before the reduction was {value:.4g} where its"
            f" peers and its own past let expect {usual:.4g}, in {len(lines)} of the newest {RECENT_STEPS} steps;"
            " no other node's was"
        )
        return [
            self._verdict(
                window,
                column,
                CONFIDENCE_DATA if by_data else CONFIDENCE_NORM,
                float(steps.times_s[lines[0]]) - window.interval_s,
                summary + ("; its own loss moves with it, so its data may explain it" if by_data else ""),
                (
                    Evidence("train_local_grad_norm", series.node, series.device, value, usual, limit),
                    Evidence(
                        "deviating_steps", series.node, series.device, float(len(lines)), 0.0, RECURRENCES_MIN, "steps"
                    ),
                ),
                frozenset({"local_gradient", "peers_gradient"}),
            )
        ]

    def _checksums(self, window: Window) -> list[Verdict]:
        checksum = window.steps.values.get("train_parameter_checksum")
        if checksum is None or len(checksum) <= RECURRENCES_MIN:
            return []
        number = window.steps.number[-CHECKSUM_LINES:]
        if float(number[-1] - number[0]) != len(number) - 1 or typical_step_s(window) < window.interval_s:
            return []  # reports cover several steps, so ranks' checksums are of different steps
        alone = _alone(checksum[-CHECKSUM_LINES:], window.role_of)
        if alone is None:
            return []
        offset = max(len(checksum) - CHECKSUM_LINES, 0)
        series = window.series[alone.column]
        since_s = float(window.steps.times_s[offset + alone.since]) - window.interval_s
        evidence = (
            Evidence(
                "train_parameter_checksum",
                series.node,
                series.device,
                f"equal to no other rank's in {alone.lines} steps",
                None,
                float(RECURRENCES_MIN),
                "steps",
            ),
        )
        said = (
            f"the parameters of rank {series.rank} on {series.node} are no replica's any more: {alone.lines} checksums"
        )
        if alone.rival is None or window.series[alone.rival].node == series.node:
            kinds = frozenset({"checksum", "peers_checksum"})
            said += " equal to nobody's, while all others still agree"
            return [self._verdict(window, alone.column, CONFIDENCE_CHECKSUM, since_s, said, evidence, kinds, fact=True)]
        rival = window.series[alone.rival]
        verdict = self._verdict(
            window,
            alone.column,
            CONFIDENCE_PAIR,
            since_s,
            f"the parameters of rank {series.rank} on {series.node} and of rank {rival.rank} on {rival.node} should be"
            f" equal and are not in {alone.lines} steps; nothing tells which of the two is wrong",
            evidence,
            frozenset({"checksum"}),
            nodes=tuple(sorted((series.node, rival.node))),
        )
        return [verdict]

    def _verdict(
        self,
        window: Window,
        column: int,
        confidence: float,
        onset_s: float,
        summary: str,
        evidence: tuple[Evidence, ...],
        kinds: frozenset[str],
        fact: bool = False,
        nodes: tuple[str, ...] = (),
    ) -> Verdict:
        series = window.series[column]
        return Verdict(
            detector=self.name,
            fault="silent_data_corruption",
            job=window.job,
            nodes=nodes or (series.node,),
            node=None if nodes else series.node,
            device=None if nodes else series.device,
            confidence=confidence,
            onset_s=onset_s,
            summary=summary,
            evidence=evidence,
            kinds=kinds,
            fact=fact,
        )


def _screened(lines: Floats, role_of: Integers) -> list[int]:
    """Return the columns of (rows, S) far off their role's median in one of the newest lines; worst first."""
    roles = roles_of(role_of, PEERS_MIN + 1)
    if not len(roles.size):
        return []
    middle = medians(lines, roles, PEERS_MIN + 1).astype(lines.dtype)[:, roles.place]
    if roles.place.min() < 0:
        middle[:, roles.place < 0] = np.nan
    with np.errstate(invalid="ignore", divide="ignore"):
        off = lines / middle
        far = ((off > RATIO_MIN) & (off < np.inf)) | ((off < 1 / RATIO_MIN) & (off > 0))
    columns = np.flatnonzero(far.any(axis=0))
    if not len(columns):
        return []
    with np.errstate(invalid="ignore", divide="ignore"):
        size = np.abs(np.log(off[:, columns]))
    worst = np.where(np.isfinite(size), size, 0.0).max(axis=0)
    return [int(c) for c in columns[np.lexsort((columns, -worst))[:SUSPECTS_MAX]]]


def _recurrences(local: Floats, roles: Integers, column: int) -> tuple[NDArray[np.intp] | None, list[float]]:
    """Return the lines of the newest steps in which the rank deviates, and the expected values; None: too few."""
    members = np.flatnonzero((roles == roles[column]) & (np.arange(len(roles)) != column))
    if len(members) > PEERS_SAMPLED:
        members = members[:: len(members) // PEERS_SAMPLED + 1]
    start = max(len(local) - HISTORY_STEPS, 0)
    block = np.log(_positive(local[start:, np.concatenate([[column], members])]))
    middle = _row_medians(block[:, 1:])
    off = block - middle[:, None]  # log ratios to the role, by step
    own, past = off[:, 0], off[:-RECENT_STEPS, 0]
    past = past[np.isfinite(past)]
    if len(past) < HISTORY_STEPS_MIN - RECURRENCES_MIN:
        return None, []
    usual = float(np.median(past))
    peers = off[:, 1:]
    spread = SIGMA_PER_MAD * float(np.median(np.abs(peers[np.isfinite(peers)]))) if np.isfinite(peers).any() else 0.0
    noise = SIGMA_PER_MAD * float(np.median(np.abs(past - usual)))
    limit = max(math.log(RATIO_MIN), SIGMAS * max(spread, noise, SIGMA_FLOOR))
    with np.errstate(invalid="ignore"):
        lines = np.flatnonzero((np.abs(own - usual) > limit) & (np.abs(own) > limit))
    lines = lines[lines >= len(block) - RECENT_STEPS]
    if len(lines) < RECURRENCES_MIN:
        return None, []
    return start + lines, [float(np.exp(middle[line] + usual)) for line in lines]


def _loss_moves_too(window: Window, column: int, lines: NDArray[np.intp], deviation: float) -> bool:
    """Whether the rank's own loss deviates from its peers' in the same steps: then its data may differ from theirs."""
    loss = window.steps.values.get("train_loss")
    if loss is None:
        return False
    members = np.flatnonzero((window.role_of == window.role_of[column]) & (np.arange(loss.shape[1]) != column))
    rows = _positive(loss[lines][:, np.concatenate([[column], members])])
    off = np.log(rows[:, 0]) - np.log(_row_medians(rows[:, 1:]))
    off = np.abs(off[np.isfinite(off)])
    return bool(len(off) and float(np.median(off)) > max(LOSS_SHARE * min(deviation, math.log(RATIO_MIN)), 0.0))


def _alone(lines: Floats, roles: Integers) -> _Alone | None:
    """Return the one rank whose checksum no rank of its role shares in the newest lines although it once was shared."""
    alone: set[int] = set()
    since, count = len(lines), 0
    for at in range(len(lines) - 1, -1, -1):
        line = lines[at]
        known = np.flatnonzero(~np.isnan(line))
        if not len(known):
            continue
        found = _lone(line, known, roles, surely=count > 0)
        if found is None or (found and alone and not alone & found):
            return None  # checksums do not compare here, or a different rank each time: not a replica's parameters
        if not found:
            return _settled_doubt(alone, count, since, line)
        alone = alone & found if alone else found
        since, count = at, count + 1
    return None  # never equal to another's: unlike shards, or wrong from the start of the window


def _settled_doubt(alone: set[int], count: int, since: int, before: Floats) -> _Alone | None:
    """Return the ranks without a match since the line after ``before``, in which all agreed; None if there are none."""
    columns = sorted(alone)
    if count < RECURRENCES_MIN or not np.isfinite(before[columns]).all():
        return None
    if len(columns) == 1:
        return _Alone(columns[0], count, since, None)
    first, second = columns
    return _Alone(first, count, since, second) if before[first] == before[second] else None


def _lone(values: Floats, known: NDArray[np.intp], roles: Integers, surely: bool) -> set[int] | None:
    """Return the columns whose value no other column has, at most two; None if more have none."""
    # Buckets instead of sorting: ten times as fast. A lone value that shares its bucket in the newest step shows in
    # another step. The exact check follows: of two replicas that differ, the one that happens to share a bucket is no
    # more right than the other.
    bits = np.ascontiguousarray(values[known], dtype=np.float64).view(np.uint64)
    bucket = ((bits * SPREAD) >> np.uint64(64 - BUCKET_BITS - len(known).bit_length())).astype(np.intp)
    columns = known[np.bincount(bucket)[bucket] == 1]
    if len(columns) > ALONE_MAX:
        return None
    if surely or len(columns):
        _, place, times = np.unique(bits, return_inverse=True, return_counts=True)
        columns = known[times[place] == 1]
        if len(columns) > ALONE_MAX:
            return None
    # A role with few ranks has no replicas to compare with.
    compared = {int(c) for c in columns if int((roles[known] == roles[c]).sum()) > PEERS_MIN}
    return compared if len(compared) <= 2 else None


def _row_medians(values: Floats) -> Floats:
    """Return each row's median over the known values, NaN if too few are known."""
    ordered = np.sort(values, axis=1)
    count = np.isfinite(values).sum(axis=1)
    at = np.clip((count - 1) // 2, 0, None)
    other = np.clip(count // 2, 0, values.shape[1] - 1)
    rows = np.arange(len(values))
    return np.where(count >= PEERS_MIN, (ordered[rows, at] + ordered[rows, other]) / 2, np.nan)


def _positive(values: Floats) -> Floats:
    return np.where(np.isfinite(values) & (values > 0), values.astype(np.float64), np.nan)
