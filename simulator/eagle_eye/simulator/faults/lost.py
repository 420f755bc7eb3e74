"""A node or one of its GPUs is gone."""

from __future__ import annotations

from eagle_eye.simulator import endings
from eagle_eye.simulator.story import Death, MissingRows, Place, StopKind, Story
from eagle_eye.simulator.tracks import Quantity

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
        endings.crash(story, at, onset_s + float(story.rng.uniform(1.0, 8.0)), endings.ABORT, endings.CUDA_ERROR)
    else:
        endings.abort_peers(story, (at.node,), onset_s)


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
    endings.abort_peers(story, (at.node,), onset_s)


def _vanish(story: Story, places: tuple[Place, ...], time_s: float) -> None:
    story.deaths.append(Death(time_s, places))
