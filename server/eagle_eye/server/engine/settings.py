"""Settings of detection, policy and evidence; the operator's terms for jobs and nodes, modes, maintenance. Pure."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args

import msgspec
import numpy as np
from msgspec import Meta, Struct

from eagle_eye.detectors.faults import BY_NAME
from eagle_eye.schema.action import ActionKind
from eagle_eye.server.model import Count, Positive

NAMES_MAX = 1_000  # patterns in one list, which a person must still be able to read
_WILD = frozenset("*?[")

Names = Annotated[list[str], Meta(max_length=NAMES_MAX)]


def matches(patterns: Sequence[str], name: str) -> bool:
    """Return whether one of the glob patterns matches the name; an empty list matches every name."""
    return not patterns or any(_name_fits(pattern, name) for pattern in patterns)


def is_exact(patterns: Sequence[str], name: str) -> bool:
    """Return whether the name itself is among the patterns, written without wildcards."""
    return any(pattern == name and not _WILD & set(pattern) for pattern in patterns)


def _name_fits(pattern: str, name: str) -> bool:
    # A list of exact names may exceed fnmatch's cache of compiled patterns.
    return pattern == name if _WILD.isdisjoint(pattern) else fnmatch.fnmatchcase(name, pattern)


# Restart owners for which we request the restart; "": not stated.
OUR_RESTART_OWNERS = frozenset({"", "eagle-eye"})

Seconds = Annotated[float, Meta(ge=0)]
Limit = Annotated[int, Meta(ge=0)]


class JobTerms(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Terms for the jobs whose names match one of ``jobs`` (glob patterns); omitted fields are as for all jobs."""

    jobs: Annotated[list[str], Meta(min_length=1, max_length=NAMES_MAX)]
    may_restart: bool | None = None
    restart_owner: str | None = None
    nodes_min: Count | None = None
    spares: Limit | None = None
    exclusions_per_job: Limit | None = None
    restarts_per_job: Limit | None = None
    lost_work_s: Seconds | None = None
    restart_s: Seconds | None = None
    queue_s: Seconds | None = None
    remaining_s: Seconds | None = None
    checkpoint_wait_s: Seconds | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The terms of one job, and where the operator set them ("policy.jobs[0]"; settings for all jobs are not listed).

    ``spares`` are nodes ready to replace excluded ones, None: not known, which counts as none. ``restart_owner`` is ""
    if the operator names none: then the job's own value counts. ``restart_s``, ``queue_s`` and ``lost_work_s`` are the
    costs of a restart, ``remaining_s`` how long the job is assumed to run on. ``checkpoint_wait_s`` is how long a
    planned exclusion waits for a checkpoint, 0: not at all.
    """

    may_restart: bool = True
    restart_owner: str = ""
    nodes_min: int = 1
    spares: int | None = None
    exclusions_per_job: int
    restarts_per_job: int
    lost_work_s: float
    restart_s: float
    queue_s: float
    remaining_s: float
    checkpoint_wait_s: float

    @property
    def cost_s(self) -> float:
        """The cost of one restart."""
        return self.lost_work_s + self.restart_s + self.queue_s


# Of equally specific terms the more careful value counts: that with the highest of these.
_CAREFUL_JOB_TERMS: MappingProxyType[str, Callable[[Any], Any]] = MappingProxyType(
    {
        "may_restart": lambda allowed: not allowed,
        "restart_owner": lambda owner: (owner not in OUR_RESTART_OWNERS, owner),
        "nodes_min": lambda count: count,
        "spares": lambda count: -count,
        "exclusions_per_job": lambda limit: -limit,
        "restarts_per_job": lambda limit: -limit,
        "lost_work_s": lambda seconds: seconds,
        "restart_s": lambda seconds: seconds,
        "queue_s": lambda seconds: seconds,
        "remaining_s": lambda seconds: -seconds,
        "checkpoint_wait_s": lambda seconds: seconds,
    }
)


def terms_of(job: str, given: Iterable[JobTerms], defaults: Terms) -> Terms:
    """Return the terms of the job.

    Terms that give its exact name override those that match it by a pattern; among equals the more careful value
    counts, whatever their order.
    """
    fitting = [(is_exact(terms.jobs, job), terms) for terms in given if matches(terms.jobs, job)]
    changed: dict[str, Any] = {}
    for name, careful in _CAREFUL_JOB_TERMS.items():
        said = [(exact, value) for exact, terms in fitting if (value := getattr(terms, name)) is not None]
        if said:
            changed[name] = max(said, key=lambda one: (one[0], careful(one[1])))[1]
    return dataclasses.replace(defaults, **changed) if changed else defaults


Ratio = Annotated[float, Meta(ge=0, le=1)]
NodeAction = Literal["notify", "drain_node", "restart_job", "exclude_node"]
Members = Annotated[list[str], Meta(min_length=1, max_length=NAMES_MAX)]  # glob patterns of a group's nodes
Groups = Mapping[str, Sequence[str]]  # patterns of each group's nodes

# Higher asks for more.
STRENGTH: MappingProxyType[ActionKind, int] = MappingProxyType(
    {"none": 0, "notify": 1, "checkpoint_now": 2, "drain_node": 3, "restart_job": 4, "exclude_node": 5}
)


class NodeTerms(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Terms for some nodes; a field that is not given is as for all.

    ``nodes`` are glob patterns of names, ``groups`` names of groups or racks, ``gpu_models`` patterns of NVML names of
    GPUs, ``faults`` names of faults; an empty list means all of them. At least one of ``nodes``, ``groups`` and
    ``gpu_models`` must not be empty.
    """

    nodes: Names = []
    groups: Names = []
    gpu_models: Names = []
    faults: Names = []
    action: NodeAction | None = None  # in place of the fault's own
    confidence_min: Ratio | None = None
    drain_after_s: Seconds | None = None
    drain_slowdown_min: Ratio | None = None

    def __post_init__(self) -> None:
        """Refuse terms that can never apply. Raises ValueError, which the configuration reader reports with its key."""
        if not (self.nodes or self.groups or self.gpu_models):
            raise ValueError("names no nodes, groups or gpu_models; what holds for all stands in [policy]")
        if all(getattr(self, term) is None for term in _CAREFUL_NODE_TERMS):
            raise ValueError(f"settles nothing; give one of {', '.join(_CAREFUL_NODE_TERMS)}")
        unknown = [fault for fault in self.faults if fault not in BY_NAME]
        if unknown:
            raise ValueError(f"unknown fault {unknown[0]!r} in faults; expected one of {', '.join(BY_NAME)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Floors:
    """The action and the thresholds for an incident's nodes.

    ``where`` maps a term to the key that sets it, for terms not from ``[policy]`` or the fault itself.
    """

    action: ActionKind
    confidence_min: float
    drain_after_s: float
    drain_slowdown_min: float
    where: Mapping[str, str] = field(default_factory=dict)


# Of equally specific terms the more careful value counts: that with the highest of these.
_CAREFUL_NODE_TERMS: MappingProxyType[str, Callable[[Any], float]] = MappingProxyType(
    {
        "action": lambda action: -STRENGTH[action],
        "confidence_min": lambda floor: floor,
        "drain_after_s": lambda seconds: seconds,
        "drain_slowdown_min": lambda ratio: ratio or math.inf,  # 0: never
    }
)


class _Fitting(NamedTuple):
    key: str
    terms: NodeTerms
    closeness: tuple[int, ...]  # of two that fit, the greater wins


def floors_of(
    given: Iterable[NodeTerms],
    defaults: Floors,
    nodes: Sequence[str],
    fault: str,
    gpu_models: Mapping[str, Sequence[str]],
    groups: Groups,
) -> Floors:
    """Return the floors for a fault on these nodes, with ``gpu_models`` as the names of their GPUs.

    Terms apply if they fit all of the nodes, and all GPUs of each. For each term, those that give the exact node name
    win over those that match it by pattern or group, and these over those that match its GPUs; among these, those that
    also name its GPUs or the fault win. Of the rest the more careful value counts, whatever their order. If a node's
    GPUs are not known, terms for models apply as far as they are more careful than the other terms.
    """
    fitting: list[_Fitting] = []
    unsure: list[_Fitting] = []
    for place, terms in enumerate(given):
        fits = _terms_fit(terms, nodes, fault, gpu_models, groups)
        if fits is not False:
            (fitting if fits else unsure).append(_Fitting(f"policy.nodes[{place}]", terms, _closeness(terms, nodes)))
    found: dict[str, Any] = {}
    where: dict[str, str] = {}
    for name, careful in _CAREFUL_NODE_TERMS.items():
        value = getattr(defaults, name)
        said = [(one, given) for one in fitting if (given := getattr(one.terms, name)) is not None]
        if said:
            one, value = max(said, key=lambda pair: (pair[0].closeness, careful(pair[1])))
            where[name] = one.key
        for one in unsure:
            other = getattr(one.terms, name)
            if other is not None and careful(other) > careful(value):
                value, where[name] = other, f"{one.key}, for its GPUs are not known"
        found[name] = value
    return Floors(**found, where=where)


def groups_of(node: str, groups: Groups) -> list[str]:
    """Return the groups that contain a node."""
    return [name for name, members in groups.items() if matches(members, node)]


def _closeness(terms: NodeTerms, nodes: Sequence[str]) -> tuple[int, ...]:
    exact = all(is_exact(terms.nodes, node) for node in nodes)
    return exact, bool(terms.nodes) + bool(terms.groups), bool(terms.gpu_models), bool(terms.faults)


def _terms_fit(
    terms: NodeTerms, nodes: Sequence[str], fault: str, gpu_models: Mapping[str, Sequence[str]], groups: Groups
) -> bool | None:
    """Return whether terms fit all of the nodes; None if that depends on GPUs whose names are not known."""
    if not nodes or (terms.faults and fault not in terms.faults):
        return False
    if not all(matches(terms.nodes, node) for node in nodes):
        return False
    if terms.groups:
        named = {name: groups[name] for name in terms.groups if name in groups}
        if not all(groups_of(node, named) for node in nodes):
            return False
    if not terms.gpu_models:
        return True
    names = [gpu_models.get(node, ()) for node in nodes]
    if not all(matches(terms.gpu_models, name) for own in names for name in own):
        return False
    return True if all(names) else None


Mode = Literal["observe", "approve", "act"]
AskedKind = Literal["exclude_node", "restart_job", "drain_node", "checkpoint_now"]  # kinds that subscribers are asked

# Higher is more careful.
CAREFULNESS = MappingProxyType({mode: len(get_args(Mode)) - place for place, mode in enumerate(get_args(Mode))})


class ModeRule(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A mode for some jobs (glob patterns), faults and kinds of action; an empty list means all of them.

    At least one list must not be empty: the mode for all is ``policy.mode``.
    """

    mode: Mode
    jobs: Names = []
    faults: Names = []
    kinds: list[AskedKind] = []

    def __post_init__(self) -> None:
        """Refuse a rule that can never apply. Raises ValueError, which the configuration reader reports by key."""
        if not (self.jobs or self.faults or self.kinds):
            raise ValueError("names no jobs, faults or kinds; the mode for all is policy.mode")
        unknown = [fault for fault in self.faults if fault not in BY_NAME]
        if unknown:
            raise ValueError(f"unknown fault {unknown[0]!r} in faults; expected one of {', '.join(BY_NAME)}")


class ModeFound(NamedTuple):
    """The applicable mode; ``where`` is the key that sets it."""

    mode: Mode
    where: str


def mode_of(default: Mode, rules: Iterable[ModeRule], job: str, fault: str, kind: str) -> ModeFound:
    """Return the mode for a kind of action because of a fault of a job.

    Of the rules that apply, those win that name the most of job, fault and kind. Among several, one that gives the
    exact job name overrides those that name the same things with a pattern; of the rest the most careful wins, whatever
    their order.
    """
    fitting = [(place, rule) for place, rule in enumerate(rules) if _mode_fits(rule, job, fault, kind)]
    if not fitting:
        return ModeFound(default, "policy.mode")
    most = max(sum(_criteria(rule)) for _, rule in fitting)
    closest = [(place, rule) for place, rule in fitting if sum(_criteria(rule)) == most]
    exact = {_criteria(rule) for _, rule in closest if is_exact(rule.jobs, job)}
    left = [(p, rule) for p, rule in closest if _criteria(rule) not in exact or is_exact(rule.jobs, job)]
    place, rule = max(left, key=lambda one: (CAREFULNESS[one[1].mode], -one[0]))
    return ModeFound(rule.mode, f"policy.modes[{place}].mode")


def _mode_fits(rule: ModeRule, job: str, fault: str, kind: str) -> bool:
    fault_fits = not rule.faults or fault in rule.faults
    return matches(rule.jobs, job) and fault_fits and (not rule.kinds or kind in rule.kinds)


def _criteria(rule: ModeRule) -> tuple[bool, bool, bool]:
    return bool(rule.jobs), bool(rule.faults), bool(rule.kinds)


# Unix seconds, up to the end of the year 9999, so that they can be shown as a date.
Moment = Annotated[float, Meta(ge=0, le=253_402_300_799)]


class Maintenance(
    Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    omit_defaults=True,
    rename={"from_s": "from", "until_s": "until"},
):
    """No action on what it covers from ``from_s`` until before ``until_s`` (Unix seconds).

    It covers everything, or, if ``jobs`` or ``nodes`` (glob patterns) are given, those. ``reason`` is for display.
    """

    from_s: Moment
    until_s: Moment
    jobs: Names = []
    nodes: Names = []
    reason: str = ""

    def __post_init__(self) -> None:
        """Refuse an empty window. Raises ValueError, which the configuration reader reports with its key."""
        if not self.from_s < self.until_s:
            raise ValueError(f"until ({moment(self.until_s)}) is not after from ({moment(self.from_s)})")


class InForce(NamedTuple):
    """A window that is open now; ``node`` is one that it covers, "" if it covers the job or everything."""

    where: str
    window: Maintenance
    node: str


def in_force(windows: Iterable[Maintenance], job: str, nodes: Collection[str], now_s: float) -> InForce | None:
    """Return the open window that covers the job or one of the nodes and ends last, or None.

    ``nodes`` are those that would be affected; a window that names nodes covers them if it names any of them.
    """
    found = [
        InForce(f"policy.maintenance[{place}]", window, _concerned(window, nodes))
        for place, window in enumerate(windows)
        if window.from_s <= now_s < window.until_s and _concerns(window, job, nodes)
    ]
    return max(found, key=lambda one: (one.window.until_s, one.where), default=None)


def _concerns(window: Maintenance, job: str, nodes: Collection[str]) -> bool:
    if not (window.jobs or window.nodes):
        return True
    return (bool(window.jobs) and matches(window.jobs, job)) or bool(_concerned(window, nodes))


def _concerned(window: Maintenance, nodes: Collection[str]) -> str:
    return min((node for node in nodes if matches(window.nodes, node)), default="") if window.nodes else ""


def moment(time_s: float) -> str:
    """Return a Unix time as RFC 3339 in UTC, to the second."""
    return f"{np.datetime64(int(time_s), 's')}Z"


class EvidenceSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is gathered on the suspects' hosts before an action stops their job, and how much of it is kept."""

    ask: bool = True  # whether agents are asked automatically; requests by hand work either way
    wait_s: Annotated[float, Meta(ge=0, le=60)] = 5.0  # how long an action may be delayed at most; 0: never
    within_s: Annotated[float, Meta(ge=0.5, le=60)] = 3.0  # time given to agents; with network latency below wait_s
    nodes_max: Count = 32  # asked because of one incident
    bundle_bytes_max: Annotated[int, Meta(ge=1024, le=1 << 30)] = 64 << 20
    upload_s: Positive = 120.0  # for one bundle to arrive
    folder_bytes_max: Annotated[int, Meta(ge=1 << 20)] = 10 << 30  # of all bundles; beyond it the oldest are deleted
    bundles_max: Count = 5_000
    retention_s: Positive = 30 * 86_400.0


RULES_MAX = 1_000  # of one kind: each is looked at for every open incident at every tick

RuleT = TypeVar("RuleT")
Rules = Annotated[list[RuleT], Meta(max_length=RULES_MAX)]
AtLeastOne = Annotated[float, Meta(ge=1)]


class DetectionSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When a detector may report. Floors are absolute; a job's own habits are learned on top of them."""

    tick_s: Positive = 1.0  # how often the engine judges
    window_s: Positive = 900.0  # how much of the past detectors see
    silent_intervals: Positive = 4.0  # missed intervals before a node counts as silent...
    silent_floor_s: Seconds = 10.0  # ...but never less than this
    silent_alone_s: Seconds = 300.0  # a silent node whose job goes on is reported after this
    rank_silent_floor_s: Seconds = 10.0  # how long a living process may say nothing
    hang_typical_steps: Positive = 3.0  # a standstill means something after this many of the job's typical steps...
    hang_floor_s: Seconds = 60.0  # ...and may be acted on after this, sooner on facts about one node
    start_deadline_s: Seconds = 1800.0  # from the start of an attempt to its first steps
    warmup_steps: Limit = 3  # steps of an attempt before its pace is trusted
    crash_settle_s: Seconds = 1.0  # after a first exit, how long to wait for those of its peers
    straggler_floor_s: Seconds = 10.0  # no slowness before it has lasted this long
    straggler_ripe_s: Seconds = 60.0  # what has no hardware cause may pass by itself until then: notification only
    straggler_ratio: AtLeastOne = 1.10  # compute time over the peers' that counts as slow at once...
    straggler_mild_ratio: AtLeastOne = 1.05  # ...and over twenty steps or more
    false_exclusions_per_1000_node_days: Positive = 0.1  # how many a site accepts: sets how sure detectors must be
    model: str = ""  # a file that eagle-eye train wrote; "": nothing learned is used
    learned_alarms_per_1000_node_days: Positive = 1.0  # healthy nodes that a model may call strange: asks for a look


class PolicySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What may be requested. Limits count actions requested within the last ``window_s``."""

    mode: Mode = "observe"
    modes: Rules[ModeRule] = []  # other modes for some jobs, faults or kinds of action
    jobs: Rules[JobTerms] = []  # other terms for some jobs
    nodes: Rules[NodeTerms] = []  # other actions and floors for some nodes, by name, group or what GPUs they have
    # Groups of nodes, by glob patterns of their names; the racks of topology_file that [[policy.nodes]] names come in.
    node_groups: Annotated[dict[str, Members], Meta(max_length=RULES_MAX)] = {}
    maintenance: Rules[Maintenance] = []  # times in which nothing is done
    expires_s: Positive = 600.0  # an action that nobody carried out by then is void
    window_s: Positive = 86_400.0
    exclusions_per_job: Limit = 4
    exclusions_fleet_ratio: Ratio = 0.05  # of vouched nodes, but always at least exclusions_fleet_floor
    exclusions_fleet_floor: Limit = 2
    restarts_per_job: Limit = 10
    restarts_fleet: Limit = 50
    breaker_actions: Count = 10  # so many exclusions and restarts of the whole fleet...
    breaker_window_s: Positive = 600.0  # ...within this time are no single faults any more: nothing is done...
    breaker_rest_s: Positive = 1800.0  # ...for this long
    confidence_min: Ratio = 0.9  # inferences below it only notify
    drain_after_s: Seconds = (
        300.0  # a node that is slow by one kind of evidence is drained once it has lasted so long...
    )
    drain_slowdown_min: Ratio = 0.03  # ...and makes steps so much longer (0: never); stragglers leave for no less
    lost_work_s: Seconds = 300.0  # what a restart costs: work since the last checkpoint...
    restart_s: Seconds = 240.0  # ...start-up until the first step...
    queue_s: Seconds = 60.0  # ...and the wait for nodes
    remaining_s: Seconds = 86_400.0  # how long a job is taken to run on, where nobody says
    checkpoint_wait_s: Seconds = 0.0  # how long a planned exclusion waits for a checkpoint; 0: none is asked for
    copies_wait_s: Seconds = 30.0  # what can wait waits so long for the copies of the newest step in memory; 0: not
    repeat_window_s: Seconds = 86_400.0  # a second restart for the same node within it becomes an exclusion
    tries_max: Count = 1  # how often an action is asked for because of one incident
    retry_s: Seconds = 60.0  # from a try that failed to the next
    flapping_window_s: Positive = 28 * 86_400.0  # exclusions of one node within it count together
    probation_s: Seconds = 1800.0  # how long a node stays out after its second exclusion; doubles with each further one
    probation_s_max: Seconds = 7 * 86_400.0
    # Whether a node that a fault took out is put to work before it returns: always, where its agent offers it, never.
    readmit_check: Literal["required", "wanted", "off"] = "wanted"
    watch_s: Seconds = 86_400.0  # after its return; a fault of the same family within it counts as a relapse
    report_s: Positive = 3600.0  # an action that was begun and not spoken of for this long is given to people
    verdict_gone_s: Seconds = 30.0  # an incident whose verdict has been gone this long has recovered
    reopen_s: Seconds = 900.0  # what comes back within it is the same incident; after it a recovered one is closed
    reopens_max: Count = 3  # so many returns...
    reopens_window_s: Positive = 3600.0  # ...within this time: it stays open until it was quiet for reopen_s

    def for_job(self, job: str) -> Terms:
        """Return the terms for a job."""
        return terms_of(
            job,
            self.jobs,
            Terms(
                exclusions_per_job=self.exclusions_per_job,
                restarts_per_job=self.restarts_per_job,
                lost_work_s=self.lost_work_s,
                restart_s=self.restart_s,
                queue_s=self.queue_s,
                remaining_s=self.remaining_s,
                checkpoint_wait_s=self.checkpoint_wait_s,
            ),
        )

    def for_nodes(
        self, nodes: Sequence[str], fault: str, asked: ActionKind, gpu_models: Mapping[str, Sequence[str]]
    ) -> Floors:
        """Return the floors for a fault on these nodes whose own action is ``asked``."""
        defaults = Floors(
            action=asked,
            confidence_min=self.confidence_min,
            drain_after_s=self.drain_after_s,
            drain_slowdown_min=self.drain_slowdown_min,
        )
        if not self.nodes:
            return defaults
        return floors_of(self.nodes, defaults, nodes, fault, gpu_models, self.node_groups)
