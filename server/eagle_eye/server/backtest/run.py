"""Runs the server's engine over a trace, on the trace's clock. Deterministic: equal traces give equal verdicts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain

import msgspec

from eagle_eye.detectors.learned.model_anomaly import NO_MODEL
from eagle_eye.detectors.signs.learned_model import LearnedModel
from eagle_eye.schema.action import ActionKind, EvidenceItem
from eagle_eye.server.backtest.trace import Trace
from eagle_eye.server.backtest.trace_format import HEADER_FILE, BadTrace
from eagle_eye.server.engine import incidents as folding
from eagle_eye.server.engine.engine import Engine
from eagle_eye.server.engine.judgement import Judgement
from eagle_eye.server.engine.policy import decide
from eagle_eye.server.engine.respond import DISRUPTIVE, recurrences, with_repeated_ends
from eagle_eye.server.engine.roster import DEVICES_MAX
from eagle_eye.server.engine.rules import Situation
from eagle_eye.server.engine.settings import DetectionSettings, PolicySettings
from eagle_eye.server.model.records import Action, Incident

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
                engine.gpu_models.note(node.node, device, node.gpu_model)
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
