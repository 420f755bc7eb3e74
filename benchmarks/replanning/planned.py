"""Eagle Eye with a plan and without a spare: server, agents, launcher, and a job of pipelines on all nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.recovery import harm as harming
from benchmarks.recovery.harm import Harm
from benchmarks.recovery.site import FireStack, can_simulate_gpus
from benchmarks.recovery.yard import Yard
from eagle_eye.demo.stack import DemoSite

NODES = ("node1", "node2", "node3", "node4")
PACED = Path(__file__).with_name("paced_train.py")
STEP_S = 0.3  # of all nodes, at least: what the demonstration's steps take
STEPS_BEFORE = 5
SETTLED_AFTER_S = 5  # a start takes seconds here, and what has gone so long may grow
STARTED_WITHIN_S = 180.0
LOOK_S = 0.1


def trains(log: Sequence[Mapping[str, Any]], nodes: int, steps: int = STEPS_BEFORE) -> bool:
    """Whether the newest attempt in a step log has made so many steps, and on so many nodes."""
    newest = log[-steps:]
    return len(newest) == steps and {(step["attempt"], step["ranks"]) for step in newest} == {
        (newest[-1]["attempt"], nodes)
    }


class PlannedStack(FireStack):
    """The storm's processes. An excluded node comes back once it is repaired, or ``repair_s`` after it was seen out."""

    def __init__(self, site: DemoSite, folder: Path, steps: int, repair_s: float) -> None:
        arguments = {"steps": str(steps), "plan": str(folder / "plan.json"), "step-seconds": str(STEP_S)}
        flags = ("--settled-after", str(SETTLED_AFTER_S))
        gpus = not can_simulate_gpus()
        super().__init__(site, folder, gpus=gpus, arguments=arguments, flags=flags, planned=True)
        self.script = PACED
        self.yard = Yard(self, repair_s)

    def members(self) -> Sequence[str]:
        """Return the nodes of the newest attempt."""
        return next((line["nodes"] for line in reversed(self.reported()) if line["event"] == "running"), ())

    def harm(self, kind: str, node: str) -> Harm:
        """The fault is there. Raises StageFailed where the node runs nothing that could be harmed."""
        return harming.harm(self, kind, node)

    def repair(self, node: str) -> None:
        """Nothing of what was done to the node is left."""
        harming.repair(self, node)
        self.yard.has_repaired(node)

    def tick(self) -> None:
        """Excluded nodes whose time has come are back."""
        self.yard.tick()

    def full(self) -> bool:
        """Whether all nodes train."""
        return trains(self.steps(), len(self.site.nodes))
