from __future__ import annotations

import importlib.util
import math
import os
import socket
import struct
import warnings
import zlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_eye.agent.collector import Drops, Unsupported
from eagle_eye.agent.collectors.tensorboard import (
    ENTER_BYTES,
    LOOK_S,
    SCALAR_BYTES_MAX,
    TAGS,
    TORN_READS_MAX,
    DamagedRecord,
    EventFile,
    Scalar,
    TensorBoardCollector,
    event_files,
    masked_crc,
    next_record,
    read_records,
    reading,
)
from eagle_eye.agent.processes.process_registry import TrainingProcess, TrainingProcesses
from eagle_eye.agent.training_logs.lines import LineWriter, LogReading
from eagle_eye.schema.frame import block
from eagle_eye.schema.metrics import Scope
from tests.agent.fakes import FakeClock

PID = 4_100
MANY = 1_000


def slow_crc32c(data: bytes) -> int:
    """CRC-32C bit by bit, straight from its definition."""
    crc = 0xFFFFFFFF
    for byte in data:
        for bit in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if (crc ^ byte >> bit) & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> int:
    crc = slow_crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def record(data: bytes) -> bytes:
    head = struct.pack("<Q", len(data))
    return head + struct.pack("<I", masked(head)) + data + struct.pack("<I", masked(data))


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def event(step: int, scalars: dict[str, float], time_s: float = 1_000.0, tensor: bool = False) -> bytes:
    values = b""
    for tag, value in scalars.items():
        if tensor:  # as TensorFlow 2 writes them
            held = b"\x08\x01" + field(4, struct.pack("<f", value))
            inner = field(8, held)
        else:
            inner = b"\x15" + struct.pack("<f", value)
        values += field(1, field(1, tag.encode()) + inner)
    return record(b"\x09" + struct.pack("<d", time_s) + b"\x10" + varint(step) + field(5, values))


BEGINNING = record(b"\x09" + struct.pack("<d", 1.0) + field(3, b"brain.Event:2"))


def test_the_checksum_is_crc_32c() -> None:
    assert slow_crc32c(b"123456789") == 0xE3069283  # the check value of CRC-32C, RFC 3720
    assert masked_crc(b"123456789") == masked(b"123456789")
    assert zlib.crc32(b"123456789") != 0xE3069283


@given(st.binary(max_size=200))
def test_the_checksum_of_any_bytes_is_the_definitions(data: bytes) -> None:
    assert masked_crc(data) == masked(data)


@pytest.mark.parametrize("tensor", [False, True])
def test_scalars_are_read_with_tag_step_and_time(tensor: bool) -> None:
    data = BEGINNING + event(7, {"loss": 1.5, "other": math.nan}, 12.5, tensor) + event(-1, {"loss": 2.0}, 13.0, tensor)
    records = read_records(data, 100)
    assert (records.used, records.damaged) == (len(data), 0)
    first, odd, last = records.scalars
    assert first == Scalar("loss", 7, 12.5, 1.5)
    assert math.isnan(odd.value)
    assert last.step == -1


def test_what_else_a_summary_holds_is_passed_over() -> None:
    value = field(1, b"loss") + b"\x15" + struct.pack("<f", 1.5)
    summary = field(1, value) + field(2, value) + b"\x08\x07" + field(9, b"\xff")  # our field, others, a number
    content = b"\x09" + struct.pack("<d", 1.0) + b"\x10" + varint(3) + field(4, field(1, value)) + field(5, summary)
    assert read_records(BEGINNING + record(content), 9).scalars == [Scalar("loss", 3, 1.0, 1.5)]


def test_a_record_that_is_not_complete_yet_waits() -> None:
    data = BEGINNING + event(1, {"loss": 1.0})
    for cut in range(len(BEGINNING), len(data)):
        assert read_records(data[:cut], 100).used == len(BEGINNING)


def test_a_record_with_a_wrong_checksum_is_counted_and_the_next_is_read() -> None:
    broken = bytearray(event(1, {"loss": 1.0}))
    broken[20] ^= 1
    records = read_records(bytes(broken) + event(2, {"loss": 2.0}), 100)
    assert ([scalar.step for scalar in records.scalars], records.damaged) == ([2], 1)


def test_a_wrong_length_is_no_record() -> None:
    broken = bytearray(event(1, {"loss": 1.0}))
    broken[0] ^= 1
    with pytest.raises(DamagedRecord):
        read_records(bytes(broken), 100)


def test_a_large_record_is_stepped_over_unread() -> None:
    image = record(bytes(SCALAR_BYTES_MAX + 1))
    records = read_records(image[:100], 100)
    assert (records.scalars, records.used) == ([], len(image))


def test_the_number_of_records_is_bounded() -> None:
    data = event(1, {"loss": 1.0}) * 10
    assert len(read_records(data, 4).scalars) == 4


def test_a_file_is_entered_midway_at_a_record() -> None:
    data = event(1, {"loss": 1.0}) + event(2, {"loss": 2.0}) + event(3, {"loss": 3.0})
    start = next_record(data, 1)
    assert start == len(event(1, {"loss": 1.0}))
    assert [scalar.step for scalar in read_records(data[start:], 9).scalars] == [2, 3]
    assert next_record(bytes(200_000)) is None


@settings(max_examples=200)
@given(st.binary(max_size=300), st.integers(0, 400))
def test_any_bytes_are_records_or_none(data: bytes, cut: int) -> None:
    next_record(data)
    for candidate in (
        data,
        record(data),
        event(1, {"loss": 1.0})[:cut] + data,
        record(event(3, {"a": 1.0})[12:-4][:cut] + data),
    ):
        try:
            records = read_records(candidate, 10)
        except DamagedRecord:
            continue
        assert all(isinstance(scalar.value, float) for scalar in records.scalars)


def test_every_tag_is_a_field_of_a_reading_and_lower_case() -> None:
    assert all(tag == tag.lower() and item.field in LogReading.__dataclass_fields__ for tag, item in TAGS.items())


def test_a_tag_is_known_by_its_exact_name() -> None:
    assert reading(Scalar("lm loss", 3, 9.0, 2.0)) == LogReading(step=3, loss=2.0, stamp_s=9.0, writer=LineWriter.LAST)
    assert reading(Scalar("elapsed_time_per_iteration_ms", 3, 9.0, 250.0)) == LogReading(
        step=3, step_s=0.25, stamp_s=9.0, writer=LineWriter.FIRST
    )
    assert reading(Scalar("lm loss vs samples", 3_000, 9.0, 2.0)) is None
    assert reading(Scalar("loss", -1, 9.0, 2.0)) is None


def test_a_torn_file_is_read_on_after_the_damage(tmp_path: Path) -> None:
    log, drops = tmp_path / "events", Drops()
    log.write_bytes(event(1, {"loss": 1.0}) + b"\xff" * 40 + event(2, {"loss": 2.0}))
    file = EventFile(log, drops)
    assert [scalar.step for scalar in file.read(MANY)] == [1]
    for _ in range(TORN_READS_MAX + 1):
        assert file.read(MANY) == []
    assert [scalar.step for scalar in file.read(MANY)] == [2]
    assert drops.snapshot() == {"tensorboard_damaged": 1}
    file.close()


def test_a_file_from_before_is_entered_near_its_end(tmp_path: Path) -> None:
    log = tmp_path / "events"
    one = len(event(1, {"loss": 1.0}))
    count = 2 * ENTER_BYTES // one
    log.write_bytes(
        b"".join(event(step, {"loss": 1.0}) for step in range(128)) * (count // 128) + event(77, {"loss": 1.0})
    )
    file = EventFile(log, Drops())
    entered = file.enter()
    assert entered[-1].step == 77
    assert ENTER_BYTES // one - 2 <= len(entered) <= ENTER_BYTES // one
    assert file.read(MANY) == []
    with log.open("ab") as writer:
        writer.write(event(78, {"loss": 1.0}))
    assert [scalar.step for scalar in file.read(MANY)] == [78]
    file.close()


def test_a_large_record_that_is_still_under_way_is_waited_for(tmp_path: Path) -> None:
    log = tmp_path / "events"
    image = record(bytes(SCALAR_BYTES_MAX + 1))
    log.write_bytes(event(1, {"loss": 1.0}) + image[:100])
    file = EventFile(log, Drops())
    assert [scalar.step for scalar in file.read(MANY)] == [1]
    assert file.read(MANY) == []
    with log.open("ab") as writer:
        writer.write(image[100:] + event(2, {"loss": 2.0}))
    assert [scalar.step for scalar in file.read(MANY)] == [2]
    log.write_bytes(event(3, {"loss": 3.0}))
    assert [scalar.step for scalar in file.read(MANY)] == [3]
    file.close()


class Site:
    def __init__(self, tmp_path: Path, clock: FakeClock) -> None:
        self.clock, self.folder, self.drops = clock, tmp_path / "tb", Drops()
        self.folder.mkdir()
        self.processes = TrainingProcesses()
        self.processes.publish([TrainingProcess(PID + rank, "j", rank, 8, rank, rank) for rank in range(8)])
        self.reported: set[int] = set()
        self.agent = TensorBoardCollector(
            self.processes,
            self.drops,
            event_files(str(self.folder), "n1"),
            lambda: self.reported,
            host="gpu-a",
            monotonic_s=clock.monotonic_s,
        )
        self.rows()

    def file(self, name: str, *events: bytes) -> Path:
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab") as writer:
            writer.write(b"".join(events))
        os.utime(file, (self.clock.now_s(), self.clock.now_s()))
        return file

    def rows(self) -> dict[int, dict[str, float]]:
        self.clock.advance(LOOK_S)
        devices = self.agent.collect(self.clock.now_s()).devices
        if devices:
            block(Scope.DEVICE, devices)
        return devices


@pytest.fixture
def site(tmp_path: Path, clock: FakeClock) -> Site:
    return Site(tmp_path, clock)


def test_scalars_become_the_row_of_the_process_that_the_name_says(site: Site) -> None:
    name = f"run1/tb/events.out.tfevents.1700000000.gpu-a.site.org.{PID + 3}.0"
    site.file(name, BEGINNING, event(10, {"train/loss": 2.5, "train/grad_norm": 0.5}, 1_000.0))
    assert site.rows() == {3: {"train_step": 10.0, "train_loss": 2.5, "train_grad_norm": 0.5}}
    site.file(name, event(20, {"train/loss": math.nan}, 1_025.0))
    row = site.rows()[3]
    assert (row["train_step"], row["train_step_seconds"], row["train_loss"]) == (20.0, 2.5, math.inf)


def test_a_file_of_another_host_is_the_ranks_that_writes_such_tags(site: Site) -> None:
    site.file("events.out.tfevents.1700000000.pod-7.1.0", event(10, {"lm loss": 2.0}))
    assert site.rows() == {7: {"train_step": 10.0, "train_loss": 2.0}}
    site.file("a/events.out.tfevents.1700000000.pod-7.1.0.v2", event(12, {"loss": 3.0}, tensor=True))
    assert site.rows()[0] == {"train_step": 12.0, "train_loss": 3.0}


def test_what_was_there_before_is_not_told(tmp_path: Path, clock: FakeClock) -> None:
    (tmp_path / "tb").mkdir()
    old = tmp_path / "tb" / f"events.out.tfevents.1.gpu-a.{PID}.0"
    old.write_bytes(BEGINNING + event(900, {"loss": 1.0}))
    os.utime(old, (clock.now_s(), clock.now_s()))
    (tmp_path / "tb").rename(tmp_path / "kept")
    site = Site(tmp_path, clock)
    site.folder.rmdir()
    (tmp_path / "kept").rename(site.folder)
    site.agent._seen = None
    assert site.rows() == {}
    site.file(old.name, event(910, {"loss": 1.5}))
    assert site.rows() == {0: {"train_step": 910.0, "train_loss": 1.5}}


def test_devices_that_are_told_already_are_left_out(site: Site) -> None:
    site.reported = {3}
    site.file(f"events.out.tfevents.1.gpu-a.{PID + 3}.0", event(10, {"loss": 2.5}))
    assert site.rows() == {}


def test_a_folder_without_event_files_is_named_and_none_is_unsupported(site: Site) -> None:
    assert "no event file below" in site.agent.collect(site.clock.now_s()).problem
    with pytest.raises(Unsupported, match="tensorboard_logs"):
        TensorBoardCollector(site.processes, site.drops, []).collect(0.0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make links of other users")
def test_a_strangers_link_among_event_files_is_refused_counted_and_named(site: Site) -> None:
    secret = site.file("secret", event(10, {"loss": 2.0}))
    link = site.folder / f"events.out.tfevents.1.gpu-a.{PID}.0"
    link.symlink_to(secret)
    os.chown(link, 12_345, 12_345, follow_symlinks=False)
    assert site.rows() == {}
    assert "a link on the way belongs to user 12345" in site.agent.collect(site.clock.now_s()).problem
    assert site.drops.snapshot() == {"tensorboard_refused": 1}


def test_files_that_torch_writes_are_read(tmp_path: Path) -> None:
    if importlib.util.find_spec("tensorboard") is None:
        pytest.skip("needs tensorboard: pip install tensorboard")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the writer's own dependencies
        import torch
        from torch.utils.tensorboard import SummaryWriter

        for new_style in (False, True):
            folder = tmp_path / str(new_style)
            writer = SummaryWriter(str(folder))
            for step in range(5):
                writer.add_scalar("train/loss", 2.0 / (step + 1), step, new_style=new_style)
            writer.add_histogram("weights", torch.arange(10_000.0), 5)
            writer.add_scalar("train/loss", math.nan, 6)
            writer.close()
    for new_style in (False, True):
        (path,) = (tmp_path / str(new_style)).iterdir()
        assert f".{socket.gethostname()}.{os.getpid()}." in path.name
        file = EventFile(path, Drops())
        scalars = file.read(MANY)
        assert [scalar.step for scalar in scalars] == [0, 1, 2, 3, 4, 6]
        assert [scalar.value for scalar in scalars[:2]] == [2.0, 1.0]
        assert math.isnan(scalars[-1].value)
        file.close()
