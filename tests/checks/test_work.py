"""What the children do, on the real torch and a real disk."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_eye.checks.work import in_torch, on_disk
from eagle_eye.checks.work.lines import WorkerOutput
from eagle_eye.checks.work.on_disk import Mount, mount

CPU = torch.device("cpu")
AT_ONCE = {"seconds": 0.0, "quick": True}


@pytest.fixture
def line() -> WorkerOutput:
    return WorkerOutput(0, os.open(os.devnull, os.O_WRONLY))


class Faulty:
    """torch on a device that gets one number of one product wrong: the ``nth`` from 0 on."""

    def __init__(self, nth: int) -> None:
        self._left = nth

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def matmul(self, *operands: torch.Tensor, **more: Any) -> torch.Tensor:
        found = torch.matmul(*operands, **more)
        if self._left == 0:
            found[7, 7] += 2
        self._left -= 1
        return found


def test_products_on_a_sound_device_are_as_known_and_alike(line: WorkerOutput) -> None:
    found = in_torch.gemm(torch, CPU, AT_ONCE, 0, line)
    assert (found["wrong_rows"], found["differing"], found["repetitions"]) == (0, 0, 1)
    assert found["flops_per_second"] > 1e6


def test_one_wrong_number_in_the_first_product_is_found(line: WorkerOutput) -> None:
    assert in_torch.gemm(Faulty(0), CPU, AT_ONCE, 0, line)["wrong_rows"] == 1


def test_one_wrong_number_in_a_repetition_is_found(line: WorkerOutput) -> None:
    assert in_torch.gemm(Faulty(1), CPU, AT_ONCE, 0, line)["differing"] == 1


def test_products_known_exactly_fit_the_numbers_that_hold_them() -> None:
    assert float(torch.tensor(in_torch.INNER, dtype=torch.float16)) == in_torch.INNER
    assert float(torch.tensor(in_torch.INNER - 1, dtype=torch.float16)) == in_torch.INNER - 1


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_torch, "CPU_CHUNK_BYTES", 1 << 16)
    monkeypatch.setattr(in_torch, "CPU_BYTES_MAX", 1 << 18)


@pytest.mark.usefixtures("little")
def test_memory_that_keeps_what_it_is_given_has_no_wrong_words(line: WorkerOutput) -> None:
    found = in_torch.memory(torch, CPU, AT_ONCE, 0, line)
    assert (found["bytes"], found["passes"], found["wrong_words"]) == (1 << 18, 1, 0)


@pytest.mark.parametrize("pattern", [*in_torch.PATTERNS, None])
def test_one_wrong_word_is_found_with_every_pattern(pattern: int | None) -> None:
    chunk = torch.empty(64, dtype=torch.int64)
    in_torch._write_pattern(torch, chunk, pattern, 3)
    assert in_torch._wrong_words(torch, chunk, pattern, 3) == 0
    chunk[5] ^= 1 << 40
    assert in_torch._wrong_words(torch, chunk, pattern, 3) == 1


def test_patterns_cover_both_states_of_every_bit() -> None:
    assert {bit for pattern in in_torch.PATTERNS for bit in range(64) if pattern >> bit & 1} == set(range(64))
    assert {bit for pattern in in_torch.PATTERNS for bit in range(64) if not pattern >> bit & 1} == set(range(64))


def disk_says(folder: Path, size: int = 2 << 20) -> list[dict[str, Any]]:
    """Return the lines of the disk's work in this process."""
    read, write = os.pipe()
    on_disk._try({"folder": str(folder), "bytes": size}, WorkerOutput(0, write))
    os.close(write)
    with os.fdopen(read, "rb") as lines:
        return [json.loads(text) for text in lines]


@pytest.fixture
def any_kind(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mount], None]:
    return lambda found: monkeypatch.setattr(on_disk, "_mount", lambda _folder: found)


def test_a_disk_gives_back_what_it_was_given_and_keeps_nothing(
    tmp_path: Path, any_kind: Callable[[Mount], None]
) -> None:
    any_kind(Mount("ext4"))
    values = disk_says(tmp_path)[-1]["values"]
    assert (values["bytes"], values["wrong_blocks"]) == (2 << 20, 0)
    assert 0.0 < values["sync_seconds"] <= values["sync_seconds_max"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("found", "size", "said"),
    [(Mount("tmpfs"), 1 << 20, "is kept in memory (tmpfs)"), (Mount("ext4"), 1 << 55, "MiB free")],
)
def test_a_folder_that_says_nothing_of_a_disk_is_not_written(
    tmp_path: Path, any_kind: Callable[[Mount], None], found: Mount, size: int, said: str
) -> None:
    any_kind(found)
    with pytest.raises(on_disk.NoDisk, match=re.escape(said)):
        disk_says(tmp_path, size)


def test_a_folder_that_is_gone_is_no_broken_disk(tmp_path: Path) -> None:
    assert disk_says(tmp_path / "none")[-1]["hardware"] is False


@pytest.mark.parametrize(
    ("options", "kind", "given_up"),
    [
        ("rw,relatime", "ext4 /dev/sda1 ro,errors=remount-ro", True),
        ("rw,relatime", "ext4 /dev/sda1 rw,errors=remount-ro", False),
        ("ro,relatime", "ext4 /dev/sda1 ro", False),
        ("rw,relatime", "squashfs /dev/loop0 ro", False),
    ],
)
def test_only_a_filesystem_that_the_kernel_closed_by_itself_has_given_up(
    options: str, kind: str, given_up: bool
) -> None:
    info = f"20 1 0:5 / /proc rw - proc proc rw\n36 35 8:1 / /var {options} shared:1 - {kind}\nhalf a line\n"
    assert mount(info, "8:1") == Mount(kind.partition(" ")[0], given_up)
    assert mount(info, "9:9") == Mount()


def test_a_line_repeats_its_phase_seldom_and_fits_into_one_write() -> None:
    read, write = os.pipe()
    line = WorkerOutput(3, write)
    for _ in range(1_000):
        line.phase("working")
    line.error(RuntimeError("x" * 10_000 + "\nsecond line"), hardware=False)
    os.close(write)
    with os.fdopen(read, "rb") as lines:
        reported = [json.loads(text) for text in lines]
    assert len(reported) < 100
    assert [each["worker"] for each in reported[:1]] == [3]
    assert len(json.dumps(reported[-1])) < 4_096
    assert reported[-1]["at_s"] <= time.monotonic()
