from __future__ import annotations

import platform
import subprocess
import sys

import pytest

# The first block teaches glibc's own limit. Each thread then frees what it took, but for a block at its heap's end.
PEAKS = """
import os, sys, threading
from eagle_eye.agent.command import share_heap

def resident_bytes():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def peak():
    blocks = [bytearray(block_bytes) for _ in range(blocks_max)]
    kept.append(bytearray(100 << 10))
    del blocks
    over.release()
    end.wait()

how, block_bytes, blocks_max = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if how == "shared":
    assert share_heap()
kept, over, end = [], threading.Semaphore(0), threading.Event()
bytearray(8 << 20)
before_bytes = resident_bytes()
for _ in range(8):
    threading.Thread(target=peak).start()
    over.acquire()
print(resident_bytes() - before_bytes)
end.set()
"""


def left_bytes(how: str, block_bytes: int, blocks: int) -> int:
    command = [sys.executable, "-c", PEAKS, how, str(block_bytes), str(blocks)]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return int(ran.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries cannot be told")
@pytest.mark.parametrize(("block_bytes", "blocks"), [(4 << 20, 1), (100 << 10, 40)])
def test_of_eight_threads_peaks_less_than_two_stay(block_bytes: int, blocks: int) -> None:
    assert left_bytes("shared", block_bytes, blocks) < 8 << 20 < left_bytes("as it comes", block_bytes, blocks)
