from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.agent.collector import CollectFailed, Unsupported
from eagle_eye.agent.collectors.host import (
    BYTES_PER_S_MAX,
    HostCollector,
    cpu_jiffies,
    disk_bytes,
    memory_used_ratio,
    network_bytes,
    pressure_us,
    tcp_retransmits,
)
from eagle_eye.agent.foreign_files import content
from eagle_eye.schema.metrics import BY_NAME, Scope
from tests.agent.fakes import FakeClock

SNMP = "Tcp: RtoAlgorithm RetransSegs InErrs\nTcp: 1 {} 0\nUdp: InDatagrams\nUdp: 5\n"
PRESSURE = "some avg10=0.00 avg60=0.00 avg300=0.00 total={}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"
NET_HEAD = "Inter-|   Receive\n face |bytes packets errs drop fifo frame compressed multicast|bytes packets\n"


class Machine:
    """A /proc and a /sys of our own; times are jiffies, sizes bytes."""

    def __init__(self, root: Path) -> None:
        self.root = root / "proc"
        self.sys = root / "sys"
        for folder in ("pressure", "net"):
            (self.root / folder).mkdir(parents=True)
        (self.sys / "block/nvme0n1/device").mkdir(parents=True)
        (self.sys / "block/dm-0").mkdir()
        self.is_at(busy=100, idle=100)
        self.has_moved()

    def is_at(
        self, busy: int, idle: int, iowait: int = 0, steal: int = 0, stalled_us: int = 0, retransmits: int = 10
    ) -> None:
        cpu = f"cpu  {busy} 0 0 {idle} {iowait} 0 0 {steal} 0 0\n"
        interrupts = f"intr {' '.join(['7'] * 2_000)}\n"
        tasks = "procs_running 2\nprocs_blocked 3\n"
        (self.root / "stat").write_text(cpu + "cpu0 1 2 3 4 5 6 7 8 0 0\n" + interrupts + tasks)
        (self.root / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 5 kB\nMemAvailable: 750 kB\n")
        for resource in ("cpu", "memory", "io"):
            (self.root / "pressure" / resource).write_text(PRESSURE.format(stalled_us))
        (self.root / "net" / "snmp").write_text(SNMP.format(retransmits))

    def has_moved(self, disk: int = 0, **interfaces: int) -> None:
        """So many bytes were read and written by each block device, received and sent by each interface."""
        sectors = disk // 512
        names = ("nvme0n1", "nvme0n1p1", "dm-0")  # one disk, its partition, and what is mapped onto it
        lines = [f" 259 {n} {name} 9 0 {sectors} 0 9 0 {sectors} 0 0 0 0" for n, name in enumerate(names)]
        (self.root / "diskstats").write_text("\n".join(lines) + "\n")
        counts = {"lo": 10**9, **(interfaces or {"eth0": 0})}
        net = "".join(f"{name:>6}: {n} 1 0 0 0 0 0 0 {n} 1 0 0 0 0 0 0\n" for name, n in counts.items())
        (self.root / "net/dev").write_text(NET_HEAD + net)

    def collector(self, clock: FakeClock) -> HostCollector:
        return HostCollector(self.root, self.sys, clock.monotonic_s)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_rates_are_taken_between_two_collections(machine: Machine, clock: FakeClock) -> None:
    host = machine.collector(clock)
    host.collect(clock.now_s())
    clock.advance(2.0)
    machine.is_at(busy=150, idle=120, iowait=20, steal=10, stalled_us=500_000, retransmits=16)
    machine.has_moved(disk=4096, eth0=2000, ib0=10**9)
    row = host.collect(clock.now_s()).node
    assert row["node_cpu_utilization_ratio"] == pytest.approx(0.5)
    assert row["node_iowait_ratio"] == pytest.approx(0.2)
    assert row["node_cpu_steal_ratio"] == pytest.approx(0.1)
    assert row["node_cpu_pressure_ratio"] == row["node_io_pressure_ratio"] == pytest.approx(0.25)
    assert row["node_tcp_retransmits_per_second"] == pytest.approx(3.0)
    assert row["node_disk_read_bytes_per_second"] == row["node_disk_write_bytes_per_second"] == pytest.approx(2048.0)


def test_the_first_collection_has_levels_and_no_rates(machine: Machine, clock: FakeClock) -> None:
    row = machine.collector(clock).collect(1.0).node
    assert row == {"node_memory_used_ratio": pytest.approx(0.25), "node_blocked_tasks": 3.0}


def test_an_interface_that_came_or_went_makes_no_jump(machine: Machine, clock: FakeClock) -> None:
    machine.has_moved(eth0=1000, veth1=10**12)
    host = machine.collector(clock)
    host.collect(1.0)
    clock.advance(1.0)
    machine.has_moved(eth0=1500, ib0=10**12)
    row = host.collect(2.0).node
    assert row["node_network_rx_bytes_per_second"] == row["node_network_tx_bytes_per_second"] == 500.0


def test_a_counter_that_went_back_is_not_observed_and_counts_again_afterwards(
    machine: Machine, clock: FakeClock
) -> None:
    machine.has_moved(eth0=4_000_000_000, ib0=0)
    host = machine.collector(clock)
    host.collect(1.0)
    clock.advance(1.0)
    machine.is_at(busy=200, idle=200, retransmits=2)
    machine.has_moved(eth0=5_000, ib0=10)  # it wrapped, or its driver was loaded anew
    row = host.collect(2.0).node
    assert "node_tcp_retransmits_per_second" not in row
    assert "node_network_rx_bytes_per_second" not in row
    clock.advance(1.0)
    machine.has_moved(eth0=6_000, ib0=10)
    assert host.collect(3.0).node["node_network_rx_bytes_per_second"] == 1000.0


def test_a_counter_that_jumped_beyond_all_hardware_is_not_observed(machine: Machine, clock: FakeClock) -> None:
    host = machine.collector(clock)
    host.collect(1.0)
    clock.advance(1.0)
    machine.has_moved(eth0=int(2 * BYTES_PER_S_MAX))
    row = host.collect(2.0).node
    assert "node_network_rx_bytes_per_second" not in row
    assert row["node_disk_read_bytes_per_second"] == 0.0


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_a_jump_of_the_wall_clock_changes_no_rate(machine: Machine, clock: FakeClock, jump_s: float) -> None:
    host = machine.collector(clock)
    host.collect(clock.now_s())
    clock.advance(1.0)
    clock.jump(jump_s)
    machine.has_moved(eth0=700)
    assert host.collect(clock.now_s()).node["node_network_rx_bytes_per_second"] == pytest.approx(700.0)


def test_two_collections_at_one_moment_have_no_rates_over_time(machine: Machine, clock: FakeClock) -> None:
    host = machine.collector(clock)
    host.collect(1.0)
    machine.has_moved(eth0=700)
    assert not [name for name in host.collect(1.0).node if name.endswith("_per_second")]


def test_what_the_kernel_does_not_tell_is_absent(machine: Machine, clock: FakeClock) -> None:
    for file in [*(machine.root / "pressure").iterdir(), machine.root / "net" / "snmp"]:
        file.unlink()
    host = machine.collector(clock)
    host.collect(1.0)
    clock.advance(1.0)
    observed = host.collect(2.0)
    assert not [name for name in observed.node if "pressure" in name or "tcp" in name]
    assert observed.problem == ""


def test_what_can_no_longer_be_read_is_named_and_the_rest_is_told(machine: Machine, clock: FakeClock) -> None:
    host = machine.collector(clock)
    host.collect(1.0)
    clock.advance(1.0)
    (machine.root / "net/dev").unlink()
    (machine.root / "pressure/io").write_text("")
    observed = host.collect(2.0)
    assert observed.problem == "can no longer be read: pressure/io, net/dev"
    assert "node_cpu_pressure_ratio" in observed.node
    assert not [name for name in observed.node if "network" in name or "io_pressure" in name]
    machine.has_moved(eth0=700)
    assert host.collect(3.0).problem == "can no longer be read: pressure/io"


def test_without_proc_the_host_is_unsupported_and_one_that_loses_it_fails(machine: Machine, clock: FakeClock) -> None:
    with pytest.raises(Unsupported, match="not Linux"):
        HostCollector(proc=machine.root / "nowhere").collect(1.0)
    host = machine.collector(clock)
    host.collect(1.0)
    (machine.root / "stat").unlink()
    with pytest.raises(CollectFailed, match="no longer"):
        host.collect(2.0)


def test_a_file_is_read_up_to_its_limit_and_no_further(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(b"x" * 300_000)
    assert len(content(str(tmp_path / "large"), 200_000)) == 200_000
    assert len(content(str(tmp_path / "large"), 10**9)) == 300_000
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(OSError, match="directory"):
        content(str(tmp_path), 10)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_this_machine_yields_catalogued_metrics(clock: FakeClock) -> None:
    host = HostCollector(monotonic_s=clock.monotonic_s)
    host.collect(1.0)
    clock.advance(1.0)
    row = host.collect(2.0).node
    assert row.keys() >= {"node_memory_used_ratio", "node_blocked_tasks", "node_network_rx_bytes_per_second"}
    assert all(BY_NAME[name].scope is Scope.NODE and value >= 0.0 for name, value in row.items())
    assert all(value <= 1.0 for name, value in row.items() if name.endswith("_ratio"))


WORDS = st.sampled_from(
    [
        "cpu",
        "some",
        "total=",
        "Tcp:",
        "RetransSegs",
        "MemTotal:",
        "MemAvailable:",
        "eth0:",
        ":",
        "0",
        "17",
        "-1",
        "1e9",
        "nan",
        "²",
        "\x00",
        "\n",
        "99999999999999999999999",
    ]
)


@given(st.text(max_size=200) | st.lists(WORDS, max_size=60).map(" ".join))
def test_any_text_is_parsed_or_not_observed(text: str) -> None:
    for parse in (pressure_us, tcp_retransmits, memory_used_ratio):
        value = parse(text)
        assert value is None or 0.0 <= value < 1e20
    assert all(value >= 0.0 for value in cpu_jiffies(text).values())
    for sizes in (disk_bytes, network_bytes):
        assert all(0.0 <= value < 1e24 for pair in sizes(text).values() for value in pair)
