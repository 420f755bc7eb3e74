"""torchft's replica groups with Eagle Eye: its server, an agent on each node, and `eagle-eye orchestrate torchft`.

Nobody tells them of faults. A group is forked from a process on its node that has imported what it needs, and ended by
it while the node is in the exclude file (``standby_group.py``). Excluded nodes are readmitted once they are repaired.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import psutil

from benchmarks.recovery import harm as harming
from benchmarks.recovery.site import config
from benchmarks.replanning.peers import Torchft
from benchmarks.torchft.sick import EagleEye
from eagle_eye.demo.stack import DemoNode, DemoSite, free_port, processes_of

LOOK_EVERY_S = 1.0
ROOM = f"ROOM={'.' * 8192}"  # for what /proc is to show of a forked group


class GuardedTorchft(Torchft):
    """The groups of torchft, and Eagle Eye, which sees that one has stopped or is cut off."""

    def __init__(self, site: DemoSite, folder: Path, collective_s: float, repair_s: float) -> None:
        """``repair_s``: an excluded node that nobody repairs comes back so long after it was seen to be excluded."""
        super().__init__(site, folder, collective_s)
        self._eye = EagleEye(site, folder / "eagle-eye", config=config())
        self.job = self._eye.job
        self._repair_s, self._looked_s = repair_s, 0.0
        self._due_s: dict[str, float] = {}  # by excluded node: when it comes back (Unix seconds)

    def repair(self, node: str) -> None:
        """Nothing of what was done to the node is left; a group that was cut off starts anew."""
        self.site.mend(node)
        harming.go_on(self, node)
        if node in self._due_s:
            self._due_s[node] = time.time()
        if node in self._cut:
            for process in processes_of(self.job, node):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self._cut.remove(node)

    def tick(self) -> None:
        """What keeps the groups runs, and excluded nodes whose time has come are back."""
        super().tick()
        if time.time() - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now_s = time.time()
        with contextlib.suppress(httpx.HTTPError):
            out = {node["node"] for node in self._eye.items("nodes", state="excluded")}
            self._due_s = {node: self._due_s.get(node, now_s + self._repair_s) for node in out}
            for node in [node for node, due_s in self._due_s.items() if due_s <= now_s]:
                self.repair(node)
                self._eye.api.post(f"/nodes/{node}/readmit", params={"reason": "repaired"})

    def close(self) -> None:
        """Nothing runs any more."""
        super().close()
        self._eye.close()

    def _start_head(self) -> subprocess.Popen[bytes]:
        process = super()._start_head()
        groups = self._folder / "groups.json"
        nodes = self.members()
        groups.write_text(json.dumps({f"group_{nodes.index(node)}": [node] for node in nodes}), encoding="utf-8")
        self._eye.run(self._url, free_port("127.0.0.1"), ("--groups", str(groups)))
        return process

    def _command(self, node: DemoNode, script: Sequence[str]) -> list[str]:
        words = super()._command(node, script)
        group = words[words.index(str(self.script)) :]
        rank = self.members().index(node.name)
        hook = self._eye.hook(rank, len(self.site.nodes))(node.name)
        return [
            *("env", ROOM, sys.executable, "-m", "benchmarks.replanning.standby_group"),
            *("--excluded", str(self._eye.exclude_file), "--node", node.name),
            *(word for name, value in hook.items() for word in ("--env", f"{name}={value}")),
            *("--", *group, "--watched", "--exclude-file", str(self._eye.exclude_file)),
            *("--peers", json.dumps({one.name: one.address for one in self.site.nodes})),
        ]
