"""Training processes as /proc would show them, and the files that NCCL and PyTorch write for them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle_eye.agent.processes.process_registry import TrainingProcess, TrainingProcesses

HOST = "node-7"


def process(rank: int = 0, world_size: int = 2, pid: int = 0, **changes: Any) -> TrainingProcess:
    fields: dict[str, Any] = {"job": "j", "device": rank, "local_rank": rank}
    return TrainingProcess(pid=pid or 1000 + rank, rank=rank, world_size=world_size, **(fields | changes))


def published(*processes: TrainingProcess) -> TrainingProcesses:
    found = TrainingProcesses()
    found.publish(processes)
    return found


class FakeProc:
    """A /proc with the processes that were told to it; their working folder is ``folder``."""

    def __init__(self, tmp_path: Path) -> None:
        self.path = tmp_path / "proc"
        self.folder = tmp_path / "work"
        self.folder.mkdir()

    def runs(self, pid: int, environ: Mapping[str, str] | None = None, own_pid: int | None = None) -> None:
        at = self.path / str(pid)
        at.mkdir(parents=True, exist_ok=True)
        user = os.geteuid()
        (at / "status").write_text(
            f"Name:\tpython\nUid:\t{user}\t{user}\t{user}\t{user}\nNSpid:\t{pid}\t{own_pid or pid}\n"
        )
        (at / "environ").write_bytes(b"".join(f"{name}={value}\0".encode() for name, value in (environ or {}).items()))
        if not (at / "root").is_symlink():
            (at / "root").symlink_to("/")
            (at / "cwd").symlink_to(self.folder)
            (at / "ns").symlink_to("/proc/self/ns")

    def contains(self, pid: int, root: Path) -> None:
        """Let the process have a root folder of its own."""
        (self.path / f"{pid}/root").unlink()
        (self.path / f"{pid}/root").symlink_to(root)


def inspector_line(sequence: int, kind: str = "AllReduce", **changes: Any) -> bytes:
    """One line as NCCL Inspector v4.0 writes it. ``id``, ``n_ranks`` and ``rank`` go into the header."""
    header = {"id": "0xabc", "comm_name": "DP", "rank": 0, "n_ranks": 8, "nnodes": 1}
    said: dict[str, Any] = {
        "coll": kind,
        "coll_sn": sequence,
        "coll_msg_size_bytes": 1 << 20,
        "coll_exec_time_us": 400,
        "coll_timing_source": "kernel_gpu",
        "coll_algobw_gbs": 50.0,
        "coll_busbw_gbs": 100.0,
    }
    for name, value in changes.items():
        (header if name in header else said)[name] = value
    metadata = {"inspector_output_format_version": "v4.0", "dump_timestamp_us": 1, "hostname": HOST, "pid": 1}
    return json.dumps({"header": header, "metadata": metadata, "coll_perf": said}).encode() + b"\n"


def flight_entry(sequence: int, state: str = "completed", **changes: Any) -> dict[str, Any]:
    """One operation as PyTorch 2.10 of the format writes it."""
    fields: dict[str, Any] = {
        "frames": [{"name": "step", "filename": "train.py", "line": 7}],
        "record_id": sequence,
        "pg_id": 0,
        "process_group": ("0", "default_pg"),
        "collective_seq_id": sequence,
        "p2p_seq_id": 0,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": 1_700_000_000_000_000_000,
        "input_sizes": [[4, 2]],
        "input_dtypes": ["Float"],
        "output_sizes": [[4, 2]],
        "output_dtypes": ["Float"],
        "state": state,
        "retired": state == "completed",
        "timeout_ms": 600_000,
        "is_p2p": False,
    }
    return fields | changes


def flight_dump(*entries: dict[str, Any], ranks: int = 2, enqueued: int = 7, completed: int = 6) -> dict[str, Any]:
    status = {"last_enqueued_collective": enqueued, "last_completed_collective": completed}
    return {
        "version": "2.10",
        "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(ranks)))}},
        "pg_status": {0: status},
        "entries": list(entries),
    }
