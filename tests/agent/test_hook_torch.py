from __future__ import annotations

import copy
import io
import math
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install eagle-eye[ml]")

from eagle_eye.agent.hook import Training, attach  # noqa: E402
from eagle_eye.agent.training_hook.torch_module import (  # noqa: E402  # noqa: E402
    LOOKS_JUDGED,
    OUTPUTS_LOOKED_AT_MAX,
    LocalNorm,
    Share,
    collectives_inside,
    tensors_in,
)
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
        self.training.step(loss=loss, **values)
        if self.training._sender is not None:
            self.training._sender.send()


@pytest.fixture
def job(listener: Listener) -> Iterator[Job]:
    made = Job(listener)
    yield made
    made.training.detach()


def test_a_step_on_the_cpu_is_seen_whole(job: Job, listener: Listener) -> None:
    job.step()
    job.step()
    totals = listener.read_last().totals
    assert (totals.timed_steps, totals.compute_steps, totals.data_wait_steps, totals.collective_steps) == (2, 2, 1, 0)
    assert 0.0 < totals.compute_s + totals.data_wait_s <= totals.step_s
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


def test_a_gradient_that_is_not_finite_is_counted_in_an_unsampled_step(
    job: Job, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Share, "looked", lambda share, _cost_s, _step_s: setattr(share, "every", 4))
    job.step()  # sampled: the next three are not
    broken = job.model[2].register_forward_hook(
        lambda _module, _arguments, output: output.register_hook(lambda gradient: gradient * float("nan")) and None
    )
    job.step()
    broken.remove()
    job.step()
    totals = listener.read_last().totals
    assert (totals.local_grad_norm_odd, totals.local_grad_norms) == (1.0, 1.0)


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


def test_detaching_within_a_backward_pass_is_harmless(job: Job) -> None:
    job.model[0].weight.register_hook(lambda _gradient: job.training.detach())
    job.step()
    assert job.training.failures == 0


@pytest.fixture
def group() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_where_a_program_reduces_by_itself_the_collective_lasts_until_the_optimizer(
    group: None, listener: Listener
) -> None:
    job = Job(listener)
    job.backward()
    time.sleep(0.05)
    job.optimizer.step()
    job.training.step()
    job.training.detach()
    totals = listener.read_last().totals
    assert totals.collective_steps == 1.0
    assert 0.05 <= totals.collective_s < totals.step_s


def test_a_model_that_nobody_wrapped_yet_is_measured_under_its_wrapper(group: None, listener: Listener) -> None:
    job = Job(listener)
    wrapped = torch.nn.parallel.DistributedDataParallel(job.model)
    wrapped(torch.ones(2, 4)).sum().backward()
    time.sleep(0.2)  # as clipping and logging would take
    job.optimizer.step()
    job.training.step()
    job.training.detach()
    totals = listener.read_last().totals
    assert (totals.compute_steps, totals.collective_steps) == (1.0, 1.0)
    assert totals.collective_s < 0.1


def test_a_second_backward_through_the_same_outputs_is_compute_too(job: Job, listener: Listener) -> None:
    loss = job.model(torch.ones(2, 4)).pow(2).mean()
    loss.backward(retain_graph=True)
    time.sleep(0.05)
    loss.backward()
    job.optimizer.step()
    job.training.step()
    job.training.detach()
    totals = listener.read_last().totals
    assert totals.compute_s > 0.05
    assert totals.local_grad_norms == 0.0  # the gradients of both, which no single norm describes


@pytest.mark.parametrize("wrap", [dict, tuple, SimpleNamespace])
def test_a_loss_is_found_in_whatever_a_model_returns(wrap: Any) -> None:
    tensor = torch.ones(1, requires_grad=True) * 2
    wrapped = {dict: {"a": None, "b": [1, tensor]}, tuple: ("x", (tensor, 2.0))}.get(wrap, SimpleNamespace(loss=tensor))
    assert [found is tensor for found in tensors_in(wrapped)] == [True]


def test_huge_and_cyclic_outputs_are_looked_at_in_part() -> None:
    cyclic: list[Any] = [torch.ones(1)]
    cyclic.append(cyclic)
    assert 1 <= len(list(tensors_in(cyclic))) <= OUTPUTS_LOOKED_AT_MAX
    assert len(list(tensors_in([torch.ones(1)] * 10_000))) <= OUTPUTS_LOOKED_AT_MAX


@pytest.mark.parametrize("sign", ["ds_id", "tensor_model_parallel", "device_mesh"])
def test_where_collectives_are_inside_the_model_its_compute_is_not_observed(sign: str) -> None:
    model = torch.nn.Linear(2, 2)
    assert not collectives_inside(model, list(model.parameters()))
    setattr(model.weight, sign, True)
    assert collectives_inside(model, list(model.parameters()))


def test_steps_that_are_not_looked_into_count_all_the_same(
    job: Job, listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Share, "looked", lambda share, _cost_s, _step_s: setattr(share, "every", 4))
    for _ in range(9):
        job.step()
    totals = listener.read_last().totals
    assert (totals.steps, totals.losses, totals.compute_steps, totals.local_grad_norms) == (9, 9, 3, 3)


def test_looking_that_costs_too_much_is_done_seldom() -> None:
    share = Share(ratio_max=0.001, every_max=64)
    for _ in range(LOOKS_JUDGED):
        share.looked(cost_s=0.003, step_s=1.0)
    assert share.every == 4
    for _ in range(LOOKS_JUDGED):
        share.looked(cost_s=0.5, step_s=1.0)
    assert share.every == 64


def test_one_dear_look_does_not_make_looks_seldom() -> None:
    share = Share(ratio_max=0.001, every_max=64)
    for cost_s in [0.5] * (LOOKS_JUDGED - 1) + [0.0001]:
        share.looked(cost_s, 1.0)
    assert share.every == 1


def norm_of(*gradients: Any) -> float | None:
    norm = LocalNorm([], lambda call: call)
    for gradient in gradients:
        norm._add(gradient)
    return norm.finish(1, 1.0)


def test_large_gradients_are_not_called_infinite() -> None:
    assert norm_of(torch.full((2, 2), 1e30)) == pytest.approx(2e30)


def test_with_a_sparse_gradient_the_norm_is_not_observed() -> None:
    assert norm_of(torch.ones(2), torch.ones(2, 2).to_sparse()) is None
