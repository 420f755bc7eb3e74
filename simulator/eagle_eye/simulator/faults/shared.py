"""What many nodes share fails: switch, fabric, storage, the work's balance."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from eagle_eye.simulator import endings
from eagle_eye.simulator.story import MissingRows, Place, PlannedPause, StopKind, Story
from eagle_eye.simulator.tracks import Quantity

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
    endings.abort_peers(story, nodes if variant == "dark" else (), onset_s)


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
