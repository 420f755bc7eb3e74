from __future__ import annotations

import errno
import mmap
import os
import struct
import tracemalloc
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.agent.collector import Unsupported
from eagle_eye.agent.network import EthtoolStatistics, KernelEthtool, Statistic, link_statistics

GSTRINGS, GSTATS, GSSET_INFO = 0x1B, 0x1D, 0x37


class Driver:
    """The kernel's side: fills the buffer as linux/ethtool.h says."""

    def __init__(self, **statistics: int) -> None:
        self.statistics = statistics
        self.error = 0
        self.asked: list[int] = []
        self.newer = False  # kernels that refuse a number that is not theirs any more

    def __call__(self, interface: str, buffer: mmap.mmap) -> None:
        command = struct.unpack_from("=I", buffer)[0]
        self.asked.append(command)
        if self.error:
            raise OSError(self.error, os.strerror(self.error))
        size = len(self.statistics)
        if command == GSSET_INFO:
            assert struct.unpack_from("=Q", buffer, 8)[0] == 1 << 1
            struct.pack_into("=I", buffer, 16, size)
        elif command == GSTRINGS:
            struct.pack_into("=I", buffer, 8, size)
            for place, name in enumerate(self.statistics):
                struct.pack_into("=32s", buffer, 12 + 32 * place, name.encode())
        else:
            assert command == GSTATS
            if self.newer and struct.unpack_from("=I", buffer, 4)[0] != size:
                size = 0
            struct.pack_into("=I", buffer, 4, size)
            struct.pack_into(f"={size}Q", buffer, 8, *list(self.statistics.values())[:size])


def everything(names: Sequence[str]) -> dict[str, str]:
    return dict.fromkeys(names, "any")


def test_chosen_statistics_are_read_with_their_roles() -> None:
    driver = Driver(rx_packets=1, rx_prio3_pause=2**63, rx_prio3_pause_duration=3, rx_discards_phy=4)
    statistics = EthtoolStatistics(link_statistics, driver).read("eth0")
    assert statistics == [
        Statistic("errors", "rx_discards_phy", 4),
        Statistic("pause_rx", "rx_prio3_pause", 2**63),
    ]


def test_names_are_read_once() -> None:
    driver = Driver(a=1)
    ethtool = EthtoolStatistics(everything, driver)
    for _ in range(3):
        ethtool.read("eth0")
    assert driver.asked == [GSSET_INFO, GSTRINGS, GSTATS, GSTATS, GSTATS]


@pytest.mark.parametrize("newer", [False, True])
def test_names_are_read_again_when_their_number_changes(newer: bool) -> None:
    driver = Driver(a=1)
    driver.newer = newer
    ethtool = EthtoolStatistics(everything, driver)
    ethtool.read("eth0")
    driver.statistics = {"b": 7, "a": 2}
    assert ethtool.read("eth0") == [Statistic("any", "b", 7), Statistic("any", "a", 2)]


def test_a_driver_whose_names_never_stand_still_is_not_observed() -> None:
    class Restless(Driver):
        def __call__(self, interface: str, buffer: mmap.mmap) -> None:
            if struct.unpack_from("=I", buffer)[0] == GSTATS:
                self.statistics[f"more {len(self.statistics)}"] = 0
            super().__call__(interface, buffer)

    assert EthtoolStatistics(everything, Restless(a=1)).read("eth0") == []


@pytest.mark.parametrize("error", [errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM])
def test_a_driver_that_refuses_is_not_asked_again(error: int) -> None:
    driver = Driver(a=1)
    driver.error = error
    ethtool = EthtoolStatistics(everything, driver)
    for _ in range(3):
        with pytest.raises(Unsupported, match=os.strerror(error)):
            ethtool.read("eth0")
    assert len(driver.asked) == 1
    driver.error = 0
    ethtool.forget()
    assert ethtool.read("eth0")


def test_a_failure_is_tried_again() -> None:
    driver = Driver(a=1)
    ethtool = EthtoolStatistics(everything, driver)
    driver.error = errno.ENODEV
    with pytest.raises(OSError, match="No such device"):
        ethtool.read("eth0")
    driver.error = 0
    assert ethtool.read("eth0")


def test_nothing_is_asked_of_a_driver_that_counts_nothing_of_interest() -> None:
    driver = Driver(rx_packets=1)
    ethtool = EthtoolStatistics(link_statistics, driver)
    assert ethtool.read("eth0") == ethtool.read("eth0") == []
    assert GSTATS not in driver.asked


@pytest.mark.parametrize(
    "name",
    [
        "rx_prio3_pause",  # mlx5
        "rx_pause_prio_3",  # mlx4
        "rx_pfc_ena_frames_pri3",  # bnxt_en
        "rx_pfc_frames",
        "rx_priority_3_xoff.nic",  # ice
        "port.rx_priority_3_xoff",  # i40e, old and new
        "port.rx_priority_3_xoff_rx",
        "rx_pb_3_pxoff",  # ixgbe
        "rx_ppp3",  # cxgb4
        "mac_rx_pfc_pri3_pkt_num",  # hns3
        "frames_rx_pripause",  # ionic
    ],
)
def test_pauses_are_known_by_every_drivers_name(name: str) -> None:
    other_way = name.replace("rx", "tx")
    assert link_statistics([name, other_way]) == {name: "pause_rx", other_way: "pause_tx"}


def test_pauses_are_not_counted_twice() -> None:
    names = ["rx_pfc_frames", "rx_pfc_ena_frames_pri0", "rx_pfc_ena_frames_pri3"]
    assert set(link_statistics(names)) == set(names[1:])


@pytest.mark.parametrize(
    "name",
    ["rx_global_pause", "rx_prio3_pause_transition", "rx_prio3_packets", "rx_out_of_buffer", "rx_priority_3_xon.nic"],
)
def test_what_says_nothing_of_a_link_is_left_out(name: str) -> None:
    assert link_statistics([name]) == {}


@given(st.lists(st.text(max_size=40)))
def test_any_names_are_understood_or_left_out(names: list[str]) -> None:
    assert set(link_statistics(names)) <= set(names)


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_any_answer_is_read_or_refused(info: bytes, answer: bytes) -> None:
    def ask(interface: str, buffer: mmap.mmap) -> None:
        new = info if struct.unpack_from("=I", buffer)[0] == GSSET_INFO else answer
        size = min(len(new), len(buffer))
        buffer[:size] = new[:size]

    try:
        statistics = EthtoolStatistics(everything, ask).read("eth0")
    except (Unsupported, OSError):
        return
    assert all(0 <= value < 2**64 for _, _, value in statistics)


def test_room_for_any_drivers_statistics_is_not_taken_from_the_heap() -> None:
    tracemalloc.start()
    try:
        EthtoolStatistics(everything, Driver(a=1)).read("eth0")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 64 << 10


def interfaces() -> list[str]:
    try:
        return sorted(entry.name for entry in Path("/sys/class/net").iterdir())
    except OSError:
        return []


def test_the_kernel_answers_for_this_machines_interfaces() -> None:
    ethtool = EthtoolStatistics(everything)
    answers = {}
    for interface in interfaces():
        try:
            answers[interface] = ethtool.read(interface)
        except (Unsupported, OSError) as error:
            answers[interface] = [Statistic("", str(error), 0)]
    ethtool.close()
    read = {name: found for name, found in answers.items() if found and found[0].role}
    if not read:
        pytest.skip(f"no interface here has statistics: {answers}")
    assert all(statistic.name and statistic.value >= 0 for found in read.values() for statistic in found)


def test_the_kernel_says_that_an_interface_is_not_there() -> None:
    ethtool = KernelEthtool()
    buffer = mmap.mmap(-1, 20)
    struct.pack_into("=IIQI", buffer, 0, GSSET_INFO, 0, 2, 0)
    with pytest.raises(OSError, match="No such device"):
        ethtool("nosuchif0", buffer)
    with pytest.raises(OSError, match="No such device"):
        ethtool("a name that is too long", buffer)
    ethtool.close()
