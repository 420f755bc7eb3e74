"""One GPU or node is slower than its peers, and everybody waits for it.

Strengths are factors on what suffers. Stragglers of production fleets are about 10% slower (MegaScale, NSDI 2024),
throttled GPUs 20% (Greyhound, ATC 2025), the public trace's worker 2.35x (Lin et al., OSDI 2025).
"""

from __future__ import annotations

from eagle_eye.simulator.story import Place, Story
from eagle_eye.simulator.tracks import Quantity

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
