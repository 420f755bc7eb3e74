"""What this machine can do: the measures that the figures stand beside."""

from __future__ import annotations

import os
import platform
import socket
import time
from pathlib import Path
from typing import Any

import torch

PIECE_BYTES = 1 << 20


def described() -> dict[str, Any]:
    """Return what it is, and how busy it is now."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "torch": str(torch.__version__),
        "load_average": load_average(),
    }


def load_average() -> list[float]:
    """Return the load averages over 1, 5 and 15 minutes."""
    return [round(value, 2) for value in os.getloadavg()]


class Memcpy:
    """Two buffers whose pages are there, between which so many bytes are copied."""

    def __init__(self, size_bytes: int) -> None:
        self._source = torch.ones(size_bytes, dtype=torch.uint8)
        self._target = torch.zeros(size_bytes, dtype=torch.uint8)

    def seconds(self) -> float:
        """Return how long one copy takes."""
        began_s = time.perf_counter()
        self._target.copy_(self._source)
        return time.perf_counter() - began_s

    def cpu_seconds(self) -> float:
        """Return how much of a core one copy takes: what others do on the core meanwhile does not count."""
        began_s = time.thread_time()
        self._target.copy_(self._source)
        return time.thread_time() - began_s


def send_over_loopback(port: int, size_bytes: int) -> None:
    """Send so many bytes to a listener on this host."""
    data = memoryview(bytearray(PIECE_BYTES))
    with socket.create_connection(("127.0.0.1", port)) as sock:
        for start in range(0, size_bytes, PIECE_BYTES):
            sock.sendall(data[: min(PIECE_BYTES, size_bytes - start)])


def receive_over_loopback(listener: socket.socket, size_bytes: int) -> float:
    """Return how many seconds it takes to receive so many bytes from who connects."""
    buffer = memoryview(bytearray(PIECE_BYTES))
    sock, _ = listener.accept()
    with sock:
        began_s, left = time.perf_counter(), size_bytes
        while left > 0:
            count = sock.recv_into(buffer[: min(PIECE_BYTES, left)])
            if count == 0:
                raise ConnectionError(f"the sender ended with {left} bytes to go")
            left -= count
        return time.perf_counter() - began_s


def forget_cached(folder: Path) -> None:
    """The files of a folder are on the disk, and no longer in the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)


def _processor() -> str:
    with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
        found = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        return next(found, platform.machine())
