"""Writes what an agent of the version at hand says, and what it means, for later versions to be tested against.

``python -m tests.compatibility.recording FOLDER`` writes ``request.bin`` (frames with every metric and every kind of
event of the catalogue), ``datagrams.hex`` (what the training hook said, one datagram a line), the spool's files, and
``meaning.json``: all of it as this version reads it. It imports only what every version has, so that it records earlier
versions, too: with their folders first on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from eagle_eye.agent import hook
from eagle_eye.agent.collector import Drops
from eagle_eye.agent.collectors.training import RankProcess
from eagle_eye.agent.training_hook import message as hook_message
from eagle_eye.agent.transport.spool import Spool
from eagle_eye.schema import events, frame, metrics

NODE = "n1"
BEGIN_S = 1_700_000_000.0
FRAMES = 2
HEARTBEAT_S = 0.1
RECORDED_STREAM = "11111111-1111-4111-8111-111111111111"


def meaning_of(seen: frame.Frame) -> dict[str, Any]:
    """Return all that a frame says, as plain JSON; numbers by scope, row and metric."""
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for item in seen.blocks:
        values = list(frame.values_of(item))
        for column, metric in enumerate(item.metrics):
            for row, key in enumerate(item.keys):
                value = values[column * len(item.keys) + row]
                if not math.isnan(value):
                    rows.setdefault(item.scope.value, {}).setdefault(str(key), {})[metric] = value
    names = ("node", "boot_id", "stream", "sequence", "time_s", "interval_s", "job", "collectors", "dropped")
    return {
        **{name: getattr(seen, name) for name in names},
        "rows": rows,
        "ranks": [{name: getattr(rank, name) for name in rank.__struct_fields__} for rank in seen.ranks],
        "events": [[event.time_s, event.kind, event.device, event.attributes] for event in seen.events],
    }


def heard(datagrams: list[bytes]) -> dict[str, Any]:
    """Return what one training process's datagrams amount to: its rank, its events and the row of all its steps."""
    messages = [hook_message.decode(datagram) for datagram in datagrams]
    process = RankProcess(messages[0], pid=1, device=0, now_s=0.0)
    reported = [event for message in messages for event in process.accept(message, 1.0, BEGIN_S)]
    rank = process.rank(1.0)
    return {
        "row": process.row(1.0),
        "rank": {name: getattr(rank, name) for name in rank.__struct_fields__},
        "events": [[event.kind, event.attributes] for event in reported],
        "goodbye": messages[-1].goodbye,
    }


def _frame(stream: str, sequence: int) -> bytes:
    rows: dict[metrics.Scope, dict[str, float]] = {scope: {} for scope in metrics.Scope}
    for number, spec in enumerate(metrics.METRICS):
        rows[spec.scope][spec.name] = number + sequence / 4
    happened = [
        events.Event(BEGIN_S + sequence, spec.kind, 1, {name: _attribute(name) for name in spec.attributes})
        for spec in events.EVENTS
        if spec.kind != "agent_stop" or sequence == FRAMES
    ]
    device = rows[metrics.Scope.DEVICE]
    return frame.encode_frame(
        frame.Frame(
            version=frame.WIRE_VERSION,
            node=NODE,
            boot_id="b0",
            stream=stream,
            sequence=sequence,
            time_s=BEGIN_S + sequence,
            interval_s=1.0,
            agent_version="0.1.0",
            job="llm",
            ranks=[frame.Rank("llm", 3, 8, 1, attempt=2, pid=77, role="stage-1", silent_s=0.5)],
            blocks=[
                frame.block(metrics.Scope.DEVICE, {0: {**device, "train_loss": math.inf}, 1: {"train_step": 7.0}}),
                frame.block(metrics.Scope.NODE, {-1: rows[metrics.Scope.NODE]}),
                frame.block(metrics.Scope.LINK, {"mlx5_0/1": rows[metrics.Scope.LINK]}),
            ],
            events=happened if sequence != 1 else [],
            collectors={"host": "ok", "nvml": "unsupported: no driver"},
            dropped={"spool_full": sequence},
        )
    )


def _attribute(name: str) -> str | int | bool:
    numbers: dict[str, int | bool] = {"code": 79, "exit_code": -9, "rank": 3, "pid": 77, "attempt": 2, "step": 7}
    return True if name == "goodbye" else numbers.get(name, f"some {name}")


def _spoken() -> list[bytes]:
    """Return the datagrams of a short training that ends in an error."""
    os.environ.update(EAGLE_EYE_JOB="llm", EAGLE_EYE_ATTEMPT="2", RANK="3", WORLD_SIZE="8", LOCAL_RANK="1")
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        path = Path(folder, "hook.sock")
        listener.bind(str(path))
        datagrams: list[bytes] = []
        reader = threading.Thread(target=lambda: datagrams.extend(iter(lambda: listener.recv(1 << 16), b"")))
        reader.start()
        training = hook.attach(socket=path, heartbeat_s=HEARTBEAT_S)
        for loss in (2.5, 2.25, math.nan):
            training.step(loss=loss, grad_norm=1.0, tokens=4096, work_units=2.0, compute_s=0.5, data_wait_s=0.25)
            time.sleep(HEARTBEAT_S)
        with training.phase("eval"):
            time.sleep(HEARTBEAT_S)
        training.detach()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as ending:
            ending.sendto(b"", str(path))
        reader.join()
        return datagrams


def main(folder: Path) -> None:
    """Write the recording."""
    folder.mkdir(parents=True, exist_ok=True)
    raws = [_frame(RECORDED_STREAM, sequence + 1) for sequence in range(FRAMES)]
    body = frame.encode_request(raws, BEGIN_S + FRAMES)
    datagrams = _spoken()
    spool = Spool(folder, NODE, Drops())
    for _ in range(FRAMES):
        spool.append(_frame)
    spool.close()
    (folder / "lock").unlink()
    (folder / "request.bin").write_bytes(body)
    (folder / "datagrams.hex").write_text("".join(f"{datagram.hex()}\n" for datagram in datagrams), encoding="ascii")
    meaning = {"frames": [meaning_of(frame.decode_frame(raw)) for raw in raws], "hook": heard(datagrams)}
    (folder / "meaning.json").write_text(f"{json.dumps(meaning, indent=1, sort_keys=True)}\n", encoding="utf-8")


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("folder", type=Path)
    main(arguments.parse_args().folder)
