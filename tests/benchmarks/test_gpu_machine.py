"""Which Python computes on the GPU for the tests of ``tests/gpu``, and what is said where none does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.gpu.machine import NAMED, pythons, torch_python


def python(folder: Path, script: str) -> Path:
    """Make a program that stands for a Python."""
    folder.mkdir()
    path = folder / "python3"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_a_named_python_that_sees_a_gpu_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = python(tmp_path / "a", "echo 2.9.0+cu130")
    monkeypatch.setenv(NAMED, str(named))
    found = torch_python.__wrapped__()
    assert (found.path, found.version, found.missing) == (str(named), "2.9.0+cu130", "")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo no GPU", "no GPU"),
        ("echo 'ModuleNotFoundError: No module named torch' >&2; exit 1", "No module named torch"),
        ("exit 3", "exit code 3"),
    ],
)
def test_one_that_does_not_is_said_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, said: str
) -> None:
    named = python(tmp_path / "a", script)
    monkeypatch.setenv(NAMED, str(named))
    missing = torch_python.__wrapped__().missing
    assert str(named) in missing
    assert said in missing
    assert f"name one by {NAMED}" in missing


def test_a_python_that_is_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAMED, str(tmp_path / "none"))
    assert "cannot be asked" in torch_python.__wrapped__().missing


def test_this_python_is_asked_first_and_then_those_on_the_path_once_each(tmp_path: Path) -> None:
    one, other = python(tmp_path / "a", ""), python(tmp_path / "b", "")
    path = f"{one.parent}::{other.parent}:{one.parent}:{tmp_path / 'none'}"
    assert list(pythons({"PATH": path})) == [sys.executable, str(one), str(other)]
