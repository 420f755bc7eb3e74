"""Settings of detection and policy: sections [detection] and [policy] of the server's configuration."""

from __future__ import annotations

from typing import Literal

import msgspec


class DetectionSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When a detector may speak. Floors are absolute; what a job does by itself is learned on top of them."""

    tick_s: float = 1.0  # how often the engine judges
    window_s: float = 900.0  # how much of the past detectors see
    silent_intervals: float = 4.0  # missed intervals before a node counts as silent...
    silent_floor_s: float = 10.0  # ...but never less than this
    silent_alone_s: float = 300.0  # a silent node whose job goes on is told of after this
    rank_silent_floor_s: float = 10.0  # how long a living process may say nothing
    hang_typical_steps: float = 3.0  # a standstill means something after this many of the job's typical steps...
    hang_floor_s: float = 60.0  # ...and may be acted on after this, sooner on two kinds of evidence against one node
    start_deadline_s: float = 1800.0  # from the start of an attempt to its first steps
    warmup_steps: int = 3  # steps of an attempt before its pace is trusted
    crash_settle_s: float = 1.0  # after a first exit, how long to wait for those of its peers
    straggler_floor_s: float = 10.0  # no slowness before it has lasted this long
    straggler_ripe_s: float = 60.0  # what has no hardware cause may pass by itself until then: only told of
    straggler_ratio: float = 1.10  # compute time over the peers' that counts as slow at once...
    straggler_mild_ratio: float = 1.05  # ...and over twenty steps or more
    false_exclusions_per_1000_node_days: float = 0.1  # how many a site accepts: sets how sure detectors must be
    model: str = ""  # a file that eagle-eye train wrote; "": nothing learned is used
    learned_alarms_per_1000_node_days: float = 1.0  # healthy nodes that a model may call strange: asks for a look


class PolicySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What may be asked for. Limits count actions asked for within the last ``window_s``."""

    mode: Literal["observe", "approve", "act"] = "observe"
    expires_s: float = 600.0  # an action that nobody carried out by then is void
    window_s: float = 86_400.0
    exclusions_per_job: int = 4
    exclusions_fleet_ratio: float = 0.05  # of all known nodes, but always at least exclusions_fleet_floor
    exclusions_fleet_floor: int = 2
    restarts_per_job: int = 10
    confidence_min: float = 0.9  # inferences below it only notify
    restart_cost_s: float = 600.0  # queueing, start-up and lost steps of one restart
    remaining_s: float = 86_400.0  # how long a job is taken to run on, where nobody says
    repeat_window_s: float = 86_400.0  # a second restart for the same node within it becomes an exclusion
    verdict_gone_s: float = 30.0  # an incident whose verdict has been gone this long has recovered
