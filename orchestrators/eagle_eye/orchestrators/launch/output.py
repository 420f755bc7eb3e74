"""The launcher's output: one line per change, as text or as JSON."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any, TextIO

from eagle_eye.orchestrators.logs import one_line


class Output:
    """Writes to ``stream``; thread-safe. A closed stream does not end the job."""

    def __init__(self, stream: TextIO, job: str, *, as_json: bool, clock: Callable[[], float] = time.time) -> None:
        self._stream = stream
        self._job = job
        self._as_json = as_json
        self._clock = clock
        self._lock = threading.Lock()
        self._deaf = False

    def say(self, event: str, attempt: int, fields: dict[str, Any]) -> None:
        """Write the change: ``{"time", "event", "job", "attempt", ...fields}`` or a line of text."""
        now_s = self._clock()
        if self._as_json:
            text = json.dumps({"time": now_s, "event": event, "job": self._job, "attempt": attempt, **fields})
        else:
            reported = ((name, value) for name, value in fields.items() if value not in (None, "", [], {}))
            words = "  ".join(f"{name}={_word(value)}" for name, value in reported)
            text = f"{time.strftime('%H:%M:%S', time.localtime(now_s))} attempt {attempt}: {event}  {words}".rstrip()
        with self._lock:
            if self._deaf:
                return
            try:
                self._stream.write(text + "\n")
                self._stream.flush()
            except (BrokenPipeError, ValueError):
                self._deaf = True


def _word(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return str(len(value))  # the details are for programs
    if isinstance(value, list | tuple):
        return ",".join(_word(item) for item in value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_word(item)}" for name, item in value.items()) + "}"
    return f"{value:g}" if isinstance(value, float) else one_line(str(value))  # it may contain text written by ranks
