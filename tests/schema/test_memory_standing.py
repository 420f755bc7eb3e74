"""What a store says of how checkpoints stand is read within bounds, whoever wrote it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle_eye.schema.checkpoint_files import (
    JOBS_MAX,
    STANDING_BYTES_MAX,
    STANDING_FILE,
    JobStanding,
    Standing,
    decode_standing,
    encode_standing,
    read_standing,
)

SAID = Standing(
    1.7e9, [JobStanding(job="llm", attempt=2, pids=[41], step=12, whole_step=11, copies=2, copies_wanted=2)]
)


def test_what_is_said_is_what_is_read(tmp_path: Path) -> None:
    (tmp_path / STANDING_FILE).write_bytes(encode_standing(SAID))
    assert read_standing(tmp_path) == SAID


def test_where_there_is_no_store_nothing_is_said(tmp_path: Path) -> None:
    assert read_standing(tmp_path) is None


def test_a_newer_store_may_say_more() -> None:
    said = json.loads(encode_standing(SAID))
    said["jobs"][0]["mood"] = "good"
    assert decode_standing(json.dumps(said).encode()) == SAID


@pytest.mark.parametrize(
    "changes",
    [
        {"attempt": -1},
        {"step": 10**400},
        {"whole_step": 1 << 60},
        {"copies": 1.5},
        {"blocked_s": -0.1},
        {"blocked_s": 1e300},
        {"pids": [1] * 2_000},
        {"pids": [-1]},
        {"job": None},
    ],
    ids=str,
)
def test_numbers_that_can_be_none_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="no store's words"):
        decode_standing(json.dumps({"time_s": 1.0, "jobs": [{"job": "j", "attempt": 0, **changes}]}).encode())


def test_more_jobs_than_a_node_has_are_refused() -> None:
    with pytest.raises(ValueError, match="no store's words"):
        decode_standing(encode_standing(Standing(1.0, [JobStanding(job="j", attempt=0)] * (JOBS_MAX + 1))))


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe", b'{"time_s": NaN, "jobs": []}', b"[" * 5_000])
def test_what_is_no_json_of_ours_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="no store's words"):
        decode_standing(content)


def test_a_file_that_is_too_long_is_not_parsed() -> None:
    with pytest.raises(ValueError, match="262,144 bytes"):
        decode_standing(b" " * (STANDING_BYTES_MAX + 1))
