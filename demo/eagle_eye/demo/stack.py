"""Everything the demo runs: nodes on this machine, a server, an agent per node, the launcher with the training job."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import secrets
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import httpx
import psutil

from eagle_eye.checkpoint.store_client import end_store
from eagle_eye.schema.checkpoint_files import FOLDER_VARIABLE

NODES = ("node1", "node2", "node3", "node4")  # three train, the last is the spare
# Set by the launcher for every process of a job on a node.
JOB_VARIABLE, NODE_VARIABLE = "EAGLE_EYE_JOB", "EAGLE_EYE_NODE"


@dataclass(frozen=True, slots=True)
class DemoNode:
    """One node: its name, its address, and the words that run a command on it."""

    name: str
    address: str
    interface: str
    prefix: tuple[str, ...]


class DemoSite(Protocol):
    """Where the demo's nodes are. ``close`` leaves nothing behind."""

    description: str
    head_address: str
    nodes: tuple[DemoNode, ...]
    exec_template: str

    def cut(self, node: str, job: str, agent_pid: int) -> str:
        """Make the node unreachable, as a fault would, and return how."""
        ...

    def mend(self, node: str) -> None:
        """Make the node reachable again; killed processes stay dead."""
        ...

    def close(self) -> None:
        """Remove what was made."""
        ...


class NamespaceSite:
    """Nodes as network namespaces on one bridge; needs root (or CAP_NET_ADMIN and CAP_SYS_ADMIN) and iproute2."""

    def __init__(self, names: Sequence[str] = NODES) -> None:
        self._names = tuple(names)
        self._tag = f"ee{secrets.token_hex(2)}"
        self._bridge = f"{self._tag}br"
        # One of 256 subnets of the range set aside for benchmarks (RFC 2544): no site routes it.
        subnet = f"198.18.{secrets.randbelow(256)}"
        self.head_address = f"{subnet}.1"
        self.exec_template = f"ip netns exec {self._tag}-{{node}}"
        self.nodes = tuple(
            DemoNode(name, f"{subnet}.{10 + i}", "eth0", ("ip", "netns", "exec", f"{self._tag}-{name}"))
            for i, name in enumerate(self._names, start=1)
        )
        self.description = f"network namespaces on bridge {self._bridge}"
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def cut(self, node: str, job: str, agent_pid: int) -> str:  # noqa: ARG002 - everything lives on, unheard
        """Take the node's link down."""
        _ip("link", "set", self._port(node), "down")
        return "its network link was taken down"

    def mend(self, node: str) -> None:
        """Take the node's link up."""
        _ip("link", "set", self._port(node), "up")

    def close(self) -> None:
        """Remove the namespaces and the bridge."""
        for node in self._names:
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", f"{self._tag}-{node}")
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "del", self._bridge)

    def _port(self, node: str) -> str:
        return f"{self._tag}p{self._names.index(node) + 1}"

    def _build(self) -> None:
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self.head_address}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for node in self.nodes:
            space, port = f"{self._tag}-{node.name}", self._port(node.name)
            _ip("netns", "add", space)
            _ip("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
            _ip("link", "set", port, "master", self._bridge, "up")
            _ip("-n", space, "link", "set", "lo", "up")
            _ip("-n", space, "addr", "add", f"{node.address}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")


class LoopbackSite:
    """Nodes as loopback addresses: any user can have them."""

    def __init__(self, names: Sequence[str] = NODES) -> None:
        self.head_address = "127.0.0.1"
        self.exec_template = ""
        self.nodes = tuple(DemoNode(name, f"127.0.0.{10 + i}", "lo", ()) for i, name in enumerate(names, start=1))
        self.description = "loopback addresses (network namespaces cannot be made here: they need root and iproute2)"

    def cut(self, node: str, job: str, agent_pid: int) -> str:
        """Kill every process of the node, its agent among them."""
        for process in processes_of(job, node):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.Process(agent_pid).kill()
        return "all its processes were killed"

    def mend(self, node: str) -> None:
        """Do nothing: only processes were killed."""

    def close(self) -> None:
        """Do nothing: nothing was created."""


def open_site(names: Sequence[str] = NODES) -> DemoSite:
    """Return nodes in namespaces if this user may create them, else on loopback addresses."""
    if os.geteuid() == 0 and shutil.which("ip"):
        with contextlib.suppress(subprocess.CalledProcessError):
            return NamespaceSite(names)
    return LoopbackSite(names)


def processes_of(job: str, node: str) -> list[psutil.Process]:
    """Return the launcher's processes for a job on a node, identified by their environment."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            environment = process.environ()
            mine = (environment.get(JOB_VARIABLE), environment.get(NODE_VARIABLE)) == (job, node)
            if mine and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def ranks_of(job: str, node: str, script: str) -> list[psutil.Process]:
    """Return the training processes of a job on a node."""
    found = []
    for process in processes_of(job, node):
        with contextlib.suppress(psutil.Error):
            if any(word.endswith(script) for word in process.cmdline()):
                found.append(process)
    return found


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


WORKERS = 3
SCRIPT = Path(__file__).with_name("train.py")
PIPELINE_SCRIPT = Path(__file__).with_name("pipeline_train.py")
PIPELINE_LAYERS = "eagle_eye.demo.pipeline_train:job"
STANDBYS = ("--standby", "auto", "--standby-import", "eagle_eye.demo.pipeline_train")
GLOBAL_BATCH = 16  # samples of a step of that job, on however many nodes
CORRUPTION_MODULE = Path(__file__).with_name("corruption")
STOP_WITHIN_S = 15.0
STARTED_WITHIN_S = 60.0
POLL_S = 0.05
# On a machine that others keep busy everything takes longer, as the job's own steps do. Waits are for steps of up to
# PACE_S; where the newest PACE_STEPS took longer, so many times as long, they are longer in proportion.
PACE_S, PACE_STEPS, SLOWER_TIMES_MAX = 0.5, 8, 10.0
ANSWER_WITHIN_S = 30.0

# Short limits make a demonstration of seconds; a site keeps the defaults of minutes.
SERVER_CONFIG = """\
[detection]
tick_s = 0.25
silent_floor_s = 2.0
silent_intervals = 3.0
rank_silent_floor_s = 1.25
hang_floor_s = 2.0
crash_settle_s = 0.6
straggler_floor_s = 3.0
straggler_ripe_s = 4.0
straggler_ratio = 1.3
start_deadline_s = 180.0

[policy]
mode = "act"
verdict_gone_s = 5.0

[webhooks]
allow_private = true
heartbeat_s = 5.0
"""
AGENT_INTERVAL_S = 0.5

ResultT = TypeVar("ResultT")


class StageFailed(Exception):
    """Something that the demo promises did not happen; the message says what."""


class Stack:
    """The demo's processes, their files under ``folder``, and a client of the server's API.

    ``close`` must be called so that no process is left behind. Logs are in ``folder``/logs.
    """

    def __init__(
        self,
        site: DemoSite,
        folder: Path,
        job_arguments: Mapping[str, str] | None = None,
        waiting: Callable[[str], AbstractContextManager[object]] = nullcontext,
        config: str = SERVER_CONFIG,
        launch_flags: Sequence[str] = (),
        planned: bool = False,
    ) -> None:
        """``launch_flags`` stand after the demo's own, so that they win.

        ``planned``: the job of pipelines trains on all nodes, by a plan, and there is no spare.
        """
        self.site = site
        self.folder = folder
        self.job = f"demo-{secrets.token_hex(3)}"
        self.step_log = folder / "steps.jsonl"
        self.checkpoints = folder / "checkpoints"
        self.corruption = folder / "corruption"
        self.memory = Path("/dev/shm") / f"eagle-eye-{self.job}"  # noqa: S108 - checkpoints are kept in memory
        self.url = f"http://{site.head_address}:{free_port(site.head_address)}"
        self.servers: tuple[str, ...] = (self.url,)
        self._job_arguments = job_arguments or {}
        self._waiting = waiting
        self._launch_flags = tuple(launch_flags)
        self._planned = planned
        self.script = PIPELINE_SCRIPT if planned else SCRIPT
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        for path in (folder / "logs", folder / "tokens", self.checkpoints, self.corruption):
            path.mkdir(parents=True, exist_ok=True)
        self._config = folder / "server.toml"
        self._config.write_text(config, encoding="utf-8")
        for name, scope in self._scopes().items():
            self._make_token(name, *scope)
        bearer = f"Bearer {self.token_file('admin').read_text(encoding='utf-8')}"
        self.api = httpx.Client(
            base_url=f"{self.url}/api/v1", headers={"Authorization": bearer}, timeout=ANSWER_WITHIN_S
        )

    def start(self) -> None:
        """Start server, agents and launcher; the job is starting. Raises StageFailed if the server does not answer."""
        self.start_server()
        for node in self.site.nodes:
            self.start_agent(node.name)
        self.start_launcher()

    def start_server(self) -> None:
        """Start the server and wait until it answers."""
        self._start_server("server", self.url)

    def _start_server(self, name: str, url: str) -> None:
        """Start a server with the data folder of its name, and wait until it answers."""
        words = ("server", "--config", str(self._config), "--data", str(self.folder / name))
        self._start(name, (), (*words, "--listen", url.removeprefix("http://")), {})
        self.wait("the server answers", lambda: _answers(url) or None, STARTED_WITHIN_S)

    def start_agent(self, name: str) -> None:
        """Start the node's agent."""
        node = self._node(name)
        words = ("agent", "--node", name, "--interval", str(AGENT_INTERVAL_S))
        files = ("--token-file", str(self.token_file(name)), "--spool", str(self.folder / "spool" / name))
        # All nodes share this machine's /proc and its loopback ports.
        alone = {"EAGLE_EYE_SHARED_HOST": "true", "EAGLE_EYE_METRICS_LISTEN": ""}
        servers = {"EAGLE_EYE_SERVERS": json.dumps(self.servers)}
        hook = ("--hook-socket", self._socket("{node}", name))
        prefix, flags, more = self._agent_extras(node)
        self._start(f"agent-{name}", prefix, (*words, *files, *hook, *flags), {**alone, **servers, **more})

    def _agent_extras(self, node: DemoNode) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, str]]:
        """Return the words that run a command on the node, further flags of its agent and its environment."""
        return node.prefix, (), {}

    def start_launcher(self) -> None:
        """Start the launcher with the job on the first nodes and the last as a spare; a planned job on all."""
        job = [word for key, value in self._job_arguments.items() for word in (f"--{key}", value)]
        script = (
            "--",
            str(self.script),
            "--step-log",
            str(self.step_log),
            "--checkpoint-dir",
            str(self.checkpoints),
            *job,
        )
        ranks = {
            "EAGLE_EYE_HOOK_SOCKET": self._socket("{node}", "{node}"),
            "GLOO_SOCKET_IFNAME": self.site.nodes[0].interface,
            "OMP_NUM_THREADS": "1",
            FOLDER_VARIABLE: str(self.memory / "{node}"),
        }
        words = (
            *("launch", "--job", self.job, "--nodes", self._names),
            *("--nnodes", str(len(self.site.nodes) if self._planned else WORKERS)),
            *(("--layouts", str(self._plan()), *STANDBYS) if self._planned else ()),
            *("--exec", self.site.exec_template, "--rdzv-host", self.site.head_address),
            *("--checkpoint-dir", str(self.checkpoints), "--state-dir", str(self.folder / "launch")),
            *("--server", ",".join(self.servers), "--token-file", str(self.token_file("launcher")), "--json"),
            *(word for key, value in ranks.items() for word in ("--env", f"{key}={value}")),
            *self._launch_flags,
        )
        # Unknown to the launcher: a module in the nodes' Python path that can corrupt gradients.
        outside = {"PYTHONPATH": str(CORRUPTION_MODULE), "EAGLE_EYE_DEMO_CORRUPTION": str(self.corruption)}
        self._start("launcher", (), (*words, *script), outside)

    @property
    def _names(self) -> str:
        return ",".join(node.name for node in self.site.nodes)

    def _plan(self) -> Path:
        """Return the file of a plan for the job of pipelines, as its owner would make it."""
        profile, plan = self.folder / "profile.json", self.folder / "plan.json"
        profile.write_text(self._said("plan", "profile", PIPELINE_LAYERS, "--rounds", "3"), encoding="utf-8")
        whole = sum(
            2 * layer["parameter_bytes"] + layer["optimizer_bytes"] + layer["activation_bytes"]
            for layer in json.loads(profile.read_text(encoding="utf-8"))["layers"]
        )
        job = ("--job", self.job, "--nodes", self._names, "--global-batch", str(GLOBAL_BATCH))
        said = self._said(
            "plan", "--profile", str(profile), *job, "--gpu-memory", str(self._gpu_memory_bytes(whole)), "--json"
        )
        plan.write_text(said, encoding="utf-8")
        return plan

    def _gpu_memory_bytes(self, whole: int) -> int:
        """Return what a node has for the job, all of whose layers take ``whole``: too little for these."""
        return whole - 1

    def token_file(self, name: str) -> Path:
        """Return the file with the token of "admin", "launcher" or a node."""
        return self.folder / "tokens" / name

    def pid(self, name: str) -> int:
        """Return the process id of a server ("server"), "launcher" or "agent-NODE"."""
        return self._processes[name].pid

    def ended(self, name: str) -> int | None:
        """Return the process's exit code, None while it runs."""
        return self._processes[name].poll()

    def kill(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        """Send the process a signal and wait for its exit; kill it if it does not exit."""
        process = self._processes.pop(name)
        process.send_signal(how)
        _reap(process)

    def items(self, kind: str, **filters: Any) -> list[dict[str, Any]]:
        """Return the newest records of a kind from the server's API; raises httpx.HTTPError."""
        response = self.api.get(f"/{kind}", params={"limit": 1000, **filters})
        response.raise_for_status()
        found: list[dict[str, Any]] = response.json()["items"]
        return found

    def steps(self) -> list[dict[str, Any]]:
        """Return the job's own step log: time_s, step, attempt, loss, resumed_from, source, kept_s."""
        if not self.step_log.exists():
            return []
        lines = self.step_log.read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in lines[:-1]]  # the last may be half written

    def wait(self, what: str, look: Callable[[], ResultT | None], within_s: float) -> ResultT:
        """Return what ``look`` returns once it is not None.

        Raises StageFailed after ``within_s``, or in proportion later where the job's steps are slow.
        """
        with self._waiting(what):
            return self._wait(what, look, within_s)

    def pace_s(self) -> float:
        """Return how long the newest steps of an attempt took, 0 before there are two."""
        times_s = [(step["attempt"], step["time_s"]) for step in self.steps()[-PACE_STEPS - 1 :]]
        took_s = [then_s - now_s for (one, now_s), (next_, then_s) in itertools.pairwise(times_s) if one == next_]
        return statistics.median(took_s) if took_s else 0.0

    def _wait(self, what: str, look: Callable[[], ResultT | None], within_s: float) -> ResultT:
        began_s = time.monotonic()
        while True:
            with contextlib.suppress(httpx.TransportError):
                seen = look()
                if seen is not None:
                    return seen
            for name in self._processes:
                if name.startswith(("server", "launcher")) and self.ended(name) is not None:
                    raise StageFailed(f"{what}: {self._how_it_ended(name)}")
            waited_s = time.monotonic() - began_s
            if waited_s > within_s:
                pace_s = self.pace_s()
                if waited_s > within_s * min(max(pace_s / PACE_S, 1.0), SLOWER_TIMES_MAX):
                    raise StageFailed(f"{what}: not within {waited_s:.0f} s{_steps_of(pace_s)}")
            time.sleep(POLL_S)

    def close(self) -> None:
        """End every process, the launcher first so that it can end the job."""
        for name in sorted(self._processes, key=lambda name: (name != "launcher", name.startswith("server"))):
            process = self._processes[name]
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.terminate()
                _reap(process)
        self._processes.clear()
        for node in self.site.nodes:
            end_store(self.memory / node.name)
        shutil.rmtree(self.memory, ignore_errors=True)
        self.api.close()

    def _scopes(self) -> dict[str, tuple[str, str | None]]:
        agents: dict[str, tuple[str, str | None]] = {node.name: ("agent", node.name) for node in self.site.nodes}
        return {"admin": ("admin", None), "launcher": ("operate", None), **agents}

    def _make_token(self, name: str, scope: str, node: str | None) -> None:
        """Put a new token into its file, as an administrator would on the server's machine."""
        place = ("--config", str(self._config), "--data", str(self.folder / "server"))
        words = ["tokens", "create", "--scope", scope, *place, "--json"]
        words += ["--node", node] if node else []
        path = self.token_file(name)
        path.touch(mode=0o600)
        path.write_text(json.loads(self._said(*words))["token"], encoding="utf-8")

    def _said(self, *words: str) -> str:
        """Return what a command of ours has printed. Raises StageFailed where it failed."""
        done = subprocess.run([*_EAGLE_EYE, *words], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise StageFailed(f"eagle-eye {' '.join(words[:2])}: {done.stderr.strip()}")
        return done.stdout

    def _socket(self, placeholder: str, name: str) -> str:
        return str(self.folder / "hook" / placeholder / "hook.sock").replace(placeholder, name)

    def _node(self, name: str) -> DemoNode:
        return next(node for node in self.site.nodes if node.name == name)

    def _start(self, name: str, prefix: tuple[str, ...], words: tuple[str, ...], more: Mapping[str, str]) -> None:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("EAGLE_EYE_")}
        with self._log(name).open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [*prefix, *_EAGLE_EYE, *words],
                env={**clean, **more},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the demo, which then ends them in order
                preexec_fn=end_with_parent,  # noqa: PLW1509 - one prctl call, and no thread holds a lock yet
            )

    def _how_it_ended(self, name: str) -> str:
        """Say with what status the process ended, and its last words: the folder may be gone when they are needed."""
        code = self._processes[name].returncode
        status = f"exit status {code}" if code >= 0 else signal.Signals(-code).name
        lines = self._log(name).read_text(encoding="utf-8", errors="replace").splitlines()
        return f"the {name} ended ({status}); the end of its log: {' | '.join(lines[-3:]) or 'empty'}"

    def _log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"


_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_EAGLE_EYE = (sys.executable, "-m", "eagle_eye.cli.main")


def end_with_parent() -> None:
    """Make the kernel send SIGTERM when the demo itself is killed, so that no process is left."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _steps_of(pace_s: float) -> str:
    return f", in which the job's newest steps took {pace_s:.1f} s each" if pace_s else ""


def _answers(url: str) -> bool:
    return httpx.get(f"{url}/healthz", timeout=1.0).status_code == httpx.codes.OK


def _reap(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(STOP_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_port(address: str) -> int:
    """Return a free port of the address."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port
