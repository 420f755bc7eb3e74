"""What control groups leave a store, from files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle_eye.checkpoint import shared_memory
from eagle_eye.checkpoint.shared_memory import DoesNotFit, reserve

GIB = 1 << 30


class Kernel:
    """/proc and /sys/fs/cgroup of a process."""

    def __init__(self, folder: Path) -> None:
        self.proc, self.cgroups = folder / "proc", folder / "cgroup"
        (self.proc / "self").mkdir(parents=True)

    def is_in(self, lines: str) -> None:
        (self.proc / "self/cgroup").write_text(lines)

    def group(self, path: str, limit: str, used_bytes: int, files_bytes: int = 0) -> None:
        """A group of version 2; half of its pages of files are as good as forgotten."""
        folder = self.cgroups / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used_bytes}\n")
        pages = f"anon 5\ninactive_file {files_bytes // 2}\nactive_file {files_bytes - files_bytes // 2}\n"
        (folder / "memory.stat").write_text(f"{pages}workingset_refault_anon 0\n")

    def left_bytes(self) -> int | None:
        return shared_memory.left_bytes(self.proc, self.cgroups)


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


def test_the_tightest_of_the_groups_above_counts(kernel: Kernel) -> None:
    kernel.is_in("0::/checkpoints.slice/store.service\n")
    kernel.group("", "max", 90 * GIB)
    kernel.group("checkpoints.slice", str(64 * GIB), 60 * GIB)
    kernel.group("checkpoints.slice/store.service", str(32 * GIB), 10 * GIB)
    assert kernel.left_bytes() == 4 * GIB


def test_pages_of_files_that_were_written_are_room(kernel: Kernel) -> None:
    kernel.is_in("0::/store\n")
    kernel.group("store", str(8 * GIB), 7 * GIB, files_bytes=3 * GIB)
    assert kernel.left_bytes() == 4 * GIB


def test_in_a_container_the_root_is_its_own_group(kernel: Kernel) -> None:
    kernel.is_in("0::/\n")
    kernel.group("", str(8 * GIB), 6 * GIB)
    assert kernel.left_bytes() == 2 * GIB


def test_the_first_version_says_the_same_in_other_words(kernel: Kernel) -> None:
    kernel.is_in("5:cpu,cpuacct:/\n4:memory:/store\n")
    folder = kernel.cgroups / "memory/store"
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{4 * GIB}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{3 * GIB}\n")
    (folder / "memory.stat").write_text(f"cache 1\ntotal_inactive_file {GIB}\ntotal_active_file 0\n")
    assert kernel.left_bytes() == 2 * GIB


@pytest.mark.parametrize("limit", ["max", str((1 << 63) - 4096)])
def test_no_limit_is_none(kernel: Kernel, limit: str) -> None:
    kernel.is_in("0::/store\n")
    kernel.group("store", limit, GIB)
    assert kernel.left_bytes() is None


def test_more_than_the_limit_leaves_nothing(kernel: Kernel) -> None:
    kernel.is_in("0::/store\n")
    kernel.group("store", str(GIB), 2 * GIB)
    assert kernel.left_bytes() == 0


@pytest.mark.parametrize("lines", ["", "0:\n", "nonsense", "0::/../../etc\n"])
def test_what_is_not_understood_is_no_limit(kernel: Kernel, lines: str) -> None:
    kernel.is_in(lines)
    assert kernel.left_bytes() is None


def test_what_the_limit_has_no_room_for_is_refused_before_the_kernel_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "left_bytes", lambda: 100 << 20)
    with pytest.raises(DoesNotFit, match=r"the store's control group has 104,857,600 bytes free"):
        reserve(tmp_path / "slot", 64 << 20)
    assert not (tmp_path / "slot").exists()
