"""The training hook: two lines in a training loop, and a faulty rank is found in seconds.

    from eagle_eye.agent.hook import attach

    training = attach(model, optimizer)   # once, after wrapping the model for data parallelism
    ...
    training.step(loss=loss, tokens=n)    # after optimizer.step(), at each step

Nothing here blocks or raises into the training loop: failures are counted and logged once. It behaves the same when the
agent is gone or stopped. Touches: a Unix datagram socket, one daemon thread, ``sys.excepthook`` (chained), ``atexit``,
one environment variable of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any

from eagle_eye.agent.redact import redact
from eagle_eye.agent.training_hook.launch_variables import attempt
from eagle_eye.agent.training_hook.message import HEARTBEAT_S, PHASE_CHARS_MAX, TEXT_BYTES_MAX
from eagle_eye.agent.training_hook.sender import (
    HookSender,
    HookState,
    Identity,
    RunningTotals,
    collective_sequences,
    hook_socket,
)
from eagle_eye.agent.training_hook.torch_module import StepParts, StepTimer, Watch
from eagle_eye.agent.training_hook.torchft_manager import ReplicaCollectives
from eagle_eye.schema.restart_names import HOOK_ATTEMPT_VARIABLE

SEND_EVERY_S = 0.1  # new state is sent at most this often: frames are a second apart
TRACEBACK_CHARS_READ_MAX = 16_384

_log = logging.getLogger("eagle_eye.hook")
_current: Training | None = None


def attach(
    model: Any = None,
    optimizer: Any = None,
    *,
    step: int = 0,
    socket: str | os.PathLike[str] | None = None,
    heartbeat_s: float = HEARTBEAT_S,
) -> Training:
    """Return the object that reports this process's training; it also sends heartbeats by itself.

    ``model`` (a torch module, after wrapping and compiling) and ``optimizer`` are optional: with them a step's compute,
    data wait and collective times are measured where ``docs/reference/hook.md`` says so. ``step`` is the last finished
    step when a job resumes. ``socket`` overrides the path where the agent listens. Attaching again ends the earlier
    report. Never raises.
    """
    global _current  # noqa: PLW0603 - one report per process, as one excepthook and one atexit
    if _current is not None:
        _current.detach()
    training = Training()
    try:
        training._begin(model, optimizer, step, None if socket is None else Path(socket), heartbeat_s)
    except Exception as error:  # noqa: BLE001 - training must go on without us
        training._count_failure(error)
    _current = training
    return training


class Training:
    """One process's report, created by ``attach``."""

    def __init__(self) -> None:
        self._state = HookState()
        self._timer = StepTimer()
        self._watch = Watch(self._timer, self._count_failure)
        self._tally = RunningTotals(self._count_failure)
        self._replicas = ReplicaCollectives(self._count_failure)
        self._step = 0
        self._sound = True  # the last loss was finite, as far as known
        self._sender: HookSender | None = None
        self._stopped = threading.Event()
        self._heartbeat: threading.Thread | None = None
        self._phases: list[str] = []
        self._excepthook = sys.excepthook
        self._error: BaseException | None = None  # the last one reported
        self._logged = False

    @property
    def failures(self) -> int:
        """How often the hook failed to do its work; 0 when all is well."""
        return self._state.failures

    def step(
        self,
        *,
        step: int | None = None,
        loss: Any = None,
        grad_norm: Any = None,
        tokens: float | None = None,
        work_units: float | None = None,
        local_grad_norm: Any = None,
        compute_s: float | None = None,
        data_wait_s: float | None = None,
        collective_s: float | None = None,
    ) -> None:
        """Report a finished training step; call it after ``optimizer.step()``.

        All arguments are optional. ``step`` is the number of the finished step, by default one more than the last.
        ``tokens`` and ``work_units`` are this rank's in this step. ``loss`` and norms may be numbers or tensors; a GPU
        tensor is copied asynchronously and counts some steps later, one on another device is not read. ``compute_s``,
        ``data_wait_s`` and ``collective_s`` are for programs that measure them with device events; they replace the
        hook's own measurements.
        """
        try:
            # Few calls: between steps that evict the caches each costs some microseconds.
            watch, tally = self._watch, self._tally
            self._step = self._step + 1 if step is None else int(step)
            looked = watch.looking
            measured = self._timer.finish(perf_counter())
            norm = watch.finish(measured)
            tally.step(measured.step_s, tokens)
            if looked or compute_s is not None or data_wait_s is not None or collective_s is not None:
                self._add_parts(measured, compute_s, data_wait_s, collective_s)
            norm = norm if local_grad_norm is None else local_grad_norm
            sound = tally.values(loss, grad_norm, norm, work_units, looking=looked)
            if self._state.phase == "start":
                self._enter("train")
            self._state.unread = tally.unread
            self._state.progress = (self._step, tuple(tally.sums))
            if self._sound and not sound and self._sender is not None:
                self._sender.send()  # at once: a non-finite value often ends the program
            self._sound = sound
        except Exception as error:  # noqa: BLE001 - training must go on without us
            self._count_failure(error)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Exclude the block from training: its time and its forward passes count in no step.

        "checkpoint" also reports when the checkpoint started and ended, and after which step.
        """
        opened = self._open_phase(name)
        try:
            yield
        finally:
            if opened:
                self._close_phase()

    def error(self, error: BaseException) -> None:
        """Report an exception that ends training; uncaught exceptions are reported automatically. Never raises."""
        sender = self._sender
        if sender is None or isinstance(error, KeyboardInterrupt) or error is self._error:
            return
        try:
            self._error = error
            text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
            text = redact(text[-TRACEBACK_CHARS_READ_MAX:])
            sender.event("training_error", text.encode("utf-8", "replace")[-TEXT_BYTES_MAX:].decode("utf-8", "ignore"))
            sender.send()
        except Exception as failure:  # noqa: BLE001 - the program's own error matters more
            self._count_failure(failure)

    def detach(self) -> None:
        """Send a goodbye, remove every hook and stop reporting. Never raises."""
        try:
            self._end()
        except Exception as error:  # noqa: BLE001 - training must go on without us
            self._count_failure(error)

    def _begin(self, model: Any, optimizer: Any, step: int, path: Path | None, heartbeat_s: float) -> None:
        self._step = int(step)
        self._state.progress = (self._step if self._step > 0 else -1, tuple(self._tally.sums))
        try:
            self._watch.attach(model, optimizer, sys.modules)
        except Exception as error:  # noqa: BLE001 - without the model's hooks there are still steps and a heartbeat
            self._watch.remove()
            self._count_failure(error)
        try:
            self._replicas.attach(sys.modules)
        except Exception as error:  # noqa: BLE001 - another version of torchft; the rest of the report stands
            self._count_failure(error)
        self._state.gpu = self._watch.gpu
        path = hook_socket(os.environ) if path is None else path
        self._sender = HookSender(None, self._state, path, heartbeat_s, self._sequences)
        self._identify(self._sender)
        self._sender.event("phase", "start")
        self._sender.send()
        self._excepthook = sys.excepthook
        sys.excepthook = self._report_error
        atexit.register(self._end)
        self._heartbeat = threading.Thread(target=self._beat, name="eagle-eye-hook", daemon=True)
        self._heartbeat.start()
        os.environ[HOOK_ATTEMPT_VARIABLE] = str(attempt(os.environ))

    def _identify(self, sender: HookSender) -> None:
        """Set who the process is once that is known; several processes that all call themselves rank 0 mislead."""
        identity = Identity.known(os.environ, sys.modules)
        if identity is not None:
            sender.identity = identity if self._watch.device is None else identity.on_device(self._watch.device)
        elif self._state.progress[1][0] > 0.0:  # steps
            self._count_failure(RuntimeError("WORLD_SIZE is set, and nothing gives this process's rank: set RANK"))

    def _end(self) -> None:
        sender, self._sender = self._sender, None
        if sender is None:
            return
        os.environ.pop(HOOK_ATTEMPT_VARIABLE, None)
        self._stopped.set()
        self._watch.remove()
        self._replicas.remove()
        if self._state.progress[1][0] > 0.0:  # steps
            self._add_reported()
            self._tally.arrived()
            self._state.progress = (self._step, tuple(self._tally.sums))
        atexit.unregister(self._end)
        if sys.excepthook == self._report_error:
            sys.excepthook = self._excepthook
        if self._heartbeat is not None:
            self._heartbeat.join(timeout=0.1)  # it is woken, so the wait ends at once
        sender.send(goodbye=True)
        sender.close()

    def _fork(self) -> None:
        """Disable reporting in a forked child: it is not the rank, and its parent's thread does not exist in it."""
        self._stopped.set()
        self._sender = None
        self._heartbeat = None

    def _beat(self) -> None:
        """Send new state and, every ``heartbeat_s``, a heartbeat; runs in its own thread.

        Not in the training thread: building and sending a message costs 0.1 ms with cold caches, and more when the
        kernel runs the reader first on the sender's core.
        """
        sender = self._sender
        if sender is None:
            return
        sent: tuple[int, tuple[float, ...]] | None = None
        sent_s = perf_counter()
        while not self._stopped.wait(min(SEND_EVERY_S, sender.heartbeat_s)):
            progress = self._state.progress
            if progress is not sent or perf_counter() - sent_s >= sender.heartbeat_s:
                sent, sent_s = progress, perf_counter()
                self._send(sender)

    def _send(self, sender: HookSender) -> None:
        try:
            if sender.identity is None:
                self._identify(sender)
            sender.send()
        except Exception as error:  # noqa: BLE001 - the next beat may succeed
            self._count_failure(error)

    def _sequences(self) -> tuple[int, int]:
        try:
            if (position := self._replicas.position()) is not None:  # replica groups are wider than any process group
                self._state.take_quorum(position.quorum)
                return position.sequence, position.completed
            return collective_sequences(sys.modules)
        except Exception as error:  # noqa: BLE001 - private names of torch may change; the rest of the message stands
            self._count_failure(error)
            return -1, -1

    def _open_phase(self, name: str) -> bool:
        try:
            text = str(name)[:PHASE_CHARS_MAX]
            text = text if text and text.isprintable() else "unnamed"
            self._timer.pause(perf_counter())
            self._watch.phase_begins()
            self._phases.append(self._state.phase)
            self._enter(text)
            if text == "checkpoint":
                self._tell("checkpoint_begin", self._step)
            if self._sender is not None:
                self._sender.send()
        except Exception as error:  # noqa: BLE001 - training must go on without us
            self._count_failure(error)
            return False
        return True

    def _close_phase(self) -> None:
        try:
            if self._state.phase == "checkpoint":
                self._tell("checkpoint_end", self._step)
            self._enter(self._phases.pop())
            self._timer.resume(perf_counter())
            if self._sender is not None:
                self._sender.send()
        except Exception as error:  # noqa: BLE001 - training must go on without us
            self._count_failure(error)

    def _enter(self, phase: str) -> None:
        self._state.phase = phase
        self._tell("phase", phase)

    def _tell(self, kind: str, value: str | int) -> None:
        if self._sender is not None:
            self._sender.event(kind, value)

    def _report_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.error(error)
        self._excepthook(kind, error, trace)

    def _add_parts(
        self, measured: StepParts, compute_s: float | None, data_wait_s: float | None, collective_s: float | None
    ) -> None:
        """Add a step's parts: those given by the program, else those measured."""
        if compute_s is None and collective_s is None:
            self._add_reported()
        else:
            self._watch.forget_device()
        self._tally.parts(
            measured.compute_s if compute_s is None else compute_s,
            measured.data_wait_s if data_wait_s is None else data_wait_s,
            measured.collective_s if collective_s is None else collective_s,
        )

    def _add_reported(self) -> None:
        """Add what a device has reported of earlier steps."""
        for parts in self._watch.device_steps():
            self._tally.parts(parts.compute_s, None, parts.collective_s)

    def _count_failure(self, error: BaseException) -> None:
        self._state.failures += 1
        if not self._logged:
            self._logged = True
            _log.warning("the training hook failed and goes on (further failures are only counted): %r", error)


def _forget_in_child() -> None:
    if _current is not None:
        _current._fork()


os.register_at_fork(after_in_child=_forget_in_child)
