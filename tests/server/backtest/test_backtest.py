"""The engine over traces on disk: verdict lines, actions, scores; and real traces where they are at hand."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eagle_eye.server.backtest.command import blind_line, configure, run, score_line, upper_bound
from eagle_eye.server.backtest.run import Backtest, BacktestTotals, Scorecard, VerdictLine, poisson_upper
from eagle_eye.server.backtest.trace import BadTrace, Label, Trace
from eagle_eye.server.engine.settings import DetectionSettings, NodeTerms, PolicySettings
from eagle_eye.simulator.scenario import Scenario
from eagle_eye.simulator.simulate import simulate
from eagle_eye.simulator.writer import write

START_S = 1_700_000_000.0


def write_trace(folder: Path, rows: list[dict[str, Any]], labels: list[dict[str, Any]], **header: Any) -> Path:
    folder.mkdir()
    nodes = sorted({row["node"] for row in rows})
    fields = {
        "format": "eagle-eye-trace/1",
        "job": "j",
        "interval_s": 1.0,
        "start": START_S,
        "end": START_S + 120,
        "nodes": [{"node": node, "gpus": 1} for node in nodes],
        "ranks": [{"rank": i, "node": n, "device": 0, "dp": i, "pp": 0, "tp": 0} for i, n in enumerate(nodes)],
    }
    (folder / "trace.json").write_text(json.dumps({**fields, **header}))
    pq.write_table(pa.Table.from_pylist(rows), folder / "samples.parquet")
    (folder / "faults.jsonl").write_text("".join(json.dumps(label) + "\n" for label in labels))
    return folder


def slow_rows(culprit: str = "n1", since: int = 60) -> list[dict[str, Any]]:
    rows = []
    for second in range(1, 121):
        for node in ("n0", "n1", "n2", "n3"):
            slow = node == culprit and second > since
            compute_s = 0.9 if slow else 0.5
            rows.append(
                {
                    "time": START_S + second,
                    "node": node,
                    "device": 0,
                    "train_step": float(second),
                    "train_step_seconds": 1.4 if second > since else 1.0,
                    "train_compute_seconds": compute_s,
                    "nccl_collective_seconds": 1.0 - compute_s,
                    "gpu_never_heard_of": 1.0,
                }
            )
    return rows


SLOW_LABEL = {"start": START_S + 60, "end": START_S + 120, "nodes": ["n1"], "fault": "straggler", "expect": "exclude"}


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    return write_trace(tmp_path / "slow", slow_rows(), [SLOW_LABEL])


def backtest(folder: Path) -> list[VerdictLine]:
    settings = DetectionSettings(straggler_floor_s=10, straggler_ripe_s=20)
    return list(Backtest(Trace(folder), settings, PolicySettings()).run())


def test_names_the_straggler_and_asks_for_its_exclusion(slow: Path) -> None:
    reported, asked = backtest(slow)
    assert {(line.fault, line.node, tuple(line.nodes)) for line in (reported, asked)} == {("straggler", "n1", ("n1",))}
    assert (reported.action, asked.action) == ("notify", "exclude_node")


def test_gives_the_same_verdicts_every_time(slow: Path) -> None:
    assert backtest(slow) == backtest(slow)


def test_the_order_of_rows_does_not_matter(slow: Path, tmp_path: Path) -> None:
    turned = write_trace(tmp_path / "turned", list(reversed(slow_rows())), [SLOW_LABEL])
    here, there = backtest(slow), backtest(turned)
    assert [(v.time, v.node, v.fault) for v in here] == [(v.time, v.node, v.fault) for v in there]


def test_sees_no_row_before_its_time(slow: Path) -> None:
    assert backtest(slow)[0].time >= START_S + 60 + 10


def test_labels_are_scored(slow: Path) -> None:
    trace, card = Trace(slow), Scorecard()
    labels = trace.labels()
    assert labels is not None
    card.add(labels, backtest(slow), 4, 120)
    report = card.report()
    assert report["overall"]["f1"] == 1.0
    assert report["faults"]["straggler"]["hits"] == 1
    assert 10 <= report["overall"]["delay_p50_s"] < 15
    assert 20 <= report["overall"]["action_delay_p50_s"] < 25


def test_a_cancelled_job_raises_nothing(tmp_path: Path) -> None:
    folder = write_trace(tmp_path / "t", slow_rows(), [])
    event = {
        "time": START_S + 50,
        "node": None,
        "device": -1,
        "kind": "job_state",
        "attributes": {"state": "cancelled"},
    }
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
    assert backtest(folder) == []


def restate(folder: Path, **header: Any) -> None:
    file = folder / "trace.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **header}))


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda f: (f / "trace.json").unlink(), "trace is a folder with trace.json"),
        (lambda f: restate(f, interval_s=0.0), "interval_s is 0.0; expected 0.01 to 86400 seconds"),
        (lambda f: restate(f, end=START_S - 1), "end is 1699999999.0, before start, 1700000000.0"),
        (lambda f: (f / "trace.json").write_text("{}"), "format"),
        (lambda f: (f / "samples.parquet").write_bytes(b"PAR1"), "samples.parquet"),
        (lambda f: (f / "faults.jsonl").write_text("{nonsense}\n"), "faults.jsonl:1"),
    ],
)
def test_a_bad_trace_is_named(slow: Path, spoil: Any, complaint: str) -> None:
    spoil(slow)
    with pytest.raises(BadTrace, match=complaint):
        Trace(slow).labels() is None or backtest(slow)


class TestScore:
    label = Label(100.0, 200.0, ["a"], "hang", "exclude")

    def line(self, **changes: Any) -> VerdictLine:
        fields: dict[str, Any] = {
            "id": "v1",
            "trace": "t",
            "time": 110.0,
            "nodes": ["a"],
            "node": "a",
            "device": None,
            "job": "j",
            "fault": "hang",
            "confidence": 1.0,
            "onset": 100.0,
            "action": "exclude_node",
            "detectors": [],
            "summary": "",
            "evidence": [],
        }
        return VerdictLine(**{**fields, **changes})

    def score(self, *lines: VerdictLine) -> dict[str, Any]:
        card = Scorecard()
        card.add([self.label], lines, 10, 86_400)
        return card.report()

    def test_the_right_action_on_the_right_node_in_time_is_a_hit(self) -> None:
        assert self.score(self.line())["overall"]["hits"] == 1

    def test_silence_is_a_miss(self) -> None:
        assert self.score()["overall"]["recall"] == 0.0

    def test_another_node_is_a_miss_and_a_false_exclusion(self) -> None:
        report = self.score(self.line(nodes=["b"], node="b"))
        assert (report["overall"]["hits"], report["false_exclusions"]) == (0, 1)

    def test_an_exclusion_after_the_grace_is_false(self) -> None:
        assert self.score(self.line(time=261.0))["false_exclusions"] == 1

    def test_a_notice_on_the_labelled_node_is_neither_false_nor_wrong(self) -> None:
        overall = self.score(self.line(action="notify"))["overall"]
        assert (overall["false"], overall["wrong_notices"]) == (0, 0)

    def test_notices_on_healthy_nodes_are_wrong(self) -> None:
        lines = [self.line(id=f"v{i}", action="notify", nodes=["b"], time=110.0 + i) for i in range(2)]
        overall = self.score(*lines)["overall"]
        assert (overall["wrong_notices"], overall["false"]) == (2, 0)

    def test_a_notice_about_the_job_is_wrong_only_while_nothing_is(self) -> None:
        assert self.score(self.line(action="notify", nodes=[], node=None))["overall"]["wrong_notices"] == 0
        assert self.score(self.line(action="notify", nodes=[], node=None, time=9.0))["overall"]["wrong_notices"] == 1

    def test_a_verdict_repeated_after_the_fault_is_not_wrong(self) -> None:
        told = self.line(action="notify")
        assert (
            self.score(told, self.line(action="notify", fault="straggler", time=300.0))["overall"]["wrong_notices"] == 0
        )

    def test_a_false_exclusion_is_not_a_wrong_notice_as_well(self) -> None:
        lines = [self.line(action=action, nodes=["b"], node="b") for action in ("notify", "exclude_node")]
        overall = self.score(*lines)["overall"]
        assert (overall["false"], overall["wrong_notices"]) == (1, 0)

    def test_a_drain_of_a_healthy_node_is_wrong(self) -> None:
        report = self.score(self.line(action="drain_node", nodes=["b"], node="b", fault="recurrent_node"))
        assert report["overall"]["wrong_drains"] == 1
        assert report["faults"]["recurrent_node"]["wrong_drains"] == 1

    def test_an_expected_drain_is_a_hit_and_an_exclusion_is_not(self) -> None:
        label = Label(100.0, 200.0, ["a"], "gpu_memory_error", "drain")
        for action, expected in (("drain_node", (1, 0, 0)), ("exclude_node", (0, 1, 0))):
            card = Scorecard()
            card.add([label], [self.line(action=action, fault="gpu_memory_error")], 10, 86_400)
            assert (card.overall.hits, card.overall.false, card.overall.wrong_drains) == expected

    def test_a_hit_under_another_faults_name_is_counted(self) -> None:
        overall = self.score(self.line(fault="straggler"))["overall"]
        assert (overall["hits"], overall["other_name"], overall["other_names"]) == (1, 1, {"straggler": 1})

    def test_the_verdict_in_words_names_what_was_wrong(self) -> None:
        line = score_line(self.score(self.line(fault="straggler"), self.line(id="v2", action="notify", nodes=["b"])))
        assert line.endswith("wrong drains: 0; wrong notices: 1; hits under another fault's name: 1 straggler")

    def test_no_false_exclusion_still_has_an_upper_bound(self) -> None:
        assert poisson_upper(0) == pytest.approx(2.9957, abs=1e-3)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"expect": "exclude_node"}, "expect is 'exclude_node'; expected one of .*; did you mean exclude"),
        ({"expect": "restart_job"}, "did you mean restart"),
        ({"expect": "drain_node"}, "did you mean drain"),
        ({"expect": "notify"}, "did you mean job"),
        ({"expect": "Drain"}, "did you mean drain"),
        ({"expect": "sing"}, "expected one of exclude, restart, drain, job, none$"),
        ({"fault": "stragler"}, "no fault is named 'stragler'; did you mean straggler"),
        ({"fault": "gremlins"}, "no fault is named 'gremlins'; known are switch_down"),
        ({"nodes": ["n11"]}, "the trace has no node 'n11'; did you mean n1"),
        ({"end": START_S + 59}, "before start"),
    ],
)
def test_a_label_that_no_verdict_could_fulfil_is_refused(slow: Path, change: dict[str, Any], complaint: str) -> None:
    (slow / "faults.jsonl").write_text(json.dumps({**SLOW_LABEL, **change}) + "\n")
    with pytest.raises(BadTrace, match=complaint):
        Trace(slow).labels()


def test_the_command_writes_verdicts_and_a_report(slow: Path, tmp_path: Path, capsys: Any) -> None:
    parser = argparse.ArgumentParser()
    configure(parser)
    verdicts, report = tmp_path / "v.jsonl", tmp_path / "r.json"
    assert run(parser.parse_args([str(slow), "--verdicts", str(verdicts), "--report", str(report)])) == 0
    line = msgspec.json.decode(verdicts.read_bytes().splitlines()[0], type=VerdictLine)
    assert line.trace == str(slow)
    reported = json.loads(report.read_text())
    assert reported["overall"]["labelled"] == 1
    assert reported["blind_ratio"]["loss_not_finite"] == 1.0, "a trace without a loss: cannot tell, not healthy"
    assert "straggler" in capsys.readouterr().out


def test_the_table_shows_wrong_words_beside_wrong_actions(slow: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (slow / "faults.jsonl").write_text("")
    heading, row = (line.split() for line in printed(slow, capsys).splitlines() if line.startswith(("fault ", "all")))
    assert heading[1:7] == ["labels", "hits", "name", "false", "drains", "notices"]
    assert row[1:7] == ["0", "0", "0", "1", "0", "0"]


def printed(folder: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    parser = argparse.ArgumentParser()
    configure(parser)
    assert run(parser.parse_args([str(folder), *flags])) == 0
    return capsys.readouterr().out


def test_detectors_that_could_not_tell_take_one_line(slow: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for line in printed(slow, capsys).splitlines() if "could not tell" in line]
    assert [re.sub(r"\d+", "N", line) for line in lines] == [
        "could not tell: N detectors at times, N of them always (-v lists them)"
    ]


def test_the_line_counts_detectors_that_never_could_tell() -> None:
    totals = BacktestTotals(judgements=4, blind=Counter({"a": 4, "b": 1, "c": 3}))
    assert blind_line(totals) == "could not tell: 3 detectors at times, 1 of them always (-v lists them)"


def test_v_lists_each_detector_that_could_not_tell(slow: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(slow, capsys, "-v")
    assert "loss_not_finite could not tell in 100% of " in out
    assert "-v lists them" not in out


def test_a_short_trace_bounds_no_rate(slow: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = " ".join(printed(slow, capsys).split())
    assert "in 0.006 node-days (too short to bound their rate: that takes 3 node-days or more)" in out


def test_three_node_days_bound_the_rate() -> None:
    assert upper_bound(3.0, 998.6) == "95% upper bound 998.6 per 1,000"


def test_progress_moves_within_one_trace(slow: Path) -> None:
    shares: list[float] = []
    list(Backtest(Trace(slow), DetectionSettings(), PolicySettings(), progress=shares.append).run())
    assert len(shares) > 100
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_the_command_says_what_it_left_out(slow: Path, capsys: Any) -> None:
    parser = argparse.ArgumentParser()
    configure(parser)
    event = {"time": START_S + 1, "node": "n1", "device": -1, "kind": "earthquake", "attributes": {}}
    (slow / "events.jsonl").write_text((json.dumps(event) + "\n") * 2)
    assert run(parser.parse_args([str(slow)])) == 0
    assert "left out: event of unknown kind 'earthquake' (2 times)" in capsys.readouterr().err


def real(name: str) -> Path:
    folder = os.environ.get("EAGLE_EYE_TEST_DATA")
    if not folder or not (Path(folder) / "traces" / name).exists():
        pytest.skip("EAGLE_EYE_DATA does not name the folder with the recorded traces")
    return Path(folder) / "traces" / name


def test_the_slow_worker_of_a_production_job_is_excluded_within_five_rows() -> None:
    trace = Trace(real("AR"))
    lines = list(Backtest(trace, DetectionSettings(), PolicySettings()).run())
    excluded = [line for line in lines if line.action == "exclude_node"]
    assert [line.nodes for line in excluded] == [["dp0-pp0"]]
    assert excluded[0].time <= trace.header.start + 5 * trace.header.interval_s


def test_a_long_last_stage_is_nobodys_fault() -> None:
    lines = Backtest(Trace(real("ST")), DetectionSettings(), PolicySettings()).run()
    assert [line for line in lines if line.action in ("exclude_node", "restart_job")] == []


def test_a_traces_gpu_model_reaches_policy(tmp_path: Path) -> None:
    terms = NodeTerms(gpu_models=["NVIDIA GB200"], action="drain_node")
    actions = {}
    for name in ("NVIDIA GB200", "NVIDIA H200"):
        folder = tmp_path / name
        write(simulate(Scenario(fault="gpu_lost", nodes=4, gpus=2, minutes=3, seed=1)), folder)
        header = json.loads((folder / "trace.json").read_text())
        nodes = [{**node, "gpu_model": name} for node in header["nodes"]]
        (folder / "trace.json").write_text(json.dumps({**header, "nodes": nodes}))
        lines = list(Backtest(Trace(folder), DetectionSettings(), PolicySettings(nodes=[terms])).run())
        actions[name] = {line.action for line in lines if line.fault == "gpu_lost"}
    assert actions == {"NVIDIA GB200": {"drain_node"}, "NVIDIA H200": {"exclude_node"}}
