"""What the copies take: arithmetic that is spelled out, and a refusal where it is too much."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.checkpoint.shared_memory import DoesNotFit, check_fits, plan_memory, reported, size_bytes

GIB = 1 << 30


@pytest.mark.parametrize(
    ("replicas", "kept", "persists", "spelled"),
    [
        (2, 2, True, "2 copies x (2 kept + 1 arriving + 1 persisting) x 3.0 GiB = 24.0 GiB"),
        (2, 2, False, "2 copies x (2 kept + 1 arriving) x 3.0 GiB = 18.0 GiB"),
        (1, 1, False, "1 copy x (1 kept + 1 arriving) x 3.0 GiB = 6.0 GiB"),
    ],
)
def test_the_arithmetic_is_spelled_out(replicas: int, kept: int, persists: bool, spelled: str) -> None:
    assert str(plan_memory(3 * GIB, replicas, kept, persists=persists)) == spelled


@given(st.integers(1, 1 << 50), st.integers(1, 8), st.integers(1, 8), st.booleans())
def test_every_copy_of_every_checkpoint_that_is_held_counts(
    size: int, replicas: int, kept: int, persists: bool
) -> None:
    assert plan_memory(size, replicas, kept, persists=persists).total_bytes == size * replicas * (kept + 1 + persists)


def test_steps_that_reach_further_back_take_two_more() -> None:
    plan = plan_memory(3 * GIB, 2, 2, persists=True, reach_s=600.0)
    assert str(plan) == "2 copies x (2 kept + 2 spaced + 1 arriving + 1 persisting) x 3.0 GiB = 36.0 GiB"


@pytest.mark.parametrize("reach_s", [-1.0, math.inf, math.nan])
def test_a_reach_that_is_no_time_is_refused(reach_s: float) -> None:
    with pytest.raises(ValueError, match="reach: expected seconds, 0 or more, got"):
        plan_memory(GIB, 2, 2, persists=True, reach_s=reach_s)


def test_what_just_fits_fits() -> None:
    check_fits(plan_memory(3 * GIB, 2, 2, persists=True), 24 * GIB)


def test_too_little_memory_is_refused_with_the_arithmetic_what_is_free_and_what_to_do() -> None:
    message = re.escape(
        "2 copies x (2 kept + 1 arriving + 1 persisting) x 3.0 GiB = 24.0 GiB, but 16.0 GiB are free:"
        " keep fewer checkpoints, hold fewer copies, or spread the job's state over more nodes"
    )
    with pytest.raises(DoesNotFit, match=message):
        check_fits(plan_memory(3 * GIB, 2, 2, persists=True), 16 * GIB)


@pytest.mark.parametrize(
    ("size", "replicas", "kept", "message"),
    [
        (0, 2, 2, "shard_bytes: expected 1 or more, got 0"),
        (1, 0, 2, "replicas: expected 1 or more, got 0"),
        (1, 2, 0, "kept: expected 1 to 100, got 0"),
        (1, 2, 101, "kept: expected 1 to 100, got 101"),
    ],
)
def test_what_holds_nothing_is_refused(size: int, replicas: int, kept: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_memory(size, replicas, kept, persists=True)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1048576", 1_048_576),
        ("512B", 512),
        ("3GiB", 3 * GIB),
        ("3G", 3 * GIB),
        ("1.5 MiB", 1_572_864),
        ("500MB", 500_000_000),
        ("2TB", 2_000_000_000_000),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, size: int) -> None:
    assert size_bytes(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1G", "1e9", "3 Gib", "1,5G", "9" * 40, "٣G"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a size such as 3GiB, 500MB or 1048576, got"):
        size_bytes(text)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (3 * GIB, "3.0 GiB"), (1 << 52, "4096.0 TiB")],
)
def test_sizes_are_told_in_the_largest_unit_of_which_there_is_one(size: int, text: str) -> None:
    assert reported(size) == text
