"""docs/how-to/data-frames.md as its reader types it, against a real server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from eagle_eye.client import Client, ServerEvent
from eagle_eye.schema.frame import Frame, Rank, block
from eagle_eye.schema.metrics import Scope
from eagle_eye.server.store.store import Change
from tests.docs.pages import blocks
from tests.server.builders import FakeClock, body, frame, incident, running

PAGE = "docs/how-to/data-frames.md"
WATTS = {"n1": 300.0, "n2": 500.0}


def sent(node: str, number: int, time_s: float) -> Frame:
    device = {"gpu_power_watts": WATTS[node], "gpu_temperature_celsius": WATTS[node] / 10, "train_step": float(number)}
    ranks = [Rank("JOB", 0, 2, 0)]
    return frame(number, node, time_s, job="JOB", ranks=ranks, blocks=[block(Scope.DEVICE, {0: device})])


def test_each_block_does_what_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("EAGLE_EYE_TOKEN_FILE", raising=False)
    now_s = time.time()
    found: dict[str, Any] = {}
    follow = Client.events
    with running(tmp_path / "data", FakeClock(now_s)) as server:
        for node in WATTS:
            server.send(body(*(sent(node, n, now_s - 600 + 10 * n) for n in range(1, 60)), sent_s=now_s))
        store = server.dispatcher.services.store
        store.commit(Change(incidents=(incident(job="JOB", detected_s=now_s - 60),)))
        monkeypatch.setenv("EAGLE_EYE_SERVER", server.url)

        def until_an_incident(self: Client) -> Iterator[ServerEvent]:
            for event in follow(self, after=0):
                yield event
                if event.kind == "incident":
                    return

        monkeypatch.setattr(Client, "events", until_an_incident)
        python = [block.text for block in blocks(PAGE) if block.language == "python"]
        assert len(python[0].strip().splitlines()) == 5
        for text in python:
            exec(text, found)
    said = capsys.readouterr().out
    assert said.split("\n")[:4] == ["node", "n1    300.0", "n2    500.0", "Name: value, dtype: float64"]
    assert "confirmed n1 hangs\n" in said
    assert f"{len(found['power'])} 2 " in said
    assert said.endswith("watts []\n")
    assert list(found["hottest"].index) == [("n2", 0), ("n1", 0)]
    assert set(found["apart"]["n1", 0].dropna()) == {-10.0}
    assert list(found["incidents"]["id"]) == ["inc_1"]
    parts = pd.concat([pd.read_parquet(file) for file in sorted(tmp_path.glob("part-*.parquet"))])
    assert len(parts) == 2 * 59
    assert set(parts["gpu_power_watts"]) == {300.0, 500.0}
