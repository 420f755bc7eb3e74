"""Settings of detection and policy: sections [detection] and [policy] of the server's configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from eagle_eye.schema.action import ActionKind
from eagle_eye.server.engine.job_terms import Count, JobTerms, Limit, Seconds, Terms, terms_of
from eagle_eye.server.engine.maintenance import Maintenance
from eagle_eye.server.engine.modes import Mode, ModeRule
from eagle_eye.server.engine.node_terms import Floors, Members, NodeTerms, floors_of
from eagle_eye.server.model.bounds import Positive

RULES_MAX = 1_000  # of one kind: each is looked at for every open incident at every tick

RuleT = TypeVar("RuleT")
Rules = Annotated[list[RuleT], Meta(max_length=RULES_MAX)]
Ratio = Annotated[float, Meta(ge=0, le=1)]
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
