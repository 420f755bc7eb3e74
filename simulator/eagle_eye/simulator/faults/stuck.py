"""The job stands still and no process has died."""

from __future__ import annotations

from eagle_eye.simulator import endings
from eagle_eye.simulator.story import Blank, Place, StopKind, Story
from eagle_eye.simulator.tracks import Quantity

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
    endings.abort_peers(story, (at.node,), onset_s)


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
    endings.abort_peers(story, (), onset_s)


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
    endings.abort_peers(story, (), onset_s)
