"""NVIDIA's own bug report, as its support requests. Takes minutes, queries all of the driver, and is not redacted.

It runs in safe mode, without the parts that may hang a system with a failing GPU.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from eagle_eye.agent.evidence.bundle import PIECE_BYTES_MAX
from eagle_eye.agent.evidence.proc_files import read
from eagle_eye.agent.evidence.source import Scene, Task
from eagle_eye.agent.external_tool import find, run
from eagle_eye.agent.redact import redact

PROGRAM = "nvidia-bug-report.sh"
REPORT = "nvidia-bug-report.log"
OUTPUT_BYTES_MAX = 1 << 16  # of its stdout, which is discarded


class BugReport:
    """One file, compressed by NVIDIA's tool."""

    name = "bug_report"

    def __init__(self, program: Callable[[], str | None] = lambda: find(PROGRAM)) -> None:
        self._program = program

    def tasks(self, scene: Scene) -> list[Task]:
        """Return the one task."""
        return [Task(f"{REPORT}.gz", lambda: self._gather(scene))]

    def _gather(self, scene: Scene) -> None:
        program = self._program()
        if program is None:
            scene.bundle.miss(self.name, REPORT, f"{PROGRAM} is not installed")
            return
        with tempfile.TemporaryDirectory(prefix="eagle-eye-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            arguments = [program, "--safe-mode", "--output-file", str(folder / REPORT)]
            ran = run(arguments, scene.tools_until_s, OUTPUT_BYTES_MAX, folder, scene.monotonic_s)
            reports = [path for path in (folder / f"{REPORT}.gz", folder / REPORT) if path.is_file()]
            if ran.status != 0 or not reports:
                ended = "was killed" if ran.status is None else f"ended with {ran.status}"
                scene.bundle.miss(self.name, REPORT, f"{PROGRAM} {ended}: {redact(ran.complaint)}")
            if reports:
                content, more = read(reports[0], PIECE_BYTES_MAX)
                scene.bundle.add(self.name, f"{scene.bundle.folder}/{reports[0].name}", content, cut=more)
