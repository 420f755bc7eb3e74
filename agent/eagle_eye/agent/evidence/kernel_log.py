"""The newest part of the kernel's ring buffer. Reads /dev/kmsg: each reader has its own position in it."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path

from eagle_eye.agent.collectors.kernel_log import RECORD_BYTES_MAX, open_log
from eagle_eye.agent.evidence.source import Scene, Task
from eagle_eye.agent.kernel.messages import record
from eagle_eye.agent.redact import redact

LOG_BYTES_MAX = 1 << 20  # the newest part; distributions' buffers hold 256 KiB to 1 MiB
RECORDS_MAX = 1 << 18  # in a 16 MiB buffer, the largest common size, plus what is added while we read


class KernelLog:
    """One file with the newest lines, oldest first, stamped in seconds since boot."""

    name = "kernel_log"

    def __init__(
        self,
        path: Path = Path("/dev/kmsg"),
        opener: Callable[[Path], int] = open_log,
        read: Callable[[int, int], bytes] = os.read,
    ) -> None:
        self._path = path
        self._open = opener
        self._read = read

    def tasks(self, scene: Scene) -> list[Task]:
        """Return the one task."""
        return [Task("kernel.log", lambda: self._gather(scene))]

    def _gather(self, scene: Scene) -> None:
        lines: deque[str] = deque()
        size, cut = 0, False
        descriptor = self._open(self._path)
        try:
            for _ in range(RECORDS_MAX):
                if scene.left_s() <= 0:
                    cut = True
                    break
                try:
                    raw = self._read(descriptor, RECORD_BYTES_MAX)
                except BlockingIOError:
                    break
                except OSError as error:
                    if error.errno in (errno.EPIPE, errno.EINVAL):  # overwritten while we read, or malformed
                        continue
                    raise
                if not raw:
                    break
                found = record(raw)
                if found is None:
                    continue
                text = found.text.partition(b"\n")[0].decode("utf-8", "replace")
                line = f"[{found.stamp_s:12.6f}] {text}"
                lines.append(line)
                size += len(line) + 1
                while size > LOG_BYTES_MAX:
                    size -= len(lines.popleft()) + 1
                    cut = True
        finally:
            os.close(descriptor)
        content = "".join(
            f"{redact(line)}\n" for line in lines
        ).encode()  # line by line: one long search would block all threads
        scene.bundle.add(self.name, f"{scene.bundle.folder}/kernel.log", content, cut=cut)
