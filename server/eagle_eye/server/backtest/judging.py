"""Judges recorded traces one after the other and scores what was found, for the command and for data frames."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from eagle_eye.detectors.learned.model_anomaly import NO_MODEL
from eagle_eye.detectors.signs.learned_model import LearnedModel
from eagle_eye.schema import configuration
from eagle_eye.server.backtest.run import Backtest, VerdictLine
from eagle_eye.server.backtest.score import Scorecard
from eagle_eye.server.backtest.trace import Trace
from eagle_eye.server.backtest.trace_clocks import clock_lines
from eagle_eye.server.config import ServerConfig
from eagle_eye.server.site_files.learned_model import BadModel, read
from eagle_eye.server.site_files.node_groups import with_racks


@dataclass(slots=True)
class BacktestTotals:
    """Totals over all traces: when each began, the number of judgements, and how many were blind by detector.

    ``ignored`` counts, by reason, what was left out of the traces; ``clock_offsets`` has, by trace, the nodes whose
    clocks were ahead of the others' and by how many seconds.
    """

    starts_s: dict[str, float] = field(default_factory=dict)
    judgements: int = 0
    blind: Counter[str] = field(default_factory=Counter)
    ignored: Counter[str] = field(default_factory=Counter)
    clock_offsets: dict[str, dict[str, float]] = field(default_factory=dict)

    def remarks(self) -> list[str]:
        """Return remarks about corrected or ignored parts of the traces."""
        clocks = [line for folder, found in self.clock_offsets.items() for line in clock_lines(folder, found)]
        return clocks + [f"left out: {reason} ({count} times)" for reason, count in sorted(self.ignored.items())]

    def ratios(self) -> dict[str, float]:
        """Return the share of judgements in which each detector was blind; those that never were are absent."""
        return {name: round(count / self.judgements, 4) for name, count in sorted(self.blind.items())}


class JudgedTraces(NamedTuple):
    """The verdicts on all traces in order, their score against the labels, and the totals."""

    lines: tuple[VerdictLine, ...]
    card: Scorecard
    totals: BacktestTotals

    def report(self) -> dict[str, Any]:
        """Return the score, the shares of blind judgements and the wrong clocks as plain data."""
        totals = self.totals
        return {**self.card.report(), "blind_ratio": totals.ratios(), "clock_offset_s": totals.clock_offsets}


def judge_traces(folders: Sequence[Path], config: Path | None, progress: Callable[[float], None]) -> JudgedTraces:
    """Judge the traces as the server's configuration file and the environment say.

    ``progress`` is told the share of all traces that is judged. Raises BadTrace, OSError, ConfigurationError.
    """
    settings = configuration.load(ServerConfig, config, os.environ, {})
    settings = msgspec.structs.replace(settings, policy=with_racks(settings.policy, settings.topology_file))
    try:
        model = read(Path(settings.detection.model).expanduser())[0] if settings.detection.model else NO_MODEL
    except BadModel as error:
        raise configuration.ConfigurationError(f"detection.model: {error}") from None
    card = Scorecard()
    found: list[VerdictLine] = []
    totals = BacktestTotals()
    for done, folder in enumerate(folders):

        def within(share: float, done: int = done) -> None:
            progress((done + share) / len(folders))

        found += _judged(folder, settings, model, card, totals, within)
    return JudgedTraces(tuple(found), card, totals)


def _judged(
    folder: Path,
    config: ServerConfig,
    model: LearnedModel | str,
    card: Scorecard,
    totals: BacktestTotals,
    progress: Callable[[float], None],
) -> list[VerdictLine]:
    trace = Trace(folder)
    labels = trace.labels()  # a mistake in them is found before the work, not after it
    backtest = Backtest(trace, config.detection, config.policy, model, progress)
    lines = list(backtest.run())
    totals.starts_s[str(folder)] = trace.header.start
    totals.judgements += backtest.judgements
    totals.blind.update(backtest.blind)
    totals.ignored.update(trace.ignored)
    if trace.clock_offsets:
        totals.clock_offsets[str(folder)] = trace.clock_offsets
    if labels is not None:
        header = trace.header
        card.add(labels, lines, len(header.nodes), header.end - header.start)
    return lines
