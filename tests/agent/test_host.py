from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.agent.collector import Unsupported
from eagle_eye.agent.collectors.host import HostCollector, pressure_us, tcp_retransmits
from eagle_eye.schema.metrics import BY_NAME, Scope
from tests.agent.fakes import FakeClock

SNMP = "Tcp: RtoAlgorithm RetransSegs InErrs\nTcp: 1 {} 0\nUdp: InDatagrams\nUdp: 5\n"
PRESSURE = "some avg10=0.00 avg60=0.00 avg300=0.00 total={}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"


class Machine:
    """A /proc of our own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "pressure").mkdir()
        (root / "net").mkdir()

    def is_at(self, busy: int, idle: int, iowait: int, steal: int, stalled_us: int, retransmits: int) -> None:
        cpu = f"cpu  {busy} 0 0 {idle} {iowait} 0 0 {steal} 0 0\n"
        (self.root / "stat").write_text(cpu + "cpu0 1 2 3 4 5 6 7 8 0 0\nprocs_running 2\nprocs_blocked 3\n")
        for resource in ("cpu", "memory", "io"):
            (self.root / "pressure" / resource).write_text(PRESSURE.format(stalled_us))
        (self.root / "net" / "snmp").write_text(SNMP.format(retransmits))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    made.is_at(busy=100, idle=100, iowait=0, steal=0, stalled_us=0, retransmits=10)
    return made


def test_rates_are_taken_between_two_collections(machine: Machine, clock: FakeClock) -> None:
    host = HostCollector(proc=machine.root, monotonic_s=clock.monotonic_s)
    host.collect(clock.now_s())
    clock.advance(2.0)
    machine.is_at(busy=150, idle=120, iowait=20, steal=10, stalled_us=500_000, retransmits=16)
    row = host.collect(clock.now_s()).node
    assert row["node_cpu_utilization_ratio"] == pytest.approx(0.5)
    assert row["node_iowait_ratio"] == pytest.approx(0.2)
    assert row["node_cpu_steal_ratio"] == pytest.approx(0.1)
    assert row["node_cpu_pressure_ratio"] == row["node_io_pressure_ratio"] == pytest.approx(0.25)
    assert row["node_tcp_retransmits_per_second"] == pytest.approx(3.0)


def test_the_first_collection_has_levels_and_no_rates(machine: Machine) -> None:
    row = HostCollector(proc=machine.root).collect(1.0).node
    assert set(row) == {"node_memory_used_ratio", "node_blocked_tasks"}
    assert row["node_blocked_tasks"] == 3.0


def test_a_counter_that_went_back_is_not_observed(machine: Machine, clock: FakeClock) -> None:
    host = HostCollector(proc=machine.root, monotonic_s=clock.monotonic_s)
    host.collect(1.0)
    clock.advance(1.0)
    machine.is_at(busy=200, idle=200, iowait=0, steal=0, stalled_us=0, retransmits=2)
    assert "node_tcp_retransmits_per_second" not in host.collect(2.0).node


def test_what_the_kernel_does_not_tell_is_absent(machine: Machine, clock: FakeClock) -> None:
    for file in [*(machine.root / "pressure").iterdir(), machine.root / "net" / "snmp"]:
        file.unlink()
    host = HostCollector(proc=machine.root, monotonic_s=clock.monotonic_s)
    host.collect(1.0)
    clock.advance(1.0)
    row = host.collect(2.0).node
    assert not [name for name in row if "pressure" in name or "tcp" in name]


def test_without_proc_the_host_is_unsupported(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="not Linux"):
        HostCollector(proc=tmp_path).collect(1.0)


def test_this_machine_yields_catalogued_metrics(clock: FakeClock) -> None:
    host = HostCollector(monotonic_s=clock.monotonic_s)
    host.collect(1.0)
    clock.advance(1.0)
    row = host.collect(2.0).node
    assert row.keys() >= {"node_memory_used_ratio", "node_blocked_tasks"}
    assert all(BY_NAME[name].scope is Scope.NODE and value >= 0.0 for name, value in row.items())
    assert all(value <= 1.0 for name, value in row.items() if name.endswith("_ratio"))


@given(st.text(max_size=200))
def test_any_text_is_parsed_or_not_observed(text: str) -> None:
    for parse in (pressure_us, tcp_retransmits):
        assert parse(text) is None or parse(text) >= 0.0  # type: ignore[operator]
