"""What is captured again and again is looked up once: and is what would be looked up anew."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import eagle_eye.checkpoint.state as state_module
from eagle_eye.checkpoint.state import KeptState


class Training:
    """A small model that is trained, and how often its state was looked up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, **settings)
        self.looked_up = 0
        self.kept = KeptState({"model": self.model, "optimizer": self.optimizer})
        monkeypatch.setattr(state_module, "get_optimizer_state_dict", self._look_up)
        self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 4)).sum().backward()
        self.optimizer.step()

    def _look_up(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        self.looked_up += 1
        return dict(get_optimizer_state_dict(model, optimizer))

    def assert_current(self) -> None:
        """What is collected is what torch would collect now, down to the memory that it lies in."""
        collected = self.kept.collect(0)
        model: dict[str, Any] = dict(get_model_state_dict(self.model))
        optimizer: dict[str, Any] = dict(get_optimizer_state_dict(self.model, self.optimizer))
        assert {name: one.data_ptr() for name, one in collected["model"].items()} == {
            name: one.data_ptr() for name, one in model.items()
        }
        assert collected["optimizer"]["param_groups"] == optimizer["param_groups"]
        assert collected["optimizer"]["state"].keys() == optimizer["state"].keys()
        for name, values in optimizer["state"].items():
            for key, value in values.items():
                assert collected["optimizer"]["state"][name][key].data_ptr() == value.data_ptr()


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process."""
    store = dist.HashStore()  # type: ignore[attr-defined]  # public, yet not marked as exported
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_what_is_collected_after_a_restore_has_the_names_that_it_had_before() -> None:
    kept = KeptState({"model": nn.parallel.DistributedDataParallel(nn.Linear(2, 1))})
    kept.load(kept.collect(0))
    assert set(kept.collect(0)["model"]) == {"weight", "bias"}


def test_steps_need_no_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(monkeypatch)
    for _ in range(3):
        training.assert_current()
        training.step()
    assert training.looked_up == 1


def test_a_schedule_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(monkeypatch)
    training.assert_current()
    training.optimizer.param_groups[0]["lr"] = 0.01
    training.assert_current()
    assert training.kept.collect(0)["optimizer"]["param_groups"][0]["lr"] == 0.01


def test_a_parameter_that_was_given_other_memory_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(monkeypatch)
    training.assert_current()
    weight = next(training.model.parameters())
    weight.data = weight.data.clone()
    training.assert_current()


def test_an_optimizer_that_was_loaded_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(monkeypatch)
    training.assert_current()
    training.optimizer.load_state_dict(training.optimizer.state_dict())
    state = training.optimizer.state[next(training.model.parameters())]
    state["exp_avg"] = state["exp_avg"].clone()
    training.assert_current()


def test_an_optimizer_whose_state_is_no_tensor_is_looked_up_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(monkeypatch)
    for values in training.optimizer.state.values():
        values["note"] = 1
    for _ in range(3):
        training.kept.collect(0)
    assert training.looked_up == 3


def test_who_loads_into_what_was_collected_changes_no_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(monkeypatch)
    collected = training.kept.collect(0)
    collected["optimizer"]["param_groups"][0]["params"] = ["another"]
    collected["optimizer"]["param_groups"][0]["lr"] = 7.0
    training.assert_current()
