from __future__ import annotations

import io
import os
import tarfile
import threading
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.agent.evidence import source as limits
from eagle_eye.agent.evidence.source import Bundle, BundleManifest, BundleStuck, safe_name


def manifest() -> BundleManifest:
    return BundleManifest(
        node="n1",
        job="j",
        attempt=0,
        kind="evidence",
        agent_version="0",
        begun_s=1.0,
        ended_s=2.0,
        deadline_s=3.0,
        processes=[],
        files=[],
        missing=[],
    )


def unpacked(content: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(content), mode="r:gz") as tar:
        found = {}
        for member in tar.getmembers():
            file = tar.extractfile(member)
            assert file is not None
            found[member.name] = file.read()
        return found


def test_a_bundle_says_what_is_in_it_and_what_is_not() -> None:
    bundle = Bundle("n1", 1.0)
    bundle.add("kernel_log", "n1/kernel.log", b"line\n", cut=True)
    bundle.miss("stacks", "rank-0-pid-7", "py-spy is not installed")
    reported, content = bundle.close(manifest())
    files = unpacked(content)
    assert files["n1/kernel.log"] == b"line\n"
    assert msgspec.json.decode(files["n1/manifest.json"], type=BundleManifest) == reported
    assert [(piece.name, piece.bytes, piece.cut) for piece in reported.files] == [("n1/kernel.log", 5, True)]
    assert [(gap.what, gap.why) for gap in reported.missing] == [("rank-0-pid-7", "py-spy is not installed")]


def test_what_comes_after_the_end_is_let_go() -> None:
    bundle = Bundle("n1", 1.0)
    _, content = bundle.close(manifest())
    bundle.add("late", "n1/late", b"x")
    assert list(unpacked(content)) == ["n1/manifest.json"]


def test_no_bundle_is_larger_than_its_limit_whatever_is_put_in() -> None:
    bundle = Bundle("n1", 1.0, bytes_max=3 << 20)
    for number in range(8):
        bundle.add("noise", f"n1/{number}", os.urandom(700_000))
    reported, content = bundle.close(manifest())
    assert len(content) <= 3 << 20
    assert len(reported.files) >= 2
    assert len(reported.files) + len(reported.missing) == 8
    assert "has no room" in reported.missing[0].why


@pytest.mark.parametrize(
    ("limit", "why"), [("PIECE_BYTES_MAX", "a piece may have"), ("PIECES_MAX", "pieces, which is the most")]
)
def test_a_piece_beyond_a_limit_is_named_as_missing(monkeypatch: pytest.MonkeyPatch, limit: str, why: str) -> None:
    monkeypatch.setattr(limits, limit, 3)
    bundle = Bundle("n1", 1.0)
    for number in range(5):
        bundle.add("source", f"n1/{number}", b"x" * number)
    reported, _ = bundle.close(manifest())
    assert [gap.what for gap in reported.missing] == (["n1/4"] if limit == "PIECE_BYTES_MAX" else ["n1/3", "n1/4"])
    assert why in reported.missing[0].why


def test_two_pieces_of_one_name_do_not_hide_each_other() -> None:
    bundle = Bundle("n1", 1.0)
    bundle.add("one", "n1/x", b"1")
    bundle.add("two", "n1/x", b"2")
    reported, content = bundle.close(manifest())
    assert unpacked(content)["n1/x"] == b"1"
    assert reported.missing[0].why == "another piece has the same name"


def test_reasons_are_bounded_in_number_and_length() -> None:
    bundle = Bundle("n1", 1.0)
    for _ in range(limits.MISSING_MAX + 10):
        bundle.miss("source", "w" * 10_000, "y" * 10_000)
    reported, content = bundle.close(manifest())
    assert len(reported.missing) == limits.MISSING_MAX
    assert len(reported.missing[0].why) == limits.WHY_CHARS_MAX
    assert len(content) < limits.RESERVE_BYTES


def test_a_thread_that_never_lets_go_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LOCK_S", 0.05)
    bundle = Bundle("n1", 1.0)
    held: Any = bundle._lock
    threading.Thread(target=held.acquire, daemon=True).start()
    with pytest.raises(BundleStuck):
        bundle.close(manifest())


@given(st.text(max_size=300))
def test_any_name_becomes_one_harmless_part_of_a_path(text: str) -> None:
    name = safe_name(text)
    assert 0 < len(name) <= limits.NAME_CHARS_MAX
    assert name.isascii()
    assert not name.startswith(".")
    assert not set(name) & set('/\\\0\n "')
