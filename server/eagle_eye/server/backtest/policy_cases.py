"""Written policy cases: an incident in a situation, with the expected decision. Pure, except for reading the file.

The format is described in docs/reference/policy.md. Defaults describe an everyday situation: a running job of eight
nodes whose fault is certain, a fleet of 100 nodes, no earlier requests, mode act.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from eagle_eye.detectors.faults import BY_NAME
from eagle_eye.schema import configuration
from eagle_eye.schema.action import ActionKind, MemberRank
from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.server.engine.judgement import SchedulerContact
from eagle_eye.server.engine.policy import RULE_NAMES, Decision, Weighing, weigh
from eagle_eye.server.engine.rules import Situation
from eagle_eye.server.engine.settings import Limit, Mode, PolicySettings, Seconds
from eagle_eye.server.model.records import Action, ActionState, Incident, Node, NodeState
from eagle_eye.server.site_files import with_racks

FORMAT = "eagle-eye-policy-cases/1"
CASES_MAX = 1_000
ITEMS_MAX = 10_000  # actions, nodes or names in one case
NODES_MAX = 20_000
NOW_S = 1_772_330_400.0  # 2026-03-01T02:00:00Z; an arbitrary time
INCIDENT_ID, JOB, NODE = "inc", "job", "n1"

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Names = Annotated[list[Name], Meta(max_length=ITEMS_MAX)]
Probability = Annotated[float, Meta(ge=0, le=1)]


class IncidentCase(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The incident; ``node`` "" accuses no node; ``nodes`` defaults to the accused one."""

    fault: Name
    job: Name = JOB
    attempt: Limit = 0
    node: Annotated[str, Meta(max_length=256)] = NODE
    nodes: Names | None = None
    fact: bool = False
    kinds: Names = msgspec.field(default_factory=lambda: ["one", "two"])
    confidence: Probability = 0.99
    slowdown_ratio: Seconds = 0.0
    asks: Literal["", "exclude_node", "restart_job", "drain_node", "checkpoint_now", "notify", "none"] = ""
    application: bool = False
    age_s: Seconds = 0.0  # since it began

    def __post_init__(self) -> None:
        """Refuse an unknown fault. Raises ValueError."""
        if self.fault not in BY_NAME:
            raise ValueError(f"unknown fault {self.fault!r}; expected one of {', '.join(BY_NAME)}")


class JobCase(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The job: its ``nodes`` are named n1, n2 and so on, unless ``names`` names them."""

    state: Name = "running"
    nodes: Annotated[int, Meta(ge=0, le=NODES_MAX)] = 8
    names: Names = []
    restart_owner: str = ""
    scheduler: str = ""  # the job's scheduler; "": none is queried
    scheduler_age_s: Seconds | None = None  # since it was last heard; None: never
    ends_in_s: Seconds | None = None  # until its time limit; None: unknown
    pace_left_ratio: Annotated[float, Meta(ge=0, le=1)] | None = None  # of its pace, without a node and a spare
    crashed: bool = False  # the scheduler reports that it failed
    failed: Names = []  # other nodes of it that have lost a GPU


class FleetCase(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The fleet: number of ``nodes``, why the server is ``blind``, other jobs on nodes, nodes out of service.

    ``gpu_models`` are NVML's names of nodes' GPUs; nodes that are not listed have an unknown model.
    """

    nodes: Limit = 100
    blind: str = ""
    neighbours: Mapping[str, Names] = {}
    standing: Mapping[str, NodeState] = {}
    gpu_models: Mapping[str, Name] = {}


class ActionCase(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An action requested ``age_s`` ago; ``own``: because of this incident; ``times`` identical ones.

    ``job`` defaults to the incident's.
    """

    kind: ActionKind
    age_s: Seconds
    state: ActionState = "done"
    job: str = ""
    attempt: Limit = 0
    node: str = ""
    exclude: Names = []
    restart: bool | None = None
    own: bool = False
    preliminary: bool = False
    times: Annotated[int, Meta(ge=1, le=ITEMS_MAX)] = 1


class Expected(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The expected decision; fields not given are not checked. ``rule`` "": no rule holds."""

    kind: ActionKind | None = None
    exclude: Names | None = None
    restart: bool | None = None
    mode: Mode | None = None
    rule: str | None = None
    first: ActionKind | None = None

    def __post_init__(self) -> None:
        """Refuse impossible and empty expectations. Raises ValueError."""
        if self.rule and self.rule not in RULE_NAMES:
            raise ValueError(f"unknown rule {self.rule!r}; expected one of {', '.join(RULE_NAMES)}")
        if all(getattr(self, name) is None for name in self.__struct_fields__):
            raise ValueError(f"expects nothing; give one of {', '.join(self.__struct_fields__)}")


class Case(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One case; ``policy`` are settings that differ from the file's, ``now`` is Unix seconds."""

    name: Name
    incident: IncidentCase
    expect: Expected
    now: float = NOW_S
    policy: dict[str, Any] = {}
    job: JobCase = JobCase()
    fleet: FleetCase = FleetCase()
    actions: Annotated[list[ActionCase], Meta(max_length=ITEMS_MAX)] = []


class CaseFile(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A file of cases; ``policy`` are settings of all its cases."""

    format: Literal["eagle-eye-policy-cases/1"]
    policy: dict[str, Any] = {}
    case: Annotated[list[Case], Meta(min_length=1, max_length=CASES_MAX)]


@dataclass(frozen=True, slots=True)
class Tested:
    """A case with policy's decision; ``differs`` names what is unexpected, empty: it passed."""

    case: Case
    weighing: Weighing
    differs: tuple[str, ...]


def read_cases(file: Path) -> CaseFile:
    """Return the file's cases. Raises ConfigurationError with the error and its location."""
    return configuration.load(CaseFile, file, {}, {})


def run_cases(cases: CaseFile, base: Mapping[str, Any]) -> Iterator[Tested]:
    """Run all cases; the file's settings override those in ``base``. Raises ConfigurationError."""
    _settings({**base, **cases.policy}, "policy")  # report a mistake here as the file's, not the first case's
    for place, case in enumerate(cases.case):
        merged = {**base, **cases.policy, **case.policy}
        weighing = weigh(_incident(case, case.incident), _situation(case, _settings(merged, f"case[{place}].policy")))
        yield Tested(case, weighing, tuple(_differences(case.expect, weighing.decision)))


def _settings(plain: Mapping[str, Any], where: str) -> PolicySettings:
    try:
        settings = msgspec.convert(plain, PolicySettings)
    except msgspec.ValidationError as error:
        raise ConfigurationError(f"{where}: {error}") from None
    return with_racks(settings, "", where)  # the base has those of the site's file


def _differences(expected: Expected, decision: Decision) -> Iterator[str]:
    for name in expected.__struct_fields__:
        wanted, found = getattr(expected, name), getattr(decision, name)
        if name == "exclude":
            found = list(found)
        if wanted is not None and wanted != found:
            yield f"{name}: expected {wanted!r}, got {found!r}"


def _incident(case: Case, said: IncidentCase, incident_id: str = INCIDENT_ID) -> Incident:
    node = said.node or None
    return Incident(
        id=incident_id,
        job=said.job,
        attempt=said.attempt,
        fault=said.fault,
        nodes=said.nodes if said.nodes is not None else [node] if node else [],
        node=node,
        device=None,
        confidence=said.confidence,
        state="confirmed",
        onset_s=case.now - said.age_s,
        detected_s=case.now,
        updated_s=case.now,
        ended_s=None,
        detectors=[],
        summary=case.name,
        evidence=[],
        action="none",
        kinds=said.kinds,
        fact=said.fact,
        slowdown_ratio=said.slowdown_ratio,
        asks=said.asks,
        application=said.application,
        seen_s=case.now,
    )


def _situation(case: Case, settings: PolicySettings) -> Situation:
    lost = msgspec.structs.replace(case.incident, fault="gpu_lost", fact=True, asks="")
    failed = [msgspec.structs.replace(lost, node=node, nodes=[node]) for node in case.job.failed]
    names = case.job.names or [f"n{number}" for number in range(1, case.job.nodes + 1)]
    return Situation(
        settings=settings,
        actions=list(_actions(case)),
        fleet_size=case.fleet.nodes,
        members=len(names),
        job_state=case.job.state,
        restart_owner=case.job.restart_owner,
        blind=case.fleet.blind,
        now_s=case.now,
        ranks=[MemberRank(rank, node, 0) for rank, node in enumerate(names)],
        standing={node: _standing(node, state) for node, state in case.fleet.standing.items()},
        neighbours=case.fleet.neighbours,
        crashed=case.job.crashed,
        hearing=_hearing(case),
        ends_s=None if case.job.ends_in_s is None else case.now + case.job.ends_in_s,
        incidents=[_incident(case, said, f"other_{place}") for place, said in enumerate(failed)],
        gpu_models={node: (name,) for node, name in case.fleet.gpu_models.items()},
        pace_left_ratio=case.job.pace_left_ratio,
    )


def _hearing(case: Case) -> SchedulerContact:
    age_s = case.job.scheduler_age_s
    return SchedulerContact(case.job.scheduler, None if age_s is None else case.now - age_s)


def _standing(node: str, state: NodeState) -> Node:
    return Node(node=node, state=state, reason="as the case has it", updated_s=0.0)


def _actions(case: Case) -> Iterator[Action]:
    for place, said in enumerate(case.actions):
        for number in range(said.times):
            created_s = case.now - said.age_s
            yield Action(
                id=f"act_{place}_{number}",
                incident_id=INCIDENT_ID if said.own else f"other_{place}_{number}",
                kind=said.kind,
                job=said.job or case.incident.job,
                attempt=said.attempt,
                exclude=said.exclude,
                restart=said.kind in ("exclude_node", "restart_job") if said.restart is None else said.restart,
                fault=case.incident.fault,
                confidence=1.0,
                onset_s=created_s,
                detected_s=created_s,
                expires_s=created_s,
                repair="none",
                summary="",
                evidence=[],
                ranks=[],
                state=said.state,
                node=said.node or None,
                created_s=created_s,
                updated_s=created_s,
                preliminary=said.preliminary,
            )
