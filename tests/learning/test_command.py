"""The command from traces to a file, the file's checks, and the server that uses it."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from eagle_eye.cli.main import main
from eagle_eye.detectors.signs.learned_model import LearnedModel
from eagle_eye.learning import training
from eagle_eye.learning.features import read as read_history
from eagle_eye.learning.model import make
from eagle_eye.server.engine.settings import DetectionSettings
from eagle_eye.server.site_files import (
    BadModel,
    ModelDocument,
    ModelFile,
    ModelMetadata,
    read_learned_model,
    write_learned_model,
)
from tests.detectors.tiny_model import tiny_model
from tests.learning.builders import START_S, Fleet

HOURS = 3.0


@pytest.fixture(scope="module", autouse=True)
def soon() -> Iterator[None]:
    """Train for a few epochs only: what is tested here is not how well a model does."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "make", functools.partial(make, epochs=4))
        yield


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Fleet(seed=1, nodes=10, gpus=1, hours=HOURS).write(tmp_path_factory.mktemp("traces") / "healthy")


@pytest.fixture(scope="module")
def trained(trace: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("models") / "site.model"
    assert main(["train", str(trace), "--out", str(out)]) == 0
    return out


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    write_learned_model(tmp_path / "tiny.model", tiny_model(), ModelMetadata(created_s=0.0))
    return tmp_path / "tiny.model"


def changed(path: Path, **fields: Any) -> Path:
    document = msgspec.msgpack.decode(path.read_bytes(), type=ModelDocument)
    path.write_bytes(msgspec.msgpack.encode(msgspec.structs.replace(document, **fields)))
    return path


class TestTrain:
    def test_the_file_says_what_was_learned_from_what(self, trained: Path, trace: Path) -> None:
        model, metadata = read_learned_model(trained)
        assert (model.gpus_per_node, model.gpu_models, model.interval_s) == ((1,), ("H100",), 10.0)
        assert model.node_days == pytest.approx(10 * (HOURS - 0.25) / 24, rel=0.05)
        assert metadata.options["traces"] == [str(trace)]
        assert metadata.report["left_out"]["start of an attempt"] > 0

    def test_show_prints_it(self, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["train", "--show", str(trained), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["job"] == "j"

    def test_a_refresh_learns_as_before_and_replaces_the_file(
        self, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        copy = tmp_path / "copy.model"
        copy.write_bytes(trained.read_bytes())
        assert main(["train", "--refresh", str(copy), "--json"]) == 0
        reported = json.loads(capsys.readouterr().out)
        assert reported["before"]["seen"] == reported["check"]["seen"]  # the same history: neither better nor worse
        assert [p.name for p in tmp_path.iterdir()] == ["copy.model"]

    def test_a_refresh_that_fails_leaves_the_file_as_it_is(
        self, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        copy = tmp_path / "copy.model"
        copy.write_bytes(trained.read_bytes())
        assert main(["train", str(tmp_path / "absent"), "--refresh", str(copy)]) == 1
        assert copy.read_bytes() == trained.read_bytes()
        assert "absent" in capsys.readouterr().err

    @pytest.mark.parametrize(
        "arguments",
        [["TRACE"], ["--out", "m"], ["--out", "m", "--server", "http://x"], ["TRACE", "--out", "m", "--refresh", "n"]],
    )
    def test_wrong_usage_is_one_line_and_code_2(
        self, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        write_learned_model(tmp_path / "n", tiny_model(), ModelMetadata(created_s=0.0))
        assert main(["train", *arguments]) == 2
        assert capsys.readouterr().err.count("\n") == 1

    def test_a_server_that_is_not_there_is_one_line_and_code_1(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        arguments = ["--server", "http://127.0.0.1:1", "--job", "j", "--out", str(tmp_path / "m")]
        assert main(["train", *arguments]) == 1
        assert "cannot be reached" in capsys.readouterr().err

    @pytest.mark.parametrize("flag", ["--since", "--until"])
    def test_a_wrong_time_is_wrong_usage_before_anybody_is_asked(
        self, flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        arguments = ["--server", "http://127.0.0.1:1", "--job", "j", "--out", str(tmp_path / "m"), flag, "yesterday"]
        assert main(["train", *arguments]) == 2
        assert f"{flag}: expected RFC 3339" in capsys.readouterr().err

    def test_what_was_labelled_a_fault_is_left_out(self, tmp_path: Path) -> None:
        label = {
            "start": START_S + 3600,
            "end": START_S + 5400,
            "nodes": ["n1"],
            "fault": "straggler",
            "expect": "exclude",
        }
        folder = Fleet(seed=1, nodes=4, gpus=1, hours=2).write(tmp_path / "t", [label])
        history = read_history([folder], DetectionSettings())
        sick = history.times_s[history.node == history.nodes.index("n1")]
        assert not ((sick > START_S + 3600) & (sick < START_S + 5400)).any()
        assert history.left_out["labelled fault"] > 20
        assert len(history.times_s[history.node == 0]) > len(sick)


class TestFile:
    def test_reads_what_was_written(self, tiny: Path) -> None:
        model, _ = read_learned_model(tiny)
        values = np.random.default_rng(0).normal(size=(5, 12)).astype(np.float32)
        assert np.array_equal(model.scores(values), tiny_model().scores(values))
        assert model == read_learned_model(tiny)[0]

    def test_another_format_is_refused_with_the_remedy(self, tiny: Path) -> None:
        with pytest.raises(BadModel, match=r"eagle-eye-model/9.*train again"):
            read_learned_model(changed(tiny, format="eagle-eye-model/9"))

    @pytest.mark.parametrize("content", [b"", b"\x80\x04pickle", b"\x81\xa6format\xa1x"])
    def test_anything_else_is_refused(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "m").write_bytes(content)
        with pytest.raises(BadModel):
            read_learned_model(tmp_path / "m")

    def test_metrics_of_another_program_are_refused(self, tiny: Path) -> None:
        document = msgspec.msgpack.decode(tiny.read_bytes(), type=ModelDocument)
        with pytest.raises(BadModel, match="flux_capacitor"):
            read_learned_model(changed(tiny, metrics=["flux_capacitor", *document.metrics[1:]]))

    def test_indexes_that_point_outside_are_refused(self, tiny: Path) -> None:
        document = msgspec.msgpack.decode(tiny.read_bytes(), type=ModelDocument)
        left = document.arrays["forest_left"]
        bad = msgspec.structs.replace(left, data=np.array([99, 1, 2], "<i4").tobytes())
        with pytest.raises(BadModel, match="forest_left"):
            read_learned_model(changed(tiny, arrays={**document.arrays, "forest_left": bad}))

    def test_arrays_of_another_size_are_refused(self, tiny: Path) -> None:
        document = msgspec.msgpack.decode(tiny.read_bytes(), type=ModelDocument)
        bad = msgspec.structs.replace(document.arrays["centre"], shape=(2, 3), data=bytes(24))
        with pytest.raises(BadModel, match="centre"):
            read_learned_model(changed(tiny, arrays={**document.arrays, "centre": bad}))

    def test_a_missing_file_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(BadModel, match="No such file"):
            read_learned_model(tmp_path / "absent")


class TestRunningServer:
    def test_takes_a_new_file_once(self, tiny: Path) -> None:
        file = ModelFile(tiny, lambda: None)
        assert isinstance(file.poll(), LearnedModel)
        assert file.poll() is None

    def test_tells_of_a_bad_file_once_and_takes_the_good_one_after_it(self, tiny: Path) -> None:
        failures: list[int] = []
        file = ModelFile(tiny, lambda: failures.append(1))
        file.poll()
        good = tiny.read_bytes()
        tiny.write_bytes(b"broken")
        assert isinstance(file.poll(), BadModel)
        assert file.poll() is None
        tiny.write_bytes(good)
        assert isinstance(file.poll(), LearnedModel)
        assert len(failures) == 1

    def test_says_once_that_the_file_is_gone(self, tmp_path: Path) -> None:
        file = ModelFile(tmp_path / "absent", lambda: None)
        assert isinstance(file.poll(), BadModel)
        assert file.poll() is None

    def test_backtest_uses_the_configured_model(
        self, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        fleet = Fleet(seed=3, nodes=10, gpus=1, hours=1).drift("n5", START_S + 1800, memory=0.3, dram=0.3)
        folder = fleet.write(tmp_path / "drift")
        # A model of so short a history dares little: more alarms are allowed than by default.
        settings = f'[detection]\nmodel = "{trained}"\nlearned_alarms_per_1000_node_days = 100.0\n'
        (tmp_path / "c.toml").write_text(settings)
        assert main(["backtest", str(folder), "--config", str(tmp_path / "c.toml"), "--json"]) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        found = [line for line in lines if line.get("fault") == "node_anomaly"]
        assert [(line["node"], line["action"]) for line in found] == [("n5", "notify")]

    def test_backtest_with_a_bad_model_is_wrong_configuration(
        self, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "c.toml").write_text('[detection]\nmodel = "/absent.model"\n')
        assert main(["backtest", str(trace), "--config", str(tmp_path / "c.toml")]) == 2
        assert "detection.model" in capsys.readouterr().err


def test_a_server_uses_the_model_and_keeps_it_when_the_file_turns_bad(tiny: Path) -> None:
    from eagle_eye.server.site_files import ModelFile, keep_model_current
    from eagle_eye.server.telemetry.counters import Telemetry

    used: list[LearnedModel | str] = []
    telemetry = Telemetry()

    async def story() -> None:
        file = ModelFile(tiny, telemetry.model_errors.inc)
        task = asyncio.create_task(keep_model_current(file, used.append, poll_s=0.01))
        await until(lambda: bool(used))
        await asyncio.to_thread(tiny.write_bytes, b"broken")
        await until(lambda: b"eagle_eye_model_errors_total 1.0" in telemetry.text())
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def until(happened: Callable[[], bool]) -> None:
        for _ in range(2_000):
            if happened():
                return
            await asyncio.sleep(0.01)
        pytest.fail("it did not happen within 20 s")

    asyncio.run(story())
    assert [type(one) for one in used] == [LearnedModel]
