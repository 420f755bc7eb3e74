from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eagle_eye.agent.collector import CollectFailed, Drops, Unsupported
from eagle_eye.agent.collectors.kernel_log import (
    NEWS_MAX,
    PLACES_S,
    RECORDS_MAX,
    STATE_FILE,
    KernelLogCollector,
    KernelLogHost,
    open_log,
)
from eagle_eye.schema.events import BY_KIND, Event
from eagle_eye.schema.frame import WIRE_VERSION, Frame, decode_frame, encode_frame
from tests.agent.fakes import FakeClock

UP_S = 100_000.0  # how long the machine has been up when a test begins
OFF_THE_BUS = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=python3, GPU has fallen off the bus."
KILLED = "Memory cgroup out of memory: Killed process 77 (python3) total-vm:1kB"
LINK_DOWN = "mlx5_core 0000:41:00.0 ens1np0: Link down"
UNCORRECTED = "mce: [Hardware Error]: CPU 3: Machine Check Exception: 5 Bank 6: b200000000070000"


class Kernel:
    """A log as the kernel keeps it: a ring of records, each opening begins at the oldest, a read returns one."""

    def __init__(self, tmp_path: Path, clock: FakeClock) -> None:
        self.clock = clock
        self.clock.passed_s = UP_S
        self.records: list[bytes | OSError] = []
        self.next = 0
        self.reads = 0
        self.proc = tmp_path / "proc"
        self.pstore = tmp_path / "pstore"
        self.archive = tmp_path / "archive"
        self.sys = tmp_path / "sys"
        self.state = tmp_path / "state"
        self.state.mkdir()
        self.drops = Drops()
        self.devices: dict[str, int] = {"00000000:3B:00.0": 2}
        self._at: dict[int, int] = {}
        self.boots("first")

    def boots(self, boot_id: str) -> None:
        file = self.proc / "sys/kernel/random/boot_id"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(boot_id + "\n")
        self.records, self.next = [], 0

    def logs(self, text: str, ago_s: float = 0.0, sequence: int | None = None) -> None:
        if sequence is not None:
            self.next = sequence
        stamp_us = int((self.clock.passed_s - ago_s) * 1e6)
        self.records.append(f"4,{self.next},{stamp_us},-;{text}\n".encode())
        self.next += 1

    def opens(self, path: Path) -> int:
        descriptor = os.open("/dev/null", os.O_RDONLY)
        self._at[descriptor] = 0
        return descriptor

    def read(self, descriptor: int, most: int) -> bytes:
        self.reads += 1
        at = self._at[descriptor]
        if at >= len(self.records):
            raise BlockingIOError(errno.EAGAIN, "nothing")
        self._at[descriptor] = at + 1
        found = self.records[at]
        if isinstance(found, OSError):
            raise found
        return found

    def agent(self, state: bool = True) -> KernelLogCollector:
        host = KernelLogHost(
            proc=self.proc,
            sys=self.sys,
            panic_folders=(self.pstore, self.archive),
            monotonic_s=self.clock.monotonic_s,
            opener=self.opens,
            read=self.read,
        )
        return KernelLogCollector(self.drops, self.devices, self.state if state else None, host=host)


@pytest.fixture
def kernel(tmp_path: Path, clock: FakeClock) -> Kernel:
    return Kernel(tmp_path, clock)


def collect(agent: KernelLogCollector, kernel: Kernel, after_s: float = 1.0) -> list[Event]:
    kernel.clock.advance(after_s)
    events = agent.collect(kernel.clock.now_s()).events
    for event in events:
        assert set(event.attributes) == set(BY_KIND[event.kind].attributes)
    decode_frame(encode_frame(Frame(WIRE_VERSION, "n", "b", "s", 1, kernel.clock.now_s(), 1.0, "1", events=events)))
    return events


def test_an_xid_is_told_with_its_gpu_its_text_and_its_time(kernel: Kernel) -> None:
    agent = kernel.agent()
    collect(agent, kernel)
    kernel.logs(OFF_THE_BUS)
    (event,) = collect(agent, kernel, 0.5)
    assert (event.kind, event.device, event.attributes["code"]) == ("xid", 2, 79)
    assert event.attributes["text"] == "pid=1, name=python3, GPU has fallen off the bus."
    assert event.time_s == pytest.approx(kernel.clock.now_s() - 0.5, abs=1e-3)
    assert collect(agent, kernel) == []


def test_an_xid_of_a_gpu_that_nobody_knows_keeps_the_address(kernel: Kernel) -> None:
    kernel.logs(OFF_THE_BUS.replace("3b", "86"))
    (event,) = collect(kernel.agent(), kernel)
    assert event.device == -1
    assert event.attributes["text"].startswith("PCI:0000:86:00, pid=1")


def test_an_xid_waits_a_little_for_the_driver_to_say_which_gpu_it_is(kernel: Kernel) -> None:
    places = kernel.devices
    kernel.devices = {}
    kernel.logs(OFF_THE_BUS, ago_s=1_000.0)
    agent = kernel.agent()
    assert collect(agent, kernel) == []
    kernel.devices.update(places)
    (event,) = collect(agent, kernel)
    assert event.device == 2
    assert event.time_s == pytest.approx(kernel.clock.now_s() - 1_002.0, abs=1e-3)

    kernel.devices = {}
    kernel.boots("second")
    kernel.logs(OFF_THE_BUS)
    other = kernel.agent()
    assert collect(other, kernel) == []
    (event,) = collect(other, kernel, PLACES_S + 1.0)
    assert event.device == -1


def test_an_xid_that_waits_is_not_lost_with_the_agent(kernel: Kernel) -> None:
    kernel.devices = {}
    kernel.logs(OFF_THE_BUS)
    agent = kernel.agent()
    assert collect(agent, kernel) == []
    agent.close()
    kernel.devices = {"0000:3b:00.0": 4}
    (event,) = collect(kernel.agent(), kernel)
    assert event.device == 4


def test_every_kind_of_message_becomes_its_event(kernel: Kernel) -> None:
    (kernel.sys / "class/net/ens1np0/device/infiniband/mlx5_3").mkdir(parents=True)
    (kernel.sys / "class/net/ens1np0/dev_port").write_text("0\n")
    agent = kernel.agent()
    collect(agent, kernel)
    lines = [
        "nvidia-nvswitch1: SXid (PCI:0000:05:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
        "nvidia-nvswitch1: SXid (PCI:0000:05:00.0): 20034, Severity 1 Engine instance 30 Sub-engine instance 00",
        KILLED,
        LINK_DOWN,
        "bond0: (slave ens1np0): link status definitely down, disabling slave",
        UNCORRECTED,
        "mce: [Hardware Error]: TSC 0 ADDR 1ffdeb2c MISC 0",
        "bnxt_en 0000:01:00.0 eth9: NIC Link is Up, 25000 Mbps (NRZ) full duplex",
    ]
    for line in lines:
        kernel.logs(line)
    events = collect(agent, kernel) + collect(agent, kernel, 2.0)
    assert {(event.kind, event.device) for event in events} == {
        (kind, -1) for kind in ("sxid", "oom_kill", "link_down", "link_up", "machine_check")
    }
    by_kind = {event.kind: event.attributes for event in events}
    assert len(events) == 5
    assert by_kind["oom_kill"] == {"process": "python3"}
    assert by_kind["link_down"] == {"link": "mlx5_3"}
    assert by_kind["link_up"] == {"link": "eth9"}
    assert by_kind["machine_check"]["text"].startswith("uncorrected error: CPU 3")
    assert by_kind["sxid"]["code"] == 20034


def test_links_have_the_names_of_their_rows(kernel: Kernel) -> None:
    net = kernel.sys / "class/net"
    for interface, device, port in (("ens1", "mlx5_1", 0), ("ens2", "mlx5_bond_0", 0), ("ens3", "mlx4_0", 1)):
        (net / interface / f"device/infiniband/{device}/ports/{port + 1}").mkdir(parents=True)
        (net / interface / "dev_port").write_text(f"{port}\n")
    (net / "ens2/master").mkdir()
    agent = kernel.agent()
    collect(agent, kernel)
    for interface in ("ens1", "ens2", "ens3", "ens4"):
        kernel.logs(f"mlx5_core 0000:41:00.0 {interface}: Link down")
    assert [event.attributes["link"] for event in collect(agent, kernel)] == ["mlx5_1", "ens2", "mlx4_0:2", "ens4"]
    shutil.rmtree(net / "ens1")  # the device has failed altogether
    kernel.logs("mlx5_core 0000:41:00.0 ens1: Link up")
    (net / "ens3/phys_port_name").write_text("pf0vf1\n")
    kernel.logs("mlx5_core 0000:41:00.0 ens3: Link up")
    assert [event.attributes["link"] for event in collect(agent, kernel)] == ["mlx5_1", "ens3"]


def test_a_failed_adapter_has_the_name_of_its_row(kernel: Kernel) -> None:
    (kernel.sys / "bus/pci/devices/0000:41:00.0/infiniband/mlx5_3").mkdir(parents=True)
    (kernel.sys / "bus/pci/devices/0000:42:00.0/net/ens7").mkdir(parents=True)
    agent = kernel.agent()
    agent.collect(kernel.clock.now_s())
    for address in ("0000:41:00.0", "0000:42:00.0", "0000:43:00.0"):
        kernel.logs(f"mlx5_core {address}: poll_health:852:(pid 0): device's health compromised - reached miss count")
    events = agent.collect(kernel.clock.now_s()).events
    assert [event.attributes["link"] for event in events] == ["mlx5_3", "ens7", "0000:43:00.0"]
    assert {event.attributes["what"] for event in events} == {"nic_failed"}


def test_a_fatal_pcie_error_of_a_gpu_names_the_gpu(kernel: Kernel) -> None:
    kernel.logs("nvidia 0000:3b:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Inaccessible")
    (event,) = kernel.agent().collect(kernel.clock.now_s()).events
    assert (event.kind, event.device, event.attributes["what"]) == ("host_error", 2, "pcie_fatal")


def test_a_blocked_task_is_reported_with_what_it_waits_in(kernel: Kernel) -> None:
    agent = kernel.agent()
    agent.collect(kernel.clock.now_s())
    for line in (
        "INFO: task python3:4711 blocked for more than 120 seconds.",
        "task:python3         state:D stack:    0 pid: 4711 ppid:  4700 flags:0x00000002",
        " __schedule+0x2cd/0x890",
        " nfs_wait_bit_killable+0x1c/0x90 [nfs]",
        " ? rpc_execute.part.0+0xb1/0x120 [sunrpc]",
        " nfs_file_read+0x1c/0x90 [nfs]",
    ):
        kernel.logs(line)
    assert agent.collect(kernel.clock.now_s()).events == []
    kernel.clock.advance(2.0)
    (event,) = agent.collect(kernel.clock.now_s()).events
    assert event.attributes["device"] == "python3"
    assert event.attributes["text"].endswith("seconds. in __schedule, nfs, sunrpc")


def test_a_blocked_task_is_not_lost_with_the_agent(kernel: Kernel) -> None:
    agent = kernel.agent()
    agent.collect(kernel.clock.now_s())
    kernel.logs("INFO: task python3:4711 blocked for more than 120 seconds.")
    assert agent.collect(kernel.clock.now_s()).events == []
    agent.close()
    again = kernel.agent()
    again.collect(kernel.clock.now_s())
    kernel.clock.advance(2.0)
    assert [event.kind for event in again.collect(kernel.clock.now_s()).events] == ["host_error"]


def test_at_the_very_first_start_a_gpu_that_did_not_come_up_is_told_and_an_old_io_error_is_not(kernel: Kernel) -> None:
    kernel.logs("NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x62:0x40:2477)", 50_000.0)
    kernel.logs("blk_update_request: I/O error, dev nvme0n1, sector 8 op 0x0:(READ)", 50_000.0)
    kernel.logs("INFO: task python3:4711 blocked for more than 120 seconds.", 50_000.0)
    events = kernel.agent().collect(kernel.clock.now_s()).events
    assert [(event.attributes["what"], event.device) for event in events] == [("gpu_unusable", 2)]


def test_at_the_very_first_start_old_errors_are_told_and_old_news_is_not(kernel: Kernel) -> None:
    for ago_s in (50_000.0, 200.0):
        kernel.logs(KILLED, ago_s)
        kernel.logs(LINK_DOWN, ago_s)
        kernel.logs(OFF_THE_BUS, ago_s)
    events = collect(kernel.agent(), kernel, 0.0)
    now_s = kernel.clock.now_s()
    assert [(event.kind, round(now_s - event.time_s)) for event in events] == [
        ("xid", 50_000),
        ("oom_kill", 200),
        ("link_down", 200),
        ("xid", 200),
    ]


def test_a_restarted_agent_neither_repeats_nor_misses(kernel: Kernel) -> None:
    agent = kernel.agent()
    kernel.logs(OFF_THE_BUS)
    kernel.logs("nothing")
    assert len(collect(agent, kernel)) == 1
    agent.close()
    kernel.logs(KILLED)
    other = kernel.agent()
    assert [event.kind for event in collect(other, kernel, 3_000.0)] == ["oom_kill"]  # however long it took
    assert kernel.drops.snapshot() == {}


def test_an_agent_that_was_killed_before_its_frame_was_made_tells_again(kernel: Kernel) -> None:
    agent = kernel.agent()
    collect(agent, kernel)
    kernel.logs(OFF_THE_BUS)
    first = collect(agent, kernel)
    assert collect(kernel.agent(), kernel) == first  # no close, no further collection
    collect(agent, kernel)
    assert collect(kernel.agent(), kernel) == []


def test_a_new_boot_is_read_from_its_beginning(kernel: Kernel) -> None:
    agent = kernel.agent()
    for _ in range(10):
        kernel.logs("nothing")
    collect(agent, kernel)
    agent.close()
    kernel.boots("second")
    kernel.logs(KILLED, ago_s=400.0)
    assert [event.kind for event in collect(kernel.agent(), kernel)] == ["oom_kill"]


@pytest.mark.parametrize("state", ["", "[]", "{", '{"boot_id": 5}', '{"boot_id": "first", "sequence": "x"}', "\x00"])
def test_a_damaged_state_is_a_first_start(kernel: Kernel, state: str) -> None:
    (kernel.state / STATE_FILE).write_text(state)
    kernel.logs(OFF_THE_BUS)
    agent = kernel.agent()
    assert len(collect(agent, kernel)) == 1
    agent.close()
    assert json.loads((kernel.state / STATE_FILE).read_text())["sequence"] == 0


def test_a_state_from_beyond_the_log_does_not_silence_the_agent(kernel: Kernel) -> None:
    (kernel.state / STATE_FILE).write_text('{"boot_id": "first", "sequence": 900, "panics": []}')
    kernel.logs("nothing")
    agent = kernel.agent()
    collect(agent, kernel)
    kernel.logs(OFF_THE_BUS)
    assert len(collect(agent, kernel)) == 1


def test_a_state_that_cannot_be_written_is_counted_and_costs_nothing_else(kernel: Kernel) -> None:
    kernel.state.rmdir()
    agent = kernel.agent()
    kernel.logs(OFF_THE_BUS)
    assert len(collect(agent, kernel)) == 1
    collect(agent, kernel)
    assert kernel.drops.snapshot()["kernel_log_unsaved"] >= 1


def test_printing_keeps_no_state(kernel: Kernel) -> None:
    agent = kernel.agent(state=False)
    kernel.logs(OFF_THE_BUS)
    collect(agent, kernel)
    agent.close()
    assert list(kernel.state.iterdir()) == []


def test_what_the_kernel_overwrote_is_counted(kernel: Kernel) -> None:
    agent = kernel.agent()
    kernel.logs("nothing")
    collect(agent, kernel)
    kernel.records.append(OSError(errno.EPIPE, "Broken pipe"))
    kernel.logs(OFF_THE_BUS, sequence=501)
    assert len(collect(agent, kernel)) == 1
    assert kernel.drops.snapshot() == {"kernel_log_overwritten": 500}


def test_what_is_no_record_is_counted_and_passed_over(kernel: Kernel) -> None:
    agent = kernel.agent()
    kernel.records += [OSError(errno.EINVAL, "too small"), b"garbage", b"6,x,y,-;z", b"\xff\xfe;\x00"]
    kernel.logs("text \\x0a" + "x" * 15_000 + "\n KEY=value\n")
    kernel.logs(OFF_THE_BUS)
    assert len(collect(agent, kernel)) == 1
    assert kernel.drops.snapshot() == {"kernel_log_malformed": 4}


def test_a_failing_log_fails_and_is_opened_anew(kernel: Kernel) -> None:
    agent = kernel.agent()
    kernel.logs(OFF_THE_BUS)
    kernel.records.append(OSError(errno.EIO, "I/O error"))
    observed = agent.collect(kernel.clock.now_s())
    assert len(observed.events) == 1
    assert "I/O error" in observed.problem
    with pytest.raises(CollectFailed, match="I/O error"):
        agent.collect(kernel.clock.now_s())
    kernel.records.pop()
    kernel.logs(KILLED)
    assert [event.kind for event in collect(agent, kernel)] == ["oom_kill"]
    agent.close()


def test_the_work_of_one_collection_is_bounded_and_the_rest_comes_next(kernel: Kernel) -> None:
    agent = kernel.agent()
    collect(agent, kernel)
    for _ in range(100_000):
        kernel.logs(OFF_THE_BUS)
    events: list[Event] = []
    slowest_s, collections, busy_s = 0.0, 0, 0.0
    while kernel.reads < 100_001:
        reads, begin_s = kernel.reads, time.perf_counter()
        events += collect(agent, kernel)
        took_s = time.perf_counter() - begin_s
        slowest_s, busy_s, collections = max(slowest_s, took_s), busy_s + took_s, collections + 1
        assert kernel.reads - reads <= RECORDS_MAX
    events += collect(agent, kernel, 100.0)
    print(f"100,000 records: {collections} collections, {busy_s:.2f} s, the slowest {slowest_s * 1e3:.0f} ms")
    assert [event.kind for event in events] == ["xid", "xid"]
    assert "(99999 more until " in events[1].attributes["text"]
    assert slowest_s < 2.0  # some 20 ms on a machine with nothing else to do


def test_a_flood_of_different_errors_is_spread_over_collections(kernel: Kernel) -> None:
    agent = kernel.agent()
    collect(agent, kernel)
    for code in range(600):
        kernel.logs(f"NVRM: Xid (PCI:0000:3b:00): {code}, text")
    counts = [len(collect(agent, kernel)) for _ in range(4)]
    assert max(counts) <= NEWS_MAX
    assert sum(counts) == 600


def test_times_follow_the_wall_clock_of_the_collection(kernel: Kernel) -> None:
    agent = kernel.agent()
    collect(agent, kernel)
    kernel.logs(OFF_THE_BUS)
    kernel.clock.jump(-500_000.0)
    (event,) = collect(agent, kernel)
    assert event.time_s == pytest.approx(kernel.clock.now_s() - 1.0, abs=1e-3)


@pytest.mark.parametrize("drift_s", [-300.0, 300.0])
def test_the_kernel_s_stamps_may_have_drifted(kernel: Kernel, drift_s: float) -> None:
    agent = kernel.agent()
    collect(agent, kernel)
    kernel.logs(OFF_THE_BUS, ago_s=drift_s)
    (event,) = collect(agent, kernel)
    assert kernel.clock.now_s() - 1.01 <= event.time_s <= kernel.clock.now_s()


def test_no_clock_makes_an_event_that_the_server_refuses(kernel: Kernel) -> None:
    agent = kernel.agent()
    kernel.clock.wall_s = 5.0  # no battery: it is 1970
    kernel.logs(OFF_THE_BUS, ago_s=50_000.0)
    (event,) = agent.collect(5.0).events
    assert event.time_s > 0.0


PANIC = "Panic#1 Part1\n<0>[ 3098.275469] Kernel panic - not syncing: Fatal machine check\n"


def dump(folder: Path, name: str, text: str, time_s: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    os.utime(folder / name, (time_s, time_s))


def test_the_panic_before_this_boot_is_told_once(kernel: Kernel) -> None:
    crash_s = kernel.clock.now_s() - UP_S - 300.0
    dump(kernel.pstore, "dmesg-erst-1", "Panic#1 Part2\n<6>[ 3000.0] fine\n", crash_s)
    dump(kernel.pstore, "dmesg-erst-2", PANIC, crash_s)
    dump(kernel.pstore, "console-ramoops-0", PANIC.partition("\n")[2], crash_s)
    dump(kernel.archive / "1/001", "dmesg.txt", PANIC, crash_s)
    dump(kernel.pstore, "dmesg-erst-0", PANIC.replace("3098", "17"), crash_s - 200_000.0)  # of long ago
    agent = kernel.agent()
    (event,) = collect(agent, kernel)
    assert (event.kind, event.time_s) == ("kernel_panic", crash_s)
    assert event.attributes == {"text": "Kernel panic - not syncing: Fatal machine check"}
    agent.close()
    assert collect(kernel.agent(), kernel) == []
    dump(kernel.archive / "2", "dmesg-erst-3", PANIC.replace("3098", "44"), crash_s + 100.0)
    assert len(collect(kernel.agent(), kernel)) == 1


def test_a_panic_whose_line_was_not_kept_is_still_one(kernel: Kernel) -> None:
    now_s = kernel.clock.now_s()
    dump(kernel.pstore, "dmesg-erst-1", "Panic#1 Part1\n<4>[ 3.0] trace\n", now_s)
    dump(kernel.pstore, "dmesg-erst-2", "Panic#1 Part2\n<1>[ 2.9] BUG: unable to handle page fault\n", now_s)
    dump(kernel.pstore, "dmesg-erst-3", "Oops#1 Part1\n<1>[ 1.0] BUG: survived\n", now_s)
    (event,) = collect(kernel.agent(), kernel)
    assert event.attributes == {"text": "Kernel panic: BUG: unable to handle page fault"}


def test_dumps_that_may_not_be_read_are_said_once(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr("eagle_eye.agent.collectors.kernel_log.os.scandir", refuse)
    agent = kernel.agent()
    kernel.logs(OFF_THE_BUS)
    observed = agent.collect(kernel.clock.now_s())
    assert "Permission denied" in observed.problem
    assert len(observed.events) == 1
    assert agent.collect(kernel.clock.now_s()).problem == ""


def refusing(error: OSError) -> Callable[[Path], int]:
    def opens(path: Path) -> int:
        raise error

    return opens


def test_a_host_without_the_log_or_the_right_to_it_is_unsupported(kernel: Kernel, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="no "):
        KernelLogCollector(kernel.drops, host=KernelLogHost(path=tmp_path / "kmsg")).collect(1.0)
    denied = PermissionError(errno.EPERM, "Operation not permitted")
    with pytest.raises(Unsupported, match="CAP_SYSLOG"):
        KernelLogCollector(kernel.drops, host=KernelLogHost(opener=refusing(denied))).collect(1.0)
    with pytest.raises(Unsupported, match="not the kernel's log"):
        KernelLogCollector(kernel.drops, host=KernelLogHost(path=Path("/dev/null"))).collect(1.0)
    busy = OSError(errno.EBUSY, "busy")
    with pytest.raises(CollectFailed, match="busy"):
        KernelLogCollector(kernel.drops, host=KernelLogHost(opener=refusing(busy))).collect(1.0)


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    kernel_end, agent_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    kernel_end.setblocking(False)
    agent_end.setblocking(False)
    yield kernel_end, agent_end
    kernel_end.close()
    agent_end.close()


def test_a_real_descriptor_is_read_record_by_record_and_never_waited_for(
    ends: tuple[socket.socket, socket.socket], kernel: Kernel
) -> None:
    kernel_end, agent_end = ends
    agent = KernelLogCollector(
        kernel.drops,
        {"3b:00.0": 1},
        host=KernelLogHost(
            panic_folders=(),
            monotonic_s=kernel.clock.monotonic_s,
            opener=lambda path: os.dup(agent_end.fileno()),
        ),
    )
    assert collect(agent, kernel) == []
    for number in range(3):
        kernel_end.send(f"4,{number},{int(UP_S * 1e6)},-;{OFF_THE_BUS}\n".encode())
    assert [event.device for event in collect(agent, kernel)] == [1]
    agent.close()


def test_this_machine_s_own_log_is_read(tmp_path: Path) -> None:
    try:
        os.close(open_log(Path("/dev/kmsg")))
    except OSError as error:
        pytest.skip(f"/dev/kmsg cannot be read here: {error}")
    drops = Drops()
    agent = KernelLogCollector(drops, state_folder=tmp_path)
    for _ in range(100):
        before = agent._sequence
        agent.collect(time.time())
        if agent._sequence == before:
            break
    assert agent._sequence is not None
    assert "kernel_log_malformed" not in drops.snapshot()
    agent.close()
    assert json.loads((tmp_path / STATE_FILE).read_text())["sequence"] <= agent._sequence
