"""The same storm over the same job, kept running by Eagle Eye, by plain torchrun and by torchft. All of it is real.

What counts is training that stays: samples of steps that are not made again.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from benchmarks.replanning.faults import Arm, Storm, draw
from benchmarks.replanning.peers import STEPS_FOR_EVER, Peer, Torchft, Torchrun
from benchmarks.replanning.planned import LOOK_S, NODES, STARTED_WITHIN_S, STEP_S, PlannedStack
from benchmarks.replanning.torchft_with_eagle_eye import GuardedTorchft
from eagle_eye.demo.stack import GLOBAL_BATCH, DemoSite, StageFailed, open_site

OURS, GUARDED = "Eagle Eye", "Eagle Eye with torchft"
PEERS: Mapping[str, type[Peer]] = {"torchrun": Torchrun, "torchft": Torchft}
ARMS = (OURS, GUARDED, *PEERS)

Say = Callable[[str], None]


class Job(Arm, Protocol):
    """A job that is measured."""

    def start(self) -> None:
        """It is starting."""
        ...

    def wait_full(self) -> None:
        """All nodes train. Raises StageFailed where they do not in time."""
        ...

    def steps(self) -> list[dict[str, Any]]:
        """Return its step log, with time_s, step, ranks and samples of each, oldest first."""
        ...

    def close(self) -> None:
        """Nothing of it runs any more."""
        ...


class Planned(PlannedStack):
    """Eagle Eye's arm, on nodes like the others': each can hold all layers, so that one node goes on alone."""

    def _gpu_memory_bytes(self, whole: int) -> int:
        return whole

    def wait_full(self) -> None:
        """All nodes train. Raises StageFailed where they do not in time."""
        self.wait("all nodes train", lambda: self.full() or None, STARTED_WITHIN_S)


def measure(
    settings: Mapping[str, Any],
    arms: Sequence[str],
    kept: Mapping[str, Any],
    folder: Path,
    until_s: float,
    say: Say,
    heard: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Return the part's figures, and give them to ``heard`` after each arm; none is begun after ``until_s``.

    ``settings``: ``faults`` in all, ``every_s``, ``repair_s``, ``seed``, ``calm_s`` before them and ``collective_s``,
    after which a collective of the others has failed. Arms that ``kept`` has of the same settings are not run again.
    """
    found: dict[str, Any] = {"settings": dict(settings), "arms": {}}
    if kept.get("settings") == settings:
        found["arms"] = dict(kept["arms"])
    for arm in arms:
        if arm in found["arms"] or time.monotonic() >= until_s:
            continue
        (place := folder / arm.replace(" ", "-")).mkdir()
        found["arms"][arm] = _run(arm, settings, place, say)
        heard(figures(found))
    return figures(found)


def _job(arm: str, site: DemoSite, settings: Mapping[str, Any], folder: Path) -> Job:
    if arm == OURS:
        return Planned(site, folder, STEPS_FOR_EVER, settings["repair_s"])
    if arm == GUARDED:
        return GuardedTorchft(site, folder, settings["collective_s"], settings["repair_s"])
    return PEERS[arm](site, folder, settings["collective_s"])


def _run(arm: str, settings: Mapping[str, Any], folder: Path, say: Say) -> dict[str, Any]:
    """Return what the arm made of the storm, and of the calm before it."""
    load = round(os.getloadavg()[0], 2)
    with (
        contextlib.closing(open_site(NODES)) as site,
        contextlib.closing(_job(arm, site, settings, folder)) as job,
    ):
        say(f"{arm}: starting")
        job.start()
        job.wait_full()
        calm_s = time.time()
        while time.time() < calm_s + settings["calm_s"]:
            job.tick()
            time.sleep(LOOK_S)
        storm = Storm(job, draw(settings["faults"], settings["every_s"], settings["seed"]), settings["repair_s"])
        storm.begin()
        storm_s = time.time()
        # To the end of the last repair: a fault counts with all that it costs.
        end_s = storm_s + settings["faults"] * settings["every_s"] + settings["repair_s"]
        while time.time() < end_s:
            storm.tick()
            if isinstance(job, Planned) and (code := job.ended("launcher")) is not None:
                raise StageFailed(f"the launcher has ended with exit code {code}; logs in {folder / 'logs'}")
            say(f"{arm}: {len(storm.harms)} of {settings['faults']} faults, {end_s - time.time():.0f} s left")
            time.sleep(LOOK_S)
        log = job.steps()
        description = site.description
    return {
        "nodes": description,
        "load_average_before": load,
        "calm": span(log, calm_s, storm_s),
        "storm": span(log, storm_s, end_s),
        "faults": len(storm.harms), "by_kind": storm.by_kind,
        "struck": [[round(harm.at_s - storm_s, 1), harm.kind, harm.node] for harm in storm.harms],
    }  # fmt: skip


def span(log: Sequence[Mapping[str, Any]], begin_s: float, end_s: float) -> dict[str, Any]:
    """Return what was trained in a stretch of time (Unix seconds), less what it had lost again by its end.

    A step of which nobody lived to write a line has all its samples.
    """
    moments = [step["time_s"] for step in log]
    first, last = (bisect.bisect_right(moments, at_s) for at_s in (begin_s, end_s))
    inside = log[first:last]
    before, after = (log[place - 1]["step"] if place else 0 for place in (first, last))
    held = {step["step"]: step["samples"] for step in log[:last]}
    samples = sum(held.get(step, GLOBAL_BATCH) for step in range(before + 1, after + 1))
    edges = [begin_s, *moments[first:last], end_s]
    return {
        "seconds": round(end_s - begin_s, 1),
        "steps": after - before,
        "steps_again": len(inside) - len({step["step"] for step in inside}),
        "samples": samples,
        "samples_per_s": round(samples / (end_s - begin_s), 2),
        "longest_without_a_step_s": round(max(late - early for early, late in pairwise(edges)), 1),
        "steps_by_nodes": {str(nodes): count for nodes, count in sorted(Counter(s["ranks"] for s in inside).items())},
    }


def figures(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report: what the storm left of what each arm makes undisturbed, and of what all are paced to make."""
    paced = GLOBAL_BATCH / STEP_S
    arms = {
        arm: {
            **one,
            "of_undisturbed_ratio": round(one["storm"]["samples_per_s"] / one["calm"]["samples_per_s"], 3),
            "of_paced_ratio": round(one["storm"]["samples_per_s"] / paced, 3),
        }
        for arm, one in found["arms"].items()
    }
    return {**found, "paced_samples_per_s": round(paced, 2), "arms": arms}


def misses(found: Mapping[str, Any]) -> list[str]:
    """Return what was asked for and is not so: each of Eagle Eye's arms trains more in the storm than the others."""
    arms, asked = found["arms"], found["settings"]["faults"]
    missed = [f"compare: {arm} was not measured" for arm in ARMS if arm not in arms]
    missed += [
        f"compare: {arm}: {one['faults']} of {asked} faults" for arm, one in arms.items() if one["faults"] < asked
    ]
    rates = {arm: one["storm"]["samples_per_s"] for arm, one in arms.items()}
    missed += [
        f"compare: {rates[arm]:g} samples/s with {arm}, {rates[own]:g} with {own}; asked: more"
        for own in (OURS, GUARDED)
        for arm in PEERS
        if own in rates and rates.get(arm, 0.0) >= rates[own]
    ]
    return missed
