"""The simulator as the suite uses it: a case in, a trace folder for each profile out."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.detection.plan import Case
from eagle_eye.simulator.names import SITUATIONS
from eagle_eye.simulator.scenario import Scenario
from eagle_eye.simulator.simulate import Recording, simulate
from eagle_eye.simulator.sites import PROFILES, profile, visible_faults
from eagle_eye.simulator.story import Story
from eagle_eye.simulator.tracks import Quantity, Track
from eagle_eye.simulator.writer import interval_s, write

MEMORY_FOLDER = Path("/dev/shm")
MEMORY_FREE_MIN_BYTES = 4 << 30


def profiles() -> list[str]:
    """Return the names of what a site's instruments may leave out."""
    return [profile.name for profile in PROFILES]


def situations() -> list[str]:
    """Return the names of what looks guilty and is not."""
    return sorted(SITUATIONS)


def is_visible(case: Case, profile: str) -> bool:
    """Whether the profile's instruments show the case's fault at all; quiet traces are always judged."""
    return case.kind != "fault" or case.fault in visible_faults(profile)


def read_every_s(case: Case, name: str) -> float:
    """Return at which interval the profile's instruments are read."""
    return interval_s(scenario(case), profile(name))


def scenario(case: Case) -> Scenario:
    """Return a case as the simulator takes it."""
    return Scenario(
        fault=case.fault,
        nodes=case.nodes,
        gpus=case.gpus,
        seed=case.seed,
        minutes=case.minutes,
        step_s=case.step_s,
        interval_s=case.interval_s,
        strength=case.strength,
        creeping=case.creeping,
        background=case.background,
        physics=case.physics,
    )


def slowed(story: Story) -> list[Track]:
    """Return what of a story's fault makes GPUs compute longer."""
    return [cause for cause in story.tracks[story.background_tracks :] if cause.quantity is Quantity.COMPUTE]


def compute_ratio(story: Story) -> float:
    """Return how many times as long the slowest GPU computes for a story's fault."""
    return max((cause.value for cause in slowed(story)), default=1.0)


def work_is_equal(story: Story) -> bool:
    """Whether ranks have the same work, or the code says how much each has."""
    packed = story.job.packed_from_s < math.inf and not story.job.says_work_units
    return not (story.physics.uneven_experts or story.job.expert_spread or packed)


def record(case: Case) -> Recording:
    """Return the simulated run of a case."""
    return simulate(scenario(case))


@contextmanager
def written(recording: Recording, profile: str) -> Iterator[Path]:
    """Write the trace into memory where there is room, else to disk; it is deleted at the end."""
    roomy = MEMORY_FOLDER.is_dir() and shutil.disk_usage(MEMORY_FOLDER).free >= MEMORY_FREE_MIN_BYTES
    folder = Path(tempfile.mkdtemp(prefix="eagle-eye-trace-", dir=MEMORY_FOLDER if roomy else None))
    try:
        write(recording, folder / "trace", profile)
        yield folder / "trace"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
