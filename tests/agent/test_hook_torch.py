from __future__ import annotations

import copy
import io
import math
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install eagle-eye[ml]")

from eagle_eye.agent.hook import Training, attach  # noqa: E402
from eagle_eye.agent.hook_torch import LocalNorm  # noqa: E402
from tests.agent.fakes import Listener  # noqa: E402


class Job:
    """A small model, its optimizer and its report."""

    def __init__(self, listener: Listener, device: str = "cpu") -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.training: Training = attach(self.model, self.optimizer, socket=listener.path, heartbeat_s=3600.0)

    def backward(self) -> Any:
        loss = self.model(torch.ones(2, 4)).pow(2).mean()
        loss.backward()
        return loss

    def step(self, **values: Any) -> None:
        self.optimizer.zero_grad()
        loss = self.backward()
        self.optimizer.step()
        self.training._sent_s = -1.0
        self.training.step(loss=loss, **values)


@pytest.fixture
def job(listener: Listener) -> Iterator[Job]:
    made = Job(listener)
    yield made
    made.training.detach()


def test_a_step_on_the_cpu_is_seen_whole(job: Job, listener: Listener) -> None:
    job.step()
    job.step()
    totals = listener.read_last().totals
    assert (totals.timed_steps, totals.compute_steps, totals.data_wait_steps, totals.collective_steps) == (2, 2, 1, 2)
    assert 0.0 < totals.compute_s + totals.data_wait_s + totals.collective_s <= totals.step_s
    assert totals.losses == 2.0
    assert job.training.failures == 0


def test_the_local_norm_is_that_of_the_gradients(job: Job, listener: Listener) -> None:
    job.step()
    expected = math.sqrt(sum(float(p.grad.norm()) ** 2 for p in job.model.parameters()))
    assert listener.read_last().totals.local_grad_norm == pytest.approx(expected)


def test_a_gradient_that_is_not_finite_is_counted_before_the_reduction(job: Job, listener: Listener) -> None:
    def corrupt(_module: Any, _arguments: Any, output: Any) -> None:
        output.register_hook(lambda gradient: gradient * float("nan"))

    job.model[2].register_forward_hook(corrupt)
    job.step()
    totals = listener.read_last().totals
    assert (totals.local_grad_norm_odd, totals.loss_odd) == (1.0, 0.0)


def test_the_gradient_of_a_loss_that_is_not_finite_is_not_observed(job: Job, listener: Listener) -> None:
    with torch.no_grad():
        job.model[0].weight.fill_(float("inf"))
    job.step()
    totals = listener.read_last().totals
    assert (totals.local_grad_norm_odd, totals.local_grad_norms, totals.loss_odd) == (0.0, 0.0, 1.0)


def test_evaluation_is_in_no_step(job: Job, listener: Listener) -> None:
    job.step()
    with job.training.phase("eval"):
        job.backward()
    with torch.no_grad():
        job.model(torch.ones(2, 4))
    job.training._watch.norm.wanted = True
    job.step()
    totals = listener.read_last().totals
    assert (totals.compute_steps, totals.local_grad_norms, totals.data_wait_steps) == (2, 2, 0)


def test_after_several_backwards_the_local_norm_is_not_observed(job: Job, listener: Listener) -> None:
    job.backward()
    job.step()
    totals = listener.read_last().totals
    assert (totals.compute_steps, totals.local_grad_norms) == (1, 0)


def test_off_the_cpu_nothing_inside_a_step_is_observed(listener: Listener) -> None:
    job = Job(listener, device="meta")
    loss = job.model(torch.ones(2, 4, device="meta")).mean()
    loss.backward()
    job.optimizer.step()
    job.training.step(loss=loss)
    job.training.detach()
    last = listener.read_last()
    assert (last.totals.compute_steps, last.totals.collective_steps, last.totals.local_grad_norms) == (0, 0, 0)
    assert last.unread == 1
    assert job.training.failures == 0


def test_a_copy_of_the_model_reports_nothing(job: Job, listener: Listener) -> None:
    average = copy.deepcopy(job.model)
    average(torch.ones(2, 4)).sum().backward()
    job.step()
    assert listener.read_last().totals.compute_steps == 1.0
    assert job.training._timer._ready_s is not None


def test_a_model_pickled_whole_loads_where_eagle_eye_is_not_installed(job: Job) -> None:
    buffer = io.BytesIO()
    torch.save(job.model, buffer)
    program = (
        "import sys, io, torch; sys.modules['eagle_eye'] = None;"
        "model = torch.load(io.BytesIO(sys.stdin.buffer.read()), weights_only=False);"
        "print(tuple(model(torch.ones(2, 4)).shape))"
    )
    done = subprocess.run([sys.executable, "-c", program], input=buffer.getvalue(), capture_output=True, check=False)
    assert done.stdout.decode().strip() == "(2, 1)", done.stderr.decode()


def test_the_optimizer_can_still_be_pickled(job: Job) -> None:
    pickle.loads(pickle.dumps(job.optimizer))


def test_detaching_leaves_the_model_as_it_was(job: Job) -> None:
    job.training.detach()
    assert not job.model._forward_pre_hooks
    assert not any(p._backward_hooks for p in job.model.parameters())


def test_local_norms_that_cost_too_much_are_taken_seldom() -> None:
    norm = LocalNorm()
    taken = 0
    for _ in range(64):
        if norm.wanted:
            norm.add(torch.ones(4))
            norm._cost_s = 0.004  # of a step of 1 s: twice what it may
        taken += norm.finish(1, 1.0) is not None
    assert taken == 32


def test_large_gradients_are_not_called_infinite() -> None:
    norm = LocalNorm()
    norm.add(torch.full((2, 2), 1e30))
    assert norm.finish(1, 1.0) == pytest.approx(2e30)


def test_with_a_sparse_gradient_the_norm_is_not_observed() -> None:
    norm = LocalNorm()
    norm.add(torch.ones(2))
    norm.add(torch.ones(2, 2).to_sparse())
    assert norm.finish(1, 1.0) is None
