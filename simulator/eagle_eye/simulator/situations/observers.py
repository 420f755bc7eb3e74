"""Situations in which the observers or their clocks are odd, and the job is well."""

from __future__ import annotations

from eagle_eye.simulator.story import MissingRows, Story
from eagle_eye.simulator.tracks import Quantity

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
