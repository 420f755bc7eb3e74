"""What looks guilty and is not: situations of room and fabric, job control, observers, pauses and work."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from eagle_eye.simulator import faults
from eagle_eye.simulator.faults import congest
from eagle_eye.simulator.job import MODELS, Model, stage_compute_s
from eagle_eye.simulator.story import EndlessStep, MissingRows, Place, PlannedPause, SimulatedAttempt, StopKind, Story
from eagle_eye.simulator.tracks import Quantity, Track

SOFTWARE_POWER = 0x4  # NVML: the power cap holds the clocks
RACK_NODES = 4


def congestion_burst(story: Story) -> None:
    """Bursts of others' traffic on one switch, 10 to 30 seconds each."""
    nodes = story.layout.under(story.layout.switch[story.culprit().node])
    start_s = story.onset(0.15, 0.3)
    while start_s < story.scenario.duration_s:
        end_s = start_s + float(story.rng.uniform(10.0, 30.0))
        congest(story, nodes, float(story.rng.uniform(2.0, 5.0)), start_s, end_s)
        start_s = end_s + float(story.rng.uniform(40.0, 120.0))


def hot_node(story: Story) -> None:
    """One node's GPUs are 8 to 12 degrees hotter than all others, below the limit, and as fast as they are."""
    node = story.culprit().node
    story.change(Quantity.AMBIENT, float(story.rng.uniform(8.0, 12.0)), -1e9, nodes=(node,))


def link_flap(story: Story) -> None:
    """One link goes down and up twice within five minutes; collectives are repeated and go on."""
    at = story.culprit()
    port = Place(at.node, at.device * len(story.layout.links) // story.layout.gpus)
    link, moment_s = story.layout.links[port.device], story.onset(0.2, 0.35)
    for _ in range(2):
        up_s = moment_s + float(story.rng.uniform(2.0, 6.0))
        story.say(moment_s, "link_down", at.node, link=link)
        story.say(up_s, "link_up", at.node, link=link)
        story.change(Quantity.LINK_UP, 0.0, moment_s, at=port, end_s=up_s)
        story.change(Quantity.LINK_DOWNED, 1.0, moment_s, at=port)
        # The step in progress waits for the link.
        story.change(Quantity.STALL, up_s - moment_s, moment_s, nodes=(at.node,), end_s=moment_s + story.job.step_s)
        moment_s = up_s + float(story.rng.uniform(0.1, 0.3)) * min(story.scenario.duration_s, 600.0)


def rack_power_cap(story: Story) -> None:
    """The facility caps the power of a rack: all its nodes are slower together."""
    layout, onset_s = story.layout, story.onset()
    size = min(RACK_NODES, max(2, layout.nodes - 1))  # one node alone: nothing tells it from a fault of that node
    first = int(story.rng.integers(0, max(1, layout.nodes // size))) * size
    nodes = tuple(n for n in range(first, first + size) if n < layout.nodes)
    slower = float(story.rng.uniform(1.06, 1.2))
    clock = 0.9 / (slower - 0.1)
    story.change(Quantity.COMPUTE, slower, onset_s, nodes=nodes)
    story.change(Quantity.CLOCK, clock, onset_s, nodes=nodes)
    story.change(Quantity.POWER_LIMIT, 0.98 * clock**2, onset_s, nodes=nodes)
    story.change(Quantity.THROTTLE_BITS, SOFTWARE_POWER, onset_s, nodes=nodes)


def diurnal_heat(story: Story) -> None:
    """Midday: all GPUs a few degrees hotter and 1-2% slower, as Llama 3's training saw every day."""
    length_s = story.scenario.duration_s
    heat = Track(Quantity.AMBIENT, float(story.rng.uniform(4.0, 8.0)), 0.1 * length_s, rise_s=0.5 * length_s)
    slow = Track(Quantity.COMPUTE, float(story.rng.uniform(1.01, 1.02)), 0.1 * length_s, rise_s=0.5 * length_s)
    clock = Track(Quantity.CLOCK, 0.985, 0.1 * length_s, rise_s=0.5 * length_s)
    story.tracks += [heat, slow, clock]


def warm_up(story: Story) -> None:
    """The job starts within the trace: nothing at first, then slow steps that compile and fill caches."""
    start_s = float(story.rng.uniform(5.0, 20.0))
    first_s = float(story.rng.uniform(20.0, 60.0))
    # Compilation and data set indices come before and in the first step, whatever a step takes later.
    factors = (first_s / story.job.step_s, 6.0, 2.5, 1.5, 1.2)
    story.attempts.append(SimulatedAttempt(start_s, 0, tuple(max(f, 1.0) for f in factors)))
    story.job = replace(story.job, first_step=0, checkpoint_every_s=math.inf)


def restart(story: Story) -> None:
    """Somebody else restarts the job: all ranks end, a new attempt begins on the same nodes."""
    stop_s = story.onset(0.35, 0.5)
    begin_s = stop_s + float(story.rng.uniform(20.0, 60.0))
    job = story.job
    lead_s = 3 * max(job.step_s, story.scenario.interval_s)
    again = job.first_step + int(0.7 * stop_s / job.step_s)
    story.attempts += [
        SimulatedAttempt(-lead_s, job.first_step, (), EndlessStep(stop_s, StopKind.SYMMETRIC)),
        SimulatedAttempt(begin_s, again, (5.0, 2.0, 1.2)),
    ]
    story.say(stop_s - 0.5, "job_state", state="completing", attempt=0)
    _end_all(story, stop_s)
    story.say(begin_s, "job_state", state="running", attempt=1)
    story.job = replace(job, checkpoint_every_s=math.inf)


def scancel(story: Story) -> None:
    """The user cancels the job: the scheduler says so, ranks end by SIGTERM."""
    moment_s = story.onset(0.5, 0.7)
    story.stop(moment_s, StopKind.SYMMETRIC)
    story.say(moment_s - float(story.rng.uniform(0.1, 1.5)), "job_state", state="cancelled", attempt=0)
    _end_all(story, moment_s)


def preempted(story: Story) -> None:
    """The scheduler takes the nodes for a job of higher priority: SIGTERM, and SIGKILL for those that linger."""
    moment_s = story.onset(0.5, 0.7)
    story.stop(moment_s, StopKind.SYMMETRIC)
    story.say(moment_s - float(story.rng.uniform(0.1, 1.5)), "job_state", state="preempted", attempt=0)
    lingering = story.culprit().node
    for node in range(story.layout.nodes):
        late = node == lingering
        code = faults.KILLED if late else faults.TERMINATED
        after_s = 30.0 if late else float(story.rng.uniform(0.0, 3.0))
        faults.end(story, story.places(node), moment_s + after_s, code)


def elastic_leave(story: Story) -> None:
    """An elastic job gives a node back: a new membership without it, its ranks say goodbye, the job goes on."""
    if story.layout.nodes < 2:
        return
    node, moment_s = story.culprit().node, story.onset()
    story.gone.append((moment_s, (node,)))
    for place in story.places(node):
        story.say(moment_s, "process_exit", node, place.device, exit_code=0, rank=story.rank(place), goodbye=True)
    story.say(moment_s + 5.0, "agent_stop", node, reason="node released")
    story.outages.append(MissingRows(node, moment_s + 5.0))


def _end_all(story: Story, moment_s: float) -> None:
    for node in range(story.layout.nodes):
        faults.end(story, story.places(node), moment_s + float(story.rng.uniform(0.0, 2.0)), faults.TERMINATED)


# Application errors and bookkeeping that need no action on the node (NVIDIA XID catalogue).
BENIGN = {
    13: "Graphics SM Warp Exception",
    31: "MMU Fault: ENGINE GRAPHICS",
    43: "Reset Channel Verification Error",
    63: "Row remapping event: row remap recorded",
}


def benign_xids(story: Story) -> None:
    """XIDs of debugging tools and bookkeeping on several nodes while the job goes on."""
    for _ in range(int(story.rng.integers(3, 9))):
        at, code = story.culprit(), int(story.rng.choice(list(BENIGN)))
        moment_s = story.onset(0.1, 0.95)
        for repeat in range(int(story.rng.choice([1, 1, 2, 12]))):
            story.say(moment_s + 0.2 * repeat, "xid", at.node, at.device, code=code, text=BENIGN[code])
        if code == 63:
            story.change(Quantity.REMAPPED, 1.0, moment_s, at=at)
            story.change(Quantity.REMAP_PENDING, 1.0, moment_s, at=at)


def corrected_errors(story: Story) -> None:
    """Single corrected memory errors on one GPU, more than the others have, and harmless."""
    at = story.culprit()
    story.change(Quantity.ECC_CORRECTED_RATE, 0.05, story.onset(0.1, 0.3), at=at)


def agent_restart(story: Story) -> None:
    """An agent is upgraded: it says goodbye, is silent for a while and comes back."""
    node, moment_s = story.culprit().node, story.onset()
    away_s = float(story.rng.uniform(5.0, 60.0))
    story.say(moment_s, "agent_stop", node, reason="signal 15")
    story.outages.append(MissingRows(node, moment_s, moment_s + away_s))
    story.say(moment_s + away_s, "agent_start", node, version="0.1.1")


def agent_silent(story: Story) -> None:
    """An agent or its network is away for 1 to 3 minutes without goodbye; the job goes on."""
    node, moment_s = story.culprit().node, story.onset()
    story.outages.append(MissingRows(node, moment_s, moment_s + float(story.rng.uniform(60.0, 180.0))))


def clock_skew(story: Story) -> None:
    """One node's clock is seconds off, all the time."""
    node = story.culprit().node
    offset_s = float(story.rng.uniform(1.5, 8.0)) * float(story.rng.choice([-1.0, 1.0]))
    story.change(Quantity.CLOCK_OFFSET, offset_s, -1e9, nodes=(node,))


def ntp_step(story: Story) -> None:
    """One node's clock jumps by seconds in the midst of the run."""
    node = story.culprit().node
    offset_s = float(story.rng.uniform(2.0, 12.0)) * float(story.rng.choice([-1.0, 1.0]))
    story.change(Quantity.CLOCK_OFFSET, offset_s, story.onset(), nodes=(node,))


WRITE_BYTES_PER_S = 1.5e9  # per node, to the shared file system


def checkpoint(story: Story) -> None:
    """All ranks pause while the checkpoint is written; announced by the training code, or not."""
    announced = story.variant("announced", "unannounced") == "announced"
    _no_habits(story)
    length_s = story.scenario.duration_s
    start_s, every_s = story.onset(0.1, 0.3), float(story.rng.uniform(0.2, 0.4)) * length_s
    seconds = float(story.rng.uniform(8.0, 40.0))
    while start_s < length_s:
        story.pauses.append(
            PlannedPause("checkpoint", start_s, seconds, announced=announced, disk_bytes_per_s=WRITE_BYTES_PER_S)
        )
        start_s += every_s + seconds


def long_checkpoint(story: Story) -> None:
    """A checkpoint that takes a third of the trace, as on a slow file system; announced, and it ends."""
    _no_habits(story)
    seconds = float(story.rng.uniform(0.25, 0.4)) * story.scenario.duration_s
    story.pauses.append(
        PlannedPause("checkpoint", story.onset(0.3, 0.45), seconds, disk_bytes_per_s=0.3 * WRITE_BYTES_PER_S)
    )


def evaluation(story: Story) -> None:
    """The model is evaluated between training steps: forward passes only, the step count rests."""
    announced = story.variant("announced", "unannounced") == "announced"
    seconds = float(story.rng.uniform(0.1, 0.25)) * story.scenario.duration_s
    story.pauses.append(PlannedPause("evaluation", story.onset(), seconds, busy=0.6, announced=announced))


def lone_pause(story: Story) -> None:
    """Rank 0 saves, evaluates or compiles for 30 s to 10 minutes and says nothing of it; all others wait for it."""
    doing = story.variant("saves", "evaluates", "compiles")
    length_s = story.scenario.duration_s
    seconds = float(np.exp(story.rng.uniform(np.log(30.0), np.log(min(600.0, 0.5 * length_s)))))
    pause = PlannedPause(doing, story.onset(0.2, 0.4), seconds, announced=False, alone=True, cpus=0.6)
    if doing == "saves":
        pause = replace(pause, disk_bytes_per_s=WRITE_BYTES_PER_S)
    elif doing == "evaluates":
        pause = replace(pause, busy=0.6, cpus=1.2)
    else:
        pause = replace(pause, cpus=float(story.rng.uniform(0.9, 8.0)))
    story.pauses.append(pause)


def short_steps_pause(story: Story) -> None:
    """Steps of a fraction of a second, and pauses of 10 to 40 seconds in which the code does something else."""
    _no_habits(story)
    _shorten(story, float(story.rng.uniform(0.04, 0.1)))
    start_s, length_s = story.onset(0.08, 0.15), story.scenario.duration_s
    while start_s < length_s:
        seconds = float(story.rng.uniform(10.0, 40.0))
        story.pauses.append(
            PlannedPause("other", start_s, seconds, spins=bool(story.rng.random() < 0.5), announced=False)
        )
        start_s += seconds + float(story.rng.uniform(40.0, 120.0))


def storage_stall_short(story: Story) -> None:
    """The shared file system is slow for half a minute: all ranks wait for data, then all is well."""
    onset_s = story.onset()
    end_s = onset_s + float(story.rng.uniform(15.0, 40.0))
    story.change(Quantity.DATA_WAIT, float(story.rng.uniform(1.0, 4.0)) * story.job.step_s, onset_s, end_s=end_s)
    story.change(Quantity.IOWAIT, 0.1, onset_s, end_s=end_s)
    story.change(Quantity.IO_PRESSURE, 0.5, onset_s, end_s=end_s)
    story.change(Quantity.BLOCKED, 12.0, onset_s + 1.0, end_s=end_s)


def data_loader_hiccup(story: Story) -> None:
    """One rank waits for its data in a few steps, now and then."""
    at = story.culprit()
    for _ in range(3):
        onset_s = story.onset(0.2, 0.9)
        end_s = onset_s + float(story.rng.uniform(2, 5)) * story.job.step_s
        story.change(
            Quantity.DATA_WAIT, float(story.rng.uniform(0.3, 1.5)) * story.job.step_s, onset_s, at=at, end_s=end_s
        )


def periodic_gc(story: Story) -> None:
    """Python's garbage collector halts one rank in every k-th step."""
    at = story.culprit()
    every = int(story.rng.integers(10, 40))
    stall_s = float(story.rng.uniform(0.2, 0.6)) * story.job.step_s
    period_s = every * story.job.step_s
    story.tracks.append(
        Track(Quantity.STALL, stall_s, 0.0, nodes=(at.node,), device=at.device, period_s=period_s, duty=1.0 / every)
    )


def _shorten(story: Story, step_s: float) -> None:
    """Make all of a step shorter, unless steps are that short already."""
    job, factor = story.job, min(1.0, step_s / story.job.step_s)
    story.job = replace(
        job,
        step_s=job.step_s * factor,
        compute_s=job.compute_s * factor,
        communication_s=job.communication_s * factor,
        data_wait_s=job.data_wait_s * factor,
    )


def _no_habits(story: Story) -> None:
    story.job = replace(story.job, checkpoint_every_s=float("inf"))


def packed_sequences(story: Story) -> None:
    """Packed data: every step another replica has the most work; the code says how much (units) or not (silent)."""
    units = story.variant("units", "silent") == "units"
    story.job = replace(story.job, packed_from_s=-math.inf, says_work_units=units)


def uneven_last_stage(story: Story) -> None:
    """The last pipeline stage has more to do than the others, on every replica, from the start."""
    layout, job = story.layout, story.job
    if layout.pp == 1:
        return
    weights = [1.0] * (layout.pp - 1) + [float(story.rng.uniform(1.3, 1.65))]
    compute_s = stage_compute_s(job.step_s, job.communication_s / job.step_s, weights, job.microbatches)
    story.job = replace(job, stage_weights=tuple(weights), compute_s=compute_s)


def hot_expert(story: Story) -> None:
    """Mixture of experts: the router gives every rank another load, and one of them lastingly more from a moment on."""
    onset_s, at = story.onset(), story.culprit()
    story.job = replace(story.job, expert_spread=float(story.rng.uniform(0.05, 0.12)))
    story.change(Quantity.COMPUTE, float(story.rng.uniform(1.25, 1.7)), onset_s, at=at)


def long_documents(story: Story) -> None:
    """One replica's shard of packed data has longer documents from a moment on; nobody says how much work that is."""
    onset_s, layout = story.onset(), story.layout
    story.job = replace(story.job, packed_from_s=-math.inf, says_work_units=False)
    longer, replica = float(story.rng.uniform(1.25, 1.7)), layout.replica()
    for node, device in np.argwhere(replica == story.rng.integers(layout.dp)).tolist():
        story.change(Quantity.COMPUTE, longer, onset_s, at=Place(node, device))


def batch_size_change(story: Story) -> None:
    """A schedule raises the batch: all steps are longer from one moment on, and do more."""
    onset_s = story.onset()
    factor = float(story.rng.choice([1.25, 1.5, 2.0]))
    story.change(Quantity.COMPUTE, factor, onset_s)
    story.change(Quantity.TOKENS, factor, onset_s)


def mixed_gpu_models(story: Story) -> None:
    """Some nodes have another GPU model, slower by its data sheet; they are slow and healthy."""
    layout = story.layout
    fast, slow = Model(*MODELS[0]), Model(*MODELS[2])
    number = max(1, layout.nodes // 4)
    places = set(story.rng.choice(layout.nodes, number, replace=False).tolist())
    models = tuple(slow if n in places else fast for n in range(layout.nodes))
    story.layout = replace(layout, models=models)
