from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.agent.collector import CollectorStanding, Observed, TickFrame
from eagle_eye.agent.host_verdict import EXIT_CODES, REASONS_MAX, SOURCES, HostVerdict, judge, lines
from eagle_eye.schema import driver_facts
from eagle_eye.schema.events import Event

BOOT_S = 1_000_000.0
HEALTHY_GPU = {"gpu_power_watts": 70.0, "gpu_remap_pending": 0.0, "gpu_ecc_uncorrected_total": 0.0}


def host(*events: Event, seen: Observed | None = None, states: Mapping[str, str] = MappingProxyType({})) -> TickFrame:
    """A host of two GPUs and a port where all is well but for what is said."""
    everything = Observed(
        devices={0: dict(HEALTHY_GPU), 1: dict(HEALTHY_GPU)},
        node={"node_mounts_unresponsive": 0.0},
        links={"mlx5_0": {"link_up": 1.0}},
    )
    standings = tuple(CollectorStanding(name, states.get(name, "ok"), 0.0, 0) for name in ("host", *SOURCES))
    return TickFrame(BOOT_S + 3600.0, 1.0, seen or everything, events, standings, 1)


def xid(code: int, after_s: float = 100.0, device: int = 1, text: str = "pid=1, name=python3") -> Event:
    return Event(BOOT_S + after_s, "xid", device, {"code": code, "text": text})


def recovery(action: str, after_s: float, device: int = 1) -> Event:
    return xid(154, after_s, device, f"GPU recovery action changed from 0x1 (GPU Reset Required) to {action}")


def fact(what: str, after_s: float, device: int = -1, part: str = "") -> Event:
    return Event(BOOT_S + after_s, "host_error", device, {"what": what, "device": part, "text": "a line"})


def test_a_host_that_nothing_stands_against_is_healthy() -> None:
    assert judge(host(), gpus_expected=2)[:3] == ("healthy", (), ())


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("state", ["failed: no answer for 15 s", "unsupported: not here"])
def test_what_was_not_seen_is_not_called_healthy(source: str, state: str) -> None:
    assert judge(host(states={source: state}))[:3] == ("cannot_tell", (), (f"{source}: {state}",))


def test_a_source_that_was_not_asked_is_not_called_healthy() -> None:
    tick = replace(host(), collectors=())
    assert judge(tick).state == "cannot_tell"
    assert "mounts: not asked" in judge(tick).unseen


def test_a_host_without_gpus_needs_no_nvml() -> None:
    assert judge(host(states={"nvml": "unsupported: no libnvidia-ml.so.1"}), gpus_expected=0).state == "healthy"
    assert judge(host(states={"nvml": "unsupported: no libnvidia-ml.so.1"}), gpus_expected=2).state == "cannot_tell"


def test_a_missing_gpu_is_a_fact_only_where_nvml_answers() -> None:
    assert judge(host(), gpus_expected=8).reasons == ("NVML shows 2 of 8 GPUs",)
    assert judge(host(states={"nvml": "failed: nvmlInit: Driver Not Loaded"}), gpus_expected=8).state == "cannot_tell"
    assert judge(host()).state == "healthy"


def test_rows_of_ranks_are_no_gpus() -> None:
    seen = Observed(devices={0: {"train_step": 5.0}, 1: dict(HEALTHY_GPU)}, node={"node_mounts_unresponsive": 0.0})
    assert judge(host(seen=seen), gpus_expected=2).reasons == ("NVML shows 1 of 2 GPUs",)


def test_a_lost_gpu_is_sick() -> None:
    verdict = judge(host(Event(BOOT_S + 5.0, "gpu_lost", 1, {"uuid": "GPU-b"})))
    assert verdict.state == "sick"
    assert verdict.reasons[0].startswith("gpu 1: the GPU has left the bus; it needs a reboot, at 1970-01-12T13:46:45Z")


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        ("gpu_remap_pending", "gpu 1: a row remap waits for a GPU reset"),
        ("gpu_ecc_uncorrected_total", "gpu 1: 1 uncorrectable memory errors since its last reset; reset the GPU"),
    ],
)
def test_memory_that_waits_for_a_reset_is_sick(metric: str, said: str) -> None:
    tick = host()
    tick.seen.devices[1][metric] = 1.0
    assert judge(tick).reasons == (said,)


@pytest.mark.parametrize("code", [46, 79, 95, 119, 136, 151, 167, 173])
def test_an_xid_that_asks_for_a_repair_is_sick(code: int) -> None:
    tick = host(xid(code))
    del tick.seen.devices[1]["gpu_ecc_uncorrected_total"]
    (reason,) = judge(tick).reasons
    repair = "a reboot" if code == 79 else "a GPU reset"
    assert reason.startswith(f"gpu 1: XID {code} ({driver_facts.BY_CODE[code].meaning}); it needs {repair}, at 1970")


@pytest.mark.parametrize("code", [13, 31, 43, 45, 63, 74, 92, 94, 144, 99_999])
def test_an_xid_of_the_program_or_of_elsewhere_is_not(code: int) -> None:
    assert judge(host(xid(code))).state == "healthy"


@pytest.mark.parametrize(("device", "state"), [(-1, "sick"), (1, "healthy")])
def test_a_gpu_that_the_driver_could_not_bring_up_is_unless_it_is_up_by_now(device: int, state: str) -> None:
    said = {"what": "gpu_unusable", "device": "0000:3b:00.0", "text": "NVRM: GPU 0000:3b:00.0: RmInitAdapter failed!"}
    found = judge(
        host(Event(BOOT_S + 9.0, "host_error", device, said), Event(BOOT_S + 9.5, "host_error", device, said))
    )
    assert (found.state, len(found.reasons)) == (state, int(device < 0))


@pytest.mark.parametrize("action", ["0x1 (PF FLR)", "0x2 (OS Reboot)", "0x4 (Drain and Reset)"])
def test_the_driver_s_word_is_read_by_its_number(action: str) -> None:
    assert judge(host(recovery(action, 100.0))).state == "sick"


def test_a_counter_at_zero_says_that_the_gpu_was_reset_since() -> None:
    assert judge(host(xid(95))).state == "healthy"
    assert judge(host(xid(119))).state == "sick"  # nothing counts these


def test_the_driver_s_own_word_overrides_the_table() -> None:
    assert judge(host(xid(119, 10.0), recovery("0x0 (None)", 20.0))).state == "healthy"
    assert judge(host(recovery("0x0 (None)", 20.0), xid(119, 30.0))).state == "sick"
    (reason,) = judge(host(recovery("0x2 (Node Reboot Required)", 20.0))).reasons
    assert "Node Reboot Required" in reason
    assert judge(host(recovery("0x3 (Drain P2P)", 20.0))).state == "healthy"


def test_the_word_on_one_gpu_says_nothing_of_another() -> None:
    assert judge(host(xid(119, 10.0, 0), recovery("0x0 (None)", 20.0, 1))).state == "sick"
    unknown = xid(119, 10.0, -1, "PCI:0000:3b:00, pid=1"), recovery("0x0 (None)", 20.0, 1)
    (reason,) = judge(host(*unknown)).reasons
    assert reason.startswith("GPU 0000:3b:00: XID 119")


def test_what_somebody_repaired_counts_no_more() -> None:
    events = (xid(119, 10.0), Event(BOOT_S - 5.0, "kernel_panic", attributes={"text": "Fatal machine check"}))
    assert judge(host(*events), repaired_s=BOOT_S + 5.0).reasons[0].startswith("gpu 1: XID 119")
    assert len(judge(host(*events), repaired_s=BOOT_S + 5.0).reasons) == 1
    assert judge(host(*events), repaired_s=BOOT_S + 50.0).state == "healthy"


def test_a_port_that_was_up_and_is_down_is_sick() -> None:
    tick = host()
    tick.seen.links["mlx5_3"] = {"link_up": 0.0}
    tick.seen.links["mlx5_4"] = {"link_rx_bytes_per_second": 0.0}  # nobody knows
    assert judge(tick).reasons == ("link mlx5_3 is down, and has been up",)


def test_a_mount_that_hangs_is_sick_and_named() -> None:
    tick = host(states={"mounts": "failed: /data (nfs4 from fs1:/x) has not answered since 2026-01-01T00:00:00Z"})
    tick.seen.node["node_mounts_unresponsive"] = 1.0
    verdict = judge(tick)
    assert verdict.reasons[0].startswith("a network filesystem does not answer: /data (nfs4")
    assert verdict.unseen == ()


def test_a_panic_before_the_boot_is_sick() -> None:
    panic = Event(BOOT_S - 5.0, "kernel_panic", attributes={"text": "Kernel panic - not syncing\x1b[31m"})
    assert judge(host(panic)).reasons == ("the kernel panicked before the last boot: Kernel panic - not syncing [31m",)


def test_sick_is_sick_also_where_not_all_was_seen() -> None:
    verdict = judge(host(xid(79), states={"fabric": "failed: ports"}))
    assert verdict.state == "sick"
    assert verdict.unseen == ("fabric: failed: ports",)


def test_what_is_told_is_bounded() -> None:
    seen = Observed(links={f"mlx5_{n}": {"link_up": 0.0} for n in range(500)})
    assert len(judge(host(seen=seen)).reasons) == REASONS_MAX


def test_only_sick_has_the_code_that_no_failing_tool_ends_with() -> None:
    assert EXIT_CODES["sick"] not in (0, 1, 2, 124, 126, 127, *range(128, 256))
    assert len(set(EXIT_CODES.values())) == len(EXIT_CODES)
    assert EXIT_CODES["healthy"] == 0


def test_people_are_told_the_verdict_and_what_could_not_be_checked() -> None:
    assert lines(HostVerdict("healthy", (), (), ("8 GPUs", "the log"), ("n",))) == (
        ["healthy: nothing stands against this host; judged: 8 GPUs; the log", "noted: n"],
        [],
    )
    assert lines(HostVerdict("sick", ("a", "b"), ("c",))) == (["sick: a", "sick: b"], ["could not check: c"])
    assert lines(HostVerdict("cannot_tell", (), ("c",))) == ([], ["could not check: c"])


def test_healthy_names_only_what_was_judged() -> None:
    tick = host()
    del tick.seen.devices[0]["gpu_ecc_uncorrected_total"]
    tick.seen.read_since_s = BOOT_S + 60.0
    gpus, log, ports, mounts = judge(tick, gpus_expected=2).judged
    assert gpus == "2 GPUs by NVML (lost, missing, row remaps that wait)"
    assert log.startswith("the kernel's log since 1970-01-12T13:47:40Z (XIDs,")
    assert (ports, mounts) == ("1 network port (down)", "network filesystems (that do not answer)")


def test_what_the_driver_asks_for_is_judged_where_every_driver_says_it() -> None:
    asks_nothing = [fact("gpu_repaired", 5.0, device) for device in (0, 1)]
    assert "the driver's recovery action" in judge(host(*asks_nothing)).judged[0]
    assert "the driver's recovery action" not in judge(host(asks_nothing[0])).judged[0]


def test_a_line_that_names_no_gpu_stands_until_no_driver_asks_for_anything() -> None:
    broken = fact("nvlink_broken", 5.0)
    (reason,) = judge(host(broken)).reasons
    assert reason.startswith(
        "a GPU that the line does not name: the driver's state of the NVLinks is broken; it needs a GPU"
    )
    assert judge(host(broken, fact("gpu_repaired", 9.0, 0))).state == "sick"
    assert judge(host(broken, fact("gpu_repaired", 9.0, 0), fact("gpu_repaired", 9.0, 1))).state == "healthy"


def test_what_was_repaired_is_noted() -> None:
    error = fact("gpu_hardware_error", 5.0, part="0000:1c:00.0")
    assert judge(host(error)).state == "sick"
    verdict = judge(host(error, fact("gpu_repaired", 9.0, part="0000:1c:00.0")))
    assert verdict.state == "healthy"
    assert verdict.noted[0].startswith("GPU 0000:1c:00.0: an uncorrectable hardware error of the GPU; it needs")
    assert verdict.noted[0].endswith("repaired since")


def test_what_only_hints_at_trouble_is_noted() -> None:
    verdict = judge(host(fact("task_blocked", 5.0, part="python3")))
    assert (verdict.state, verdict.noted[0][:26]) == ("healthy", "python3: a task is blocked")


VALUES = st.none() | st.integers() | st.floats() | st.text(max_size=20) | st.booleans()


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["xid", "sxid", "gpu_lost", "kernel_panic", "oom_kill", "host_error", "machine_check"]),
            st.integers(-1, 9),
            VALUES,
            VALUES,
        )
    )
)
def test_any_events_are_judged(found: list[tuple[str, int, object, object]]) -> None:
    events = [
        Event(BOOT_S, kind, device, {"code": code, "text": text, "what": text}) for kind, device, code, text in found
    ]
    assert judge(host(*events)).state in EXIT_CODES
