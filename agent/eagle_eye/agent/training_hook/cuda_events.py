"""Times a step's moments on a GPU with CUDA events, recorded asynchronously and read long after.

Never imports torch: ``torch.cuda`` is passed in.

What is measured. An event marks the moment at which the model's stream reaches it, after all work enqueued before.
Between the call of the model and the end of its backward pass the stream holds the model's own kernels, and idles where
the host is slow to enqueue them: that time is compute, host stalls included. Meanwhile ``DistributedDataParallel``
reduces gradients on a stream of its own; the model's stream waits for it in DDP's own callback at the end of the
backward pass. The engine runs such callbacks in the order in which they were queued, on the streams of the caller of
``backward``. Ours is queued at the first gradient and DDP's with the last bucket, so that ours runs before the wait,
and one queued from within ours runs after it: the time between the two is the wait for the reduction (slower peers
included) and the copy out of the buckets, nothing else. Reductions overlapped with the backward pass are in neither,
except that they slow its kernels down.

What is not measured. Collectives inside the model (tensor, sequence, expert, pipeline, fully sharded) run between or
beside its kernels, and such events cannot separate them: the caller does not use this there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from eagle_eye.agent.training_hook.timer import StepParts, StepTimer

# A step's moments, named as in the timer.
FORWARD = "forward"
COMPUTE_BEGIN = "compute_begin"
BACKWARD_END = "backward_end"
REDUCED = "reduced"
OPTIMIZER = "optimizer"

MARKS_PER_STEP_MAX = 256  # four for each of 64 micro-batches; a step with more is not observed
STEPS_PENDING_MAX = 16  # the driver's launch queue keeps a host from running more than a few steps ahead


class DeviceTimer:
    """Marks the moments of steps on one GPU's current stream, and returns their durations some steps later.

    It never blocks: events are polled, and again after the next step if not complete. While the stream is being
    captured into a graph nothing is recorded or polled (either would break the capture); a replayed graph calls no
    hook, so that its steps are not observed. Any failure disables the timer permanently and is passed to ``failed``
    once.
    """

    def __init__(self, cuda: Any, index: int, failed: Callable[[BaseException], None]) -> None:
        """``cuda`` is ``torch.cuda``; ``index`` the device of the model."""
        self._cuda: Any = cuda
        self._index = index
        self._failed = failed
        self._free: list[Any] = []
        self._marks: list[tuple[str, Any]] = []
        self._spoiled = False
        self._pending: deque[list[tuple[str, Any]]] = deque()

    def mark(self, moment: str) -> None:
        """Record a moment: the host has enqueued everything before it. Never raises."""
        if self._cuda is None or self._spoiled:
            return
        try:
            if (
                len(self._pending) >= STEPS_PENDING_MAX
                or len(self._marks) >= MARKS_PER_STEP_MAX
                or self._cuda.is_current_stream_capturing()
            ):
                self._spoiled = True
                return
            event = self._free.pop() if self._free else self._cuda.Event(enable_timing=True)
            event.record(self._cuda.current_stream(self._index))
            self._marks.append((moment, event))
        except Exception as error:  # noqa: BLE001 - training must go on without us; it is counted
            self._switch_off(error)

    def interrupt(self) -> None:
        """Note that something else begins; a step whose compute is in progress is not observed."""
        if self._marks and self._marks[-1][0] in (FORWARD, COMPUTE_BEGIN):
            self._spoiled = True

    def finish(self) -> list[StepParts]:
        """End the step on the host; return the durations of steps that have completed on the device."""
        if self._marks and not self._spoiled:
            self._pending.append(self._marks)
        else:
            self._free.extend(event for _, event in self._marks)
        self._marks = []
        self._spoiled = False
        return self._read()

    def _read(self) -> list[StepParts]:
        done: list[StepParts] = []
        if self._cuda is None or not self._pending:
            return done
        try:
            if self._cuda.is_current_stream_capturing():
                return done
            # The last event first: it completes last.
            while self._pending and all(event.query() for _, event in reversed(self._pending[0])):
                marks = self._pending.popleft()
                done.append(_parts(marks))
                self._free.extend(event for _, event in marks)
        except Exception as error:  # noqa: BLE001 - training must go on without us; it is counted
            self._switch_off(error)
        return done

    def close(self) -> None:
        """Stop recording and reporting."""
        self._cuda = None
        self._marks = []
        self._free.clear()
        self._pending.clear()

    def _switch_off(self, error: BaseException) -> None:
        self.close()
        self._failed(error)


def _parts(marks: list[tuple[str, Any]]) -> StepParts:
    """Return the durations of one step whose events are all complete."""
    timer = StepTimer()
    origin = marks[0][1]
    seconds = 0.0
    for moment, event in marks:
        seconds = origin.elapsed_time(event) / 1e3 if event is not origin else 0.0
        getattr(timer, moment)(seconds)
    return timer.finish(seconds)
