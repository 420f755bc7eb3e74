from __future__ import annotations

import itertools
import os
import random
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.agent.kernel_messages import (
    BRING_UP_S,
    CHANGES_MAX,
    FOLD_S,
    KEYS_MAX,
    KernelMessage,
    LinkChanges,
    NewMessage,
    Repeats,
    bus_address,
    message,
    panic,
    record,
    whole_machine_check,
)
from eagle_eye.detectors.signs.gpu_errors import BURST_S
from eagle_eye.detectors.signs.memory_kills import RANK_NEAR_S
from eagle_eye.schema.driver_facts import CORRECTED, UNCORRECTED, recovery_of, sxid_severity

OFF_THE_BUS = "NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, name=python3, GPU has fallen off the bus."


def said(line: str) -> KernelMessage | None:
    return message(line.encode())


def reported(line: str) -> KernelMessage:
    found = said(line)
    assert found is not None, line
    return found


@pytest.mark.parametrize(
    ("line", "code", "address", "text"),
    [
        (OFF_THE_BUS, 79, "0000:3b:00", "pid=4711, name=python3, GPU has fallen off the bus."),
        (
            "NVRM: Xid (PCI:0000:3B:00.0): 31, pid='<unknown>', name=<unknown>, Ch 0000001b",
            31,
            "0000:3b:00",
            "pid='<unknown>', name=<unknown>, Ch 0000001b",
        ),
        ("NVRM: Xid (0000:83:00): 14, Channel 00000001", 14, "0000:83:00", "Channel 00000001"),
        ("NVRM: Xid (0004:00): 6, PE0001", 6, "0000:04:00", "PE0001"),
        (
            "NVRM: Xid (PCI:0008:01:00): 149, NETIR_LINK_EVT  Fatal   XC0 i0 Link 08 (0x004505c6 0x0)",
            149,
            "0008:01:00",
            "NETIR_LINK_EVT  Fatal   XC0 i0 Link 08 (0x004505c6 0x0)",
        ),
        (
            "NVRM: Xid (PCI:0000:31:00 GPU-I:02): 43, pid=9, name=pt_main_thread, Ch 00000008",
            43,
            "0000:31:00",
            "GPU-I:02, pid=9, name=pt_main_thread, Ch 00000008",
        ),
        ("NVRM: Xid (PCI:0000:01:00): 62, 32ae(3138) 00000000", 62, "0000:01:00", "32ae(3138) 00000000"),
        ("NVRM: Xid (PCI:0000:01:00): 48", 48, "0000:01:00", ""),
    ],
)
def test_an_xid_is_read_with_its_code_gpu_and_text(line: str, code: int, address: str, text: str) -> None:
    found = reported(line)
    assert (found.kind, found.code, found.address, found.text) == ("xid", code, address, text)


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus.",  # XID 79 says it too
        "NVRM: GPU at PCI:0000:3b:00: GPU-34d7319c-5b19-1e75-186d-c187099e4fe5",
        "NVRM: Xid (invalid): some error",
        "NVRM: Xid (PCI:0000:3b:00): %d, text",
        "NVRM: Xid error: xyz",
        "audit: comm=x says 'NVRM: Xid (PCI:0000:3b:00): 79, no'",
        "nvidia-nvswitch0: open (major=510)",
        "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Data {0x10000000, 0x10000000}",
        "nvidia-nvswitch0: SXid (PCI:0000:05:00.0): 20034, Severity 1 Engine instance 62 Sub-engine instance 00",
        "ata8: SATA link down (SStatus 0 SControl 300)",
        "pcieport 0000:00:07.0: pciehp: Slot(0): Link Up",
        "pcieport 0000:03:04.0: PCIe Bus Error: severity=Uncorrected (Non-Fatal), type=Transaction Layer",
        "NVRM: (PCI ID: 10de:2330) installed in this system has",
        "IPv6: ADDRCONF(NETDEV_CHANGE): enp65s0f0np0: link becomes ready",
        "IPv6: ADDRCONF(NETDEV_UP): eth0: link is not ready",
        "bond0: (slave eth0): link status down, disabling it in 200 ms",
        "mlx5_core 0000:41:00.1: 63.008 Gb/s available PCIe bandwidth (8.0 GT/s PCIe x8 link)",
        "mlx5_core 0000:41:00.0: Link up",
        "lpfc 0000:81:00.0: 0:1305 Link Down Event x2 received",
        "br0: port 1(veth0) entered disabled state",
        "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),task=python,pid=9,uid=0",
        "Out of memory: Kill process 9 (python) score 900 or sacrifice child",
        "oom_reaper: reaped process 9 (python), now anon-rss:0kB",
        "EDAC MC0: Giving out device to module amd64_edac controller F19h_M10h",
        "mce: CPU0: Package temperature above threshold, cpu clock throttled",
        "MCE: In-kernel MCE decoding enabled.",
    ],
)
def test_what_only_looks_like_an_error_says_nothing(line: str) -> None:
    assert said(line) is None


def test_the_new_recovery_action_of_xid_154_is_no_repeat_of_the_last() -> None:
    lines = [
        f"NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from {change}"
        for change in ("0x0 (None) to 0x4 (Drain and Reset)", "0x4 (Drain and Reset) to 0x1 (GPU Reset Required)")
    ]
    first, second = (reported(line) for line in lines)
    assert first.subject != second.subject
    assert [recovery_of({"code": item.code, "text": item.text}) for item in (first, second)] == [
        "drain_and_reset",
        "reset",
    ]


@pytest.mark.parametrize(
    ("rest", "severity"),
    [
        ("12028, Non-fatal, Link 32 egress non-posted PRIV error (First)", "nonfatal"),
        ("20034, Fatal, Link 30 LTSSM Fault Up", "port"),
        ("22011, Fatal, Link 1 minion halted", "all"),
        ("99999, Some error", "unknown"),
    ],
)
def test_an_sxid_says_which_switch_and_how_bad(rest: str, severity: str) -> None:
    found = reported(f"nvidia-nvswitch3: SXid (PCI:0000:05:00.0): {rest}")
    assert (found.kind, found.code, found.address) == ("sxid", int(rest[:5]), "0000:05:00")
    assert sxid_severity({"code": found.code, "text": found.text}) == severity
    assert "nvidia-nvswitch3 PCI:0000:05:00.0" in found.text


@pytest.mark.parametrize(
    ("line", "process"),
    [
        ("Out of memory: Killed process 1234 (python) total-vm:1kB, anon-rss:2kB", "python"),
        ("Memory cgroup out of memory: Killed process 77 (pt_main_thread) total-vm:1kB", "pt_main_thread"),
        ("Killed process 1234 (torchrun) total-vm:1kB, anon-rss:2kB, file-rss:0kB", "torchrun"),
        ("Killed process 1234, UID 48, (httpd) total-vm:1kB", "httpd"),
        ("Out of memory: Killed process 123, UID 48, (httpd).", "httpd"),
        ("Out of memory (oom_kill_allocating_task): Killed process 8 (java) total-vm:1kB", "java"),
        ("Out of memory: Killed process 5 ((sd-pam)) total-vm:1kB", "(sd-pam)"),
        ("Out of memory: Killed process 5 (a b) total-vm:1kB", "a b"),
        ("Out of memory: Killed process 5 (q\\x5cz\\x1b) total-vm:1kB", "q\\z\ufffd"),
    ],
)
def test_a_kill_for_memory_names_the_process(line: str, process: str) -> None:
    assert reported(line) == KernelMessage("oom_kill", process)


@pytest.mark.parametrize(
    ("line", "kind", "link"),
    [
        ("mlx5_core 0000:41:00.0 enp65s0f0np0: Link down", "link_down", "enp65s0f0np0"),
        ("mlx5_core 0000:41:00.0 enp65s0f0np0: Link up", "link_up", "enp65s0f0np0"),
        ("mlx5_core 0000:41:00.0 ens1np0 (unregistering): Link down", "link_down", "ens1np0"),
        ("mlx4_en: eth2: Link Down", "link_down", "eth2"),
        ("infiniband mlx5_0: Port: 1 Link DOWN", "link_down", "mlx5_0"),
        ("infiniband mlx5_0: Port: 1 Link ACTIVE", "link_up", "mlx5_0"),
        ("mlx5_3: port 1: link down", "link_down", "mlx5_3"),
        ("mlx4_core 0000:03:00.0: mlx4_0: Port 2 link down", "link_down", "mlx4_0:2"),
        ("bond0: link status definitely down for interface eth0, disabling it", "link_down", "eth0"),
        ("bonding: bond0: link status definitely up for interface eth1, 25000 Mbps full duplex.", "link_up", "eth1"),
        ("bond0: (slave ens1f0np0): link status definitely down, disabling slave", "link_down", "ens1f0np0"),
        ("bond0: (slave ens1): link status definitely up, 200000 Mbps full duplex", "link_up", "ens1"),
        ("bnxt_en 0000:01:00.0 eth0: NIC Link is Down", "link_down", "eth0"),
        ("bnxt_en 0000:01:00.0 eth0: NIC Link is Up, 25000 Mbps (NRZ) full duplex", "link_up", "eth0"),
        ("ice 0000:31:00.0 ens1f0: NIC Link is up 100 Gbps Full Duplex, Requested FEC: RS", "link_up", "ens1f0"),
        ("i40e 0000:3d:00.0 eno1: NIC Link is Down", "link_down", "eno1"),
        ("ixgbe 0000:01:00.0: eth0: NIC Link is Down", "link_down", "eth0"),
        ("igb 0000:07:00.0 eno1: igb: eno1 NIC Link is Down", "link_down", "eno1"),
        ("e1000e: eth0 NIC Link is Down", "link_down", "eth0"),
        ("tg3 0000:04:00.0 eth0: Link is up at 1000 Mbps, full duplex", "link_up", "eth0"),
        ("r8169 0000:03:00.0 enp3s0: Link is Down", "link_down", "enp3s0"),
        ("cxgb4 0000:02:00.4 eth5: link up, 10Gbps, full-duplex, no PAUSE", "link_up", "eth5"),
        ("[qede_link_update:2211(ens2f0)]Link is down", "link_down", "ens2f0"),
        ("eth0: NIC Link is Down", "link_down", "eth0"),
    ],
)
def test_a_link_change_names_the_port(line: str, kind: str, link: str) -> None:
    found = reported(line)
    assert (found.kind, found.subject) == (kind, link)


@pytest.mark.parametrize(
    ("lines", "severity"),
    [
        (["mce: [Hardware Error]: Machine check events logged"], None),
        (
            [
                "mce: [Hardware Error]: CPU 3: Machine Check Exception: 5 Bank 6: b200000000070000",
                "mce: [Hardware Error]: TSC 1234",
            ],
            "uncorrected",
        ),
        (["mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 8: cc00084000010091"], "corrected"),
        (["mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 8: 9c20100000010091"], "deferred"),
        (["mce: Uncorrected hardware memory error in user-access at 12345680"], "uncorrected"),
        (["mce: [Hardware Error]: Machine check: Processor context corrupt"], "uncorrected"),
        (
            [
                "[Hardware Error]: Corrected error, no action required.",
                "[Hardware Error]: CPU:24 (17:31:0) MC17_STATUS[Over|CE|MiscV|-|AddrV|CECC]: 0xdc2040000000011b",
            ],
            "corrected",
        ),
        (["[Hardware Error]: Uncorrected, software restartable error."], "uncorrected"),
        (["[Hardware Error]: Deferred error, no action required."], "deferred"),
        (
            [
                "{1}[Hardware Error]: Hardware error from APEI Generic Hardware Error Source: 4",
                "{1}[Hardware Error]: It has been corrected by h/w and requires no further action",
                "{1}[Hardware Error]: event severity: corrected",
                "{1}[Hardware Error]:   section_type: memory error",
            ],
            "corrected",
        ),
        (
            [
                "{2}[Hardware Error]: event severity: recoverable",
                "{2}[Hardware Error]:   section_type: memory error",
            ],
            "uncorrected",
        ),
        (
            ["{3}[Hardware Error]: event severity: recoverable", "{3}[Hardware Error]:   section_type: PCIe error"],
            None,
        ),
        (
            ["BERT: Error records from previous boot:", "[Hardware Error]: event severity: fatal"],
            "uncorrected",
        ),
        (["EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0"], "corrected"),
        (["EDAC MC1: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0"], "uncorrected"),
    ],
)
def test_the_lines_of_a_machine_check_say_together_whether_it_was_corrected(
    lines: list[str], severity: str | None
) -> None:
    whole = whole_machine_check([reported(line) for line in lines])
    assert (whole.subject if whole is not None else None) == severity
    if whole is not None:
        assert bool(UNCORRECTED.search(whole.text)) == (severity == "uncorrected")
        assert bool(CORRECTED.search(whole.text)) or severity == "uncorrected"


@pytest.mark.parametrize(
    ("line", "subject", "address"),
    [
        (
            "mlx5_core 0000:41:00.1: poll_health:852:(pid 0): device's health compromised - reached miss count",
            "nic_failed 0000:41:00.1",
            "0000:41:00",
        ),
        ("NETDEV WATCHDOG: ens1f0np0 (mlx5_core): transmit queue 3 timed out", "nic_stalled ens1f0np0", ""),
        (
            "pcieport 0000:00:1b.2: AER: Uncorrectable (Fatal) error message received from 0000:03:04.0",
            "pcie_fatal 0000:03:04.0",
            "0000:03:04",
        ),
        (
            "pcieport 0000:00:1b.2: AER: Uncorrected (Fatal) error received: id=0304",
            "pcie_fatal id=0304",
            "",
        ),
        (
            "NVRM: The NVIDIA GPU 0000:3b:00.0\\x0aNVRM: fallen off the bus and is not responding to commands.",
            "gpu_unusable 0000:3b:00",
            "0000:3b:00",
        ),
        ("watchdog: BUG: soft lockup - CPU#12 stuck for 26s! [python3:4711]", "cpu_stuck CPU#12", ""),
        ("INFO: task kworker/u8:3:931 blocked for more than 122 seconds.", "task_blocked kworker/u8:3", ""),
        ("blk_update_request: I/O error, dev nvme0n1, sector 8 op 0x0:(READ)", "disk_errors nvme0n1", ""),
        ("nfs: server fs1.example not responding, still trying", "storage_silent fs1.example", ""),
    ],
)
def test_a_host_error_says_what_fails_and_which_device(line: str, subject: str, address: str) -> None:
    found = reported(line)
    assert (found.kind, found.subject, found.address) == ("host_error", subject, address)
    assert found.text


def test_a_fatal_pcie_error_that_firmware_reports_is_one_with_its_device() -> None:
    lines = [
        "{3}[Hardware Error]: event severity: fatal",
        "{3}[Hardware Error]:   section_type: PCIe error",
        "{3}[Hardware Error]:   device_id: 0000:17:00.0",
    ]
    whole = whole_machine_check([reported(line) for line in lines])
    assert whole is not None
    assert (whole.kind, whole.subject, whole.address) == ("host_error", "pcie_fatal 0000:17:00.0", "0000:17:00")


def test_a_record_is_read_as_the_kernel_writes_it() -> None:
    found = record(b"4,1234,98765432,-,caller=T12;text; with\\x0aescapes\n SUBSYSTEM=pci\n DEVICE=+pci:0000:3b:00.0\n")
    assert found is not None
    assert (found.sequence, found.stamp_s) == (1234, 98.765432)
    assert record(b"4,1235,98765433,c;part") is not None


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b";",
        b"text",
        b"6,1,2",
        b"6;x",
        b"6,x,2,-;t",
        b"6,-1,2,-;t",
        b"6,1,2.5,-;t",
        b"6," + b"9" * 90 + b",2,-;t",
        b"6,1," + b"9" * 9000,
    ],
)
def test_what_is_no_record_is_called_so(raw: bytes) -> None:
    assert record(raw) is None


def test_a_message_is_found_behind_an_escaped_line_feed_and_never_in_a_record_s_properties() -> None:
    assert reported("first\\x0a" + OFF_THE_BUS).code == 79
    assert message(b"first Xid (\n " + OFF_THE_BUS.encode()) is None


def test_broken_text_is_shown_as_such() -> None:
    found = message(b"NVRM: Xid (PCI:0000:3b:00): 13, \xff\xfe\\x00\\x1b[31m " + b"x" * 9000)
    assert found is not None
    assert found.text.startswith("\ufffd\ufffd\ufffd\ufffd[31m xxx")
    assert len(found.text) == 512


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("00000000:3B:00.0", "0000:3b:00"),
        ("0000:3b:00.0", "0000:3b:00"),
        ("PCI:0000:3b:00", "0000:3b:00"),
        ("3b:00.0", "0000:3b:00"),
        ("00010009:01:00.0", "10009:01:00"),
        ("", ""),
        ("invalid", ""),
    ],
)
def test_bus_addresses_of_nvml_and_of_the_log_are_the_same(text: str, address: str) -> None:
    assert bus_address(text) == address


PIECES = ["NVRM: Xid (PCI:0000:3b:00): 79", "Xid (", "SXid (", "Killed process 1 (", "link ", "Link is ", "down", "up"]
PIECES += [
    "[Hardware Error]: ",
    "EDAC MC0: 1 UE ",
    "bond0: link status definitely ",
    " NIC ",
    "port 1 ",
    "\\x0a",
    ":",
    ")",
]


@given(st.binary(max_size=400))
def test_no_bytes_break_the_reader(raw: bytes) -> None:
    found = record(raw)
    message(raw if found is None else found.text)
    panic(raw)
    bus_address(raw.decode("latin-1"))


@given(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=8)), max_size=12))
def test_no_text_breaks_the_reader(pieces: list[str]) -> None:
    found = message("".join(pieces).encode("utf-8", "surrogatepass"))
    if found is not None and found.kind == "machine_check":
        whole_machine_check([found])


def test_a_hostile_line_costs_little() -> None:
    begin_s = time.process_time()
    for line in (b"link status definitely " * 700, b"a: " * 4000 + b"link down", b"Killed process 1 (" + b")" * 16_000):
        message(line)
        message(b"NVRM: Xid (" + line)
        panic(line * 10)
    assert time.process_time() - begin_s < 0.5


def test_an_ordinary_record_costs_microseconds() -> None:
    raw = (
        b"6,4006,15519938051,-;perf: interrupt took too long (7156 > 3926), lowering kernel.perf_event_max_sample_rate"
    )
    best_s = min(_time_of(raw) for _ in range(5))
    assert best_s < 50e-6  # 8 microseconds on a quiet machine


def _time_of(raw: bytes) -> float:
    begin_s = time.thread_time()
    for _ in range(2_000):
        found = record(raw)
        assert found is not None
        message(found.text)
    return (time.thread_time() - begin_s) / 2_000


XID = KernelMessage("xid", "79", "text", 79, "0000:3b:00")


def test_the_first_is_told_at_once_and_a_flood_as_a_handful() -> None:
    repeats = Repeats()
    news: list[NewMessage] = []
    for number in range(100_000):  # 1000 a second, 100 s
        news += repeats.add(XID, 1_000.0 + number / 1_000)
        if number % 1_000 == 0:
            news += repeats.due(1_000.0 + number / 1_000)
    news += repeats.due(1_200.0)
    assert news[0] == NewMessage(XID, 1_000.0)
    assert len(news) == 3
    assert sum(item.more for item in news) == 99_999
    assert news[-1].at_s == pytest.approx(1_099.999)
    assert repeats.due(1_300.0) == []


def test_folding_changes_no_count_of_occurrences() -> None:
    assert FOLD_S < BURST_S
    random_of = random.Random(5)
    for _ in range(200):
        times_s = [0.0]
        for _ in range(random_of.randrange(60)):
            times_s.append(times_s[-1] + random_of.choice([0.001, 0.5, 20.0, 58.0, 59.5, 61.0, 300.0]))
        repeats, news = Repeats(), []
        for at_s in times_s:
            news += repeats.due(at_s) + repeats.add(XID, at_s)
        news += repeats.due(times_s[-1] + 1_000.0)
        assert _occurrences(sorted(item.at_s for item in news)) == _occurrences(times_s)
        assert sum(item.more or 1 for item in news) == len(times_s)


def _occurrences(times_s: list[float]) -> int:
    return 1 + sum(later - earlier > BURST_S for earlier, later in itertools.pairwise(times_s))


def test_other_gpus_other_codes_and_other_processes_are_not_repeats() -> None:
    repeats = Repeats()
    others = [XID, XID._replace(address="0000:86:00"), XID._replace(subject="48"), KernelMessage("oom_kill", "python3")]
    assert all(repeats.add(other, 5.0) for other in others)
    assert not any(repeats.add(other, 6.0) for other in others)


def test_kills_stay_near_enough_in_time_to_the_ranks_that_they_end() -> None:
    repeats, kill = Repeats(), KernelMessage("oom_kill", "python3")
    news = [item for second in range(60) for item in (*repeats.due(second), *repeats.add(kill, second))]
    reported_s = [item.at_s for item in news]
    assert all(min(abs(second - at_s) for at_s in reported_s) < RANK_NEAR_S for second in range(60))
    assert len(reported_s) <= 12


def test_a_flood_of_different_messages_is_bounded() -> None:
    repeats, changes = Repeats(), LinkChanges()
    for number in range(3 * KEYS_MAX):
        repeats.add(XID._replace(subject=str(number)), float(number) / 1e3)
        changes.add(KernelMessage("link_up", f"veth{number}"), float(number))
    assert len(repeats._reported) <= KEYS_MAX
    assert len(changes._links) <= KEYS_MAX


DOWN, UP = KernelMessage("link_down", "eth0"), KernelMessage("link_up", "eth0")


def test_a_change_that_driver_and_bond_both_tell_is_one() -> None:
    changes = LinkChanges()
    reported = [
        changes.add(item, 1_000.0 + at_s)
        for item, at_s in ((DOWN, 0.0), (DOWN, 0.1), (UP, 3.0), (UP, 3.2), (DOWN, 9.0))
    ]
    assert [len(item) for item in reported] == [1, 0, 1, 0, 1]


def test_a_link_that_flaps_without_end_is_reported_a_few_times_and_as_it_ended() -> None:
    changes, news = LinkChanges(), []
    for number in range(500):
        news += changes.add((DOWN, UP)[number % 2], 1_000.0 + number / 10)
        news += changes.due(1_000.0 + number / 10)
    assert len(news) == CHANGES_MAX
    news += changes.add(DOWN, 1_050.0)
    news += changes.due(1_200.0)
    assert news[-1].message == DOWN
    assert news[-1].at_s == 1_050.0


def test_a_port_with_no_cable_does_not_go_down_at_boot() -> None:
    changes = LinkChanges()
    assert changes.add(DOWN, 12.0) == []
    assert changes.add(UP, 20.0) != []
    assert changes.add(DOWN, 30.0) != []
    assert LinkChanges().add(DOWN, BRING_UP_S) != []


def test_a_panic_is_named_by_the_crashed_kernel_s_own_line() -> None:
    dump = (
        b"Panic#2 Part1\n<4>[ 3098.275460][  T812] Call Trace:\n"
        b"<0>[ 3098.275469][  T812] Kernel panic - not syncing: Fatal machine check\n"
        b"<0>[ 3098.375469][  T812] ---[ end Kernel panic - not syncing: Fatal machine check ]---\n"
    )
    found = panic(dump)
    assert found is not None
    assert found.text == "Kernel panic - not syncing: Fatal machine check"
    assert panic(dump.replace(b"Panic#2 Part1\n", b"")) == found
    assert panic(b"Oops#1 Part1\n<1>[  201.65] BUG: unable to handle kernel NULL pointer dereference") is None
    other = panic(b"Panic#1 Part1\n<1>[  201.65] BUG: unable to handle page fault\n")
    assert other is not None
    assert (other.line, other.text) == ("", "Kernel panic: BUG: unable to handle page fault")


def recorded(name: str) -> list[bytes]:
    folder = os.environ.get("EAGLE_EYE_TEST_DATA")
    if not folder:
        pytest.skip("EAGLE_EYE_DATA does not name the folder with the recorded kernel logs")
    files = sorted((Path(folder) / "real/fixtures").rglob(name))
    if not files:
        pytest.skip(f"no {name} under {folder}/real/fixtures")
    lines = [line for file in files for line in file.read_bytes().splitlines()]
    assert lines, f"{name} under {folder}/real/fixtures is empty"
    return lines


def test_recorded_lines_are_read_and_nothing_is_invented() -> None:
    lines = recorded("xid_lines_from_tests.txt")
    for line in lines:
        found = message(line)
        head, _, rest = line.partition(b"): ")
        if found is not None:
            assert str(found.code).encode() == rest.partition(b",")[0], line
        elif b"Xid (PCI:" in head and rest[:1].isdigit():
            assert b"SXid" in head, line
            assert b"Data {" in rest or b"Severity " in rest, line


def test_recorded_logs_of_healthy_hosts_hold_no_kill_and_no_link_that_fell() -> None:
    for line in recorded("kmsg.*.log") + recorded("dmesg-erst-*"):
        found = message(line.rpartition(b";")[2] if line[:1].isdigit() else line.partition(b"] ")[2])
        assert found is None or (found.kind, found.subject) == ("link_up", "enp65s0f0np0"), line
