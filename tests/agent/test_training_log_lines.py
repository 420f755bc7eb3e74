from __future__ import annotations

import gzip
import json
import math
import os
import re
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_eye.agent.training_logs.frameworks import FRAMEWORKS, LogParser, TorchtitanLogParser, expected
from eagle_eye.agent.training_logs.last_words import FailureTable, WordsReader
from eagle_eye.agent.training_logs.line_patterns import BadLinePattern
from eagle_eye.agent.training_logs.lines import (
    LineWriter,
    LogLine,
    LogReading,
    Quiet,
    bar,
    line_at,
    number,
    pairs,
    stamp_s,
    starts_of,
    without_prefixes,
)
from tests.agent.fakes import REPOSITORY

DATA = Path(os.environ["EAGLE_EYE_TEST_DATA"]) if os.environ.get("EAGLE_EYE_TEST_DATA") else None
SAMPLES = REPOSITORY / "tests/data/training_logs"
NO = (None, None, None, None)
# What every sample says: framework, then (step, seconds a step, loss, gradient norm, tokens/s) of each line with any.
EXPECTED: dict[str, tuple[str, list[tuple[object, ...]]]] = {
    "megatron_lm_core_0.14.log": (
        "megatron",
        [
            (410, 2.4107, 4.182733, 0.912, None),
            (420, 2.4106, 4.170015, 0.884, None),
            (430, 2.411, math.nan, math.nan, None),
        ],
    ),
    "megatron_lm_2.7.log": (
        "megatron",
        [(1200, 0.6554, 5.310021, 1.203, None), (1300, 0.6498, 5.270344, 1.178, None)],
    ),
    "megatron_deepspeed.log": ("megatron", [(70, 12.81, 9.004411, 4.31, 639.5), (80, None, None, None, None)]),
    "torchtitan_0.2.log": (
        "torchtitan",
        [
            (1, None, 12.25118, 1.4201, 812.0),
            (10, None, 10.90214, 2.0071, 8190.0),
            (20, None, math.nan, math.nan, 8188.0),
        ],
    ),
    "torchtitan_structured_0.2.jsonl": ("torchtitan", [(5, None, None, None, None), (6, None, None, None, None)]),
    "deepspeed_0.16.log": (
        "",
        [
            (30, None, None, None, None),
            (30, None, None, None, None),
            (40, None, None, None, None),
            (50, 2.512, 3.441, None, None),
        ],
    ),
    "hugging_face_4.57.log": (
        "hugging_face",
        [
            (None, None, 2.3107, 0.8114, None),
            (50, None, None, None, None),
            (55, None, None, None, None),
            (60, None, None, None, None),
            (None, None, math.nan, math.nan, None),
        ],
    ),
    "hugging_face_5.0.log": ("hugging_face", [(None, None, 1.907, 0.5521, None), (50, None, None, None, None)]),
    "nemo_2.4.log": ("nemo", [(7, 6.104, 10.72, None, None), (8, 6.098, 10.55, None, None)]),
    "nemo_1.23.log": ("nemo", [(35, 6.12, 7.81, None, None), (36, 6.11, math.nan, None, None)]),
    "lightning_2.5.log": ("nemo", [(None, None, 1.32, None, None), (None, None, 1.25, None, None)]),
    "nanotron_0.4.log": ("nanotron", [(3, 1.28, 10.4, 5.11, 102e3), (4, 1.27, 10.2, 4.92, 103e3)]),
    "nanotron_0.2.log": ("nanotron", [(12, 0.512, 6.02, 1.7, 64e3)]),
    "composer_0.29.log": (
        "composer",
        [
            (12, None, None, None, None),
            (None, None, 8.4213, None, None),
            (None, None, None, 1.2204, None),
            (None, 2.0, None, None, None),
            (None, None, None, None, 131072.0),
            (13, None, None, None, None),
            (None, None, math.nan, None, None),
        ],
    ),
    "mllog_llm.log": (
        "mllog",
        [
            (None, None, None, None, None),
            (None, None, None, None, None),
            (1, 12.75, 7.6975, None, None),
            (2, 12.8, math.nan, None, None),
            (None, *NO),
        ],
    ),
    "mllog_bert.log": (
        "mllog",
        [(None, None, None, None, None), *((step, None, None, None, None) for step in (196, 391))],
    ),
    "maxtext_2026.log": (
        "maxtext",
        [
            (4, 2.341, 10.877, None, 5249.031),
            (5, 2.339, 10.869, None, 5253.519),
            (6, 2.34, math.nan, None, 5251.274),
        ],
    ),
    "olmo_1.log": (
        "olmo",
        [
            (10, None, None, None, None),
            (None, None, None, 0.9712, None),
            (None, None, 11.27, None, None),
            (None, None, None, None, 9012.0),
            (None, 4.0, None, None, None),
            (20, None, None, None, None),
            (None, None, math.nan, None, None),
        ],
    ),
    "olmo_core_2.log": (
        "olmo",
        [
            (100, None, None, None, None),
            (None, None, None, 0.412, None),
            (None, 2.0, None, None, None),
            (None, None, None, None, 8190.0),
            (None, None, 6.104, None, None),
        ],
    ),
    "nanogpt.log": (
        "nanogpt",
        [
            (0, 31.20411, 10.9886, None, None),
            (10, 0.13512, 9.8031, None, None),
            (20, 0.1353, math.nan, None, None),
        ],
    ),
    "nanogpt_build.log": (
        "nanogpt",
        [(10, 0.33825, 7.412331, 2.884, None), (11, 0.338, 7.290114, 2.6104, None)],
    ),
    "nanogpt_llmc.log": (
        "nanogpt",
        [(10, 0.33825, 7.412331, 2.884, None), (900, 0.3375, 4.290114, 0.6104, None)],
    ),
    "nanogpt_modded.log": ("nanogpt", [(1, None, None, None, None), (2, None, 10.221, None, None)]),
    "litgpt_0.5.log": ("litgpt", [(4, None, 10.523, None, None), (5, None, 10.311, None, None)]),
    "fairseq_json.log": ("fairseq", [(200, 4.0, 12.318, 1.412, None), (400, 4.0, math.nan, math.nan, None)]),
    "fairseq_simple.log": ("fairseq", [(100, 0.4, 14.521, 4.812, None), (200, 0.4, 12.903, 2.201, None)]),
    "verl_0.6.log": ("verl", [(1, 120.5, -0.0021, 0.2514, 1410.2), (2, 119.9, 0.0102, 0.2611, 1417.8)]),
    "verl_sft_0.6.log": ("verl", [(1, None, 1.8123, 2.4101, None), (2, None, 1.7811, 2.2207, None)]),
    "llama_factory_0.9.log": (
        "hugging_face",
        [(None, None, 0.8123, None, None), (None, None, 0.7911, None, None)],
    ),
    "llama_factory_trainer_log.jsonl": ("", [(10, None, 0.7911, None, None), (15, None, 0.7702, None, None)]),
    "trl_grpo_0.24.log": ("hugging_face", [(None, None, 0.0021, 0.3121, None)]),
    "trl_ppo_0.24.log": ("hugging_face", [(None, None, -0.0123, None, None)]),
    "lightning_metrics.csv": (
        "lightning_csv",
        [
            (None, None, None, None, None),
            (49, None, 2.3111, None, None),
            (99, None, 2.1054, None, None),
            (149, None, math.nan, None, None),
        ],
    ),
    "lightning_unknown_length.log": ("nemo", [(None, None, 0.0478, None, None)]),
    "nemo_rl_0.3.log": (
        "nemo_rl",
        [(2, None, None, None, None), (None, None, 0.0123, None, None), (None, 45.67, None, None, None)],
    ),
    "paddlenlp_2.log": ("hugging_face", [(150, None, 0.1856, None, None), (160, None, math.nan, None, None)]),
    "ms_swift_3.log": ("hugging_face", [(295, None, 0.42409496, 3.6537035, None)]),
    "mmengine_0.10.log": ("", [(10, 3.003, 0.9421, None, None), (20, 3.0543, 0.9169, math.nan, None)]),
    "mmcv_1.7.log": ("", [(600, 0.571, 12.8004, 65.12, None), (650, 1.232, 12.115, 42.77, None)]),
    "swin.log": ("", [(1210, 0.4205, 1.9993, 2.1558, None)]),
    "birefnet.log": ("", [(970, None, 21.741, None, None), (990, None, 30.334, None, None)]),
    "paddledetection_2.log": ("", [(720, 0.1664, 4.504654, None, None)]),
    "metric_logger.log": ("", [(2010, 0.4883, 6.9135, None, None)]),
    "timm_1.0.log": ("", [(50, 0.387, 6.95, None, None)]),
    "keras_3.log": ("", [(1920, None, 0.5012, None, None), (3750, None, math.nan, None, None)]),
    "levanter.log": ("", [(1020, None, 5.921, None, None)]),
    "fairseq2.log": ("", [(200, None, 5.0, 0.8, None)]),
    "diffusers.log": ("", [(100, None, 0.123, None, None)]),
    "kohya.log": ("", [(10, None, 0.123, None, None)]),
    "detectron_1.log": ("", [(11000, 0.494551, 0.737872, None, None), (11020, 0.493332, math.nan, None, None)]),
    "detectron2_0.6.log": ("", [(639, 0.3326, 1.194, None, None)]),
    "general.log": ("", [(200, None, 3.3007, 0.79, None), (300, None, math.nan, math.nan, None)]),
    "general.jsonl": ("", [(200, 0.401, 3.3007, 0.79, None)]),
}
# Beginnings that regular expressions might go on from in too many ways.
SLOW = ["step: " * 9_000, "[" * 65_536, "|" * 65_536, " 1%|" + "#" * 65_536, "iteration " * 7_000, "{'a': " * 11_000]
SLOW += [
    "steps: 1 loss: 2 " + "x" * 65_536,
    "Epoch 0: " + "%| " * 20_000,
    "\x1b[" * 32_768,
    "Saving model checkpoint to " * 3,
]
SLOW += ["elapsed time per iteration (" + " | : " * 13_000, "A." * 32_768, " tps: step: " * 6_000, "1," * 32_768]
SLOW += [
    '{"more": ' + "[" * 65_536,
    "step:1 - " + "actor/pg_loss:" * 4_000,
    "| train_inner | epoch " + "loss=1," * 9_000,
]
SLOW += [
    "step 1 | loss 1 (" * 4_000,
    "loss: step: " * 5_000,
    "completed step: 1, seconds: 1, " * 2_000,
    ":::MLLOG {" * 6_000,
]
SLOW += ["step," * 12_000, '| train_inner | {"loss": "1", "wps": "1", ' * 1_500, "1." * 32_768 + "loss: 1.1.1.1"]


def lines_of(name: str) -> list[str]:
    return (SAMPLES / name).read_bytes().decode().replace("\r", "\n").splitlines()


def readings(lines: list[str]) -> list[LogReading]:
    parser = LogParser()
    found = [parser.parse(without_prefixes(line).text) for line in lines]
    return [reading for reading in found if reading is not None]


def test_every_sample_is_expected_and_every_framework_has_one() -> None:
    assert {path.name for path in SAMPLES.iterdir()} == set(EXPECTED)
    named = {name for name, _ in EXPECTED.values()} | {"deepspeed", "general"}
    assert {framework.name for framework in FRAMEWORKS} <= named


@pytest.mark.parametrize("name", EXPECTED)
def test_a_sample_is_recognised_and_says_what_it_says(name: str) -> None:
    framework, expected = EXPECTED[name]
    parser = LogParser()
    found = [parser.parse(without_prefixes(line).text) for line in lines_of(name)]
    values = [
        (said.step, said.step_s, said.loss, said.grad_norm, said.tokens_per_second)
        for said in found
        if said is not None and said.quiet is None
    ]
    assert parser.framework == framework
    assert values == [pytest.approx(item, nan_ok=True) for item in expected]


@pytest.mark.parametrize("name", EXPECTED)
def test_no_line_that_says_something_is_missed_by_the_search(name: str) -> None:
    raw = (SAMPLES / name).read_bytes().replace(b"\r", b"\n")
    parser = LogParser()
    if name == "lightning_metrics.csv":  # whose rows hold nothing but numbers: they are found once the header was read
        parser.parse(lines_of(name)[0])
    found = [line_at(raw, start)[0] for start in starts_of(raw, parser.needles)]
    assert [str(item) for item in readings(found)] == [str(item) for item in readings(lines_of(name))]


@pytest.mark.parametrize("name", EXPECTED)
@pytest.mark.parametrize("prefix", ["\x1b[33m", "12: ", "[rank3]: ", "[default0]:", "(Trainer pid=7, ip=10.0.0.2) "])
def test_colours_and_launchers_change_nothing(name: str, prefix: str) -> None:
    plain = [str(item) for item in readings(lines_of(name))]
    assert [str(item) for item in readings([prefix + line for line in lines_of(name)])] == plain


def test_checkpoints_are_told_by_those_that_say_both_ends() -> None:
    for name in ("megatron_lm_core_0.14.log", "torchtitan_0.2.log", "deepspeed_0.16.log"):
        reported = [said.quiet for said in readings(lines_of(name)) if said.quiet is not None]
        assert reported == [Quiet.CHECKPOINT_BEGIN, Quiet.CHECKPOINT_END]


def test_an_evaluations_bar_is_no_training_step() -> None:
    steps = [said.step for said in readings(lines_of("hugging_face_4.57.log")) if said.step is not None]
    assert steps == [50, 55, 60]
    reported = [said.quiet for said in readings(lines_of("hugging_face_4.57.log")) if said.quiet is not None]
    assert list(dict.fromkeys(reported)) == [Quiet.EVAL_BEGIN, Quiet.EVAL_END, Quiet.CHECKPOINT_BEGIN]


def test_deepspeed_below_another_framework_is_read_beside_it() -> None:
    lines = lines_of("deepspeed_0.16.log")[:1] + lines_of("hugging_face_5.0.log") + lines_of("deepspeed_0.16.log")[2:3]
    assert [said.step for said in readings(lines)] == [30, None, 50, 40]


def test_a_framework_that_is_given_is_the_only_one_read() -> None:
    parser = LogParser(expected("nemo"))
    assert [parser.parse(line) for line in lines_of("megatron_lm_2.7.log")] == [None, None]
    assert parser.parse(lines_of("nemo_2.4.log")[0]) is not None


def test_an_mlperf_log_that_evaluates_is_not_taken_for_hugging_face() -> None:
    parser = LogParser()
    assert parser.parse("{'global_steps': 196, 'eval_loss': 4.041, 'eval_mlm_accuracy': 0.38}") is None
    assert parser.framework == ""


def test_of_an_mlperf_log_without_its_batch_size_no_step_is_told() -> None:
    (said,) = readings([lines_of("mllog_llm.log")[2]])
    assert (said.step, said.step_s, said.loss) == (None, 12.75, 7.6975)


def mllog(time_s: float, key: str, value: object, **metadata: object) -> str:
    entry = {"time_ms": int(1_000 * time_s), "key": key, "value": value, "metadata": metadata}
    return f":::MLLOG {json.dumps(entry)}"


@pytest.mark.parametrize(("per_step", "steps"), [(64, [1, 2, 3]), (64 * 2_048, [2, 3])])
def test_an_mlperf_log_that_counts_tokens_is_told_from_one_that_counts_samples(per_step: int, steps: list[int]) -> None:
    lines = [mllog(0.0, "global_batch_size", 64), mllog(0.0, "max_sequence_length", 2_048)]
    for step in (1, 2, 3):
        stats = {"train_step_timing in s": 10.6}
        lines.append(mllog(100.0 + 10.7 * step, "tracked_stats", stats, step=step * per_step))
    told = [(said.step, said.step_s) for said in readings(lines) if said.step is not None]
    assert told == [(step, 10.6) for step in steps]


@pytest.mark.parametrize("name", ["nanogpt.log", "fairseq_json.log", "mllog_llm.log"])
def test_an_evaluations_end_is_told(name: str) -> None:
    assert Quiet.EVAL_END in [said.quiet for said in readings(lines_of(name))]


@pytest.mark.parametrize(
    "lines",
    [
        ["step: 100, val_loss: 3.1", "step: 200, val_loss: 3.0"],
        ["validation: step=100 loss=3.1", "validation: step=200 loss=3.0"],
        ["timestep 100 closs=3.1", "timestep 200 closs=3.1"],
        ["step_size: 0.1 loss_scale: 65536", "step_size: 0.2 loss_scale: 32768"],
        ["max iter: 100, weight decay 0.1, loss: cross_entropy", "max iter: 200, loss: cross_entropy"],
        ["step=7 loss=3.1", "step=7 loss=3.1", "step=3 loss=3.1"],
        ['{"step": 100, "eval_loss": 3.1}', '{"step": 200, "eval_loss": 3.0}'],
        ['{"step": 1.5, "loss": 3.1}', '{"step": 2.5, "loss": 3.0}'],
    ],
)
def test_what_is_no_training_step_is_not_read_by_the_general_reader(lines: list[str]) -> None:
    assert readings(lines) == []


@pytest.mark.parametrize(
    "wording",
    [
        "step={} loss={}",
        "iter: {}  train_loss: {}",
        "global_step {} | loss {}",
        "'step': '{}', 'loss': '{}'",
        "iteration {} lr=1e-4 Loss: {}",
    ],
)
def test_the_general_reader_knows_several_ways_of_saying_it(wording: str) -> None:
    found = readings([wording.format(step, 3.5) for step in (10, 20, 30)])
    assert [(said.step, said.loss) for said in found] == [(20, 3.5), (30, 3.5)]


@pytest.mark.parametrize(
    "wording",
    ['{{"epoch": {}, "iter": {}, "loss": 3.1, "data_time": 0.1}}', "epoch: {}, step: {}, loss: 3.1, eta: 0:10:00"],
)
def test_steps_that_begin_anew_in_each_epoch_go_on(wording: str) -> None:
    places = [(1, 50), (1, 100), (2, 50), (2, 100), (3, 50)]
    assert [said.step for said in readings([wording.format(*place) for place in places])] == [50, 100, 150, 200, 250]


def test_a_program_that_resumes_from_an_earlier_step_goes_back() -> None:
    places = [(2, 150), (2, 200), (1, 60), (1, 70)]
    lines = [f"epoch: {epoch}, step: {step}, loss: 3.1, eta: 0:10:00" for epoch, step in places]
    assert [said.step for said in readings(lines)] == [150, 200, 60, 70]


def test_a_framework_that_is_recognised_ends_the_general_reading() -> None:
    lines = ["step: 1 loss: 9.0", "step: 2 loss: 8.0", *lines_of("nemo_2.4.log"), "step: 9 loss: 1.0"]
    assert [said.step for said in readings(lines)] == [2, 7, 8]


def test_a_sites_own_pattern_is_read_before_all_others() -> None:
    pattern = r"^\[(?P<step>\d+)\] cost=(?P<loss>\S+) dt=(?P<step_ms>\S+)ms"
    parser = LogParser(expected("", [pattern]))
    said = parser.parse("[120] cost=2.5 dt=400ms")
    assert said is not None
    assert (said.step, said.loss, said.step_s, parser.framework) == (120, 2.5, 0.4, "site")
    raw = b"nothing\n[121] cost=2.4 dt=400ms\n"
    assert [line_at(raw, start)[0] for start in starts_of(raw, parser.needles)][:2] == raw.decode().splitlines()


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        (["("], "no regular expression"),
        (["step (.*)"], "names no group"),
        ([r"(?P<speed>\d+)"], "'speed' is not known"),
        (["x" * 1_001], "1001 characters"),
        ([r"(?P<step>\d+)"] * 17, "17 patterns"),
    ],
)
def test_a_pattern_that_cannot_be_used_is_refused_with_the_reason(patterns: list[str], said: str) -> None:
    with pytest.raises(BadLinePattern, match=re.escape(said)):
        expected("", patterns)


def test_a_pipeline_stage_without_loss_says_none() -> None:
    line = "2026-03-02 08:15:02,250 - root - INFO - step:  1  loss: -1.00000  grad_norm:  1.4  tps: 812"
    (said,) = readings([line])
    assert said.loss is None
    assert said.tokens_per_second == 812.0


def test_megatrons_highest_rank_writes_steps_and_rank_0_checkpoints() -> None:
    said = readings(lines_of("megatron_lm_core_0.14.log"))
    assert [item.writer for item in said] == [
        LineWriter.LAST,
        LineWriter.LAST,
        LineWriter.FIRST,
        LineWriter.FIRST,
        LineWriter.LAST,
    ]


def test_actors_that_count_ranks_of_their_own_are_left_aside() -> None:
    parser = TorchtitanLogParser()
    for step in (1, 2, 3):
        assert (
            parser(f'{{"rank": 0, "source": "generator", "step": {step}, "time_us": 1, "log_type_name": "x"}}') is None
        )


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda item: item.name)
@settings(max_examples=300)
@given(
    text=st.text(max_size=300), cut=st.integers(0, 400), name=st.sampled_from(sorted(EXPECTED)), at=st.integers(0, 50)
)
def test_no_text_and_no_broken_line_raises(framework: object, text: str, cut: int, name: str, at: int) -> None:
    lines = lines_of(name)
    line = lines[at % len(lines)]
    parse = framework.parser()  # type: ignore[attr-defined]
    for candidate in (text, line[:cut] + text, text + line[cut:], line[:cut] + text + line[cut:]):
        said = parse(without_prefixes(candidate).text)
        assert said is None or isinstance(said, LogReading)


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda item: item.name)
@pytest.mark.parametrize("text", SLOW, ids=range(len(SLOW)))
def test_no_line_takes_long_or_raises(framework: object, text: str) -> None:
    def taken_s() -> float:
        parse = framework.parser()  # type: ignore[attr-defined]
        line, _ = line_at(text.encode(), 0)
        begun_s = time.process_time()
        for candidate in (line, " | " + line, line + " tps: 1 it/s 'loss' s/it]"):
            parse(without_prefixes(candidate).text)
            reader = WordsReader()
            for begin in (candidate, "terminate called after throwing an instance of 'E'", candidate, candidate):
                reader.read_line(LogLine(begin))
            FailureTable().read_line(candidate)
            bar(candidate)
        return time.process_time() - begun_s

    assert min(taken_s(), taken_s()) < 0.5  # the collection of thousands of tests' garbage falls into one of them


NUMBERS = st.one_of(
    st.sampled_from(["nan", "NaN", "inf", "-nan", "-inf", "Infinity", "-Infinity"]),
    st.floats(1e-6, 1e9).map(lambda value: f"{value:.4f}"),
    st.floats(1e-30, 1e30).map(lambda value: f"{value:.3e}"),
    st.floats(1e-30, 1e30).map(lambda value: f"{value:.6E}"),
    st.integers(1_000, 10**9).map(lambda value: f"{value:,}"),
    st.floats(1_000, 1e9).map(lambda value: f"{value:,.2f}"),
    st.tuples(st.floats(1, 999), st.sampled_from("kKMGBT")).map(lambda said: f"{said[0]:.2f}{said[1]}"),
    st.integers(0, 10**9).map(str),
)
PLAIN = re.compile(r"(?<![\w.-])-?[0-9]+\.[0-9]+(?:[eE][+-]?[0-9]+)?")  # how the samples write a loss


def written_as(name: str, loss: float, text: str) -> str | None:
    """Return the sample with its one loss written otherwise; None where JSON or CSV allows no such number."""
    raw = "\n".join(lines_of(name))
    places = [found for found in PLAIN.finditer(raw) if float(found[0]) == pytest.approx(loss)]
    assert len(places) == 1, f"{name}: the loss {loss} stands there {len(places)} times"
    before, after = raw[: places[0].start()], raw[places[0].end() :]
    grouped_or_short = number(text) is not None and (text[-1] in "kKMGBT" or "," in text)
    if grouped_or_short and (name.endswith(".csv") or (before.endswith(": ") and '{"' in raw)):
        return None
    return before + text + after


def of_one_loss() -> list[tuple[str, float]]:
    """Return each sample and a loss in it that is written only once, with a point."""
    found = []
    for name, (_, expected_values) in EXPECTED.items():
        raw = "\n".join(lines_of(name))
        losses = [float(str(values[2])) for values in expected_values if values[2] is not None]
        once = [one for one in losses if sum(float(text) == one for text in PLAIN.findall(raw)) == 1]
        if once:
            found.append((name, once[-1]))
    return found


@pytest.mark.parametrize(("name", "loss"), of_one_loss())
@settings(max_examples=60, deadline=None)
@given(text=NUMBERS)
def test_every_number_is_read_in_every_format(name: str, loss: float, text: str) -> None:
    spoiled = written_as(name, loss, text)
    if spoiled is None:
        return
    expected_loss = number(text)
    assert expected_loss is not None
    losses = [said.loss for said in readings(spoiled.splitlines()) if said.loss is not None]
    assert any(one == pytest.approx(expected_loss, nan_ok=True) for one in losses), losses


def test_all_formats_take_part_in_the_test_of_numbers() -> None:
    without_a_loss = {"torchtitan_structured_0.2.jsonl", "mllog_bert.log"}
    assert set(EXPECTED) - {name for name, _ in of_one_loss()} <= without_a_loss


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1.5E-03", 0.0015),
        (" 8,190 ", 8190.0),
        ("1,234,567.5", 1234567.5),
        ("1.02K", 1020.0),
        ("1.2k", 1200.0),
        ("-nan", math.nan),
        ("-3", -3.0),
        (".5", 0.5),
        ("INF", math.inf),
        ("-inf", -math.inf),
        ("NAN", math.nan),
        ("nan.0", math.nan),
        ("1_000", None),
        ("1,23", None),
        ("", None),
        ("K", None),
        ("0x10", None),
        ("1" * 41, None),
        ("\u0663", None),
    ],
)
def test_a_number_is_read_as_logs_write_it(text: str, value: float | None) -> None:
    assert number(text) == pytest.approx(value, nan_ok=True)


def test_pairs_are_read_by_name_with_and_without_colon() -> None:
    fields = pairs(" iteration 1/ 2 | lm loss: 1.5 | LEARNING rate 3.0E-04 | x")
    assert (fields["lm loss"], fields["learning rate"]) == ("1.5", "3.0E-04")


def test_a_lines_own_time_tells_differences_to_the_millisecond() -> None:
    early, late = stamp_s("[titan] 2026-02-28 23:59:59,900 - x"), stamp_s("2026-03-01 00:00:01.150 y")
    assert early is not None
    assert late is not None
    assert late - early == pytest.approx(1.25)
    assert stamp_s("2026-13-41 00:00:00,000") is None
    assert stamp_s("2026-03-01 00:00:01 to the second") is None


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("[rank12]:[E302 08:15:02.1 x.cpp:1] text", LogLine("[E302 08:15:02.1 x.cpp:1] text", rank=12)),
        ("[rank12]:W0302 08:15:02.1 text", LogLine("W0302 08:15:02.1 text", rank=12)),
        ("[rank2]:[titan] text", LogLine("[titan] text", local_rank=2)),
        ("[rank2]:[rank10]: text", LogLine("text", rank=10, local_rank=2)),
        ("[rank12]: text", LogLine("text", rank=12)),
        ("[default3]:text", LogLine("text", local_rank=3)),
        (" 7: text", LogLine("text", task=7)),
        ("7: [default3]:[rank59]: text", LogLine("text", rank=59, local_rank=3, task=7)),
        ("(Trainer pid=41, ip=10.0.0.9) text", LogLine("text", pid=41)),
        ("\x1b[36m(RayTrainWorker pid=41)\x1b[0m text", LogLine("text", pid=41)),
        ("[1,5]<stdout>: text", LogLine("text", rank=5)),
        ("2026-03-02T08:15:02.123456789Z stderr F [rank2]: text", LogLine("text", rank=2)),
        ("[2026-03-02 08:15:02] text", LogLine("[2026-03-02 08:15:02] text")),
        ("text 7: [rank1]: x", LogLine("text 7: [rank1]: x")),
        ("", LogLine("")),
    ],
)
def test_prefixes_are_taken_off_and_tell_whose_line_it_is(line: str, expected: LogLine) -> None:
    assert without_prefixes(line) == expected


@given(st.text(max_size=400))
def test_any_text_has_a_line_without_prefixes(text: str) -> None:
    assert len(without_prefixes(text).text) <= len(text)


@pytest.mark.skipif(DATA is None, reason="EAGLE_EYE_DATA does not name the folder with the MLPerf logs")
@pytest.mark.parametrize(
    ("name", "steps", "losses"),
    [("nvidia_eos_n304_llama31_405b_result_1", 266, 266), ("dell_2xH200_bert_result_0", 16, 0)],
)
def test_real_mlperf_logs_are_read(name: str, steps: int, losses: int) -> None:
    assert DATA is not None
    lines = gzip.decompress((DATA / f"real/mlperf_v5_llm/rawlogs/{name}.txt.gz").read_bytes()).decode().splitlines()
    parser = LogParser()
    found = [said for line in lines if (said := parser.parse(without_prefixes(line).text)) is not None]
    reported = [said.step for said in found if said.step is not None]
    assert parser.framework == "mllog"
    assert (len(reported), len([said for said in found if said.loss is not None])) == (steps, losses)
    assert reported == sorted(set(reported))
