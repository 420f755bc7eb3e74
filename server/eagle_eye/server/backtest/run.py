"""Runs the server's engine over traces, on their clock, and scores its verdicts against their labels. Deterministic."""

from __future__ import annotations

import dataclasses
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from eagle_eye.detectors.learned.model_anomaly import NO_MODEL
from eagle_eye.detectors.signs.learned_model import LearnedModel
from eagle_eye.schema import configuration
from eagle_eye.schema.action import ActionKind, EvidenceItem
from eagle_eye.server.backtest.trace import EXPECTED_ACTIONS, HEADER_FILE, BadTrace, Label, Trace, clock_lines
from eagle_eye.server.config import ServerConfig
from eagle_eye.server.engine import incidents as folding
from eagle_eye.server.engine.engine import Engine
from eagle_eye.server.engine.judgement import Judgement
from eagle_eye.server.engine.policy import decide
from eagle_eye.server.engine.respond import DISRUPTIVE, recurrences, with_repeated_ends
from eagle_eye.server.engine.roster import DEVICES_MAX
from eagle_eye.server.engine.rules import Situation
from eagle_eye.server.engine.settings import DetectionSettings, PolicySettings
from eagle_eye.server.model.records import Action, Incident
from eagle_eye.server.site_files import BadModel, read_learned_model, with_racks

TICKS_MAX = 10_000_000  # four months of seconds
TICKS_PER_INTERVAL = 4  # a trace whose rows are minutes apart needs no judgement every second


class VerdictLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of a backtest: a verdict when first raised, or when its fault, nodes or action changed."""

    id: str
    trace: str
    time: float
    nodes: list[str]
    node: str | None
    device: int | None
    job: str
    fault: str
    confidence: float
    onset: float
    action: str
    detectors: list[str]
    summary: str
    evidence: list[EvidenceItem]


@dataclass(slots=True)
class Backtest:
    """One run over one trace; ``blind`` counts by detector the judgements in which it could not tell."""

    trace: Trace
    detection: DetectionSettings
    policy: PolicySettings
    model: LearnedModel | str = NO_MODEL
    progress: Callable[[float], None] | None = None  # told the share of the trace's times that are judged
    blind: dict[str, int] = field(default_factory=dict)
    judgements: int = 0
    _incidents: dict[str, Incident] = field(default_factory=dict)
    _ended: list[Incident] = field(default_factory=list)
    _asked: set[tuple[int, str, tuple[str, ...]]] = field(default_factory=set)
    _actions: list[Action] = field(default_factory=list)
    _raised: int = 0

    def run(self) -> Iterator[VerdictLine]:
        """Yield verdict lines in order of time."""
        header = self.trace.header
        engine = Engine(self.detection, watching_since_s=header.start, model=self.model)
        engine.observe_topology(self.trace.topology())
        for node in header.nodes:
            for device in range(min(node.gpus, DEVICES_MAX) if node.gpu_model else 0):
                engine.gpu_models.record_name(node.node, device, node.gpu_model)
        tick_s = max(self.detection.tick_s, header.interval_s / TICKS_PER_INTERVAL)
        steps = iter(self.trace.steps())
        step = next(steps, None)  # reads the files
        count = int((header.end - header.start) / tick_s + 1e-9) + 1
        if count > TICKS_MAX:
            raise BadTrace(
                f"{self.trace.folder / HEADER_FILE}: start to end, {header.end - header.start:.0f} s, asks for {count}"
                f" judgements; at most {TICKS_MAX} are made: set end nearer to start, or detection.tick_s higher"
            )
        # Whole multiples of the tick, so that no error adds up; the end itself is the last.
        times_s = chain((header.start + k * tick_s for k in range(count)), (header.end,))
        for done, now_s in enumerate(times_s, start=1):
            while step is not None and step.time_s <= now_s:
                if step.job is not None:
                    engine.observe_job(step.job)
                elif step.frame is not None:
                    engine.observe(step.frame, step.time_s)
                step = next(steps, None)
            for judgement in engine.tick(now_s):
                yield from self._judged(judgement)
            if self.progress is not None:
                self.progress(done / (count + 1))

    def _judged(self, judgement: Judgement) -> Iterator[VerdictLine]:
        self.judgements += 1
        for name in judgement.blind:
            self.blind[name] = self.blind.get(name, 0) + 1
        past = [*self._ended, *self._incidents.values()]
        recurrent = recurrences(judgement, past, len(self.trace.header.nodes))
        judgement = dataclasses.replace(judgement, verdicts=(*judgement.verdicts, *recurrent))
        judgement = with_repeated_ends(judgement, past, self.policy.repeat_window_s)
        changed = folding.fold(self._incidents.values(), judgement, {}, self.policy, lambda _: self._next_id())
        for incident in changed:
            known = self._incidents.get(incident.id)
            if incident.state not in folding.OPEN_STATES:
                self._ended.append(self._incidents.pop(incident.id))
                continue
            decided = self._decided(incident, judgement)
            self._incidents[incident.id] = decided
            reported = known and (known.fault, known.nodes, known.action)
            if reported != (decided.fault, decided.nodes, decided.action):
                yield self._line(decided, judgement.now_s)

    def _decided(self, incident: Incident, judgement: Judgement) -> Incident:
        """Return the incident with the action that policy requests.

        A requested action is assumed to be carried out, as far as a trace can tell: the incident no longer changes, and
        the same action is not requested again in the attempt.
        """
        if incident.state == "acting":
            return incident
        action = self._action(incident, judgement)
        request = (incident.attempt, action, tuple(incident.nodes))
        if action in DISRUPTIVE and request in self._asked:
            return msgspec.structs.replace(incident, action="notify")
        if action in DISRUPTIVE:
            self._asked.add(request)
            self._actions.append(_asked_for(incident, action, judgement.now_s))
            return msgspec.structs.replace(incident, action=action, state="acting")
        return msgspec.structs.replace(incident, action=action)

    def _action(self, incident: Incident, judgement: Judgement) -> ActionKind:
        """Return policy's action in mode act, with a full budget and no history but the trace's own.

        Actions of earlier attempts count: a crash that returns on the same node is its second.
        """
        situation = Situation(
            settings=msgspec.structs.replace(self.policy, mode="act"),
            actions=[action for action in self._actions if action.attempt < incident.attempt],
            fleet_size=len(self.trace.header.nodes),
            members=judgement.members,
            job_state=judgement.state,
            restart_owner=judgement.restart_owner,
            blind="",
            now_s=judgement.now_s,
            gpu_models=judgement.gpu_models,
        )
        decision = decide(incident, situation)
        return "notify" if decision.hold else decision.kind

    def _next_id(self) -> str:
        self._raised += 1
        return f"v{self._raised}"

    def _line(self, incident: Incident, now_s: float) -> VerdictLine:
        return VerdictLine(
            id=incident.id,
            trace=str(self.trace.folder),
            time=now_s,
            nodes=incident.nodes,
            node=incident.node,
            device=incident.device,
            job=incident.job,
            fault=incident.fault,
            confidence=incident.confidence,
            onset=incident.onset_s,
            action=incident.action,
            detectors=incident.detectors,
            summary=incident.summary,
            evidence=incident.evidence,
        )


def _asked_for(incident: Incident, kind: ActionKind, now_s: float) -> Action:
    """Return the requested action as policy remembers it."""
    return Action(
        id=incident.id,
        incident_id=incident.id,
        kind=kind,
        job=incident.job,
        attempt=incident.attempt,
        exclude=[incident.node] if kind == "exclude_node" and incident.node else [],
        restart=True,
        fault=incident.fault,
        confidence=incident.confidence,
        onset_s=incident.onset_s,
        detected_s=incident.detected_s,
        expires_s=now_s,
        repair="none",
        summary=incident.summary,
        evidence=incident.evidence,
        ranks=[],
        state="done",
        node=incident.node,
        created_s=now_s,
        updated_s=now_s,
    )


# The score: precision, recall, localisation, delay, false exclusions.
#
# A hit is an action of the expected kind on exactly the labelled nodes between onset and end + 60 s, one for each
# fault; whether it also has the fault's name is counted beside it. Any other exclusion or restart is false. Silence on
# a labelled fault is a miss, whatever its reason.
#
# A drain or notice is wrong where it accuses a node of which no label of that time speaks, where it tells of a job
# that nothing is wrong with, and, for a drain, where the label expects the node to stay.

GRACE_S = 60.0  # after a fault's end, in which its verdict still counts
DISRUPTIVE_ACTIONS = ("exclude_node", "restart_job")
DAY_S = 86_400.0


@dataclass(slots=True)
class ScoreCounts:
    """Counts over traces; for hits: ``delays_s`` from onset to verdict, ``action_delays_s`` to the action.

    A verdict may precede its action: one without a second kind of evidence yet, or that may still pass by itself, is
    reported first and acted on later. Wrong drains and notices are counted once for each verdict and set of nodes.
    """

    labelled: int = 0
    hits: int = 0
    false: int = 0
    wrong_drains: int = 0
    wrong_notices: int = 0
    named: int = 0  # hits and false claims on a labelled fault whose nodes were exactly right
    claims: int = 0  # all claims within a labelled fault's time
    other_names: Counter[str] = field(default_factory=Counter)  # names of faults that hits gave and labels did not
    delays_s: list[float] = field(default_factory=list)
    action_delays_s: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Return the figures; None where the denominator is 0. ``precision`` is that of exclusions and restarts."""
        precision = _ratio(self.hits, self.hits + self.false)
        recall = _ratio(self.hits, self.labelled)
        return {
            "labelled": self.labelled,
            "hits": self.hits,
            "other_name": self.other_names.total(),
            "other_names": dict(self.other_names.most_common()),
            "false": self.false,
            "wrong_drains": self.wrong_drains,
            "wrong_notices": self.wrong_notices,
            "precision": precision,
            "recall": recall,
            "f1": 2 * precision * recall / (precision + recall)
            if precision and recall
            else (0.0 if self.labelled else None),
            "localisation": _ratio(self.named, self.claims),
            "delay_p50_s": quantile(self.delays_s, 0.5),
            "delay_p95_s": quantile(self.delays_s, 0.95),
            "action_delay_p50_s": quantile(self.action_delays_s, 0.5),
            "action_delay_p95_s": quantile(self.action_delays_s, 0.95),
        }


@dataclass(slots=True)
class Scorecard:
    """The score over one or more traces, overall and for each fault."""

    overall: ScoreCounts = field(default_factory=ScoreCounts)
    faults: dict[str, ScoreCounts] = field(default_factory=dict)
    false_exclusions: int = 0
    node_days: float = 0.0

    def add(self, labels: Sequence[Label], lines: Sequence[VerdictLine], nodes: int, seconds: float) -> None:
        """Count one trace of ``nodes`` nodes observed for ``seconds``."""
        self.node_days += nodes * seconds / DAY_S
        used: set[int] = set()
        for label in labels:
            wanted = EXPECTED_ACTIONS[label.expect]
            if wanted is None:
                continue
            within = [i for i, line in enumerate(lines) if _in_time(label, line)]
            hit = next((i for i in within if i not in used and _is_hit(label, lines[i], wanted)), None)
            claimed = [i for i in within if lines[i].action in DISRUPTIVE_ACTIONS]
            for tally in (self.overall, self._of(label.fault)):
                tally.labelled += 1
                tally.claims += len(claimed)
                tally.named += sum(sorted(lines[i].nodes) == sorted(label.nodes) for i in claimed)
                if hit is not None:
                    tally.hits += 1
                    tally.delays_s.append(_reported_s(lines, within, hit) - label.start)
                    tally.action_delays_s.append(lines[hit].time - label.start)
                    if lines[hit].fault != label.fault:
                        tally.other_names[lines[hit].fault] += 1
            if hit is not None:
                used.update(i for i in within if lines[i].id == lines[hit].id)
        false = [line for i, line in enumerate(lines) if i not in used and line.action in DISRUPTIVE_ACTIONS]
        for line in false:
            for tally in (self.overall, self._of(line.fault)):
                tally.false += 1
            self.false_exclusions += line.action == "exclude_node"
        self._count_wrong_words(labels, lines, {_claim(line) for line in false})

    def _count_wrong_words(
        self, labels: Sequence[Label], lines: Sequence[VerdictLine], counted: set[tuple[str, ...]]
    ) -> None:
        """Count wrong drains, then wrong notices: of one claim the gravest. Adds to ``counted``, the claims so far.

        A claim is judged by when it was first made: what was right then may be repeated after the fault's end.
        """
        first: dict[tuple[str, ...], VerdictLine] = {}
        for line in lines:
            first.setdefault(_claim(line), line)
        for action in ("drain_node", "notify"):
            for line in lines:
                claim = _claim(line)
                if line.action != action or claim in counted or _is_founded(labels, first[claim], action):
                    continue
                counted.add(claim)
                for tally in (self.overall, self._of(line.fault)):
                    if action == "drain_node":
                        tally.wrong_drains += 1
                    else:
                        tally.wrong_notices += 1

    def _of(self, fault: str) -> ScoreCounts:
        return self.faults.setdefault(fault, ScoreCounts())

    def report(self) -> dict[str, Any]:
        """Return all figures as plain data."""
        thousand = self.node_days / 1000
        return {
            "overall": self.overall.summary(),
            "faults": {fault: tally.summary() for fault, tally in sorted(self.faults.items())},
            "false_exclusions": self.false_exclusions,
            "node_days": self.node_days,
            "false_exclusions_per_1000_node_days": _ratio(self.false_exclusions, thousand),
            "false_exclusions_per_1000_node_days_upper_95": _ratio(poisson_upper(self.false_exclusions), thousand),
        }


def _reported_s(lines: Sequence[VerdictLine], within: Sequence[int], hit: int) -> float:
    """Return when the hit's verdict was first raised on the same nodes."""
    same = [i for i in within if lines[i].id == lines[hit].id and sorted(lines[i].nodes) == sorted(lines[hit].nodes)]
    return min(lines[i].time for i in same)


def poisson_upper(count: int, confidence: float = 0.95) -> float:
    """Return the one-sided upper bound of a Poisson mean after seeing ``count`` events (Garwood 1936)."""
    low, high = float(count), count + 10 * math.sqrt(count + 1) + 10
    for _ in range(80):
        middle = (low + high) / 2
        seen_at_most = sum(math.exp(-middle + k * math.log(middle) - math.lgamma(k + 1)) for k in range(count + 1))
        low, high = (middle, high) if seen_at_most > 1 - confidence else (low, middle)
    return high


def _in_time(label: Label, line: VerdictLine) -> bool:
    return label.start <= line.time <= label.end + GRACE_S


def _is_hit(label: Label, line: VerdictLine, wanted: str) -> bool:
    if line.action != wanted:
        return False
    return line.action == "restart_job" or sorted(line.nodes) == sorted(label.nodes)


def _claim(line: VerdictLine) -> tuple[str, ...]:
    """Return what the line claims: a verdict on these nodes, whatever fault and action it gives them."""
    return (line.id, *sorted(line.nodes))


def _is_founded(labels: Sequence[Label], line: VerdictLine, action: str) -> bool:
    """Return whether labels of the line's time account for it: each of its nodes or, without any, a fault of the job.

    A drain also needs each node to be expected to leave, at once or later.
    """
    current = [label for label in labels if _in_time(label, line)]
    if action == "drain_node":
        current = [label for label in current if label.expect in ("exclude", "drain")]
    return bool(current) and {node for label in current for node in label.nodes}.issuperset(line.nodes)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def quantile(values: Sequence[float], q: float) -> float | None:
    """Return the nearest-rank quantile, None if there are no values."""
    return sorted(values)[max(math.ceil(q * len(values)) - 1, 0)] if values else None


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
        model = (
            read_learned_model(Path(settings.detection.model).expanduser())[0] if settings.detection.model else NO_MODEL
        )
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
