from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_eye.server.ingest.remote_write import wire
from eagle_eye.server.ingest.remote_write.wire import Malformed, Sample, labels
from tests.server.remote_write import requests
from tests.server.remote_write.requests import STALE, Written, field, series, text, v1, v2, varint

READERS = [pytest.param(v1, wire.read_v1, id="1.0"), pytest.param(v2, wire.read_v2, id="2.0")]
Writer = Callable[..., bytes]
Reader = Callable[..., wire.WriteRequest]


words = st.text(min_size=1, max_size=8)
written_series = st.builds(
    Written,
    st.dictionaries(words, words, max_size=3).map(lambda found: {**found, "__name__": "wanted"}),
    st.lists(st.tuples(st.integers(-(2**40), 2**40), st.floats(allow_nan=False)), max_size=3),
)
few = settings(max_examples=25)


@pytest.mark.parametrize(("write", "read"), READERS)
@few
@given(st.lists(written_series, max_size=3))
def test_what_a_sender_wrote_is_read(write: Writer, read: Reader, written: list[Written]) -> None:
    found = read(write(*written), {b"wanted"}, 100)
    assert [labels(one.key) for one in found.series] == [dict(one.labels) for one in written]
    assert [one.samples for one in found.series] == [
        [Sample(round(time_s * 1000), value) for time_s, value in one.samples] for one in written
    ]
    assert found.samples == sum(len(list(one.samples)) for one in written)


@pytest.mark.parametrize(("write", "read"), READERS)
@few
@given(st.lists(written_series, max_size=3))
def test_what_was_read_is_written_as_version_1_and_read_as_it_was(
    write: Writer, read: Reader, written: list[Written]
) -> None:
    found = read(write(*written, series("wanted", STALE, 7.0)), {b"wanted"}, 100)
    again = wire.read_v1(wire.request_v1(found.series), {b"wanted"}, 100)
    assert [(labels(one.key), one.samples) for one in again.series] == [
        (labels(one.key), one.samples) for one in found.series
    ]


@pytest.mark.parametrize(("write", "read"), READERS)
@few
@given(st.data())
def test_a_damaged_message_is_refused_and_nothing_else(write: Writer, read: Reader, data: st.DataObject) -> None:
    whole = bytearray(write(series("wanted", 1.5, 7.0, a="b", instance="n1:9100"), series("other", 2.0, 7.0)))
    for _ in range(data.draw(st.integers(1, 6))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(whole[: data.draw(st.integers(0, len(whole)))])
    with contextlib.suppress(Malformed):
        for one in read(damaged, {b"wanted", b"other"}, 10).series:
            labels(one.key)


@few
@given(st.binary(max_size=200))
def test_any_bytes_are_a_snappy_block_or_refused(content: bytes) -> None:
    with contextlib.suppress(wire.BadSnappy):
        announced = wire.announced_bytes(content)
        if announced <= 10_000:
            assert len(wire.uncompressed(content, announced)) == announced


@few
@given(st.binary(max_size=500))
def test_what_was_compressed_comes_back(content: bytes) -> None:
    block = requests.snappy(content)
    assert wire.uncompressed(block, wire.announced_bytes(block)) == content


def test_a_bomb_is_known_by_its_announcement() -> None:
    assert wire.announced_bytes(varint(4_000_000_000)) == 4_000_000_000


@pytest.mark.parametrize(("write", "read"), READERS)
def test_a_stale_marker_is_no_nan(write: Writer, read: Reader) -> None:
    found = read(write(Written({"__name__": "wanted"}, [(1.0, STALE), (2.0, math.nan)])), {b"wanted"}, 10)
    ended, unknown = found.series[0].samples
    assert ended.value is None
    assert unknown.value is not None
    assert math.isnan(unknown.value)


@pytest.mark.parametrize(("write", "read"), READERS)
def test_series_that_nobody_wants_are_counted_and_not_read(write: Writer, read: Reader) -> None:
    found = read(write(series("wanted", 1.0, 1.0), series("go_goroutines", 9.0, 1.0)), {b"wanted"}, 10)
    assert ([one.name for one in found.series], found.samples, found.unwanted) == (["wanted"], 2, 1)
    many = read(write(*(series(f"name_{number}", 1.0, 1.0) for number in range(40))), {b"wanted"}, 100)
    assert list(many.unwanted_names) == [f"name_{number}".encode() for number in range(wire.UNWANTED_NAMES_MAX)]


@pytest.mark.parametrize(
    ("read", "content"),
    [
        (wire.read_v1, v1(series("wanted", 1.0, 1.0), beside=field(3, b"") + field(4, b"")) + field(3, b"")),
        (wire.read_v2, v2(series("wanted", 1.0, 1.0), beside=field(4, b"") + field(3, b"") + field(5, b""))),
    ],
    ids=["1.0", "2.0"],
)
def test_histograms_exemplars_and_metadata_are_counted(read: Reader, content: bytes) -> None:
    assert dict(read(content, {b"wanted"}, 10).beside) == {"histogram": 1, "exemplar": 1, "metadata": 1}


def test_fields_of_newer_versions_are_passed_over() -> None:
    newer = field(15, b"new") + varint(16 << 3) + varint(300) + varint(17 << 3 | 1) + bytes(8)
    assert wire.read_v1(newer + v1(series("wanted", 1.0, 1.0), beside=newer), {b"wanted"}, 10).samples == 1


WANTED = text(1, "__name__") + text(2, "wanted")
BAD: list[tuple[str, Reader, bytes, str]] = [
    ("a series cut short", wire.read_v1, v1(series("wanted", 1.0, 1.0))[:-3], "truncated"),
    ("a length beyond the end", wire.read_v1, b"\x0a\x7f", "truncated"),
    ("a number without an end", wire.read_v1, b"\xff" * 11, "protobuf"),
    ("a group", wire.read_v1, b"\x0b", "protobuf"),
    ("field 0", wire.read_v1, b"\x02\x00", "protobuf"),
    ("labels after samples", wire.read_v1, field(1, field(2, b"") + field(1, WANTED)), "labels"),
    ("too many series", wire.read_v1, v1(*[series("a", 1.0, 1.0)] * 11), "series_limit"),
    ("too many series of 2.0", wire.read_v2, v2(*[series("a", 1.0, 1.0)] * 11), "series_limit"),
    ("a symbol that is not there", wire.read_v2, text(4, "") + field(5, field(1, b"\x00\x07")), "symbols"),
    ("a name without a value", wire.read_v2, text(4, "") + field(5, field(1, b"\x00")), "labels"),
    ("labels without end", wire.read_v2, text(4, "") + field(5, field(1, bytes(5_000))), "labels"),
]


@pytest.mark.parametrize(("read", "content", "reason"), [pytest.param(*case[1:], id=case[0]) for case in BAD])
def test_what_is_no_message_is_refused_with_a_reason(read: Reader, content: bytes, reason: str) -> None:
    with pytest.raises(Malformed) as refused:
        read(content, {b"wanted"}, 10)
    assert refused.value.reason == reason


@pytest.mark.parametrize(
    "found",
    [field(1, WANTED) * 2, field(1, WANTED) + field(1, text(2, "no name")), field(1, field(1, b"\xff"))],
    ids=["a label twice", "a label without a name", "no UTF-8"],
)
def test_labels_that_may_not_be_are_refused(found: bytes) -> None:
    with pytest.raises(Malformed) as refused:
        labels(found)
    assert refused.value.reason == "labels"


def test_one_long_symbol_named_often_does_not_multiply() -> None:
    references = varint(1) + varint(2) + (varint(3) * 2) * 200
    content = text(4, "") + text(4, "__name__") + text(4, "wanted") + text(4, "x" * 100_000)
    found = wire.read_v2(content + field(5, field(1, references) + field(2, b"")), {b"wanted"}, 10)
    assert (found.series, found.oversized) == ([], 1)


def test_labels_beyond_the_limit_cost_their_series_alone() -> None:
    long = series("wanted", 1.0, 1.0, text="x" * wire.LABEL_BYTES_MAX)
    found = wire.read_v1(v1(long, series("wanted", 1.0, 1.0)), {b"wanted"}, 10)
    assert (len(found.series), found.oversized) == (1, 1)


def test_too_many_samples_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "SAMPLES_MAX", 5)
    with pytest.raises(Malformed, match="more than 5 samples"):
        wire.read_v1(v1(Written({"__name__": "a"}, [(1.0, 1.0)] * 6)), {b"wanted"}, 10)
