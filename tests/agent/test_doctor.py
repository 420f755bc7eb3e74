from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgspec
import pytest

from eagle_eye.agent import doctor
from eagle_eye.agent.collector import CollectFailed, CollectorRunner, CollectorStanding, Drops, Observed, Unsupported
from eagle_eye.agent.config import AgentConfiguration
from eagle_eye.agent.doctor import HostFinding
from eagle_eye.agent.host_verdict import HostVerdict, look
from tests.agent.test_loop import Scripted, failing, node_row
from tests.agent.test_uplink import Server

DOCTOR = """
import argparse, sys
from eagle_eye.agent.doctor import configure, run
parser = argparse.ArgumentParser()
configure(parser)
sys.exit(run(parser.parse_args()))
"""


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def states(findings: Iterator[HostFinding]) -> dict[str, str]:
    return {finding.subject: finding.state for finding in findings}


def one(findings: Iterator[HostFinding]) -> HostFinding:
    (finding,) = findings
    return finding


def test_a_collector_s_reason_comes_with_what_to_do_about_it() -> None:
    found = list(
        doctor.check_collectors(
            [
                CollectorStanding("host", "ok", 0.0042, 0),
                CollectorStanding("nvml", "failed: nvmlInit: Driver Not Loaded", 0.1, 1),
                CollectorStanding("fabric", "unsupported: no RDMA device", 0.1, 0),
                CollectorStanding("kernel_log", "unsupported: /dev/kmsg may not be read", 0.1, 0),
            ]
        )
    )
    assert found[0] == HostFinding("collector host", "ok", "answered within 4 ms")
    assert (found[1].state, found[1].detail) == ("failed", "nvmlInit: Driver Not Loaded")
    assert "nvidia-smi" in found[1].remedy
    assert (found[2].state, found[2].remedy) == ("unsupported", "")
    assert found[3].state == "failed"  # the host has it, this process lacks a right
    assert "CAP_SYSLOG" in found[3].remedy


def test_collectors_are_asked_together_and_one_that_hangs_is_not_waited_for() -> None:
    def hang() -> Observed:
        time.sleep(3.0)
        return Observed()

    begin_s = time.monotonic()
    scripted = [
        Scripted("hangs", hang),
        Scripted("good", node_row),
        Scripted("bad", failing(CollectFailed("no"))),
        Scripted("none", failing(Unsupported("nowhere"))),
    ]
    found = look([CollectorRunner(one, Drops(), time.monotonic) for one in scripted], within_s=0.3)
    assert time.monotonic() - begin_s < 2.5
    hung, *others = [each.state for each in found.collectors]
    assert hung.startswith("failed: no answer for ")
    assert others == ["ok", "failed: no", "unsupported: nowhere"]


def test_the_doctor_says_the_verdict_of_the_prolog_s_check() -> None:
    sick, *others = doctor.check_host(HostVerdict("sick", ("gpu 1: XID 79", "b"), ()))
    assert (sick.state, sick.detail, len(others)) == ("failed", "sick: gpu 1: XID 79", 1)
    well, noted = doctor.check_host(HostVerdict("healthy", (), (), ("8 GPUs",), ("a task is blocked",)))
    assert (well.state, noted.state) == ("ok", "note")
    assert well.detail == "healthy: nothing stands against this host; judged: 8 GPUs"
    unknown = one(doctor.check_host(HostVerdict("cannot_tell", (), ("nvml: no",))))
    assert (unknown.state, unknown.detail) == ("note", "cannot tell: nvml: no")


class Machine:
    """A /proc and a /sys with GPUs."""

    def __init__(self, root: Path) -> None:
        self.proc, self.sys = root / "proc", root / "sys"

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def has(self, on_the_bus: int, in_the_driver: int, version: str) -> HostFinding:
        for number in range(on_the_bus):
            device = self.sys / f"bus/pci/devices/0000:{number:02x}:00.0"
            self.write(device / "vendor", "0x10de\n")
            self.write(device / "class", "0x030200\n")
            self.write(self.sys / f"bus/pci/devices/0000:{number:02x}:00.1/vendor", "0x10de\n")  # its sound
            self.write(self.sys / f"bus/pci/devices/0000:{number:02x}:00.1/class", "0x040300\n")
        for number in range(in_the_driver):
            self.write(self.proc / f"driver/nvidia/gpus/0000:{number:02x}:00.0/information", "")
        if version:
            self.write(self.sys / "module/nvidia/version", version + "\n")
        return one(doctor.check_gpu_driver(self.proc, self.sys))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_host_with_amd_gpus_is_told_what_judges_them(machine: Machine) -> None:
    device = machine.sys / "bus/pci/devices/0000:1c:00.0"
    machine.write(device / "vendor", "0x1002\n")
    machine.write(device / "class", "0x120000\n")
    found = one(doctor.check_gpu_driver(machine.proc, machine.sys))
    assert (found.state, found.detail) == ("note", "1 AMD GPUs on the PCI bus, judged by the kernel's log alone")


@pytest.mark.parametrize(
    ("on_the_bus", "in_the_driver", "version", "state", "said"),
    [
        (8, 8, "550.90.07", "ok", "NVIDIA 550.90.07, 8 of 8 GPUs on the PCI bus"),
        (8, 7, "550.90.07", "failed", "NVIDIA 550.90.07, 7 of 8 GPUs on the PCI bus"),
        (8, 0, "", "failed", "8 NVIDIA GPUs on the PCI bus and no driver for them"),
        (0, 0, "", "unsupported", "no NVIDIA GPU on the PCI bus"),
    ],
)
def test_gpus_without_their_driver_are_found(
    machine: Machine, on_the_bus: int, in_the_driver: int, version: str, state: str, said: str
) -> None:
    found = machine.has(on_the_bus, in_the_driver, version)
    assert (found.state, found.detail) == (state, said)
    assert bool(found.remedy) == (state == "failed")


def test_permissions_name_what_is_lost_without_them(machine: Machine) -> None:
    machine.write(machine.proc / "self/status", f"Name:\tx\nCapEff:\t{1 << 34:016x}\n")
    machine.write(machine.proc / "sys/kernel/dmesg_restrict", "1\n")
    machine.write(machine.proc / "sys/kernel/yama/ptrace_scope", "3\n")
    found = {finding.subject: finding for finding in doctor.check_permissions(machine.proc)}
    assert found["CAP_SYSLOG"].state == "ok"
    assert "exit codes" in found["CAP_SYS_PTRACE"].detail
    assert found["kernel.dmesg_restrict"].detail == "1: needs CAP_SYSLOG"
    assert found["kernel.yama.ptrace_scope"].state == "note"


def test_a_proc_that_does_not_tell_is_said(machine: Machine) -> None:
    assert one(doctor.check_permissions(machine.proc)).state == "note"


def test_a_spool_that_cannot_be_written_is_to_be_done(tmp_path: Path) -> None:
    assert one(doctor.check_spool(tmp_path / "not/yet/made", 1 << 20)).state == "ok"
    assert one(doctor.check_spool(tmp_path, 1 << 60)).state == "note"
    (tmp_path / "file").write_text("")
    found = one(doctor.check_spool(tmp_path / "file/spool", 1 << 20))
    assert (found.state, "spool_dir" in found.remedy) == ("failed", True)


def test_a_hook_socket_is_ok_only_with_an_agent_and_open_to_all(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    path = Path(f"/tmp/eagle-eye-doctor-{os.getpid()}.sock")  # pytest's own folders are closed to other users
    assert "no agent listens" in one(doctor.check_hook_socket(path)).detail
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)
        assert "not open to other users" in one(doctor.check_hook_socket(path)).detail
        path.chmod(0o666)
        assert one(doctor.check_hook_socket(path)).state == "ok"
        listener.close()
        assert "Connection refused: no agent listens" in one(doctor.check_hook_socket(path)).detail
    finally:
        listener.close()
        path.unlink()


def test_a_hook_socket_in_a_closed_folder_is_no_use_to_users(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(closed / "s"))
        (closed / "s").chmod(0o666)
        assert f"{closed} is closed to them" in one(doctor.check_hook_socket(closed / "s")).detail


def configured(server: Server) -> AgentConfiguration:
    return AgentConfiguration(server=server.url, node="n1")


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (400, {"server": "ok", "token": "ok", "clocks": "ok"}),  # it has looked at the token and found no frames
        (401, {"server": "ok", "token": "failed", "clocks": "ok"}),
        (403, {"server": "ok", "token": "failed", "clocks": "ok"}),
        (404, {"server": "failed"}),
        (200, {"server": "failed"}),
    ],
)
def test_the_server_s_answer_says_whether_it_takes_frames_and_the_token(
    server: Server, tmp_path: Path, status: int, expected: dict[str, str]
) -> None:
    (tmp_path / "token").write_text("secret-token\n")
    server.refuse = lambda _frames, _headers: (status, {}, {"reason": "empty"})
    assert states(doctor.check_server(configured(server), tmp_path / "token")) == expected
    assert server.requests[0]["authorization"] == "Bearer secret-token"
    assert server.frames == []


def test_a_node_that_is_enrolled_is_never_told_to_make_a_token(server: Server, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("bought-token\n")
    server.refuse = lambda _frames, _headers: (401, {}, {"reason": "token"})
    enrolled = msgspec.structs.replace(configured(server), join_token_file=str(tmp_path / "join-token"))
    found = [one for one in doctor.check_server(enrolled, tmp_path / "token") if one.subject == "token"]
    assert "tokens create" not in found[0].remedy
    assert "it enrols" in found[0].remedy


def test_without_a_token_the_first_remedy_is_to_name_its_file(server: Server) -> None:
    server.refuse = lambda _frames, _headers: (401, {}, {"reason": "token"})
    found = [one for one in doctor.check_server(configured(server), None) if one.subject == "token"]
    assert found[0].detail == "the server answered 401 to a request without a token"
    assert found[0].remedy.startswith("name the file of this node's token")


def test_a_server_that_is_not_there_and_a_token_that_is_none_are_to_be_done(server: Server, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("two words\n")
    found = one(doctor.check_server(configured(server), tmp_path / "token"))
    assert (found.subject, found.state) == ("token", "failed")
    nobody = msgspec.structs.replace(configured(server), server="http://127.0.0.1:1")
    found = one(doctor.check_server(nobody, None))
    assert (found.subject, found.state) == ("server", "failed")
    assert "Connection refused" in found.detail


def test_each_of_several_servers_is_asked(server: Server) -> None:
    server.refuse = lambda _frames, _headers: (400, {"Eagle-Eye-Leader": "http://leader"}, {"reason": "empty"})
    several = AgentConfiguration(servers=[server.url, "http://127.0.0.1:1"], node="n1")
    found = [finding for finding in doctor.check_server(several, None) if finding.subject == "server"]
    assert [finding.state for finding in found] == ["ok", "failed"]
    assert found[0].detail == f"{server.url} passes frames on to http://leader"


def test_a_standby_that_passes_nothing_on_is_to_be_done(server: Server) -> None:
    server.refuse = lambda _frames, _headers: (503, {}, {"reason": "standby"})
    found = one(doctor.check_server(configured(server), None))
    assert (found.subject, found.state) == ("server", "failed")
    assert "stands by and passes nothing on" in found.detail


def test_the_token_that_a_join_token_bought_is_the_one_that_is_tried(server: Server, tmp_path: Path) -> None:
    enrolling = msgspec.structs.replace(configured(server), join_token_file=str(tmp_path / "join-token"))
    found = one(doctor.check_server(enrolling, tmp_path / "token"))
    assert (found.subject, found.state) == ("token", "failed")
    assert "not enrolled yet" in found.detail
    (tmp_path / "token").write_text("bought-token\n")
    server.refuse = lambda _frames, _headers: (400, {}, {"reason": "empty"})
    assert states(doctor.check_server(enrolling, tmp_path / "token"))["token"] == "ok"
    assert server.requests[-1]["authorization"] == "Bearer bought-token"


@pytest.mark.parametrize(("ahead_s", "state"), [(0.0, "ok"), (1.0, "ok"), (60.0, "failed"), (-60.0, "failed")])
def test_a_server_with_another_time_is_to_be_done(server: Server, ahead_s: float, state: str) -> None:
    def answer(_frames: object, _headers: object) -> tuple[int, dict[str, str], object]:
        return 400, {}, {}

    server.refuse = answer
    found = {
        finding.subject: finding
        for finding in doctor.check_server(configured(server), None, lambda: time.time() - ahead_s)
    }
    assert found["clocks"].state == state
    if state == "failed":
        assert f"clock is {'+' if ahead_s > 0 else '-'}" in found["clocks"].detail


def test_a_time_that_is_none_is_said() -> None:
    assert one(doctor._server_clock("yesterday", 1.0, 2.0)).state == "note"
    assert one(doctor._server_clock(formatdate(1_000_000, usegmt=True), 1_000_000.9, 1_000_001.1)).state == "ok"


def test_names_that_differ_are_to_be_done() -> None:
    assert one(doctor.check_names([])).state == "ok"
    found = one(doctor.check_names(["Slurm (SLURMD_NODENAME) calls this node 'a1', the agent 'b1'"]))
    assert (found.state, "scheduler" in found.remedy) == ("failed", True)


def test_the_table_is_aligned_plain_and_says_how_much_is_to_be_done() -> None:
    findings = [HostFinding("a", "ok", "fine"), HostFinding("longer", "failed", "two\nlines", "do this")]
    out = io.StringIO()
    doctor.table(findings, out, colours=False)
    assert out.getvalue() == (
        "ok          a       fine\nfailed      longer  two lines\n                    -> do this\n1 to be done\n"
    )
    out = io.StringIO()
    doctor.table(findings[:1], out, colours=True)
    assert out.getvalue() == "\033[32mok         \033[0m a  fine\nnothing to be done\n"


def test_the_command_examines_this_host(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DOCTOR, "--json", "--server", "http://127.0.0.1:1", "--node", "elsewhere"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    assert done.stderr == ""
    found = {finding["subject"]: finding for finding in json.loads(done.stdout)}
    assert done.returncode == 1  # there is no such server
    assert found["collector host"]["state"] == "ok"
    assert found["server"]["state"] == found["node name"]["state"] == "failed"
    assert {"GPU driver", "hook socket", "spool", "py-spy", "CAP_SYSLOG"} <= found.keys()
    assert all(bool(finding["remedy"]) <= (finding["state"] == "failed") for finding in found.values())


@pytest.fixture
def metrics_page() -> Iterator[Callable[[str], str]]:
    """A page of an agent's metrics with the given text; returns its address."""
    made: list[HTTPServer] = []

    def serve(text: str) -> str:
        class Page(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                pass

        page = HTTPServer(("127.0.0.1", 0), Page)
        made.append(page)
        threading.Thread(target=page.serve_forever, daemon=True).start()
        return f"127.0.0.1:{page.server_port}"

    yield serve
    for page in made:
        page.shutdown()
        page.server_close()


def test_a_log_that_is_not_understood_is_found_on_the_agents_page(metrics_page: Callable[[str], str]) -> None:
    name = "eagle_eye_train_log_lines_since_step"
    text = f'{name}{{device="0",job="j"}} 12300\n{name}{{device="1",job="j"}} 3\n'
    finding = one(doctor.check_training_logs(metrics_page(text)))
    assert (finding.state, finding.detail) == (
        "failed",
        "12,300 lines without a step that is read, by the rank on device 0",
    )
    assert "training_log_patterns" in finding.remedy


def test_logs_that_are_read_are_found_well(metrics_page: Callable[[str], str]) -> None:
    assert one(doctor.check_training_logs(metrics_page("eagle_eye_train_step{} 3\n"))).state == "ok"


@pytest.mark.parametrize("listens", ["", "127.0.0.1:1"])
def test_without_a_running_agent_it_is_not_known_whether_logs_are_read(listens: str) -> None:
    finding = one(doctor.check_training_logs(listens))
    assert (finding.state, finding.detail[:9]) == ("note", "not known")
