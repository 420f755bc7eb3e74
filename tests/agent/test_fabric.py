from __future__ import annotations

import errno
import mmap
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_eye.agent.collector import CollectFailed, Observed, Unsupported
from eagle_eye.agent.collectors.network_ports import ELSEWHERE_S, FILE_NAME, REMEMBER_S, FabricCollector, Total, rate
from eagle_eye.agent.network import Attributes
from eagle_eye.schema.metrics import BY_NAME, Scope
from tests.agent.fakes import FakeClock

IB_COUNTERS = (
    "port_xmit_data", "port_rcv_data", "symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors",
    "local_link_integrity_errors", "excessive_buffer_overrun_errors", "port_xmit_discards", "VL15_dropped",
    "port_rcv_remote_physical_errors", "port_xmit_wait",
)  # fmt: skip
MLX5_COUNTERS = (
    "out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "rnr_nak_retry_err", "req_cqe_error",
    "roce_slow_restart", "np_cnp_sent", "np_ecn_marked_roce_packets", "rp_cnp_handled", "lifespan",
)  # fmt: skip


class Machine:
    """A /sys of our own, and the drivers that answer ethtool."""

    def __init__(self, root: Path) -> None:
        self.sys = root / "sys"
        self.folder = root / "state"
        self.statistics: dict[str, dict[str, int]] = {}
        self.ethtool_error = errno.EOPNOTSUPP
        self.asked = 0
        (self.sys / "class/net").mkdir(parents=True)

    def set(self, path: str, value: object) -> None:
        file = self.sys / "class" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{value}\n")

    def hardware(self, address: str) -> Path:
        folder = self.sys / "devices/pci0000:00" / address
        folder.mkdir(parents=True, exist_ok=True)
        driver = self.sys / "bus/pci/drivers/nic"
        driver.mkdir(parents=True, exist_ok=True)
        if not (folder / "driver").exists():
            (folder / "driver").symlink_to(driver)
        return folder

    def rdma(self, device: str, address: str, layer: str = "InfiniBand", port: int = 1, up: bool = True) -> None:
        base = f"infiniband/{device}/ports/{port}"
        self.set(f"{base}/link_layer", layer)
        self.set(f"{base}/rate", "400 Gb/sec (4X NDR)")
        for name in IB_COUNTERS:
            self.set(f"{base}/counters/{name}", 0)
        for name in MLX5_COUNTERS:
            self.set(f"{base}/hw_counters/{name}", 0)
        link = self.sys / "class/infiniband" / device / "device"
        if not link.exists():
            link.symlink_to(self.hardware(address))
        self.turn(device, up=up, port=port)

    def interface(self, name: str, address: str = "", up: bool = True, kind: int = 1) -> None:
        self.set(f"net/{name}/type", kind)
        self.set(f"net/{name}/dev_port", 0)
        self.set(f"net/{name}/operstate", "up" if up else "down")
        self.set(f"net/{name}/carrier", int(up))
        self.set(f"net/{name}/carrier_changes", 1)
        self.set(f"net/{name}/carrier_down_count", 0)
        for statistic in ("rx_bytes", "tx_bytes", "rx_crc_errors", "rx_frame_errors", "tx_carrier_errors"):
            self.set(f"net/{name}/statistics/{statistic}", 0)
        if address:
            (self.sys / "class/net" / name / "device").symlink_to(self.hardware(address))
            (self.hardware(address) / "net" / name).mkdir(parents=True)

    def turn(self, device: str, *, up: bool, port: int = 1) -> None:
        self.set(f"infiniband/{device}/ports/{port}/state", "4: ACTIVE" if up else "1: DOWN")
        self.set(f"infiniband/{device}/ports/{port}/phys_state", "5: LinkUp" if up else "3: Disabled")

    def remove(self, path: str, address: str = "") -> None:
        shutil.rmtree(self.sys / "class" / path)
        if address:
            shutil.rmtree(self.sys / "devices/pci0000:00" / address)

    def ask(self, interface: str, buffer: mmap.mmap) -> None:
        self.asked += 1
        if interface not in self.statistics:
            raise OSError(self.ethtool_error, os.strerror(self.ethtool_error))
        command, values = struct.unpack_from("=I", buffer)[0], self.statistics[interface]
        if command == 0x37:
            struct.pack_into("=I", buffer, 16, len(values))
        elif command == 0x1B:
            struct.pack_into("=I", buffer, 8, len(values))
            for place, name in enumerate(values):
                struct.pack_into("=32s", buffer, 12 + 32 * place, name.encode())
        else:
            struct.pack_into(f"=I{len(values)}Q", buffer, 4, len(values), *values.values())

    def collector(self, clock: FakeClock, **options: Any) -> FabricCollector:
        options = {"folder": self.folder, "sys": self.sys, "ask": self.ask, "monotonic_s": clock.monotonic_s, **options}
        made = FabricCollector(**options)
        _made.append(made)
        return made


_made: list[FabricCollector] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Give the open files back: other tests wait with select(), which knows the first 1,024 only."""
    yield
    while _made:
        _made.pop().close()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """An InfiniBand port, an unused one, a RoCE port with its interface, a plain interface, and what is none."""
    made = Machine(tmp_path)
    made.rdma("mlx5_0", "0000:1a:00.0")
    made.rdma("mlx5_1", "0000:3a:00.0", up=False)
    made.rdma("mlx5_2", "0000:5e:00.0", layer="Ethernet")
    made.interface("ib0", "0000:1a:00.0", kind=32)
    made.interface("eth2", "0000:5e:00.0")
    made.interface("eno1", "0000:02:00.0")
    for name in ("lo", "bond0", "veth12ab", "docker0"):
        made.interface(name)
    made.statistics["eth2"] = {"rx_packets": 5, "rx_prio3_pause": 0, "tx_prio3_pause": 0, "rx_discards_phy": 0}
    return made


def again(collector: FabricCollector, clock: FakeClock, seconds: float = 1.0) -> Observed:
    clock.advance(seconds)
    return collector.collect(clock.now_s())


def test_links_are_the_physical_ports_in_use(machine: Machine, clock: FakeClock) -> None:
    seen = machine.collector(clock).collect(clock.now_s())
    assert {name: row["link_up"] for name, row in seen.links.items()} == {"mlx5_0": 1.0, "mlx5_2": 1.0, "eno1": 1.0}
    assert seen.problem == ""


def test_the_first_collection_has_no_rates(machine: Machine, clock: FakeClock) -> None:
    seen = machine.collector(clock).collect(clock.now_s())
    assert not [name for row in (*seen.links.values(), seen.node) for name in row if name.endswith("_per_second")]
    assert seen.links["mlx5_0"] == {"link_up": 1.0, "link_errors_total": 0.0, "link_downed_total": 0.0}


def test_infiniband_counts_words_of_four_bytes(machine: Machine, clock: FakeClock) -> None:
    collector = machine.collector(clock)
    collector.collect(clock.now_s())
    machine.set("infiniband/mlx5_0/ports/1/counters/port_rcv_data", 2**40)
    machine.set("infiniband/mlx5_0/ports/1/counters/port_xmit_data", 500)
    seen = again(collector, clock, 100.0)
    assert seen.links["mlx5_0"]["link_rx_bytes_per_second"] == seen.node["node_rdma_rx_bytes_per_second"] == 2**42 / 100
    assert seen.links["mlx5_0"]["link_tx_bytes_per_second"] == seen.node["node_rdma_tx_bytes_per_second"] == 20.0


def test_wide_counters_go_before_narrow_ones(machine: Machine, clock: FakeClock) -> None:
    for name in ("port_rcv_data", "port_xmit_data"):
        machine.set(f"infiniband/mlx5_0/ports/1/counters/{name}", 2**32 - 1)
        machine.set(f"infiniband/mlx5_0/ports/1/counters_ext/{name}_64", 0)
    collector = machine.collector(clock)
    collector.collect(clock.now_s())
    machine.set("infiniband/mlx5_0/ports/1/counters_ext/port_rcv_data_64", 1000)
    assert again(collector, clock).links["mlx5_0"]["link_rx_bytes_per_second"] == 4000.0


def test_a_narrow_counter_at_its_end_is_not_observed(machine: Machine, clock: FakeClock) -> None:
    machine.set("infiniband/mlx5_0/ports/1/counters/port_rcv_data", 2**32 - 1)
    collector = machine.collector(clock)
    collector.collect(clock.now_s())
    row = again(collector, clock).links["mlx5_0"]
    assert "link_rx_bytes_per_second" not in row
    assert "link_tx_bytes_per_second" in row


def test_a_roce_link_carries_what_bypasses_the_host_and_what_does_not(machine: Machine, clock: FakeClock) -> None:
    collector = machine.collector(clock)
    collector.collect(clock.now_s())
    machine.set("infiniband/mlx5_2/ports/1/counters/port_xmit_data", 250)
    machine.set("net/eth2/statistics/tx_bytes", 10)
    seen = again(collector, clock)
    assert seen.links["mlx5_2"]["link_tx_bytes_per_second"] == 1010.0
    assert seen.node["node_rdma_tx_bytes_per_second"] == 1000.0


def test_a_roce_link_is_not_observed_by_half(machine: Machine, clock: FakeClock) -> None:
    collector = machine.collector(clock)
    collector.collect(clock.now_s())
    machine.set("net/eth2/statistics/tx_bytes", "N/A")
    row = again(collector, clock).links["mlx5_2"]
    assert "link_tx_bytes_per_second" not in row
    assert row["link_rx_bytes_per_second"] == 0.0


def test_pauses_are_those_of_the_interface(machine: Machine, clock: FakeClock) -> None:
    collector = machine.collector(clock)
    collector.collect(clock.now_s())
    machine.statistics["eth2"].update(rx_prio3_pause=8, tx_prio3_pause=2)
    seen = again(collector, clock, 2.0)
    assert seen.links["mlx5_2"]["link_pfc_rx_pause_packets_per_second"] == 4.0
    assert seen.links["mlx5_2"]["link_pfc_tx_pause_packets_per_second"] == 1.0
    assert seen.node["node_pfc_rx_pause_packets_per_second"] == 4.0
    assert "link_pfc_rx_pause_packets_per_second" not in seen.links["mlx5_0"]


def test_the_links_own_errors_and_those_of_the_transport_are_kept_apart(machine: Machine, clock: FakeClock) -> None:
    collector = machine.collector(clock)
    collector.collect(clock.now_s())
    base = "infiniband/mlx5_0/ports/1"
    for number, name in enumerate(IB_COUNTERS[2:] + MLX5_COUNTERS):
        folder = "counters" if name in IB_COUNTERS else "hw_counters"
        machine.set(f"{base}/{folder}/{name}", 10**number if number < 12 else 7)
    machine.set("net/eth2/statistics/rx_crc_errors", 3)
    machine.statistics["eth2"]["rx_discards_phy"] = 2
    seen = again(collector, clock)
    assert seen.links["mlx5_0"]["link_errors_total"] == 1111011.0  # all but link_downed and the last three
    assert seen.links["mlx5_0"]["link_downed_total"] == seen.node["node_rdma_link_downed_total"] == 100.0
    assert seen.node["node_rdma_errors_total"] == 10**10 + 10**11 + 7 + 7
    assert seen.node["node_congestion_notifications_total"] == 14.0
    assert seen.links["mlx5_2"]["link_errors_total"] == 5.0


@pytest.mark.parametrize("count", ["carrier_down_count", "carrier_changes"])
def test_an_ethernet_port_counts_how_often_its_carrier_went(machine: Machine, clock: FakeClock, count: str) -> None:
    if count == "carrier_changes":
        for name in ("eth2", "eno1"):
            (machine.sys / f"class/net/{name}/carrier_down_count").unlink()
    collector = machine.collector(clock)
    collector.collect(clock.now_s())
    changes = 2 if count == "carrier_down_count" else 5  # up, down, up, down, up
    machine.set(f"net/eth2/{count}", changes)
    machine.set(f"net/eno1/{count}", changes)
    machine.set("infiniband/mlx5_2/ports/1/counters/link_downed", 70)  # means nothing on Ethernet
    seen = again(collector, clock)
    assert seen.links["eno1"]["link_downed_total"] == seen.links["mlx5_2"]["link_downed_total"] == 2.0
    assert seen.node["node_rdma_link_downed_total"] == 2.0


def test_a_sum_without_one_of_its_ports_is_not_observed(machine: Machine, clock: FakeClock) -> None:
    collector = machine.collector(clock)
    collector.collect(clock.now_s())
    machine.set("infiniband/mlx5_2/ports/1/counters/port_xmit_data", "N/A")
    seen = again(collector, clock)
    assert "node_rdma_tx_bytes_per_second" not in seen.node
    assert seen.links["mlx5_0"]["link_tx_bytes_per_second"] == 0.0


def test_counters_of_other_drivers_are_known(machine: Machine, clock: FakeClock) -> None:
    for name in IB_COUNTERS:
        (machine.sys / f"class/infiniband/mlx5_0/ports/1/counters/{name}").unlink()
    for name in ("tx_bytes", "rx_bytes", "retrans_timeout_events", "retrans_pkts"):
        machine.set(f"infiniband/mlx5_0/ports/1/hw_counters/{name}", 0)
    collector = machine.collector(clock)
    collector.collect(clock.now_s())
    for name in ("tx_bytes", "retrans_timeout_events", "retrans_pkts"):
        machine.set(f"infiniband/mlx5_0/ports/1/hw_counters/{name}", 9)
    seen = again(collector, clock)
    assert seen.links["mlx5_0"]["link_tx_bytes_per_second"] == 9.0
    assert seen.node["node_rdma_errors_total"] == 9.0


def test_a_second_port_is_named_by_its_number(machine: Machine, clock: FakeClock) -> None:
    machine.rdma("mlx4_0", "0000:70:00.0", layer="Ethernet")
    machine.rdma("mlx4_0", "0000:70:00.0", layer="Ethernet", port=2)
    machine.interface("p1", "0000:70:00.0")
    machine.interface("p2", "0000:70:00.0")
    machine.set("net/p2/dev_port", 1)
    collector = machine.collector(clock)
    collector.collect(clock.now_s())
    machine.set("net/p2/statistics/tx_bytes", 70)
    seen = again(collector, clock)
    assert {"mlx4_0", "mlx4_0:2"} <= seen.links.keys()
    assert not {"p1", "p2"} & seen.links.keys()
    assert seen.links["mlx4_0:2"]["link_tx_bytes_per_second"] == 70.0
    assert seen.links["mlx4_0"]["link_tx_bytes_per_second"] == 0.0


def test_ports_that_their_driver_does_not_number_are_told_apart(machine: Machine, clock: FakeClock) -> None:
    machine.interface("p1", "0000:70:00.0")
    machine.interface("p2", "0000:70:00.0")
    collector = machine.collector(clock)
    collector.collect(clock.now_s())
    machine.set("net/p1/statistics/tx_bytes", 70)
    links = again(collector, clock).links
    assert (links["p1"]["link_tx_bytes_per_second"], links["p2"]["link_tx_bytes_per_second"]) == (70.0, 0.0)


def test_bonded_ports_of_an_rdma_device_keep_their_own_links(machine: Machine, clock: FakeClock) -> None:
    machine.set("net/eth2/master/ifindex", 9)
    assert {"mlx5_2", "eth2"} <= machine.collector(clock).collect(clock.now_s()).links.keys()


@pytest.mark.parametrize("state", ["2: INIT", "3: ARMED", "1: DOWN"])
def test_only_an_active_port_is_up(machine: Machine, clock: FakeClock, state: str) -> None:
    collector = machine.collector(clock)
    collector.collect(clock.now_s())
    machine.set("infiniband/mlx5_0/ports/1/state", state)
    assert again(collector, clock).links["mlx5_0"]["link_up"] == 0.0


@pytest.mark.parametrize(("physical", "up"), [("2: Polling", 0.0), ("6: LinkErrorRecovery", 1.0), ("", 1.0)])
def test_an_active_port_without_its_physical_link_is_down(
    machine: Machine, clock: FakeClock, physical: str, up: float
) -> None:
    collector = machine.collector(clock)
    collector.collect(clock.now_s())
    machine.set("infiniband/mlx5_0/ports/1/phys_state", physical)
    assert again(collector, clock).links["mlx5_0"]["link_up"] == up


def test_an_interface_without_operational_state_is_up_by_its_carrier(machine: Machine, clock: FakeClock) -> None:
    machine.set("net/eno1/operstate", "unknown")
    collector = machine.collector(clock)
    assert collector.collect(clock.now_s()).links["eno1"]["link_up"] == 1.0
    machine.set("net/eno1/carrier", 0)
    assert again(collector, clock).links["eno1"]["link_up"] == 0.0


def test_usb_interfaces_and_representors_are_no_ports(machine: Machine, clock: FakeClock) -> None:
    machine.interface("usb0", "usb1")
    (machine.sys / "bus/usb").mkdir(parents=True)
    (machine.hardware("usb1") / "subsystem").symlink_to(machine.sys / "bus/usb")
    machine.interface("eth2_0", "0000:5e:00.0")
    machine.set("net/eth2_0/phys_port_name", "pf0vf0")
    assert not {"usb0", "eth2_0"} & machine.collector(clock).collect(clock.now_s()).links.keys()


def test_an_unused_port_is_no_link_until_it_comes_up(machine: Machine, clock: FakeClock) -> None:
    machine.set("infiniband/mlx5_1/ports/1/counters/symbol_error", 1000)
    machine.set("infiniband/mlx5_1/ports/1/hw_counters/packet_seq_err", 1000)
    collector = machine.collector(clock)
    assert "mlx5_1" not in collector.collect(clock.now_s()).links
    machine.turn("mlx5_1", up=True)
    seen = again(collector, clock)
    assert seen.links["mlx5_1"]["link_up"] == 1.0
    assert seen.links["mlx5_1"]["link_errors_total"] == 0.0
    assert seen.node["node_rdma_errors_total"] == 0.0  # what it counted before we looked did not happen now
    machine.turn("mlx5_1", up=False)
    assert again(collector, clock).links["mlx5_1"]["link_up"] == 0.0


def test_a_port_that_fell_before_the_agent_started_again_is_down(machine: Machine, clock: FakeClock) -> None:
    first = machine.collector(clock)
    first.collect(clock.now_s())
    first.close()
    machine.turn("mlx5_0", up=False)
    clock.advance(REMEMBER_S - 1.0)
    links = machine.collector(clock).collect(clock.now_s()).links
    assert links["mlx5_0"]["link_up"] == 0.0
    assert "mlx5_1" not in links


def test_a_port_that_has_not_been_up_for_a_month_is_unused(machine: Machine, clock: FakeClock) -> None:
    machine.collector(clock).collect(clock.now_s())
    machine.turn("mlx5_0", up=False)
    clock.advance(REMEMBER_S + 10.0)
    assert "mlx5_0" not in machine.collector(clock).collect(clock.now_s()).links


def test_the_times_at_which_ports_were_up_are_kept_up_to_date(machine: Machine, clock: FakeClock) -> None:
    collector = machine.collector(clock)
    collector.collect(clock.now_s())
    written = (machine.folder / FILE_NAME).read_bytes()
    again(collector, clock)
    assert (machine.folder / FILE_NAME).read_bytes() == written  # not at every collection
    again(collector, clock, 7200.0)
    assert (machine.folder / FILE_NAME).read_bytes() != written


def test_a_device_that_is_gone_is_a_link_that_is_down(machine: Machine, clock: FakeClock) -> None:
    collector = machine.collector(clock)
    machine.set("infiniband/mlx5_0/ports/1/counters/link_downed", 4)
    collector.collect(clock.now_s())
    machine.remove("infiniband/mlx5_0", "0000:1a:00.0")
    for _ in range(2):
        seen = again(collector, clock)
        assert seen.links["mlx5_0"] == {"link_up": 0.0}
        assert seen.problem == "mlx5_0 is gone (0000:1a:00.0)"
    assert seen.node["node_rdma_link_downed_total"] == 4.0  # a sum over ports does not fall with one of them
    machine.rdma("mlx5_0", "0000:1a:00.0")
    machine.set("infiniband/mlx5_0/ports/1/counters/symbol_error", 10**6)
    seen = again(collector, clock)
    assert seen.links["mlx5_0"]["link_up"] == 1.0
    assert seen.links["mlx5_0"]["link_errors_total"] == 0.0
    assert seen.problem == ""


def test_an_interface_that_went_to_a_container_is_no_fault(machine: Machine, clock: FakeClock) -> None:
    collector = machine.collector(clock)
    collector.collect(clock.now_s())
    machine.remove("net/eno1")
    for seconds in (1.0, ELSEWHERE_S, 1.0):
        seen = again(collector, clock, seconds)
        assert "eno1" not in seen.links
        assert seen.problem == ""
    assert b"eno1" not in (machine.folder / FILE_NAME).read_bytes()


def test_hardware_that_leaves_after_its_interface_is_down(machine: Machine, clock: FakeClock) -> None:
    collector = machine.collector(clock)
    collector.collect(clock.now_s())
    machine.remove("net/eno1")
    assert "eno1" not in again(collector, clock).links
    (machine.hardware("0000:02:00.0") / "driver").unlink()
    assert again(collector, clock).links["eno1"] == {"link_up": 0.0}


def test_a_node_whose_last_port_went_to_a_container_goes_on(tmp_path: Path, clock: FakeClock) -> None:
    machine = Machine(tmp_path)
    machine.interface("eno1", "0000:02:00.0")
    collector = machine.collector(clock)
    collector.collect(clock.now_s())
    machine.remove("net/eno1")
    shutil.rmtree(machine.hardware("0000:02:00.0") / "net")
    for seconds in (1.0, ELSEWHERE_S, 1.0):
        assert again(collector, clock, seconds) == Observed()
    machine.remove("net", "0000:02:00.0")
    machine.interface("eno1", "0000:02:00.0")
    assert again(collector, clock).links["eno1"]["link_up"] == 1.0


def test_an_interface_whose_hardware_left_is_down(machine: Machine, clock: FakeClock) -> None:
    collector = machine.collector(clock)
    collector.collect(clock.now_s())
    machine.remove("net/eno1", "0000:02:00.0")
    seen = again(collector, clock)
    assert seen.links["eno1"] == {"link_up": 0.0}
    assert "eno1 is gone" in seen.problem


def test_a_virtual_function_that_is_destroyed_is_no_fault(machine: Machine, clock: FakeClock) -> None:
    machine.rdma("mlx5_9", "0000:1a:00.2")
    (machine.hardware("0000:1a:00.2") / "physfn").symlink_to(machine.hardware("0000:1a:00.0"))
    collector = machine.collector(clock)
    assert "mlx5_9" in collector.collect(clock.now_s()).links
    assert b"mlx5_9" not in (machine.folder / FILE_NAME).read_bytes()
    machine.remove("infiniband/mlx5_9", "0000:1a:00.2")
    assert "mlx5_9" not in again(collector, clock).links


def test_names_that_shift_at_a_reboot_hide_no_lost_device(machine: Machine, clock: FakeClock) -> None:
    first = machine.collector(clock)
    first.collect(clock.now_s())
    first.close()
    machine.remove("infiniband/mlx5_0", "0000:1a:00.0")
    (machine.sys / "class/infiniband/mlx5_2").rename(machine.sys / "class/infiniband/mlx5_0")
    seen = machine.collector(clock).collect(clock.now_s())
    assert seen.links["mlx5_0"]["link_up"] == 1.0
    assert "mlx5_2" not in seen.links
    assert seen.problem == "mlx5_0 is gone (0000:1a:00.0)"


def test_a_device_replaced_by_another_is_not_missed(machine: Machine, clock: FakeClock) -> None:
    first = machine.collector(clock)
    first.collect(clock.now_s())
    first.close()
    machine.remove("infiniband/mlx5_0", "0000:1a:00.0")
    machine.rdma("mlx5_0", "0000:1b:00.0")
    seen = machine.collector(clock).collect(clock.now_s())
    assert seen.links["mlx5_0"]["link_up"] == 1.0
    assert seen.problem == ""


def test_a_counter_that_went_back_starts_anew(machine: Machine, clock: FakeClock) -> None:
    base = "infiniband/mlx5_0/ports/1"
    machine.set(f"{base}/counters/port_rcv_data", 1000)
    machine.set(f"{base}/counters/symbol_error", 50)
    collector = machine.collector(clock)
    collector.collect(clock.now_s())
    machine.set(f"{base}/counters/port_rcv_data", 10)
    machine.set(f"{base}/counters/symbol_error", 0)
    seen = again(collector, clock)
    assert "link_rx_bytes_per_second" not in seen.links["mlx5_0"]
    assert "node_rdma_rx_bytes_per_second" not in seen.node
    assert seen.links["mlx5_0"]["link_errors_total"] == 50.0
    machine.set(f"{base}/counters/port_rcv_data", 20)
    machine.set(f"{base}/counters/symbol_error", 1)
    seen = again(collector, clock)
    assert seen.links["mlx5_0"]["link_rx_bytes_per_second"] == 40.0
    assert seen.links["mlx5_0"]["link_errors_total"] == 51.0


def test_a_counter_that_jumps_beyond_any_port_is_not_observed(machine: Machine, clock: FakeClock) -> None:
    collector = machine.collector(clock)
    collector.collect(clock.now_s())
    machine.set("infiniband/mlx5_0/ports/1/counters/port_rcv_data", 2**60)
    assert "link_rx_bytes_per_second" not in again(collector, clock).links["mlx5_0"]


def test_a_file_that_vanishes_costs_its_own_metric(machine: Machine, clock: FakeClock) -> None:
    collector = machine.collector(clock, files_max=0)
    collector.collect(clock.now_s())
    counters = machine.sys / "class/infiniband/mlx5_0/ports/1/counters"
    (counters / "port_rcv_data").unlink()
    (counters / "symbol_error").write_text("N/A (no PMA)\n")
    row = again(collector, clock).links["mlx5_0"]
    assert "link_rx_bytes_per_second" not in row
    assert row.keys() >= {"link_tx_bytes_per_second", "link_errors_total", "link_downed_total"}


def test_what_may_not_be_read_is_said_once(machine: Machine, clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    read, refused = Attributes.read, []

    def guarded(self: Attributes, path: str) -> bytes:
        if "mlx5_0" in path and "/counters/" in path:
            refused.append(path)
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return read(self, path)

    monkeypatch.setattr(Attributes, "read", guarded)
    collector = machine.collector(clock)
    seen = collector.collect(clock.now_s())
    assert seen.problem.startswith("mlx5_0: Permission denied: ")
    assert seen.problem.endswith(" and 8 more")
    assert seen.links["mlx5_0"] == {"link_up": 1.0}
    assert again(collector, clock).problem == ""
    assert len(refused) == 9  # and not once more
    assert again(collector, clock, 1000.0).problem == ""


@pytest.mark.parametrize(("error", "said"), [(errno.EOPNOTSUPP, False), (errno.EINVAL, False), (errno.EPERM, True)])
def test_a_driver_without_statistics_is_left_alone(machine: Machine, clock: FakeClock, error: int, said: bool) -> None:
    machine.statistics.clear()
    machine.ethtool_error = error
    collector = machine.collector(clock)
    assert ("ethtool" in collector.collect(clock.now_s()).problem) is said
    asked = machine.asked
    seen = again(collector, clock)
    assert machine.asked == asked
    assert seen.problem == ""
    assert "link_pfc_rx_pause_packets_per_second" not in seen.links["mlx5_2"]


def test_without_ports_the_collector_is_unsupported(tmp_path: Path, clock: FakeClock) -> None:
    machine = Machine(tmp_path)
    machine.interface("veth0")
    with pytest.raises(Unsupported, match="no RDMA device and no physical network interface"):
        machine.collector(clock).collect(clock.now_s())
    with pytest.raises(Unsupported):
        machine.collector(clock, sys=tmp_path / "nothing").collect(clock.now_s())


def test_a_folder_that_cannot_be_listed_is_a_failure(tmp_path: Path, clock: FakeClock) -> None:
    (tmp_path / "class").mkdir()
    (tmp_path / "class/net").write_text("no folder")
    with pytest.raises(CollectFailed, match="class/net"):
        FabricCollector(sys=tmp_path, monotonic_s=clock.monotonic_s).collect(clock.now_s())


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"a": {"name": "x"}}', b"\xff\xfe"])
def test_a_spoiled_file_of_ports_is_said_and_written_anew(machine: Machine, clock: FakeClock, content: bytes) -> None:
    machine.folder.mkdir()
    (machine.folder / FILE_NAME).write_bytes(content)
    collector = machine.collector(clock)
    assert FILE_NAME in collector.collect(clock.now_s()).problem
    assert again(collector, clock).problem == ""
    assert b"mlx5_0" in (machine.folder / FILE_NAME).read_bytes()


def test_a_file_of_ports_with_names_that_no_frame_carries_is_read_without_them(
    machine: Machine, clock: FakeClock
) -> None:
    machine.folder.mkdir()
    known = '"device": "devices/x", "rdma": true, "up_s": 1e6'
    (machine.folder / FILE_NAME).write_text(
        f'{{"a": {{"name": "b\\u0000d", {known}}}, "b": {{"name": "ok", {known}}}}}'
    )
    links = machine.collector(clock).collect(clock.now_s()).links
    assert links["ok"] == {"link_up": 0.0}
    assert all(name.isprintable() for name in links)


def test_without_a_place_for_it_the_file_of_ports_is_said_once(machine: Machine, clock: FakeClock) -> None:
    machine.folder.write_text("not a folder")
    collector = machine.collector(clock)
    assert FILE_NAME in collector.collect(clock.now_s()).problem
    assert again(collector, clock, 10_000.0).problem == ""


def test_a_hundred_collections_open_no_more_files_than_allowed(machine: Machine, clock: FakeClock) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    collector = machine.collector(clock, files_max=10)
    for _ in range(20):
        again(collector, clock)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 10
    collector.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_this_machine_yields_catalogued_metrics(clock: FakeClock) -> None:
    collector = FabricCollector(monotonic_s=clock.monotonic_s)
    try:
        collector.collect(clock.now_s())
    except Unsupported as reason:
        pytest.skip(str(reason))
    seen = again(collector, clock)
    collector.close()
    check(seen)


def check(seen: Observed) -> None:
    for row in seen.links.values():
        assert all(BY_NAME[name].scope is Scope.LINK and value >= 0.0 for name, value in row.items())
    assert all(BY_NAME[name].scope is Scope.NODE and value >= 0.0 for name, value in seen.node.items())
    assert all(name.isprintable() for name in seen.links)


CONTENTS = st.one_of(
    st.integers(0, 2**65).map(lambda number: str(number).encode()),
    st.sampled_from([b"4: ACTIVE", b"5: LinkUp", b"up", b"1", b"Ethernet", b"InfiniBand", b"", b"N/A (no PMA)", b"-1"]),
    st.binary(max_size=100),
)


@settings(max_examples=25)
@given(st.lists(st.tuples(st.integers(0, 10**6), CONTENTS), max_size=20), st.booleans(), st.floats(0.0, 10.0))
def test_any_contents_are_read_or_not_observed(
    writes: list[tuple[int, bytes]], kept_open: bool, seconds: float
) -> None:
    with tempfile.TemporaryDirectory() as root:
        machine, clock = Machine(Path(root)), FakeClock()
        machine.rdma("mlx5_0", "0000:5e:00.0", layer="Ethernet")
        machine.interface("eth0", "0000:5e:00.0")
        machine.interface("eno1", "0000:02:00.0")
        files = sorted(file for file in machine.sys.rglob("*") if file.is_file())
        collector = machine.collector(clock, files_max=None if kept_open else 0)
        check(collector.collect(clock.now_s()))
        for place, content in writes:
            files[place % len(files)].write_bytes(content)
            check(again(collector, clock, seconds))
        collector.close()
        final = machine.collector(clock)
        check(final.collect(clock.now_s()))
        final.close()


COUNTERS = st.dictionaries(st.sampled_from("abc"), st.integers(0, 2**64).map(float), max_size=3)


@given(COUNTERS, COUNTERS, st.floats(-1.0, 1e6), st.floats(1.0, 1e12))
def test_rates_are_never_negative_nor_beyond_the_most(
    before: dict[str, float], now: dict[str, float], elapsed_s: float, most: float
) -> None:
    value = rate(before, now, elapsed_s, most)
    assert value is None or 0.0 <= value <= most * 1.000001


@given(st.booleans(), st.lists(COUNTERS))
def test_a_total_never_goes_back(from_zero: bool, readings: list[dict[str, float]]) -> None:
    total, before = Total(from_zero=from_zero), 0.0
    for reading in readings:
        assert total.add(reading) is bool(reading)
        assert total.value >= before
        before = total.value
