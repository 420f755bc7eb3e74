"""Faults without a spare, nodes that come back, and jobs that have to end as if nothing had been. All real."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.recovery.outcome import steps_lost
from benchmarks.replanning.faults import Fault, Storm, draw
from benchmarks.replanning.planned import LOOK_S, NODES, STARTED_WITHIN_S, STEP_S, PlannedStack
from eagle_eye.demo.stack import GLOBAL_BATCH, StageFailed, open_site

UNDISTURBED = Path(__file__).with_name("plain_train.py")
STEPS_RATIO = 0.5  # a job's steps, of those that it would make undisturbed while its faults come
STUCK_S = 180.0  # without a step: a deadlock
LOSS_STEPS = 25  # losses are compared by the means of so many steps
NOISE_TIMES, NOISE_MIN = 3.0, 1e-3  # of the difference between two undisturbed layouts; at least this is noise
COURSE_WITHIN_S = 1_800.0

Say = Callable[[str], None]


def measure(
    settings: Mapping[str, Any],
    kept: Mapping[str, Any],
    folder: Path,
    until_s: float,
    say: Say,
    heard: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    """Return the part's figures, and give them to ``heard`` after each job; none is begun after ``until_s``.

    What undisturbed layouts make of the same steps is added once all jobs have ended.
    ``settings``: how many ``faults`` in all, and how many of ``each`` of the jobs that run in a row, ``every_s``,
    ``repair_s`` and ``seed``. Faults that a job's end left out come to another one; jobs that ``kept`` has of the same
    settings are not run again.
    """
    steps = math.ceil(STEPS_RATIO * settings["each"] * settings["every_s"] / STEP_S)
    found = {**kept} if kept.get("settings") == settings else {"settings": dict(settings), "steps": steps, "jobs": []}
    while (left := settings["faults"] - _struck(found)) > 0 and time.monotonic() < until_s:
        number = len(found["jobs"])
        faults = draw(min(left, settings["each"]), settings["every_s"], settings["seed"] + number)
        (place := folder / f"job-{number + 1}").mkdir()
        named = f"job {number + 1}, {left} faults left"
        job = _job(place, faults, steps, settings["repair_s"], named, say)
        found["jobs"].append(job)
        heard(figures(found))
        if job["exit_code"] != 0:
            raise StageFailed(f"{named} did not end as it should; logs in {place / 'logs'}")
    if _struck(found) == settings["faults"] and "undisturbed" not in found:
        found["undisturbed"] = [undisturbed(folder, steps, ranks, say) for ranks in (1, 2)]
    return figures(found)


def _struck(found: Mapping[str, Any]) -> int:
    return sum(job["faults"] for job in found["jobs"])


def _job(folder: Path, faults: Sequence[Fault], steps: int, repair_s: float, name: str, say: Say) -> dict[str, Any]:
    """Return what was seen of one job until it had ended, or made no step any more."""
    with (
        contextlib.closing(open_site(NODES)) as site,
        contextlib.closing(PlannedStack(site, folder, steps, repair_s)) as stack,
    ):
        say(f"{name}: starting")
        stack.start()
        stack.wait("all nodes train", lambda: stack.full() or None, STARTED_WITHIN_S)
        storm = Storm(stack, faults, repair_s)
        storm.begin()
        began_s = time.time()
        first, calm_s = stack.steps()[-1]["step"], 0.0
        stepped_s, is_stuck = began_s, False
        while (code := stack.ended("launcher")) is None and not is_stuck:
            storm.tick()
            newest = stack.steps()[-1]
            stepped_s = max(stepped_s, newest["time_s"])
            is_stuck = time.time() - stepped_s > STUCK_S
            calm_s = calm_s or (time.time() if not storm.left else 0.0)
            come = f"{len(storm.harms)} of {len(faults)} faults, step {newest['step']} of {steps}"
            say(f"{name}: {come} on {newest['ranks']} nodes")
            time.sleep(LOOK_S)
        log, reported, forced = stack.steps(), stack.reported(), stack.yard.forced
    calm_s = calm_s or time.time()
    attempts = sorted({step["attempt"] for step in log})
    moments = [began_s, *(step["time_s"] for step in log if step["time_s"] > began_s)]
    stormy = max(int(step["step"]) for step in log if step["time_s"] <= calm_s) - first
    return {
        "faults": len(storm.harms), "by_kind": storm.by_kind, "exit_code": code, "stuck": is_stuck,
        "steps_done": len({step["step"] for step in log}),
        "steps_with_other_samples": sum(step["samples"] != GLOBAL_BATCH for step in log),
        "longest_without_a_step_s": round(max((b - a for a, b in pairwise(moments)), default=0.0), 1),
        "attempts": len(attempts), "steps_lost": steps_lost(log, attempts[0], attempts[-1]),
        "storm_s": round(calm_s - began_s, 1), "storm_steps": stormy,
        "steps_by_nodes": {str(nodes): count for nodes, count in sorted(Counter(s["ranks"] for s in log).items())},
        "waited_for_a_node": sum(line["event"] == "waiting" for line in reported),
        "returned_by_hand": forced,
        "losses": means(course(log)),
        "nodes": site.description,
    }  # fmt: skip


def course(log: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the losses by step; of a step that was made again the last one counts, which training goes on from."""
    losses = {int(step["step"]): float(step["loss"]) for step in log}
    return [losses[step] for step in sorted(losses)]


def means(losses: Sequence[float]) -> list[float]:
    """Return the mean losses of each LOSS_STEPS steps in a row, without what is left of them."""
    whole = len(losses) // LOSS_STEPS
    return [round(statistics.mean(losses[LOSS_STEPS * i : LOSS_STEPS * (i + 1)]), 6) for i in range(whole)]


def undisturbed(folder: Path, steps: int, ranks: int, say: Say) -> list[float]:
    """Return the mean losses of the same steps, on so many pipelines of one stage. Raises StageFailed."""
    say(f"the same {steps} steps undisturbed, as {ranks} {'pipeline' if ranks == 1 else 'pipelines'}")
    log = folder / f"undisturbed-{ranks}.jsonl"
    words = ("--steps", str(steps), "--global-batch", str(GLOBAL_BATCH), "--step-log", str(log))
    ran = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
         str(UNDISTURBED), *words],
        capture_output=True, text=True, timeout=COURSE_WITHIN_S, check=False,
    )  # fmt: skip
    if ran.returncode != 0:
        raise StageFailed(f"the undisturbed job: {ran.stderr[-500:]}")
    return means(course([json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]))


def difference_ratio(losses: Sequence[float], others: Sequence[float]) -> float:
    """Return how far two courses are apart, as the root of the mean square over their whole length."""
    return math.sqrt(statistics.mean((one / other - 1) ** 2 for one, other in zip(losses, others, strict=True)))


def figures(found: dict[str, Any]) -> dict[str, Any]:
    """Return the report: the jobs that were run, and what they come to."""
    jobs = found["jobs"]
    by_kind: Counter[str] = sum((Counter(job["by_kind"]) for job in jobs), Counter())
    stormy_s = sum(job["storm_s"] for job in jobs)
    one, other = found.get("undisturbed", ([], []))
    whole = [job["losses"] for job in jobs if one and len(job["losses"]) == len(one)]
    return {
        **found,
        "faults": _struck(found), "by_kind": dict(by_kind),
        "deadlocks": sum(job["stuck"] for job in jobs),
        "longest_without_a_step_s": max((job["longest_without_a_step_s"] for job in jobs), default=None),
        "attempts": sum(job["attempts"] for job in jobs), "steps_lost": sum(job["steps_lost"] for job in jobs),
        "effective_training_ratio": round(sum(job["storm_steps"] for job in jobs) * STEP_S / stormy_s, 3)
        if stormy_s else None,
        "loss": {
            "difference_ratio": max((difference_ratio(losses, one) for losses in whole), default=None),
            "noise_ratio": difference_ratio(other, one) if one else None,
        },
    }  # fmt: skip


def misses(found: Mapping[str, Any]) -> list[str]:
    """Return what was asked for and is not so."""
    settings, missed = found["settings"], []
    if found["faults"] < settings["faults"]:
        missed.append(f"storm: {found['faults']} of {settings['faults']} faults")
    for number, job in enumerate(found["jobs"], start=1):
        if job["exit_code"] != 0 or job["steps_done"] < found["steps"]:
            code = "it made no step any more" if job["stuck"] else f"the launcher's exit code {job['exit_code']}"
            missed.append(f"storm: job {number}: {job['steps_done']} of {found['steps']} steps, {code}")
        if job["steps_with_other_samples"]:
            missed.append(f"storm: job {number}: {job['steps_with_other_samples']} steps with another global batch")
    off, noise = found["loss"]["difference_ratio"], found["loss"]["noise_ratio"]
    if off is not None and off > max(NOISE_TIMES * noise, NOISE_MIN):
        missed.append(f"storm: the loss is {off:.1e} off, noise is {noise:.1e}")
    return missed
