from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle_eye.agent.nvml.simulation import compiled
from tests.agent.simulated_gpus import Host, Hosts, Seen, needs_compiler, uuid

pytestmark = needs_compiler

OTHERS = set(range(8)) - {3}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("library") / "cache")


@pytest.fixture
def host(library: Path, tmp_path: Path) -> Iterator[Hosts]:
    hosts = Hosts(library, tmp_path)
    yield hosts
    hosts.end()


def back(gpus: Host) -> Seen:
    """Collect until all GPUs are there again: the call that hung returns when it likes."""
    for _ in range(100):
        seen = gpus.collect(0.0)
        if len(seen.rows) == 8:
            return seen
        time.sleep(0.01)
    raise AssertionError(seen.problem)


def test_a_gpu_that_hangs_costs_neither_the_others_nor_the_agent(host: Hosts) -> None:
    gpus = host()
    assert len(gpus.collect().rows) == 8
    gpus.says("hang 3")
    first = gpus.collect()
    assert first.rows.keys() == OTHERS
    assert first.took_s < 0.8
    second = gpus.collect(11.0)
    assert second.rows.keys() == OTHERS
    assert second.took_s < 0.1
    assert re.fullmatch("gpu 3: no answer for 1[23] s", second.problem)
    gpus.says()
    assert back(gpus).problem == ""


def test_a_gpu_that_hangs_for_long_holds_one_thread(host: Hosts) -> None:
    gpus = host("hang 3")
    gpus.collect()
    threads = gpus.collect().threads
    assert {gpus.collect().threads for _ in range(20)} == {threads}


def test_when_all_gpus_hang_each_is_named(host: Hosts) -> None:
    gpus = host()
    gpus.collect()
    gpus.says(*(f"hang {row}" for row in range(8)))
    for _ in range(3):
        seen = gpus.collect()
        assert seen.took_s < 0.8
    assert seen.rows == {}
    assert re.findall(r"gpu (\d): no answer for \d s", seen.problem) == list("01234567")
    assert seen.threads <= 2 + 8 + 1
    gpus.says()
    assert back(gpus).problem == ""


def test_a_slow_gpu_is_neither_left_out_nor_called_silent(host: Hosts) -> None:
    gpus = host("slow 3 250")
    for _ in range(3):
        seen = gpus.collect()
        assert len(seen.rows) == 8
        assert seen.problem == ""


def test_a_gpu_that_hangs_when_the_agent_starts_keeps_no_other_out(host: Hosts) -> None:
    gpus = host("hang 3")
    assert gpus.collect().rows.keys() == OTHERS
    second = gpus.collect(11.0)
    assert second.rows.keys() == OTHERS
    assert second.took_s < 0.1
    assert re.fullmatch("gpu 3: opening it: no answer for 1[12] s", second.problem)
    gpus.says()
    assert back(gpus).problem == ""


def test_the_collector_closes_while_a_gpu_hangs(host: Hosts) -> None:
    gpus = host()
    gpus.collect()
    gpus.says("hang 3")
    gpus.collect()
    begin_s = time.monotonic()
    gpus.close_collector()
    assert time.monotonic() - begin_s < 1.0


def test_one_failing_reading_is_named_and_costs_itself_alone(host: Hosts) -> None:
    gpus = host("gpus 2", "flaky 1")
    seen = gpus.collect()
    assert "gpu_temperature_celsius" not in seen.rows[1]
    assert "gpu_power_watts" in seen.rows[1]
    assert seen.problem == "gpu 1: temperature: Unknown Error"
    gpus.says("gpus 2")
    assert "gpu_temperature_celsius" in gpus.collect().rows[1]


def test_nvmls_word_that_a_gpu_is_lost_is_a_problem_and_no_event(host: Hosts) -> None:
    gpus = host()
    gpus.collect()
    gpus.says("lost 3")
    seen = [gpus.collect() for _ in range(10)]
    assert {frozenset(one.rows) for one in seen} == {frozenset(OTHERS)}
    assert {one.problem for one in seen} == {"gpu 3: utilization: GPU is lost"}
    assert [event for one in seen for event in one.events] == []


@pytest.mark.parametrize("config", [b"\xff\xff\xff\xff", b""], ids=["silent", "removed"])
def test_a_gpu_that_has_left_the_bus_is_told_lost_once(host: Hosts, config: bytes) -> None:
    gpus = host()
    gpus.collect()
    gpus.says("lost 3")
    gpus.on_the_bus(3, config)
    events = [event for _ in range(8) for event in gpus.collect().events]
    assert events == [[1000.0, "gpu_lost", 3, {"uuid": uuid(3)}]]


def test_a_gpu_that_hangs_and_has_left_the_bus_is_told_lost(host: Hosts) -> None:
    gpus = host()
    gpus.collect()
    gpus.says("hang 3")
    gpus.on_the_bus(3, b"\xff\xff\xff\xff")
    events = [event for _ in range(8) for event in gpus.collect().events]
    assert [event[1:3] for event in events] == [["gpu_lost", 3]]


def test_the_only_gpu_of_a_host_is_told_lost_too(host: Hosts) -> None:
    gpus = host("gpus 1")
    gpus.collect()
    gpus.says("gpus 1", "lost 0")
    gpus.on_the_bus(0, b"")
    assert [event[1:3] for _ in range(8) for event in gpus.collect().events] == [["gpu_lost", 0]]


def test_a_reset_during_which_the_bus_is_silent_is_no_loss(host: Hosts) -> None:
    gpus = host()
    gpus.collect()
    gpus.says("lost 3")
    gpus.on_the_bus(3, b"\xff\xff\xff\xff")
    events = [*gpus.collect().events, *gpus.collect().events, *gpus.collect().events]
    gpus.on_the_bus(3)
    gpus.collect()
    gpus.on_the_bus(3, b"\xff\xff\xff\xff")
    events += gpus.collect().events
    assert events == []


def test_where_the_kernel_never_showed_the_bus_no_gpu_is_told_lost(host: Hosts) -> None:
    gpus = host()
    gpus.on_the_bus(3, b"")
    gpus.collect()
    gpus.says("lost 3")
    assert [event for _ in range(8) for event in gpus.collect().events] == []


def test_a_gpu_that_vanishes_from_the_list_leaves_the_others_their_rows(host: Hosts) -> None:
    gpus = host("throttle 5")
    gpus.collect()
    gpus.says("throttle 5", "lost 3")
    gpus.collect()
    gpus.says("throttle 5", "absent 3")
    gpus.collect(70.0)  # the library is opened anew
    seen = gpus.collect()
    assert seen.rows.keys() == OTHERS
    assert seen.rows[5]["gpu_sm_clock_hertz"] == 1.2e9
    assert seen.problem == "gpu 3: no longer in NVML's list"
    gpus.says("throttle 5")
    gpus.collect(130.0)
    assert gpus.collect().problem == ""


def test_for_a_gpu_that_stays_lost_the_library_is_opened_anew_ever_more_seldom(host: Hosts) -> None:
    gpus = host()
    gpus.collect()
    gpus.says("lost 3")
    gpus.collect()
    # Activity needs a reading before: where it is missing, the library has just been opened.
    opened = ["gpu_sm_active_ratio" not in gpus.collect(30.5).rows[0] for _ in range(16)]
    assert [index for index, anew in enumerate(opened) if anew] == [1, 5, 13]


def test_gpus_that_come_later_are_found(host: Hosts) -> None:
    gpus = host("gpus 1")
    assert gpus.collect().rows.keys() == {0}
    (gpus.sys / "bus/pci/drivers/nvidia/0000:11:00.0").mkdir(parents=True)
    gpus.says("gpus 2")
    assert gpus.collect(6.0).rows.keys() == {0, 1}
    assert gpus.devices_by_uuid() == {uuid(0): 0, uuid(1): 1}


def test_a_driver_that_is_loaded_later_is_found_without_a_restart(host: Hosts) -> None:
    gpus = host("init 9")
    first = gpus.collect()
    assert first.raised == "CollectFailed"
    assert first.problem == "opening NVML: Driver Not Loaded; tried again every 10 s"
    gpus.says("gpus 2")
    assert gpus.collect().raised == "CollectFailed"
    assert gpus.collect(10.0).rows.keys() == {0, 1}


def test_a_host_whose_gpus_are_not_there_yet_is_asked_again(host: Hosts) -> None:
    gpus = host("gpus 0")
    seen = gpus.collect()
    assert (seen.raised, seen.problem) == ("CollectFailed", "opening NVML: no GPU is listed; tried again every 10 s")
    gpus.says("gpus 2")
    assert gpus.collect(10.0).rows.keys() == {0, 1}


def test_a_host_without_the_library_is_unsupported(tmp_path: Path) -> None:
    if Path("/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1").exists():
        pytest.skip("this machine has NVIDIA's library")
    hosts = Hosts(None, tmp_path)
    seen = hosts().collect()
    hosts.end()
    assert (seen.raised, seen.problem) == (
        "Unsupported",
        "no usable libnvidia-ml.so.1: NVML Shared Library Not Found",
    )


def test_xids_are_told_with_their_gpu_where_the_kernel_log_cannot_be_read(host: Hosts) -> None:
    gpus = host("xid 1 13 1")
    assert gpus.collect().events == []  # of before the agent: nobody was registered
    gpus.says("xid 1 13 1", "xid 3 79 2", "xid 5 48 3")
    events = gpus.collect().events
    assert [[kind, row, attributes["code"]] for _, kind, row, attributes in events] == [["xid", 3, 79], ["xid", 5, 48]]
    assert all(event[0] == pytest.approx(1000.0, abs=0.5) for event in events)
    assert gpus.collect().events == []


def test_an_xid_that_repeats_is_told_once_and_then_counted(host: Hosts) -> None:
    gpus = host()
    gpus.collect()
    gpus.says(*(f"xid 3 31 {serial}" for serial in range(1, 51)))
    (first,) = gpus.collect().events
    assert "until then" not in first[3]["text"]
    (rest,) = gpus.collect(120.0).events
    assert rest[3]["text"].endswith("(49 more until then)")


def test_no_xid_is_told_twice_where_the_kernel_log_is_read(host: Hosts) -> None:
    gpus = host()
    gpus.collect()
    gpus.kernel_log_is_read(True)
    gpus.says("xid 3 79 1")
    assert gpus.collect().events == []
    gpus.kernel_log_is_read(False)
    assert gpus.collect().events == []
    gpus.says("xid 3 79 1", "xid 3 48 2")
    assert [event[3]["code"] for event in gpus.collect().events] == [48]


@pytest.mark.parametrize(
    ("line", "after_s", "device", "what"),
    [
        ("lost 3", 61.0, 3, "gpu_lost"),
        ("answers 3 16", 61.0, 3, "gpu_reset_required"),
        ("recovery 3 1", 6.0, 3, "gpu_reset_required"),
        ("recovery 3 2", 6.0, 3, "gpu_reboot_required"),
        ("fabric 3 3 999", 6.0, 3, "fabric_failed"),
    ],
)
def test_what_nvml_states_of_a_gpu_is_told_once_it_lasts(
    host: Hosts, line: str, after_s: float, device: int, what: str
) -> None:
    gpus = host("recovery 3 0", "fabric 3 3 0")
    gpus.collect()
    gpus.says(line)
    told = [event for at in (10.0, after_s, 1.0) for event in gpus.collect(at).events]
    assert [(kind, row, said["what"]) for _, kind, row, said in told] == [("host_error", device, what)]


def test_a_gpu_that_the_driver_cannot_open_is_told_by_its_place(host: Hosts) -> None:
    gpus = host("closed 3 999")
    assert not [event for event in gpus.collect().events if event[1] == "host_error"]
    (event,) = [event for event in gpus.collect(61.0).events if event[1] == "host_error"]
    assert event[2:] == [-1, {"what": "gpu_unusable", "device": "gpu 3", "text": "NVML: gpu 3: Unknown Error"}]


def test_a_recovery_action_without_a_known_meaning_is_a_problem(host: Hosts) -> None:
    assert "unknown recovery action, 0x5" in host("recovery 3 5").collect().problem


def test_a_gpu_that_has_not_joined_its_fabric_is_a_problem(host: Hosts) -> None:
    assert "gpu 3: it has not joined its NVLink fabric" in host("fabric 3 2 0").collect().problem
