"""The site's repair yard: excluded nodes are repaired and come back, by the rules that hold for people."""

from __future__ import annotations

import collections
import contextlib
import time

import httpx

from benchmarks.recovery.harm import repair
from benchmarks.recovery.site import FireStack

LOOK_EVERY_S = 1.0
AGAIN_S = 5.0  # after a return that was refused


class Yard:
    """Repairs what is excluded ``repair_s`` after it was seen to be; ``tick`` does what is due."""

    def __init__(self, stack: FireStack, repair_s: float) -> None:
        self._stack = stack
        self._repair_s = repair_s
        self._looked_s = 0.0
        self._due_s: dict[str, float] = {}  # by node, Unix seconds
        self._mended_s: dict[str, float] = {}
        self.returned = 0
        self.forced = 0  # suspects of silent corruption, whom policy lets return by hand alone
        self.refused: collections.Counter[str] = collections.Counter()

    def has_repaired(self, node: str) -> None:
        """Somebody else has repaired the node: where it is out, it comes back with the next look."""
        if node in self._due_s:
            self._due_s[node] = time.time()

    @property
    def holds(self) -> int:
        """Return how many nodes are out."""
        return len(self._due_s)

    def has_mended(self, node: str, since_s: float) -> bool:
        """Whether the node was repaired after the moment (Unix seconds)."""
        return self._mended_s.get(node, 0.0) > since_s

    def tick(self) -> None:
        """What is due comes back. A server or launcher that is away is asked again later."""
        now_s = time.time()
        if now_s - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now_s
        with contextlib.suppress(httpx.HTTPError, StopIteration, OSError):
            out = {node["node"] for node in self._stack.items("nodes", state="excluded")}
            self._due_s = {node: self._due_s.get(node, now_s + self._repair_s) for node in out}
            for node in [node for node, due_s in self._due_s.items() if due_s <= now_s]:
                self._bring_back(node, now_s)

    def _bring_back(self, node: str, now_s: float) -> None:
        repair(self._stack, node)
        self._mended_s[node] = time.time()
        answer = self._ask(node, {"reason": "repaired"})
        if answer == "by_hand":
            answer = self._ask(node, {"reason": "its GPU was replaced", "force": "true"})
            self.forced += not answer
        if answer:
            self.refused[answer] += 1
            self._due_s[node] = now_s + AGAIN_S
            return
        self.returned += 1
        del self._due_s[node]

    def _ask(self, node: str, parameters: dict[str, str]) -> str:
        """Return "" where the node is in service again, else the word that stands against it."""
        answer = self._stack.api.post(f"/nodes/{node}/readmit", params=parameters)
        if answer.is_success:
            return ""
        if answer.status_code != httpx.codes.CONFLICT:
            answer.raise_for_status()
        return str(answer.json().get("reason", answer.status_code))
