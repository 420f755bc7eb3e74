from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from eagle_eye.agent.hook import attach
from tests.agent.fakes import script

STEPS = 4_000
STEP_S = 0.002
STOPPED = range(1_000, 2_500)  # three seconds, in which the socket's queue of some ten messages fills and stays full

READER = """
    import json, sys, time
    from pathlib import Path
    from eagle_eye.agent.collectors.training import TrainingCollector
    from eagle_eye.agent.collector import Drops

    collector = TrainingCollector(Path(sys.argv[1]), Drops())
    collector.open()
    print("ready", flush=True)
    ended = False
    while not ended:
        time.sleep(0.2)
        observed = collector.collect(time.time())
        ended = Path(sys.argv[2]).exists()
        events = [(event.kind, event.attributes) for event in observed.events]
        print(json.dumps([observed.devices.get(0, {}), events]), flush=True)
"""


@pytest.mark.slow
def test_a_reader_that_was_stopped_misses_no_step_no_loss_and_no_event(tmp_path: Path) -> None:
    socket, over = tmp_path / "hook.sock", tmp_path / "over"
    with script(READER, str(socket), str(over)) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "ready\n"
        training = attach(socket=socket)
        begin_s = time.perf_counter()
        for number in range(1, STEPS + 1):
            if number == STOPPED.start:
                reader.send_signal(signal.SIGSTOP)
            if number == STOPPED.stop:
                reader.send_signal(signal.SIGCONT)
            if number in {500, 1_500, 1_501, 2_000}:
                with training.phase("checkpoint"):
                    pass
            training.step(loss=float(number))
            time.sleep(max(0.0, begin_s + number * STEP_S - time.perf_counter()))
        unsent = training._sender.unsent if training._sender is not None else 0
        training.detach()
        time.sleep(0.5)  # for the reader to have a last look after the goodbye
        over.touch()
        lines, _ = reader.communicate(timeout=60)
    seen = [json.loads(line) for line in lines.splitlines()]
    rows = [row for row, _ in seen if "train_step" in row]
    events = [event for _, each in seen for event in each]

    assert unsent > 10  # the reader was stopped indeed
    assert rows[-1]["train_step"] == STEPS
    weighted, before = 0.0, 0.0
    for row in rows:
        weighted += row["train_loss"] * (row["train_step"] - before)
        before = row["train_step"]
    assert weighted == pytest.approx(sum(range(1, STEPS + 1)), rel=1e-9)
    checkpoints = [(kind, attributes["step"]) for kind, attributes in events if kind.startswith("checkpoint")]
    assert checkpoints == [
        (kind, step) for step in (499, 1_499, 1_500, 1_999) for kind in ("checkpoint_begin", "checkpoint_end")
    ]
    phases = [attributes["name"] for kind, attributes in events if kind == "phase"]
    assert phases == ["start", "train", *["checkpoint", "train"] * 4]
