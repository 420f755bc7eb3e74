"""Derives events from the timeline: the hook's reports of phases and checkpoints at their actual times."""

from __future__ import annotations

from eagle_eye.simulator.story import Place, Story
from eagle_eye.simulator.timing import Timeline

PHASE_NAMES = {"checkpoint": "checkpoint", "evaluation": "eval"}


def announce(story: Story, timeline: Timeline) -> None:
    """Add the events of attempts and announced pauses to the story, at the times at which they took place."""
    for number, attempt in enumerate(timeline.attempts):
        began_s = attempt.start_s
        first = next((s for s, a in zip(timeline.start_s, timeline.attempt, strict=True) if a == number), began_s)
        if began_s > 0:
            _phase(story, began_s, "start", number)
        _phase(story, max(0.5, float(first) + (0.5 if began_s > 0 else 0.0)), "train", number)
    for begin_s, end_s, pause in timeline.pauses:
        if begin_s < 0 or not pause.announced:
            continue
        name = PHASE_NAMES.get(pause.kind)
        if name is None:
            continue
        number = sum(a.start_s <= begin_s for a in timeline.attempts) - 1
        _phase(story, begin_s, name, number)
        if pause.kind == "checkpoint":
            step = int(timeline.step[timeline.start_s < begin_s][-1]) if (timeline.start_s < begin_s).any() else 0
            for node in range(story.layout.nodes):
                # The first rank writes what is not sharded and is the last to finish.
                share = 1.0 if node == 0 else float(story.rng.uniform(0.5, 0.9))
                story.say(begin_s + 0.05, "checkpoint_begin", node, 0, step=step)
                story.say(begin_s + share * (end_s - begin_s), "checkpoint_end", node, 0, step=step)
        _phase(story, end_s, "train", number)


def _phase(story: Story, time_s: float, name: str, attempt: int) -> None:
    if time_s > story.scenario.duration_s:
        return
    dead: dict[Place, float] = {}
    starts = [a.start_s for a in story.attempts] or [0.0]
    since_s = starts[attempt] if attempt < len(starts) else 0.0
    for death in story.deaths:
        if since_s <= death.time_s <= time_s:
            dead.update(dict.fromkeys(death.places, death.time_s))
    silent = {o.node for o in story.outages if o.device is None and o.start_s <= time_s < o.end_s}
    for node in range(story.layout.nodes):
        if node in silent:
            continue
        for place in story.places(node):
            if place not in dead:
                rank = story.rank(place)
                story.say(time_s, "phase", node, place.device, name=name, rank=rank, attempt=attempt)
