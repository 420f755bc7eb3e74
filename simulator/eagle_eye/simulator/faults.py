"""What happens in each fault, family by family; first how training processes end, and the errors of their peers."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from eagle_eye.simulator.story import (
    Blank,
    Death,
    EndlessStep,
    MissingRows,
    Place,
    PlannedPause,
    SimulatedAttempt,
    StopKind,
    Story,
)
from eagle_eye.simulator.tracks import Quantity

ABORT, SEGMENTATION_FAULT, KILLED, TERMINATED = -6, -11, -9, -15
CUDA_ERROR = "RuntimeError: CUDA error: unspecified launch failure"
ECC_ERROR = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.25 GiB. GPU {device} has a total capacity of "
    "79.11 GiB of which 1.02 GiB is free."
)
REMOTE_ERROR = (
    "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2251, remote process exited or there was "
    "a network error. ncclRemoteError: Last error: socketProgress: Connection closed by remote peer {peer}<47102>"
)
RESET = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.4.{n}.17]:23961"
)
WATCHDOG = (
    "[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={sequence}, "
    "OpType=_REDUCE_SCATTER_BASE, NumelIn=268435456, NumelOut=33554432, Timeout(ms)={timeout_ms}) "
    "ran for {timeout_ms} milliseconds before timing out."
)
NCCL_TIMEOUTS_S = (600.0, 600.0, 1800.0)  # torch's default is 10 minutes, many sites take 30


def crash(story: Story, at: Place, time_s: float, exit_code: int, text: str | None) -> None:
    """End one process: its launcher ends the node's others, peers wait, some of them notice.

    ``text`` is the exception that ended it, None where it died without a word.
    """
    rng, layout = story.rng, story.layout
    rank = story.rank(at)
    if text is not None:
        story.say(time_s - 0.05, "training_error", at.node, at.device, text=text, rank=rank)
    end(story, (at,), time_s, exit_code)
    local = tuple(place for place in story.places(at.node) if place != at)
    if local:
        # torchrun's agent looks at its children a few times a second and ends the rest by SIGTERM.
        end(story, local, time_s + float(rng.uniform(0.3, 6.0)), TERMINATED)
    if rng.random() < 0.5 and layout.nodes > 1:
        _echo(story, at, time_s)
    abort_peers(story, (at.node,), time_s)


def end(story: Story, places: tuple[Place, ...], time_s: float, exit_code: int) -> None:
    """End processes with an exit code (negative: a signal)."""
    story.deaths.append(Death(time_s, places))
    for place in places:
        moment_s = time_s + float(story.rng.uniform(0.0, 0.2))
        story.say(
            moment_s,
            "process_exit",
            place.node,
            place.device,
            exit_code=exit_code,
            rank=story.rank(place),
            goodbye=False,
        )


def abort_peers(story: Story, without: tuple[int, ...], stopped_s: float) -> None:
    """Let NCCL's watchdog end all waiting ranks when its timeout has passed, if the trace lasts that long."""
    rng, layout = story.rng, story.layout
    timeout_s = float(rng.choice(NCCL_TIMEOUTS_S))
    moment_s = stopped_s + timeout_s + float(rng.uniform(0.0, 2.0))
    if moment_s >= story.scenario.duration_s:
        return
    sequence = story.job.first_step * story.job.collectives
    for node in range(layout.nodes):
        if node in without:
            continue
        at_s = moment_s + float(rng.uniform(0.0, 3.0))
        for place in story.places(node):
            rank = story.rank(place)
            text = WATCHDOG.format(rank=rank, sequence=sequence, timeout_ms=int(timeout_s * 1000))
            story.say(at_s - 0.1, "training_error", node, place.device, text=text, rank=rank)
        end(story, story.places(node), at_s, ABORT)


def _echo(story: Story, at: Place, time_s: float) -> None:
    """Let one to three nodes that talked to the dead process fail by that, seconds later."""
    rng, layout = story.rng, story.layout
    others = [n for n in range(layout.nodes) if n != at.node]
    number = min(len(others), int(rng.integers(1, 4)))
    text = REMOTE_ERROR.format(peer=layout.names[at.node]) if rng.random() < 0.6 else RESET.format(n=at.node % 250)
    for node in rng.choice(others, number, replace=False).tolist():
        moment_s = time_s + float(rng.uniform(1.0, 20.0))
        for place in story.places(node):
            story.say(moment_s, "training_error", node, place.device, text=text, rank=story.rank(place))
        end(story, story.places(node), moment_s + 0.3, 1)


CRASHES = (
    (SEGMENTATION_FAULT, None),
    (ABORT, "terminate called after throwing an instance of 'c10::Error'"),
    (1, "RuntimeError: DataLoader worker (pid 31337) exited unexpectedly with exit code 1."),
    (1, "KeyError: 'tokens'"),
    (1, CUDA_ERROR),
)
# Uncorrectable memory errors (NVIDIA XID catalogue): code, what the kernel log says.
DOUBLE_BIT, REMAP_RECORDED, REMAP_FAILED, CONTAINED, UNCONTAINED = 48, 63, 64, 94, 95
XID_TEXTS = {
    DOUBLE_BIT: "DBE (double bit error) ECC Error",
    REMAP_RECORDED: "Row remapping event: row remap recorded",
    REMAP_FAILED: "Row remapping event: row remap failed",
    CONTAINED: "Contained ECC error. RST: No, D-RST: No",
    UNCONTAINED: "Uncontained ECC error. RST: Yes, D-RST: No",
}


def gpu_memory_error(story: Story) -> None:
    """An uncorrectable ECC error ends the process; uncontained the GPU is to be taken out, contained not."""
    variant = story.variant("uncontained", "double_bit", "remap_failed", "contained", odds=(0.35, 0.25, 0.15, 0.25))
    at, onset_s = story.culprit(), story.onset()
    codes = {
        "uncontained": (UNCONTAINED, REMAP_RECORDED),
        "double_bit": (DOUBLE_BIT, REMAP_RECORDED),
        "remap_failed": (DOUBLE_BIT, REMAP_FAILED),
        "contained": (CONTAINED, REMAP_RECORDED),
    }[variant]
    if story.scenario.creeping:
        story.change(Quantity.ECC_CORRECTED_RATE, 0.4, onset_s - 0.5 * onset_s, at=at, rise_s=0.5 * onset_s)
    for number, code in enumerate(codes):
        story.say(onset_s + 0.2 + 0.1 * number, "xid", at.node, at.device, code=code, text=XID_TEXTS[code])
    story.change(Quantity.ECC_UNCORRECTED, 1.0, onset_s, at=at)
    if REMAP_RECORDED in codes:
        story.change(Quantity.REMAPPED, 1.0, onset_s + 0.3, at=at)
        story.change(Quantity.REMAP_PENDING, 1.0, onset_s + 0.3, at=at)
    story.stop(onset_s, StopKind.LATE, at)
    crash(story, at, onset_s + float(story.rng.uniform(0.3, 3.0)), ABORT, ECC_ERROR)
    story.label(onset_s, (at.node,), "gpu_memory_error", "restart" if variant == "contained" else "exclude")


def process_crash(story: Story) -> None:
    """A process exits by an exception or a signal for reasons of its own."""
    at, onset_s = story.culprit(), story.onset()
    story.stop(onset_s, StopKind.LATE, at)
    exit_code, text = CRASHES[int(story.rng.integers(len(CRASHES)))]
    crash(story, at, onset_s, exit_code, text)
    story.label(onset_s, (at.node,), "process_crash", "restart")


def out_of_memory(story: Story) -> None:
    """The kernel kills the process for the host's memory (host), or an allocation on the GPU fails (device)."""
    variant = story.variant("host", "device")
    at, onset_s = story.culprit(), story.onset()
    story.stop(onset_s, StopKind.LATE, at)
    story.label(onset_s, (at.node,), "out_of_memory", "restart")
    if variant == "device":
        story.change(Quantity.MEMORY, 0.2, onset_s - 20.0, at=at, end_s=onset_s, rise_s=15.0)
        crash(story, at, onset_s, 1, OUT_OF_MEMORY.format(device=at.device))
        return
    filling_s = float(story.rng.uniform(60.0, 150.0))
    nodes = (at.node,)
    story.change(Quantity.HOST_MEMORY, 0.75, onset_s - filling_s, nodes=nodes, end_s=onset_s, rise_s=filling_s)
    story.change(Quantity.MEMORY_PRESSURE, 0.5, onset_s - 15.0, nodes=nodes, end_s=onset_s, rise_s=15.0)
    story.say(onset_s - 0.1, "oom_kill", at.node, process="python3")
    crash(story, at, onset_s, KILLED, None)


def recurrent_node(story: Story) -> None:
    """The same node fails in attempt after attempt: the first time a restart is right, then the node has to go."""
    node = story.culprit().node
    length_s = story.scenario.duration_s
    story.attempts.clear()
    down_s = float(story.rng.uniform(0.06, 0.10)) * length_s
    began_s, first_step = -3 * max(story.job.step_s, story.scenario.interval_s), story.job.first_step
    failures = [float(f) * length_s for f in (story.rng.uniform(0.2, 0.28), story.rng.uniform(0.52, 0.6))]
    for number, failure_s in enumerate(failures):
        at = Place(node, int(story.rng.integers(story.layout.gpus)))
        story.attempts.append(SimulatedAttempt(began_s, first_step, (), EndlessStep(failure_s, StopKind.LATE, (at,))))
        exit_code, text = CRASHES[int(story.rng.integers(len(CRASHES)))]
        rank = story.rank(at)
        if text is not None:
            story.say(failure_s - 0.05, "training_error", node, at.device, text=text, rank=rank, attempt=number)
        end(story, (at,), failure_s, exit_code)
        end(story, tuple(p for p in story.places(node) if p != at), failure_s + 1.0, TERMINATED)
        expect, fault = ("exclude", "recurrent_node") if number else ("restart", "process_crash")
        story.label(failure_s, (node,), fault, expect)
        restart_s = failure_s + down_s
        # The launcher ends the waiting peers shortly before it starts all again, from the last checkpoint.
        peers = tuple(p for p in story.everywhere() if p.node != node)
        story.deaths.append(Death(restart_s - 0.5 * down_s, peers))
        for place in peers:
            story.say(
                restart_s - 0.5 * down_s,
                "process_exit",
                place.node,
                place.device,
                exit_code=TERMINATED,
                rank=story.rank(place),
                goodbye=False,
            )
        began_s = restart_s
        first_step = max(story.job.first_step, first_step + int(0.5 * failure_s / story.job.step_s))
    story.attempts.append(SimulatedAttempt(began_s, first_step, (4.0, 1.5)))
    for index, label in enumerate(story.labels):
        until_s = failures[1] if index == 0 else length_s
        story.labels[index] = type(label)(label.start_s, label.nodes, label.fault, label.expect, until_s)


def silent_data_corruption(story: Story) -> None:
    """One rank computes wrongly: its gradient before the reduction (gradient) or its parameters (checksum) deviate."""
    variant = story.variant("gradient", "checksum", odds=(0.7, 0.3))
    at, onset_s = story.culprit(), story.onset()
    story.label(onset_s, (at.node,), "silent_data_corruption", "exclude")
    if variant == "checksum":
        story.job = replace(story.job, says_checksum=True)
        story.change(Quantity.CHECKSUM, float(story.rng.uniform(0.5, 50.0)), onset_s, at=at)
        return
    story.job = replace(story.job, says_local_grad=True)
    factor = (1.5, 4.0, 12.0, 80.0)[("faint", "weak", "medium", "strong").index(story.scenario.strength)]
    story.change(Quantity.LOCAL_GRAD, factor, onset_s, at=at)
    # The mean over all replicas thins it: one of R shows by sqrt(1 + (f^2 - 1) / R).
    visible = math.sqrt(1.0 + (factor**2 - 1.0) / (story.layout.dp * story.layout.tp))
    story.change(Quantity.GRAD_NORM, visible, onset_s)
    delay_s = max(6 * story.job.step_s, 4 * story.scenario.interval_s)
    if story.rng.random() < 0.5 and factor > 2:
        story.change(
            Quantity.LOSS,
            float(story.rng.uniform(*story.physics.worse_loss)),
            onset_s + delay_s,
            rise_s=8 * story.job.step_s,
        )
    elif factor > 2:
        story.change(Quantity.LOSS, math.inf, onset_s + 2 * delay_s)


def loss_not_finite(story: Story) -> None:
    """The loss is NaN on all ranks from one step to the next; training goes on in vain."""
    onset_s = story.onset()
    story.change(Quantity.LOSS, math.inf, onset_s)
    story.label(onset_s, (), "loss_not_finite", "restart")


def loss_divergence(story: Story) -> None:
    """Loss and gradient norm grow on all ranks and do not come back."""
    onset_s = story.onset(0.3, 0.4)
    rise_s = float(story.rng.uniform(0.1, 0.25)) * story.scenario.duration_s
    story.change(Quantity.LOSS, float(story.rng.uniform(*story.physics.worse_loss)), onset_s, rise_s=rise_s)
    story.change(Quantity.GRAD_NORM, float(story.rng.uniform(10.0, 60.0)), onset_s, rise_s=0.4 * rise_s)
    story.label(onset_s, (), "loss_divergence", "restart")


def loss_spike(story: Story) -> None:
    """Bad data: loss and gradient norm jump on all ranks, and recover within some tens of steps."""
    onset_s = story.onset()
    lasts_s = max(float(story.rng.uniform(5, 15)) * story.job.step_s, 3 * story.scenario.interval_s)
    height = float(story.rng.uniform(1.5, 3.0))
    for share, part in ((1.0, height), (2.0, 1.15)):
        story.change(Quantity.LOSS, part, onset_s, end_s=onset_s + share * lasts_s)
        story.change(Quantity.GRAD_NORM, 1.0 + 4.0 * (part - 1.0), onset_s, end_s=onset_s + share * lasts_s)
    story.label(onset_s, (), "loss_spike", "job")


OFF_THE_BUS = 79  # XID "GPU has fallen off the bus" (NVIDIA XID catalogue)


def gpu_lost(story: Story) -> None:
    """XID 79: the device's series end, its process dies of it (dies) or waits forever (hangs); the job stops."""
    variant = story.variant("dies", "hangs")
    at, onset_s = story.culprit(), story.onset()
    story.stop(onset_s, StopKind.LATE, at)
    story.label(onset_s, (at.node,), "gpu_lost", "exclude")
    text = f"GPU at PCI:0000:{0x19 + 0x12 * at.device:02x}:00 has fallen off the bus."
    story.say(onset_s + 0.3, "xid", at.node, at.device, code=OFF_THE_BUS, text=text)
    story.say(onset_s + float(story.rng.uniform(0.5, 3.0)), "gpu_lost", at.node, at.device)
    # Rows of the device end: NVML answers that the GPU is lost, and the process that used it is of no more use.
    story.outages.append(MissingRows(at.node, onset_s + 0.5, device=at.device))
    story.change(Quantity.PCIE_REPLAY_RATE, 2.0, onset_s - 30.0, at=at)
    if variant == "dies":
        crash(story, at, onset_s + float(story.rng.uniform(1.0, 8.0)), ABORT, CUDA_ERROR)
    else:
        abort_peers(story, (at.node,), onset_s)


def node_unreachable(story: Story) -> None:
    """No row of the node any more and the job stands still: power, kernel panic (reboot) or its network."""
    variant = story.variant("silent", "reboot", odds=(0.7, 0.3))
    at, onset_s = story.culprit(), story.onset()
    story.stop(onset_s, StopKind.LATE, *story.places(at.node))
    story.label(onset_s, (at.node,), "node_unreachable", "exclude")
    back_s = onset_s + float(story.rng.uniform(150.0, 300.0))
    rebooted = variant == "reboot" and back_s < story.scenario.duration_s
    story.outages.append(MissingRows(at.node, onset_s, back_s if rebooted else float("inf")))
    if rebooted:
        story.say(back_s + 1.0, "agent_start", at.node, version="0.1.0")
        story.say(back_s + 1.5, "kernel_panic", at.node, text="Kernel panic - not syncing: Fatal machine check")
    # Its processes are gone; nobody is left to say so.
    _vanish(story, story.places(at.node), onset_s)
    if story.rng.random() < 0.4 and story.layout.nodes > 1:
        story.change(Quantity.RETRANSMITS, 12.0, onset_s, end_s=onset_s + 60.0)
    abort_peers(story, (at.node,), onset_s)


def _vanish(story: Story, places: tuple[Place, ...], time_s: float) -> None:
    story.deaths.append(Death(time_s, places))


REPORTED = "job"


def switch_down(story: Story) -> None:
    """All links to one switch go down: the nodes' agents still speak (links) or not (dark, in-band management)."""
    variant = story.variant("links", "dark", odds=(0.75, 0.25))
    layout, onset_s = story.layout, story.onset()
    switches = sorted({switch for row in layout.link_switch for switch in row})
    switch = switches[int(story.rng.integers(len(switches)))]
    nodes = tuple(n for n in range(layout.nodes) if switch in layout.link_switch[n])
    story.stop(onset_s, StopKind.TRANSFER, *(p for n in nodes for p in story.places(n)))
    story.label(onset_s, nodes, "switch_down", REPORTED)
    rails = any(len(set(row)) > 1 for row in layout.link_switch)
    for node in nodes:
        if variant == "dark" and not rails:
            story.outages.append(MissingRows(node, onset_s + float(story.rng.uniform(0.0, 0.5))))
            continue
        for port, name in enumerate(layout.link_switch[node]):
            if name == switch:
                place = Place(node, port)
                story.change(Quantity.LINK_UP, 0.0, onset_s, at=place)
                story.change(Quantity.LINK_RATE, 0.0, onset_s, at=place)
                story.change(Quantity.LINK_DOWNED, 1.0, onset_s, at=place)
                moment_s = onset_s + float(story.rng.uniform(0.1, 1.0))
                story.say(moment_s, "link_down", node, link=layout.links[port])
    abort_peers(story, nodes if variant == "dark" else (), onset_s)


def network_congestion(story: Story) -> None:
    """Others' traffic fills the links of one switch: notifications and pauses on all its nodes, collectives slower."""
    layout, onset_s, rise_s = story.layout, story.onset(), story.rise_s()
    switch = layout.switch[int(story.rng.integers(layout.nodes))]
    nodes = layout.under(switch)
    if len(nodes) == layout.nodes and len(nodes) > 4:
        nodes = nodes[: len(nodes) // 2 + 1]
    congest(story, nodes, story.strength(1.02, 1.8, 3.0, 6.0), onset_s, rise_s=rise_s)
    story.label(onset_s, nodes, "network_congestion", REPORTED)


def congest(
    story: Story,
    nodes: tuple[int, ...],
    slower: float,
    onset_s: float,
    end_s: float = float("inf"),
    rise_s: float = 0.0,
) -> None:
    """Make the network of these nodes slow, without any of them being at fault."""
    for node in nodes:
        share = float(story.rng.uniform(0.5, 1.0))
        change = partial(story.change, start_s=onset_s, nodes=(node,), end_s=end_s, rise_s=rise_s)
        change(Quantity.NETWORK, 1.0 + (slower - 1.0) * share)
        change(Quantity.CONGESTION_RATE, 900.0 * share)
        change(Quantity.PFC_RX, 250.0 * share * (slower - 1.0))
        change(Quantity.PFC_TX, 15.0 * share)


def storage_stall(story: Story) -> None:
    """The shared file system is slow (reads: all ranks wait for data) or stuck (writes: a checkpoint does not end)."""
    variant = story.variant("reads", "writes")
    onset_s = story.onset()
    story.label(onset_s, (), "storage_stall", REPORTED)
    story.change(Quantity.IOWAIT, 0.12, onset_s, rise_s=5.0)
    story.change(Quantity.IO_PRESSURE, 0.6, onset_s, rise_s=5.0)
    story.change(Quantity.BLOCKED, 18.0, onset_s + 2.0)
    if variant == "reads":
        wait_s = (story.strength(1.02, 1.3, 2.0, 5.0) - 1.0) * story.job.step_s
        for place in story.everywhere():
            story.change(Quantity.DATA_WAIT, wait_s * float(story.rng.uniform(0.8, 1.0)), onset_s, at=place)
    else:
        story.job = replace(story.job, checkpoint_every_s=float("inf"))
        lasts_s = story.scenario.duration_s - onset_s + 60.0
        story.pauses.append(
            PlannedPause("checkpoint", onset_s, lasts_s, announced=story.rng.random() < 0.7, disk_bytes_per_s=3e6)
        )


def workload_imbalance(story: Story) -> None:
    """The work, not a node: from the onset on sequences are packed unevenly, or the last stage has more to do."""
    layout, onset_s = story.layout, story.onset()
    variants = ("sequences", "last_stage") if layout.pp > 1 else ("sequences",)
    variant = story.variant(*variants)
    if variant == "sequences":
        story.job = replace(story.job, packed_from_s=onset_s)
    else:
        per_stage = layout.nodes // layout.pp
        nodes = tuple(range(layout.nodes - per_stage, layout.nodes))
        story.change(Quantity.COMPUTE, story.strength(1.02, 1.15, 1.35, 1.7), onset_s, nodes=nodes)
        story.job = replace(story.job, packed_from_s=float("inf"))
    story.label(onset_s, (), "workload_imbalance", REPORTED)


def throughput_drop(story: Story) -> None:
    """All ranks are slower at once and nothing says why: new code, a library, a setting."""
    onset_s, rise_s = story.onset(), story.rise_s()
    late_s = (story.strength(1.02, 1.15, 1.35, 2.0) - 1.0) * story.job.step_s
    story.change(Quantity.STALL, late_s, onset_s, rise_s=rise_s)
    story.label(onset_s, (), "throughput_drop", REPORTED)


# Where one GPU or node is slower than its peers, strengths are factors on what suffers. Stragglers of production fleets
# are about 10% slower (MegaScale, NSDI 2024), throttled GPUs 20% (Greyhound, ATC 2025), the public trace's worker 2.35x
# (Lin et al., OSDI 2025).

HARDWARE_SLOWDOWN, SOFTWARE_THERMAL, HARDWARE_THERMAL, POWER_BRAKE, SOFTWARE_POWER = 0x8, 0x20, 0x40, 0x80, 0x4


def straggler(story: Story) -> None:
    """A GPU (one) or a whole node (node) computes slower; no other reading says why."""
    variant = story.variant("one", "node", odds=(0.7, 0.3))
    at, onset_s = story.culprit(), story.onset()
    slower = story.strength(1.004, 1.08, 1.2, 1.9)
    rise_s = story.rise_s()
    # Slow memory leaves the tensor cores the same work in more time; a second process on the GPU adds work to it.
    tensor = slower ** -float(story.rng.uniform(0.0, 1.0))
    for place in (at,) if variant == "one" else story.places(at.node):
        story.change(Quantity.COMPUTE, slower, onset_s, at=place, rise_s=rise_s)
        story.change(Quantity.TENSOR, tensor, onset_s, at=place, rise_s=rise_s)
    story.label(onset_s, (at.node,), "straggler", None)


def thermal_throttle(story: Story) -> None:
    """Cooling fails: temperature up, throttle bits, clock and power down at a high busy share."""
    variant = story.variant("software", "hardware")
    at, onset_s, rise_s = story.culprit(), story.onset(), story.rise_s()
    slower = story.strength(1.004, 1.08, 1.2, 1.8)
    clock = _clock_down(story, at, slower, onset_s, rise_s)
    # Heat comes first; then the clocks give, power falls, and the die stays at its limit.
    heat_s = float(story.rng.uniform(*story.physics.heat_s))
    story.change(
        Quantity.AMBIENT, float(story.rng.uniform(*story.physics.heat_c)), onset_s - heat_s, at=at, rise_s=heat_s
    )
    story.change(Quantity.AMBIENT, story.physics.lighter_c * (1.0 - clock**2), onset_s, at=at, rise_s=max(rise_s, 40.0))
    bits = SOFTWARE_THERMAL if variant == "software" else HARDWARE_SLOWDOWN | HARDWARE_THERMAL
    story.change(Quantity.THROTTLE_BITS, bits, onset_s, at=at, rise_s=rise_s / 2)
    story.label(onset_s, (at.node,), "thermal_throttle", None)


def power_throttle(story: Story) -> None:
    """Clock and power down at normal temperature: a power brake (brake) or a low power limit (limit), GPU or node."""
    variant = story.variant("brake", "limit", "node_limit")
    at, onset_s, rise_s = story.culprit(), story.onset(), story.rise_s()
    slower = story.strength(1.004, 1.08, 1.2, 1.8)
    places = story.places(at.node) if variant == "node_limit" else (at,)
    for place in places:
        clock = _clock_down(story, place, slower, onset_s, rise_s)
        if variant == "brake":
            story.change(Quantity.THROTTLE_BITS, HARDWARE_SLOWDOWN | POWER_BRAKE, onset_s, at=place, rise_s=rise_s / 2)
        else:
            story.change(Quantity.THROTTLE_BITS, SOFTWARE_POWER, onset_s, at=place, rise_s=rise_s / 2)
            story.change(Quantity.POWER_LIMIT, max(0.25, 0.98 * clock**2), onset_s, at=place, rise_s=rise_s)
    story.label(onset_s, (at.node,), "power_throttle", None)


def pcie_degraded(story: Story) -> None:
    """The GPU's link trains down (width, generation) or errs (replays): NIC traffic is slow, the NIC sends pauses."""
    variant = story.variant("width", "generation", "replays")
    at, onset_s = story.culprit(), story.onset()
    slower = story.strength(1.03, 1.9, 3.5, 9.0)
    story.change(Quantity.NETWORK, slower, onset_s, at=at)
    story.change(Quantity.STALL, 0.04 * (slower - 1.0) * story.job.step_s, onset_s, at=at)
    story.change(Quantity.PCIE, 1.0 / slower, onset_s, at=at)
    if variant == "width":
        story.change(Quantity.PCIE_WIDTH, 0.25 if slower > 3 else 0.5, onset_s, at=at)
    elif variant == "generation":
        story.change(Quantity.PCIE_GENERATION, -3.0 if slower > 3 else -2.0, onset_s, at=at)
    story.change(Quantity.PCIE_REPLAY_RATE, 40.0 if variant == "replays" else 0.3, onset_s, at=at)
    port = at.device * len(story.layout.links) // story.layout.gpus
    # The NIC cannot hand over what it receives: its buffer fills and it asks the switch to pause (Minder, NSDI 2025).
    story.change(Quantity.PFC_TX, 4000.0 * (slower - 1.0), onset_s, at=Place(at.node, port))
    story.label(onset_s, (at.node,), "pcie_degraded", None)


def nic_degraded(story: Story) -> None:
    """One port is slow: errors and retries (errors), a slower rate (rate), or both with pauses (pauses)."""
    variant = story.variant("errors", "rate", "pauses")
    at, onset_s, rise_s = story.culprit(), story.onset(), story.rise_s()
    slower = story.strength(1.03, 2.2, 4.0, 10.0)
    port = Place(at.node, at.device * len(story.layout.links) // story.layout.gpus)
    story.change(Quantity.NETWORK, slower, onset_s, at=at, rise_s=rise_s)
    # The other ports of the node go on at the pace of the ring; this one carries less than them by retries.
    story.change(Quantity.LINK_RATE, 0.9 if variant == "errors" else 0.6, onset_s, at=port, rise_s=rise_s)
    story.change(Quantity.LINK_ERROR_RATE, {"errors": 60.0, "rate": 2.0, "pauses": 8.0}[variant], onset_s, at=port)
    if variant == "pauses":
        story.change(Quantity.PFC_TX, 2500.0 * (slower - 1.0), onset_s, at=port, rise_s=rise_s)
        story.change(Quantity.PFC_RX, 300.0, onset_s, at=port)
    story.label(onset_s, (at.node,), "nic_degraded", None)


def nvlink_degraded(story: Story) -> None:
    """NVLinks of a GPU go down or err; collectives inside the node take longer."""
    variant = story.variant("links", "errors", odds=(0.7, 0.3))
    at, onset_s = story.culprit(), story.onset()
    slower = story.strength(1.03, 2.2, 4.0, 10.0)
    story.change(Quantity.NVLINK_TIME, slower, onset_s, nodes=(at.node,))
    story.change(Quantity.NVLINK, 0.7, onset_s, at=at)
    story.change(Quantity.NVLINK_ERROR_RATE, 25.0 if variant == "errors" else 3.0, onset_s, at=at)
    if variant == "links":
        total = story.layout.models[at.node].nvlinks
        story.change(Quantity.NVLINKS, -float(story.rng.integers(1, max(2, total // 3))), onset_s, at=at)
    if story.rng.random() < 0.6:
        story.say(onset_s + 0.4, "xid", at.node, at.device, code=74, text="NVLink: fatal error detected on link 3")
    story.label(onset_s, (at.node,), "nvlink_degraded", None)


def cpu_contention(story: Story) -> None:
    """Something else takes the node's CPUs (process) or the hypervisor does (steal): kernels are launched late."""
    variant = story.variant("process", "steal", odds=(0.75, 0.25))
    at, onset_s, rise_s = story.culprit(), story.onset(), story.rise_s()
    nodes = (at.node,)
    late = story.strength(1.004, 1.09, 1.25, 1.9) - 1.0
    for place in story.places(at.node):
        share = late * float(story.rng.uniform(0.75, 1.0))
        story.change(Quantity.STALL, share * story.job.step_s, onset_s, at=place, rise_s=rise_s)
    if variant == "process":
        story.change(Quantity.CPU, float(story.rng.uniform(0.6, 0.85)), onset_s, nodes=nodes, rise_s=rise_s)
        story.change(Quantity.CPU_PRESSURE, float(story.rng.uniform(0.3, 0.7)), onset_s, nodes=nodes, rise_s=rise_s)
    else:
        story.change(Quantity.STEAL, float(story.rng.uniform(0.15, 0.4)), onset_s, nodes=nodes, rise_s=rise_s)
        story.change(Quantity.CPU_PRESSURE, float(story.rng.uniform(0.1, 0.3)), onset_s, nodes=nodes, rise_s=rise_s)
    story.label(onset_s, nodes, "cpu_contention", None)


def _clock_down(story: Story, at: Place, slower: float, onset_s: float, rise_s: float) -> float:
    """Lower the clock so that compute takes ``slower`` times as long; return the clock's factor."""
    bound = story.physics.compute_bound
    clock = bound / (slower - 1.0 + bound)
    story.change(Quantity.CLOCK, clock, onset_s, at=at, rise_s=rise_s)
    story.change(Quantity.COMPUTE, slower, onset_s, at=at, rise_s=rise_s)
    return clock


# Driver and firmware hangs (NVIDIA XID catalogue): PMU halt, context switch timeout, GSP RPC timeout, GSP error.
HANG_XIDS = {62: "PMU halt error", 109: "CTX SWITCH TIMEOUT", 119: "Timeout waiting for RPC from GSP", 120: "GSP error"}

RETRIED_BYTES_PER_S = 1e6  # a port sends again what is not acknowledged


def gpu_hang(story: Story) -> None:
    """The GPU stops working: with a driver error (xid), or NVML does not answer any more (silent)."""
    variant = story.variant("xid", "silent")
    at, onset_s = story.culprit(), story.onset()
    story.stop(onset_s, StopKind.LATE, at)
    story.label(onset_s, (at.node,), "gpu_hang", "exclude")
    if variant == "xid":
        code = int(story.rng.choice(list(HANG_XIDS)))
        story.say(
            onset_s + float(story.rng.uniform(0.1, 5.0)), "xid", at.node, at.device, code=code, text=HANG_XIDS[code]
        )
        story.change(Quantity.UTILIZATION, 0.0, onset_s, at=at)
        if code in (119, 120):
            # Without its firmware the device answers no query.
            story.blanks.append(Blank(at.node, onset_s + 5.0, device=at.device))
    else:
        story.blanks.append(Blank(at.node, onset_s + 1.0, device=at.device))
        story.change(Quantity.BLOCKED, 2.0, onset_s + 2.0, nodes=(at.node,))
    story.change(Quantity.CPUS, 0.0, onset_s, at=at)
    story.change(Quantity.HELD, 1.0, onset_s, at=at)  # in the driver
    abort_peers(story, (at.node,), onset_s)


def hang(story: Story) -> None:
    """One rank does not reach the collective (late), or all did and none leaves it (symmetric: nobody to accuse)."""
    variant = story.variant("late", "symmetric", odds=(0.65, 0.35))
    at, onset_s = story.culprit(), story.onset()
    if variant == "late":
        story.stop(onset_s, StopKind.LATE, at)
        story.label(onset_s, (at.node,), "hang", "exclude")
        # The process sits on the host side, no kernel runs on its GPU; the peers' kernels spin.
        story.change(Quantity.UTILIZATION, 0.0, onset_s, at=at)
        if story.rng.random() < 0.5:
            story.change(Quantity.CPU, -0.012, onset_s, nodes=(at.node,))
        story.change(Quantity.CPUS, 0.02, onset_s, at=at)
    else:
        story.stop(onset_s, StopKind.SYMMETRIC)
        story.label(onset_s, (), "hang", "restart")
    abort_peers(story, (), onset_s)


def network_hang(story: Story) -> None:
    """All issued the collective, the culprit's transfers do not complete: its link is down (link) or errs (errors).

    A dead card (card) sends nothing and counts a burst of errors, while the others still try.
    """
    variant = story.variant("link", "errors", "card")
    at, onset_s = story.culprit(), story.onset()
    story.stop(onset_s, StopKind.TRANSFER, *story.places(at.node))
    story.label(onset_s, (at.node,), "network_hang", "exclude")
    width = len(story.layout.links)
    port = Place(at.node, int(story.rng.integers(width)))
    if variant == "link":
        story.change(Quantity.LINK_UP, 0.0, onset_s, at=port)
        story.change(Quantity.LINK_RATE, 0.0, onset_s, at=port)
        story.change(Quantity.LINK_DOWNED, 1.0, onset_s, at=port)
        story.say(onset_s + 0.2, "link_down", at.node, link=story.layout.links[port.device])
    elif variant == "card":
        story.change(Quantity.LINK_SENT, RETRIED_BYTES_PER_S, onset_s)
        story.change(Quantity.LINK_SENT, -1e9, onset_s, nodes=(at.node,))
        story.change(Quantity.LINK_ERROR_RATE, 30.0, onset_s, at=port, end_s=onset_s + 2.0)
    else:
        story.change(Quantity.LINK_ERROR_RATE, 30.0, onset_s, at=port)
        story.change(Quantity.PFC_TX, 500.0, onset_s, at=port)
    abort_peers(story, (), onset_s)
