"""A training process dies."""

from __future__ import annotations

from eagle_eye.simulator import endings
from eagle_eye.simulator.story import Death, EndlessStep, Place, SimulatedAttempt, StopKind, Story
from eagle_eye.simulator.tracks import Quantity

CRASHES = (
    (endings.SEGMENTATION_FAULT, None),
    (endings.ABORT, "terminate called after throwing an instance of 'c10::Error'"),
    (1, "RuntimeError: DataLoader worker (pid 31337) exited unexpectedly with exit code 1."),
    (1, "KeyError: 'tokens'"),
    (1, endings.CUDA_ERROR),
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
    endings.crash(story, at, onset_s + float(story.rng.uniform(0.3, 3.0)), endings.ABORT, endings.ECC_ERROR)
    story.label(onset_s, (at.node,), "gpu_memory_error", "restart" if variant == "contained" else "exclude")


def process_crash(story: Story) -> None:
    """A process exits by an exception or a signal for reasons of its own."""
    at, onset_s = story.culprit(), story.onset()
    story.stop(onset_s, StopKind.LATE, at)
    exit_code, text = CRASHES[int(story.rng.integers(len(CRASHES)))]
    endings.crash(story, at, onset_s, exit_code, text)
    story.label(onset_s, (at.node,), "process_crash", "restart")


def out_of_memory(story: Story) -> None:
    """The kernel kills the process for the host's memory (host), or an allocation on the GPU fails (device)."""
    variant = story.variant("host", "device")
    at, onset_s = story.culprit(), story.onset()
    story.stop(onset_s, StopKind.LATE, at)
    story.label(onset_s, (at.node,), "out_of_memory", "restart")
    if variant == "device":
        story.change(Quantity.MEMORY, 0.2, onset_s - 20.0, at=at, end_s=onset_s, rise_s=15.0)
        endings.crash(story, at, onset_s, 1, endings.OUT_OF_MEMORY.format(device=at.device))
        return
    filling_s = float(story.rng.uniform(60.0, 150.0))
    nodes = (at.node,)
    story.change(Quantity.HOST_MEMORY, 0.75, onset_s - filling_s, nodes=nodes, end_s=onset_s, rise_s=filling_s)
    story.change(Quantity.MEMORY_PRESSURE, 0.5, onset_s - 15.0, nodes=nodes, end_s=onset_s, rise_s=15.0)
    story.say(onset_s - 0.1, "oom_kill", at.node, process="python3")
    endings.crash(story, at, onset_s, endings.KILLED, None)


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
        endings.end(story, (at,), failure_s, exit_code)
        endings.end(story, tuple(p for p in story.places(node) if p != at), failure_s + 1.0, endings.TERMINATED)
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
                exit_code=endings.TERMINATED,
                rank=story.rank(place),
                goodbye=False,
            )
        began_s = restart_s
        first_step = max(story.job.first_step, first_step + int(0.5 * failure_s / story.job.step_s))
    story.attempts.append(SimulatedAttempt(began_s, first_step, (4.0, 1.5)))
    for index, label in enumerate(story.labels):
        until_s = failures[1] if index == 0 else length_s
        story.labels[index] = type(label)(label.start_s, label.nodes, label.fault, label.expect, until_s)
