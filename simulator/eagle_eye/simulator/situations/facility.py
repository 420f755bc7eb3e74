"""Situations of room and fabric: heat, power, cables, other people's traffic."""

from __future__ import annotations

from eagle_eye.simulator.faults.shared import congest
from eagle_eye.simulator.story import Place, Story
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
