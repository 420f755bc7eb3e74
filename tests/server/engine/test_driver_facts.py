"""Every kind of fact that drivers state, by every channel that can carry it: one judgement, in every place that judges.

The places: ``agent --once --check`` (the prolog), ``eagle-eye doctor``, and the server's detectors and policy while the
job stands still, crashes and goes on.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

from eagle_eye.agent.collector import CollectorStanding, Observed, TickFrame
from eagle_eye.agent.collectors.nvml import STATED_S, StatedFacts
from eagle_eye.agent.doctor import check_host as doctor
from eagle_eye.agent.host_verdict import SOURCES, judge
from eagle_eye.agent.nvml.device import GpuReading
from eagle_eye.agent.nvml.fields import NvmlFailure
from eagle_eye.schema.driver_facts import (
    DCGM_FACTS,
    FACTS,
    NVML_FACTS,
    NVML_OPENING_FACTS,
    NVML_RECOVERY_FACTS,
    XIDS,
    judged,
)
from eagle_eye.schema.events import Event
from tests.detectors.windows import NOW_S
from tests.server.engine.test_kernel_lines import crashed, decided, logged, read

GPU = 0


class Outcome(NamedTuple):
    """What each place makes of a fact."""

    repair: str
    prolog: str
    doctor: str
    still: str
    crash: str
    goes_on: str


LOST = Outcome("reboot", "sick", "failed", "exclude_node", "exclude_node", "exclude_node")
TO_RESET = LOST._replace(repair="reset_gpu")
DRAINS = TO_RESET._replace(goes_on="drain_node")


def kernel(*lines: str) -> Callable[[Path], list[Event]]:
    return lambda folder: read(lines, folder)


def nvml(code: int) -> Callable[[Path], list[Event]]:
    reading = GpuReading(failed=[NvmlFailure("utilization", code)])
    return lambda _: told_by_nvml({GPU: reading})


def nvml_opening(code: int) -> Callable[[Path], list[Event]]:
    return lambda _: told_by_nvml({}, NvmlFailure("gpu 0", code))


def nvml_recovery(action: int) -> Callable[[Path], list[Event]]:
    return lambda _: told_by_nvml({GPU: GpuReading(facts={NVML_RECOVERY_FACTS[action]: f"recovery action {action}"})})


def told_by_nvml(readings: Mapping[int, GpuReading], *unopened: NvmlFailure) -> list[Event]:
    stated = StatedFacts(0.0, good_news=False)
    return stated.news(readings, unopened, NOW_S, 0.0)


def dcgm(code: str) -> Callable[[Path], list[Event]]:
    return lambda _: [Event(NOW_S, "host_error", GPU, {"what": DCGM_FACTS[code], "text": code})]


def recovery(number: int, name: str) -> str:
    return f"NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x0 (None) to {number:#x} ({name})"


ASSERTION = "NVRM: nvAssertOkFailedNoLog: Assertion failed: {} returned from status @ a.c:28"
GSP = "NVRM: nvAssertFailedNoLog: Assertion failed: Back to back GSP RPC timeout detected! GPU marked for reset @ a.c:9"
LINK_MASK = "NVRM: knvlinkUpdatePostRxDetectLinkMask_IMPL: Failed to update Rx Detect Link mask!"
PEER_MASK = "NVRM: knvlinkDiscoverPostRxDetLinks_GH100: Getting peer1's postRxDetLinkMask failed!"
AMD = "amdgpu 0000:3b:00.0: {1}uncorrectable hardware error(ERREVENT_ATHUB_INTERRUPT) detected!"
AMD_DEAD = "amdgpu 0000:3b:00.0: amdgpu: GPU reset(3) failed"

# Kind, its outcome everywhere, and its channels.
KINDS: Mapping[str, tuple[Outcome, Mapping[str, Callable[[Path], list[Event]]]]] = {
    "lost": (
        LOST,
        {
            "XID": kernel("NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus."),
            "driver's code": kernel(ASSERTION.format("GPU lost from the bus [NV_ERR_GPU_IS_LOST] (0x0000000F)")),
            "NVML's code": nvml(15),
            "PCI bus": lambda _: [Event(NOW_S, "gpu_lost", GPU, {"uuid": "GPU-a"})],
            "DCGM": dcgm("DCGM_FR_FALLEN_OFF_BUS"),
        },
    ),
    "reset required": (
        TO_RESET,
        {
            "XID": kernel(recovery(1, "GPU Reset Required")),
            "driver's code": kernel(ASSERTION.format("Reset required [NV_ERR_RESET_REQUIRED] (0x00000062)")),
            "driver's words": kernel(GSP),
            "NVML's code": nvml(16),
            "NVML's recovery action": nvml_recovery(1),
            "DCGM": dcgm("DCGM_FR_GPU_RECOVERY_RESET"),
        },
    ),
    "reboot required": (
        LOST,
        {
            "XID": kernel(recovery(2, "Node Reboot Required")),
            "NVML's recovery action": nvml_recovery(2),
            "DCGM": dcgm("DCGM_FR_GPU_RECOVERY_REBOOT"),
        },
    ),
    "drain and reset": (
        DRAINS._replace(still="drain_node+restart_job"),  # with the job, but not because of it
        {
            "XID": kernel(recovery(4, "Drain and Reset")),
            "NVML's recovery action": nvml_recovery(4),
            "DCGM": dcgm("DCGM_FR_GPU_RECOVERY_DRAIN_RESET"),
        },
    ),
    "firmware silent": (
        DRAINS,
        {
            "XID": kernel("NVRM: Xid (PCI:0000:3b:00): 119, pid=1, name=a, Timeout waiting for RPC from GSP!"),
            "driver's words": kernel("NVRM: _issueRpcAndWait: rpcRecvPoll timedout for fn 76 sequence 4129!"),
        },
    ),
    "memory": (
        TO_RESET,
        {
            "XID": kernel("NVRM: Xid (PCI:0000:3b:00): 95, pid=1, Uncontained: LTC TAG (0x2, 0x1). RST: Yes"),
            "DCGM": dcgm("DCGM_FR_UNCONTAINED_ERROR"),
        },
    ),
    "needs a reset, and may work until then": (
        DRAINS,
        {
            "XID": kernel("NVRM: Xid (PCI:0000:3b:00): 156, Resource Retirement Event"),
            "NVLinks' state": kernel(LINK_MASK),
            "NVLinks' state at a peer": kernel(PEER_MASK),
            "amdgpu": kernel(AMD),
        },
    ),
    "not brought up": (
        DRAINS._replace(repair="reboot"),
        {
            "NVIDIA's driver": kernel("NVRM: GPU 0000:3b:00.0: RmInitAdapter failed! (0x62:0x40:2477)"),
            "amdgpu": kernel(AMD_DEAD),
            "NVML's code when opened": nvml_opening(999),
        },
    ),
    "fatal SXID": (
        DRAINS,
        {"kernel": kernel("nvidia-nvswitch2: SXid (PCI:0000:06:00.0): 20034, Fatal, Link 33 LTSSM")},
    ),
    "machine check": (
        DRAINS._replace(repair="inspect"),
        {"kernel": kernel("mce: [Hardware Error]: CPU 52: Machine Check Exception: 5 Bank 1: bd80000000100134")},
    ),
    "repaired by its driver": (
        Outcome("none", "healthy", "ok", "restart_job", "restart_job", ""),
        {"amdgpu": kernel("amdgpu 0000:3b:00.0: amdgpu: GPU reset(2) succeeded!"), "NVML": nvml_recovery(0)},
    ),
    "the program's": (
        Outcome("none", "healthy", "ok", "restart_job", "restart_job", ""),
        {
            "XID 45": kernel("NVRM: Xid (PCI:0000:3b:00): 45, pid=1, name=python3, Ch 00000001"),
            "corrected by its switch": kernel("nvidia-nvswitch0: SXid (PCI:0000:ca:00.0): 28002, Non-fatal, Link 20"),
            "corrected by its host": kernel("EDAC MC1: 1 CE memory read error on CPU_SrcID#1 (channel:2 slot:0)"),
        },
    ),
}


def outcome(events: list[Event]) -> Outcome:
    tick = TickFrame(
        NOW_S, 1.0, Observed(), tuple(events), tuple(CollectorStanding(n, "ok", 0.0, 0) for n in SOURCES), 1
    )
    verdict = judge(tick)
    said = judged(events[0].kind, events[0].attributes, events[0].device) if events else None
    return Outcome(
        said.repair if said is not None else "none",
        verdict.state,
        next(finding.state for finding in doctor(verdict)),
        kinds_of(logged(events, 30.0, rows=30)),
        kinds_of(crashed(events)),
        kinds_of(logged(events, 30.0)),
    )


def kinds_of(story: object) -> str:
    return "+".join(sorted({one.kind for one in decided(story)}))  # type: ignore[arg-type]  # a Story


def on_a_known_gpu(events: list[Event]) -> list[Event]:
    """Return the events with the GPU's row, as where NVML knows the address that the line names."""
    of_a_gpu = {"xid", "gpu_lost", "host_error"}
    up = {"gpu_unusable"}
    return [
        Event(e.time_s, e.kind, GPU if e.kind in of_a_gpu and e.attributes.get("what") not in up else -1, e.attributes)
        for e in events
    ]


def pairs() -> Iterator[tuple[str, str]]:
    for kind, (_, channels) in KINDS.items():
        for channel in channels:
            yield kind, channel


@pytest.mark.parametrize(("kind", "channel"), list(pairs()))
def test_a_fact_is_judged_alike_by_whatever_channel(kind: str, channel: str, tmp_path: Path) -> None:
    expected, channels = KINDS[kind]
    assert outcome(on_a_known_gpu(channels[channel](tmp_path))) == expected


def test_the_table_of_kinds_misses_no_code_of_a_channel() -> None:
    carried = {name for _, channels in KINDS.values() for name in channels}
    assert {"XID", "driver's code", "NVML's code", "NVML's recovery action", "DCGM", "amdgpu", "PCI bus"} <= carried
    names = {fact.name for fact in FACTS}
    for table in (NVML_FACTS, NVML_OPENING_FACTS, NVML_RECOVERY_FACTS, DCGM_FACTS):
        assert set(table.values()) <= names


@pytest.mark.parametrize("code", sorted(xid.code for xid in XIDS if xid.code != 154))
def test_the_prolog_refuses_what_the_detectors_take_out_for_a_repair(code: int) -> None:
    event = Event(NOW_S, "xid", GPU, {"code": code, "text": "Fatal"})
    acted = kinds_of(logged([event], 30.0)) in ("exclude_node", "drain_node")
    said = judged(event.kind, event.attributes)
    assert said is not None
    if said.fact.kind in ("lost", "hang", "memory", "reset"):
        assert acted == (said.repair != "none")
    assert (outcome([event]).prolog == "sick") == (said.repair != "none")


def test_what_nvml_says_during_a_reset_is_no_fact_yet() -> None:
    stated, lost = StatedFacts(STATED_S, good_news=False), {GPU: GpuReading(failed=[NvmlFailure("power", 15)])}
    assert stated.news(lost, (), NOW_S, 100.0) == []
    assert stated.news({GPU: GpuReading()}, (), NOW_S, 130.0) == []
    assert stated.news(lost, (), NOW_S, 140.0) == []
    assert stated.news(lost, (), NOW_S, 199.0) == []
    (event,) = stated.news(lost, (), NOW_S, 200.0)
    assert (event.kind, event.device, event.attributes["what"]) == ("host_error", GPU, "gpu_lost")
    assert stated.news(lost, (), NOW_S, 900.0) == []


def test_a_recovery_that_is_over_is_told_once() -> None:
    stated = StatedFacts(STATED_S, good_news=False)
    asks, well = GpuReading(facts={"gpu_reset_required": "1"}), GpuReading(facts={"gpu_repaired": "0"})
    assert stated.news({GPU: well}, (), NOW_S, 0.0) == []
    told = [[e.attributes["what"] for e in stated.news({GPU: one}, (), NOW_S, 1.0)] for one in (asks, asks, well, well)]
    assert told == [["gpu_reset_required"], [], ["gpu_repaired"], []]


# What people reported in public threads: the prolog's verdict, and what the server does while the job stands still.
REPORTED = {
    "k01": ("sick", {"exclude_node"}),
    "k02": ("sick", {"exclude_node"}),
    "k04": ("sick", {"exclude_node"}),
    "k05": ("healthy", {"restart_job"}),
    "k07": ("healthy", {"exclude_node"}),
    "k10": ("healthy", {"notify", "restart_job"}),
    "k11": ("healthy", {"notify", "restart_job"}),
    "k12": ("healthy", {"notify", "restart_job"}),
    "k13": ("sick", {"exclude_node"}),
}


@pytest.mark.parametrize("name", sorted(REPORTED))
def test_kernel_lines_of_public_reports_are_judged(name: str, tmp_path: Path) -> None:
    folder = os.environ.get("EAGLE_EYE_TEST_DATA")
    if not folder:
        pytest.skip("EAGLE_EYE_DATA does not name the folder with the recorded traces")
    (file,) = Path(folder, "real/reports").glob(f"{name}_*.txt")
    said = [line for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    events = read(tuple(re.sub(r"^\+[\d.]+ ", "", line) for line in said), tmp_path)
    prolog, acts = REPORTED[name]
    assert outcome(events).prolog == prolog
    assert {one.kind for one in decided(logged(events, 30.0, rows=30))} == acts


def test_a_task_blocked_in_a_driver_names_its_module_and_who_holds_the_lock(tmp_path: Path) -> None:
    events = read(
        (
            "INFO: task python3:1590 blocked for more than 860 seconds.",
            "INFO: task python3:1590 blocked on a semaphore likely last held by task nvidia-modeset/:501",
            "task:python3     state:D stack:0     pid:1590  tgid:1590  ppid:1402   flags:0x00004002",
            " down+0x43/0x50",
            " nvkms_ioctl_from_kapi_try_pmlock+0x4a/0xa0 [nvidia_modeset]",
            "task:nvidia-modeset/ state:D stack:0     pid:501  tgid:501  ppid:2   flags:0x00004000",
            " nfs_wait_bit_killable+0x1c/0x90 [nfs]",
        ),
        tmp_path,
    )
    (event,) = events
    assert (event.attributes["module"], event.attributes["holder"]) == ("nvidia_modeset", "nvidia-modeset/")
    assert "nfs" not in event.attributes["text"]
