from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from eagle_eye.agent import hook
from eagle_eye.agent.hook import Training, attach
from eagle_eye.agent.training_hook.message import Totals
from eagle_eye.agent.training_hook.sender import VALUES_PENDING_MAX
from eagle_eye.agent.training_hook.torch_module import MARKS_PER_STEP_MAX, STEPS_PENDING_MAX, DeviceTimer, Share
from tests.agent.fake_cuda import FakeCuda, FakeDataParallel, FakeTorch, FakeValue
from tests.agent.fakes import Listener


class Failures(list[BaseException]):
    def __call__(self, error: BaseException) -> None:
        self.append(error)


def timer_of(cuda: FakeCuda) -> tuple[DeviceTimer, Failures]:
    failures = Failures()
    return DeviceTimer(cuda, 0, failures), failures


def step(timer: DeviceTimer, cuda: FakeCuda, compute_s: float = 2.0, wait_s: float = 1.0) -> list[Any]:
    timer.mark("forward")
    cuda.stream.work(compute_s)
    timer.mark("backward_end")
    cuda.stream.work(wait_s)
    timer.mark("reduced")
    return timer.finish()


def test_a_step_is_told_when_the_device_is_past_it_and_not_before() -> None:
    cuda = FakeCuda()
    timer, failures = timer_of(cuda)
    assert step(timer, cuda) == []
    cuda.stream.run()
    (parts,) = step(timer, cuda)
    assert (parts.compute_s, parts.collective_s) == (2.0, 1.0)
    assert failures == []


def test_a_device_that_is_half_through_a_step_tells_nothing_of_it() -> None:
    cuda = FakeCuda()
    timer, _ = timer_of(cuda)
    step(timer, cuda)
    cuda.stream.run(3)
    assert timer.finish() == []


def test_steps_are_told_in_their_order_and_each_once() -> None:
    cuda = FakeCuda()
    timer, _ = timer_of(cuda)
    for compute_s in (1.0, 2.0, 3.0):
        step(timer, cuda, compute_s)
    cuda.stream.run()
    assert [parts.compute_s for parts in timer.finish()] == [1.0, 2.0, 3.0]
    assert timer.finish() == []


def test_events_are_used_again() -> None:
    cuda = FakeCuda()
    timer, _ = timer_of(cuda)
    for _ in range(1000):
        step(timer, cuda)
        cuda.stream.run()
    assert cuda.events <= 6


def test_a_host_far_ahead_loses_steps_and_bounds_its_events() -> None:
    cuda = FakeCuda()
    timer, failures = timer_of(cuda)
    for _ in range(1000):
        step(timer, cuda)
    assert cuda.events <= 3 * (STEPS_PENDING_MAX + 1)
    cuda.stream.run()
    assert len(timer.finish()) == STEPS_PENDING_MAX
    step(timer, cuda, 7.0)
    cuda.stream.run()
    assert [parts.compute_s for parts in timer.finish()] == [7.0]
    assert failures == []


def test_accumulated_micro_batches_add_up() -> None:
    cuda = FakeCuda()
    timer, _ = timer_of(cuda)
    for wait_s in (0.0, 0.0, 4.0):
        timer.mark("forward")
        cuda.stream.work(1.5)
        timer.mark("backward_end")
        cuda.stream.work(wait_s)
        timer.mark("reduced")
        cuda.stream.work(0.25)  # between micro-batches: neither compute nor collective
    timer.finish()
    cuda.stream.run()
    (parts,) = timer.finish()
    assert (parts.compute_s, parts.collective_s) == (4.5, 4.0)


def test_a_step_of_too_many_marks_is_not_observed_and_the_next_one_is() -> None:
    cuda = FakeCuda()
    timer, _ = timer_of(cuda)
    for _ in range(MARKS_PER_STEP_MAX + 1):
        timer.mark("forward")
    timer.finish()
    step(timer, cuda, 5.0)
    cuda.stream.run()
    assert [parts.compute_s for parts in timer.finish()] == [5.0]


def test_while_a_graph_is_captured_nothing_is_recorded_or_asked() -> None:
    cuda = FakeCuda()
    timer, failures = timer_of(cuda)
    step(timer, cuda, 1.0)
    cuda.stream.run()
    cuda.capturing = True
    assert step(timer, cuda) == []
    cuda.capturing = False
    assert [parts.compute_s for parts in step(timer, cuda)] == [1.0]
    assert failures == []


def test_a_phase_within_a_steps_compute_leaves_that_step_unobserved() -> None:
    cuda = FakeCuda()
    timer, _ = timer_of(cuda)
    timer.mark("forward")
    timer.interrupt()
    timer.mark("backward_end")
    timer.finish()
    step(timer, cuda, 3.0)
    timer.interrupt()  # between steps it takes nothing away
    cuda.stream.run()
    assert [parts.compute_s for parts in timer.finish()] == [3.0]


@pytest.mark.parametrize("missing", ["Event", "current_stream", "is_current_stream_capturing"])
def test_what_fails_switches_the_timer_off_and_is_told_once(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda()
    timer, failures = timer_of(cuda)
    monkeypatch.setattr(cuda, missing, None)
    for _ in range(10):
        assert step(timer, cuda) == []
    assert len(failures) == 1


def test_a_broken_device_switches_the_timer_off() -> None:
    cuda = FakeCuda()
    timer, failures = timer_of(cuda)
    step(timer, cuda)
    cuda.broken = True
    step(timer, cuda)
    cuda.broken = False
    cuda.stream.run()
    assert timer.finish() == []
    assert len(failures) == 1


class Job:
    """A data-parallel model on a fake GPU and its report."""

    def __init__(self, listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
        self.torch = FakeTorch()
        for name, module in {
            "torch": self.torch,
            "torch.nn.parallel": SimpleNamespace(DistributedDataParallel=FakeDataParallel),
            "torch.distributed": None,
        }.items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr(hook, "SEND_EVERY_S", 3600.0)
        monkeypatch.setattr(Share, "looked", lambda *_: None)  # these steps take no time: look into all
        self.model = FakeDataParallel(self.torch)
        self.listener = listener
        self.training: Training = attach(self.model, object(), socket=listener.path, heartbeat_s=3600.0)

    def step(self, **values: Any) -> None:
        self.model.train_step(buffers_s=0.125, compute_s=2.0, wait_s=1.0)
        self.training.step(**values)

    def totals(self) -> Totals:
        assert self.training._sender is not None
        self.training._sender.send()
        return self.listener.read_last().totals


@pytest.fixture
def job(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    made = Job(listener, monkeypatch)
    yield made
    made.training.detach()


def test_on_a_gpu_compute_and_the_wait_for_the_reduction_come_from_the_device(job: Job) -> None:
    for _ in range(3):
        job.step()
        job.torch.cuda.stream.run()
    totals = job.totals()
    assert (totals.steps, totals.compute_steps, totals.collective_steps) == (3.0, 2.0, 2.0)
    assert (totals.compute_s, totals.collective_s) == (4.0, 2.25)  # buffers and reductions
    assert job.training.failures == 0


def test_the_last_steps_are_asked_for_at_the_end(job: Job) -> None:
    job.step()
    job.torch.cuda.stream.run()
    job.training.detach()
    assert job.listener.read_last().totals.compute_steps == 1.0


def test_the_programs_own_measurement_replaces_the_devices(job: Job) -> None:
    for _ in range(3):
        job.step(compute_s=5.0)
        job.torch.cuda.stream.run()
    totals = job.totals()
    assert (totals.compute_steps, totals.compute_s, totals.collective_steps) == (3.0, 15.0, 0.0)


def test_a_loss_on_the_gpu_counts_when_it_has_arrived(job: Job) -> None:
    job.step(loss=FakeValue(job.torch.cuda, 4.0), grad_norm=FakeValue(job.torch.cuda, 1.5))
    assert job.totals().losses == 0.0
    job.torch.cuda.stream.run()
    job.step(loss=FakeValue(job.torch.cuda, float("nan")))
    totals = job.totals()
    assert (totals.losses, totals.loss, totals.grad_norm, totals.loss_odd) == (1.0, 4.0, 1.5, 0.0)
    job.torch.cuda.stream.run()
    job.step()
    assert job.totals().loss_odd == 1.0
    assert (job.training._state.unread, job.training.failures) == (0, 0)


def test_a_value_beyond_what_may_wait_is_unread_and_counted(job: Job) -> None:
    for number in range(VALUES_PENDING_MAX + 3):
        job.step(loss=FakeValue(job.torch.cuda, float(number)))
    assert job.training._state.unread == 3
    job.torch.cuda.stream.run()
    job.step()
    assert job.totals().loss == sum(range(VALUES_PENDING_MAX))


def test_while_a_graph_is_captured_no_value_is_copied(job: Job) -> None:
    job.torch.cuda.capturing = True
    job.step(loss=FakeValue(job.torch.cuda, 4.0))
    job.torch.cuda.capturing = False
    job.torch.cuda.stream.run()
    job.step()
    totals = job.totals()
    assert (totals.steps, totals.losses, totals.compute_steps) == (2.0, 0.0, 0.0)
    assert (job.training._state.unread, job.training.failures) == (1, 0)


def test_where_pinned_memory_cannot_be_had_values_are_unread(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job.torch, "empty", None)
    for _ in range(3):
        job.step(loss=FakeValue(job.torch.cuda, 4.0))
    assert (job.training._state.unread, job.training.failures) == (3, 1)


def test_parameters_on_two_devices_leave_a_steps_inside_unobserved(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = [SimpleNamespace(device=SimpleNamespace(type="cuda", index=index)) for index in (0, 1)]
    monkeypatch.setattr(FakeDataParallel, "parameters", lambda _self: devices)
    job = Job(listener, monkeypatch)
    job.step()
    assert job.training._watch._on_device is None
    assert (job.training.failures, job.training._state.gpu) == (0, "GPU-1234")
    job.training.detach()
