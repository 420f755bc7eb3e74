"""``eagle-eye plan profile``: what a model's layers cost, on a model small enough to know it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle_eye.cli.main import main
from eagle_eye.planning.files import read_profile

MODEL = """
import torch

def job():
    layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4, bias=False))
    return layers, torch.zeros(5, 8)

def plain_descent():
    layers, inputs = job()
    return list(layers), (inputs,), lambda parameters: torch.optim.SGD(parameters, lr=0.1)

class Embedded(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(10, 8)

    def forward(self, tokens):
        return self.table(tokens), tokens

class Pooled(torch.nn.Module):
    def forward(self, vectors, tokens):
        return vectors.mean(1)

def tokens():
    return [Embedded(), Pooled(), torch.nn.Linear(8, 2)], torch.zeros(3, 7, dtype=torch.long)

def nothing():
    return None

def fails():
    raise RuntimeError("out of tokens")
"""


@pytest.fixture(autouse=True)
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small_model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def measured(capsys: pytest.CaptureFixture[str], function: str) -> dict[str, Any]:
    assert main(["plan", "profile", f"small_model:{function}", "--rounds", "2"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_sizes_are_those_of_the_layers(capsys: pytest.CaptureFixture[str]) -> None:
    found = measured(capsys, "job")
    assert (found["micro_batch"], found["device"]) == (5, "cpu")
    first, relu, last = found["layers"]
    assert (first["name"], first["parameter_bytes"]) == ("Linear", 4 * (8 * 16 + 16))
    assert relu["parameter_bytes"] == relu["optimizer_bytes"] == 0
    assert last["parameter_bytes"] == 4 * 16 * 4
    steps_bytes = 4  # that Adam counts for each parameter
    assert first["optimizer_bytes"] == 2 * first["parameter_bytes"] + 2 * steps_bytes
    assert last["optimizer_bytes"] == 2 * last["parameter_bytes"] + steps_bytes


def test_activations_are_what_is_kept_for_the_backward_pass(capsys: pytest.CaptureFixture[str]) -> None:
    first, relu, last = measured(capsys, "job")["layers"]
    assert first["activation_bytes"] == 4 * 5 * 8  # its inputs
    assert relu["activation_bytes"] == 4 * 5 * 16  # its outputs
    assert last["activation_bytes"] == 4 * 5 * 16


def test_every_layer_that_computes_takes_time_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    layers = measured(capsys, "job")["layers"]
    assert [min(layer["forward_s"], layer["backward_s"]) > 0 for layer in layers] == [True] * 3


def test_the_jobs_own_optimizer_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert [layer["optimizer_bytes"] for layer in measured(capsys, "plain_descent")["layers"]] == [0] * 3


def test_layers_may_pass_several_tensors_and_begin_with_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    found = measured(capsys, "tokens")
    assert [layer["name"] for layer in found["layers"]] == ["Embedded", "Pooled", "Linear"]
    assert found["micro_batch"] == 3


def test_what_is_measured_can_be_planned_with(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text(json.dumps(measured(capsys, "job")))
    assert len(read_profile(tmp_path / "profile.json").layers) == 3
    words = ["--profile", "profile.json", "--nodes", "3", "--gpu-memory", "1MiB", "--global-batch", "40"]
    assert main(["plan", *words]) == 0


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("small_model", "expected module:function"),
        ("small_model:", "expected module:function"),
        ("no_such_module:job", "there is no module no_such_module here"),
        ("small_model:absent", "small_model has no function absent"),
        ("small_model:nothing", "expected a function without arguments that returns the layers in order"),
    ],
)
def test_what_is_no_function_of_layers_is_refused(capsys: pytest.CaptureFixture[str], target: str, said: str) -> None:
    assert main(["plan", "profile", target]) == 2
    assert said in capsys.readouterr().err


def test_what_the_jobs_code_raises_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "profile", "small_model:fails"]) == 1
    assert capsys.readouterr().err == "eagle-eye plan: out of tokens\n"


def test_a_device_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "profile", "small_model:job", "--device", "nonesuch"]) == 2
    assert "--device: 'nonesuch': " in capsys.readouterr().err
