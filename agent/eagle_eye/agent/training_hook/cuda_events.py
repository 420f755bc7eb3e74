"""When a GPU reached a step's moments: CUDA events, recorded in passing and read long after.

Torch is never imported here: ``torch.cuda`` is handed in.

What is measured. An event marks the moment at which the model's stream gets to it, all work enqueued before being
done. Between the call of the model and the end of its backward pass the stream holds the model's own kernels, and
waits where the host is slow to enqueue them: that is the compute, host stalls included. Data parallelism by
``DistributedDataParallel`` reduces gradients on a stream of its own meanwhile; the model's stream waits for it in
DDP's own callback at the end of the backward pass. The engine runs such callbacks in the order in which they were
queued, on the streams of the caller of ``backward``. Ours is queued at the first gradient and DDP's with the last
bucket, so that ours runs before the wait, and one queued from within ours runs after it: what lies between the two
is the wait for the reduction (slower peers included) and the copy out of the buckets, and nothing else. Reductions
that hide behind the backward pass are in neither, except for what they slow its kernels down.

What is not measured. Collectives inside the model (tensor, sequence, expert, pipeline, fully sharded) run between
or beside its kernels and cannot be told from them by such events: the caller does not use this there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from eagle_eye.agent.training_hook.timer import StepParts, StepTimer

# The moments of a step, by the timer's names.
FORWARD = "forward"
COMPUTE_BEGIN = "compute_begin"
BACKWARD_END = "backward_end"
REDUCED = "reduced"
OPTIMIZER = "optimizer"

MARKS_PER_STEP_MAX = 256  # four for each of 64 micro-batches; a step with more is not observed
STEPS_PENDING_MAX = 16  # the driver's launch queue ends a host's lead of more than a few steps


class DeviceTimer:
    """Marks the moments of steps on one GPU's current stream, and tells their parts some steps later.

    It waits for nothing: an event is asked whether it is past, and asked again after the next step if it is not.
    While the stream is being captured into a graph nothing is recorded and nothing is asked (either would break
    the capture); a replayed graph calls no hook, so that its steps are not observed. Whatever fails switches the
    timer off for good and is told to ``failed`` once.
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
        """The host enqueued everything up to this moment. Raises nothing."""
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
        """Something else begins; a step whose compute is under way is not observed."""
        if self._marks and self._marks[-1][0] in (FORWARD, COMPUTE_BEGIN):
            self._spoiled = True

    def finish(self) -> list[StepParts]:
        """The step ended on the host; return the parts of those steps that meanwhile ended on the device."""
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
            # The last event first: it is the one that is not past.
            while self._pending and all(event.query() for _, event in reversed(self._pending[0])):
                marks = self._pending.popleft()
                done.append(_parts(marks))
                self._free.extend(event for _, event in marks)
        except Exception as error:  # noqa: BLE001 - training must go on without us; it is counted
            self._switch_off(error)
        return done

    def close(self) -> None:
        """Record and tell nothing from here on."""
        self._cuda = None
        self._marks = []
        self._free.clear()
        self._pending.clear()

    def _switch_off(self, error: BaseException) -> None:
        self.close()
        self._failed(error)


def _parts(marks: list[tuple[str, Any]]) -> StepParts:
    """Return the parts of one step whose events are all past."""
    timer = StepTimer()
    origin = marks[0][1]
    seconds = 0.0
    for moment, event in marks:
        seconds = origin.elapsed_time(event) / 1e3 if event is not origin else 0.0
        getattr(timer, moment)(seconds)
    return timer.finish(seconds)
