"""State of one hooked training process: its last message and the means since the last frame."""

from __future__ import annotations

import math
from typing import NamedTuple

from eagle_eye.agent.training_hook.message import HookMessage, Totals
from eagle_eye.schema.events import Event
from eagle_eye.schema.frame import Rank

SILENT_BEATS = 3.0  # a rank is silent after missing this many heartbeats
SILENT_S_MIN = 2.0  # and its last values are repeated no longer than this
MESSAGES_PER_SECOND_MAX = 200  # a hook sends 24 a second and a few events


class _Mean(NamedTuple):
    metric: str
    weight: str
    total: str
    odd: str = ""


_MEANS = (
    _Mean("train_step_seconds", "timed_steps", "step_s"),
    _Mean("train_compute_seconds", "compute_steps", "compute_s"),
    _Mean("train_data_wait_seconds", "data_wait_steps", "data_wait_s"),
    _Mean("nccl_collective_seconds", "collective_steps", "collective_s"),
    _Mean("train_work_units", "work_steps", "work_units"),
    _Mean("train_loss", "losses", "loss", "loss_odd"),
    _Mean("train_grad_norm", "grad_norms", "grad_norm", "grad_norm_odd"),
    _Mean("train_local_grad_norm", "local_grad_norms", "local_grad_norm", "local_grad_norm_odd"),
    _Mean("train_tokens_per_second", "token_step_s", "timed_tokens"),
)


def means(before: Totals, after: Totals) -> dict[str, float]:
    """Return the means between two totals, by metric; absent: nothing to average.

    A quantity that was NaN or infinite even once is +inf: a mean of the rest would hide it.
    """
    row: dict[str, float] = {}
    for mean in _MEANS:
        weight = getattr(after, mean.weight) - getattr(before, mean.weight)
        if mean.odd and getattr(after, mean.odd) > getattr(before, mean.odd):
            row[mean.metric] = math.inf
        elif weight > 0:
            row[mean.metric] = (getattr(after, mean.total) - getattr(before, mean.total)) / weight
    return row


class RankProcess:
    """One process that reports as a rank. Times are of the agent's monotonic clock."""

    def __init__(self, message: HookMessage, pid: int, device: int, now_s: float) -> None:
        self.message = message
        self.pid = pid
        self.device = device
        self.pidfd: int | None = None
        self.heard_s = now_s
        self.goodbye = message.goodbye
        self._baseline = message.totals  # a process older than the agent is averaged from here on
        self._row: dict[str, float] = {}
        self._events_seen = 0
        self._phase = ""
        self._window_s = now_s
        self._window_messages = 0

    def flooding(self, now_s: float) -> bool:
        """Whether the process has exceeded its messages per second; counts one message."""
        if now_s - self._window_s >= 1.0:
            self._window_s = now_s
            self._window_messages = 0
        self._window_messages += 1
        return self._window_messages > MESSAGES_PER_SECOND_MAX

    def accept(self, message: HookMessage, now_s: float, time_s: float) -> list[Event]:
        """Accept the message; return its events that are new.

        ``time_s`` is the wall clock. If the messages that announced a phase were lost, the phase is taken from this
        one, and counts from now.
        """
        self.heard_s = now_s
        self.message = message
        self.goodbye = self.goodbye or message.goodbye
        new = [event for event in message.events if event.number > self._events_seen]
        events = []
        for event in sorted(new, key=lambda item: item.number):
            self._events_seen = event.number
            if event.kind == "phase":
                self._phase = str(event.value)
                attributes: dict[str, object] = {"name": event.value, **self.who()}
            elif event.kind == "training_error":
                attributes = {"text": event.value, **self.who()}
            else:
                attributes = {"step": event.value}
            events.append(Event(event.time_s, event.kind, self.device, attributes))
        if message.phase and message.phase != self._phase:
            self._phase = message.phase
            events.append(Event(time_s, "phase", self.device, {"name": message.phase, **self.who()}))
        return events

    def who(self) -> dict[str, object]:
        """Return the attributes that identify the process in an event."""
        message = self.message
        return {"rank": message.rank, "job": message.job, "attempt": message.attempt}

    def silent_s(self, now_s: float) -> float:
        """Return how long the hook has been silent; 0 while its heartbeats arrive and after its goodbye."""
        age_s = now_s - self.heard_s
        return 0.0 if self.goodbye or age_s <= SILENT_BEATS * self.message.heartbeat_s else age_s

    def row(self, now_s: float) -> dict[str, float]:
        """Return the row for the interval ending now and start the next; empty: not observed."""
        message = self.message
        totals = message.totals
        # After its goodbye only what is new since the last row is reported, once.
        if self.silent_s(now_s) > SILENT_S_MIN or (self.goodbye and totals.steps <= self._baseline.steps):
            return {}
        if totals.steps < self._baseline.steps:
            self._baseline = totals
        if totals.steps > self._baseline.steps:
            self._row.update(means(self._baseline, totals))
            self._baseline = totals
        row = dict(self._row)
        if message.step >= 0 and totals.steps > 0:
            row["train_step"] = float(message.step)
        if message.sequence >= 0:
            row["nccl_sequence"] = float(message.sequence)
            row["nccl_completed_sequence"] = float(max(0, message.completed_sequence))
        if message.quorum >= 0:
            row["train_quorum"] = float(message.quorum)
        return row

    def rank(self, now_s: float) -> Rank:
        """Return the rank."""
        message = self.message
        return Rank(
            job=message.job,
            rank=message.rank,
            world_size=message.world_size,
            device=self.device,
            attempt=message.attempt,
            pid=self.pid,
            role=message.role,
            silent_s=self.silent_s(now_s),
        )
