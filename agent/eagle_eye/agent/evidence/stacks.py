"""Python stacks of the suspects, without pausing them: by py-spy, else by PyTorch's own handler.

py-spy reads the process's memory from outside. ``--nonblocking``: it does not pause the process. The price is that the
stack of a running process may be inconsistent; a hung process's stack does not change. Neither tool shows local
variables, which may hold anything.
"""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable
from functools import partial

from eagle_eye.agent.evidence.proc_files import why
from eagle_eye.agent.evidence.source import Scene, Task
from eagle_eye.agent.evidence.suspects import Suspect
from eagle_eye.agent.evidence.worker_server_client import NoWorkerServer, ask
from eagle_eye.agent.external_tool import find, run
from eagle_eye.agent.redact import redact

STACK_BYTES_MAX = 4 << 20
AT_ONCE_MAX = 2  # py-spy takes some ten milliseconds per process, on cores that training needs
HANDLER = "dump_traceback"


class Stacks:
    """One file per suspect. ``pyspy`` is the program's path, None where it is not installed."""

    name = "stacks"

    def __init__(self, pyspy: Callable[[], str | None] = lambda: find("py-spy")) -> None:
        self._pyspy = pyspy
        self._turn = threading.Semaphore(AT_ONCE_MAX)

    def tasks(self, scene: Scene) -> list[Task]:
        """Return a task for each suspect."""
        pyspy = self._pyspy()
        return [Task(f"{one.label}.txt", partial(self._gather, scene, one, pyspy)) for one in scene.suspects]

    def _gather(self, scene: Scene, suspect: Suspect, pyspy: str | None) -> None:
        said = "py-spy is not installed"
        if pyspy is not None:
            text, cut, said = self._seen_by(pyspy, scene, suspect)
            if text:
                self._put(scene, suspect, text, cut=cut)
                return
        try:
            content = ask(scene, suspect, HANDLER, STACK_BYTES_MAX)
        except NoWorkerServer as error:
            scene.bundle.miss(self.name, suspect.label, f"{said}, and {error}; the process's state has the kernel's")
        except (OSError, http.client.HTTPException) as error:
            scene.bundle.miss(self.name, suspect.label, f"{said}, and its worker server does not answer: {why(error)}")
        else:
            self._put(scene, suspect, content.decode("utf-8", "replace"), cut=False)

    def _seen_by(self, pyspy: str, scene: Scene, suspect: Suspect) -> tuple[str, bool, str]:
        """Return py-spy's output, whether it was cut, and why there is none."""
        if not self._turn.acquire(timeout=scene.left_s()):
            return "", False, "py-spy was busy with others until the deadline"
        try:
            ran = run(
                [pyspy, "dump", "--nonblocking", "--pid", str(suspect.pid)],
                scene.tools_until_s,
                STACK_BYTES_MAX,
                monotonic_s=scene.monotonic_s,
            )
        except OSError as error:
            return "", False, f"py-spy cannot be started: {why(error)}"
        finally:
            self._turn.release()
        if ran.status == 0 or ran.cut:
            # Its first line repeats the command line, which has its own file with secrets masked.
            return ran.output.decode("utf-8", "replace").partition("\n")[2], ran.cut, ""
        if ran.status is None:
            return "", False, "py-spy did not end in time"
        return "", False, f"py-spy failed: {' '.join(redact(ran.complaint).split()) or ran.status}"

    def _put(self, scene: Scene, suspect: Suspect, text: str, *, cut: bool) -> None:
        if suspect.is_still(scene.proc):
            name = f"{scene.bundle.folder}/stacks/{suspect.label}.txt"
            scene.bundle.add(self.name, name, redact(text).encode(), cut=cut)
        else:
            scene.bundle.miss(self.name, suspect.label, "the process ended")
