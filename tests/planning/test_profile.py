"""Profiles: what is read, and what is refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle_eye.planning.files import read_profile, sums
from eagle_eye.schema.configuration import ConfigurationError
from tests.planning.jobs import GIB, document, profile, written


def test_a_file_by_hand_is_read(tmp_path: Path) -> None:
    read = read_profile(Path(written(tmp_path, document(3))))
    assert (len(read.layers), read.micro_batch, read.device) == (3, 1, "H100")
    assert read.layers[2].state_bytes == 3 * GIB


def test_the_documents_profile_is_read(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "planning.md").read_text(encoding="utf-8")
    (tmp_path / "profile.json").write_text(page.partition("```json\n")[2].partition("```")[0])
    assert read_profile(tmp_path / "profile.json").layers[0].name == "Block"


def test_gradients_take_what_parameters_do() -> None:
    assert sums(profile(2)).held_bytes == [0, 4 * GIB, 8 * GIB]


def without(key: str) -> object:
    found = document(3)
    del found["layers"][1][key]  # type: ignore[index]
    return found


def numbered(*numbers: int) -> object:
    found = document(len(numbers))
    for each, number in zip(found["layers"], numbers, strict=True):  # type: ignore[call-overload]
        each["layer"] = number
    return found


@pytest.mark.parametrize(
    ("file", "said"),
    [
        (document(3) | {"format": "eagle-eye-trace/1"}, r"eagle-eye-trace/1"),
        (document(3) | {"layers": []}, r"layers: expected 1 to 1000, got 0"),
        (document(3) | {"micro_batch": 0}, r"micro_batch: expected 1 to 1000000 samples, got 0"),
        (without("backward_s"), r"backward_s.*layers"),
        (numbered(0, 1, 4, 5), r"layers: missing 2, 3; each from 0 on is needed"),
        (numbered(0, 2, 1), r"layers\[1\]\.layer: expected 1, got 2"),
        (numbered(0, 1, 10**9), r"layers: missing 2, 3, 4, 5, 6, 7, 8, 9 and 990 more"),
        (numbered(0, 1, -1), r"layers\[2\]\.layer: expected 2, got -1"),
        (document(3, forward_s=-0.1), r"layers\[2\]\.forward_s: expected 0 to 86400 s, got -0\.1"),
        (document(3, activation_bytes=-1), r"layers\[2\]\.activation_bytes: expected 0 to \d+ bytes, got -1"),
        (document(3, parameter_bytes=1 << 60), r"layers\[2\]\.parameter_bytes: expected 0 to"),
        (document(3, speed=1), r"unknown field `speed`.*layers"),
        (document(1, forward_s=0, backward_s=0), r"none of them takes any time"),
    ],
    ids=lambda value: value if isinstance(value, str) else "file",
)
def test_a_bad_profile_is_refused_by_what_is_wrong_with_it(tmp_path: Path, file: object, said: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^--profile: .*{said}") as refused:
        read_profile(Path(written(tmp_path, file)))
    assert "\n" not in str(refused.value)


def test_a_file_without_end_is_not_read() -> None:
    with pytest.raises(ConfigurationError, match="/dev/zero is larger than"):
        read_profile(Path("/dev/zero"))
