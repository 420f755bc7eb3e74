"""What earlier agents, hooks and spools wrote means today what it meant to them; see tests/data/compatibility."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from eagle_eye.agent.collector import Drops
from eagle_eye.agent.transport.spool import Spool
from eagle_eye.agent.transport.spool_disk import ASIDE, EARLIER
from eagle_eye.schema.frame import decode_request, read_frame
from tests.compatibility import recording
from tests.server.builders import FakeClock, acknowledged, running

DATA = Path(__file__).parents[1] / "data" / "compatibility"
ONE_FILE = "9e19a34"  # whose spool is one SQLite file
FILE_A_STREAM = "d690683"


@pytest.fixture(params=[ONE_FILE, FILE_A_STREAM])
def recorded(request: pytest.FixtureRequest) -> Path:
    return DATA / str(request.param)


def meaning(folder: Path) -> Any:
    return json.loads((folder / "meaning.json").read_text(encoding="utf-8"))


def as_json(value: object) -> Any:
    return json.loads(json.dumps(value))


def datagrams(folder: Path) -> list[bytes]:
    return [bytes.fromhex(line) for line in (folder / "datagrams.hex").read_text(encoding="ascii").splitlines()]


def test_the_server_takes_an_earlier_agents_frames_and_sees_the_same_samples(recorded: Path, tmp_path: Path) -> None:
    expected = meaning(recorded)["frames"]
    with running(tmp_path, FakeClock(recording.BEGIN_S + len(expected))) as server:
        answer = server.send((recorded / "request.bin").read_bytes())
        assert acknowledged(answer) == {"accepted": len(expected), "duplicates": 0, "watermark": len(expected)}
        assert as_json([recording.meaning_of(frame) for frame, _, _ in server.watcher.frames]) == expected
        assert server.client.get("/api/v1/nodes").json()["items"][0]["node"] == recording.NODE
        (stored,) = server.dispatcher.services.history.streams()
        assert stored.stream == recording.RECORDED_STREAM


def test_nothing_of_an_earlier_agents_frames_is_unknown(recorded: Path) -> None:
    _, raws = decode_request((recorded / "request.bin").read_bytes())
    assert [read_frame(raw).unknown for raw in raws] == [()] * recording.FRAMES


def test_the_agent_understands_an_earlier_hook(recorded: Path) -> None:
    expected = meaning(recorded)["hook"]
    heard = as_json(recording.heard(datagrams(recorded)))
    assert (heard["events"], heard["goodbye"]) == (expected["events"], expected["goodbye"])
    assert heard["row"].items() >= expected["row"].items()
    assert heard["rank"].items() >= expected["rank"].items()


def test_what_an_earlier_agent_left_in_its_spool_is_sent(tmp_path: Path) -> None:
    shutil.copytree(DATA / FILE_A_STREAM, tmp_path, dirs_exist_ok=True)
    drops = Drops()
    spool = Spool(tmp_path, recording.NODE, drops)
    batch = spool.newest(100, 1 << 20)
    assert batch is not None
    seen = as_json([recording.meaning_of(read_frame(raw).frame) for _, raw in batch.frames])
    assert [each["rows"] for each in seen] == [each["rows"] for each in meaning(DATA / FILE_A_STREAM)["frames"]]
    assert {each["stream"] for each in seen} == {batch.stream}
    assert drops.snapshot() == {}
    spool.close()


def test_a_spool_of_another_kind_is_set_aside_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copy(DATA / ONE_FILE / EARLIER, tmp_path)
    drops = Drops()
    spool = Spool(tmp_path, recording.NODE, drops)
    assert not spool.in_memory
    assert drops.snapshot() == {"spool_earlier_format": 1}
    assert (tmp_path / ASIDE).exists()
    assert EARLIER in caplog.text
    spool.close()


def test_this_version_can_be_recorded_for_later_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("EAGLE_EYE_JOB", "EAGLE_EYE_ATTEMPT", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.setenv(name, "")  # what the recording sets is taken back
    recording.main(tmp_path)
    expected = meaning(tmp_path)
    _, raws = decode_request((tmp_path / "request.bin").read_bytes())
    assert as_json([recording.meaning_of(read_frame(raw).frame) for raw in raws]) == expected["frames"]
    assert as_json(recording.heard(datagrams(tmp_path))) == expected["hook"]
    assert expected["hook"]["rank"].items() >= {"job": "llm", "attempt": 2, "rank": 3, "world_size": 8}.items()
    assert expected["hook"]["row"]["train_step"] == 3.0
