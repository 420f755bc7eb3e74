"""Images built and run by podman as docs/get-started/containers.md says; a Debian made here is their base."""

from __future__ import annotations

import fcntl
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import tomllib

from eagle_eye.agent.nvml.simulation import compiled
from tests.agent.fakes import until

REPOSITORY = Path(__file__).parents[2]
BASE = "localhost/eagle-eye-test-base:1"
FOLDER = Path(tempfile.gettempdir()) / "eagle-eye-test-containers"
NEEDED = ("podman", "runc", "debootstrap")
READY_S = 60.0  # for what a container does: this machine may be busy with other tests


class Podman:
    """podman with a store of its own below ``folder``, away from whatever containers this machine has.

    The folder is always the same and never one of pytest's: of a run that was killed containers and mounts are left,
    which the next one ends here, and which pytest could not remove. One run at a time has it; others wait.
    """

    def __init__(self, folder: Path = FOLDER) -> None:
        folder.mkdir(mode=0o700, exist_ok=True)
        self.folder = folder
        self._lock = (folder / "lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        settings = folder / "containers.conf"
        # Neither systemd nor more rights than a build machine's root has are taken for granted.
        settings.write_text(
            '[containers]\ndefault_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]\n'
            '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
        )
        storage = folder / "storage.conf"
        storage.write_text(
            f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/store"\nrunroot = "{folder}/run-store"\n'
        )
        self.environ = {
            **os.environ,
            "CONTAINERS_CONF": str(settings),
            "CONTAINERS_STORAGE_CONF": str(storage),
            "TMPDIR": str(folder),
        }
        self._clear()

    def run(self, *words: str, check: bool = True, within_s: float = 300.0) -> subprocess.CompletedProcess[str]:
        """Return how the command ended; one that fails unexpectedly fails the test with what it said."""
        done = subprocess.run(
            ["podman", *words], env=self.environ, capture_output=True, text=True, timeout=within_s, check=False
        )
        assert not check or done.returncode == 0, f"podman {shlex.join(words)}: {done.stderr}"
        return done

    def inside(self, image: str, *command: str) -> str:
        """Return what a command in a new container of the image prints."""
        return self.run("run", "--rm", "--network=host", f"--entrypoint={command[0]}", image, *command[1:]).stdout

    def inspected(self, name: str) -> Any:
        """Return what podman knows of the container or image."""
        return json.loads(self.run("inspect", name).stdout)[0]

    def health(self, name: str) -> tuple[int, str]:
        """Run the health check that the image brings; return its exit code and what it says."""
        code = self.run("healthcheck", "run", name, check=False).returncode
        return code, self.inspected(name)["State"]["Health"]["Log"][-1]["Output"]

    def pid(self, name: str) -> int:
        """Return the process of a running container."""
        pid = int(self.inspected(name)["State"]["Pid"])
        assert pid > 1, f"{name} does not run: {self.run('logs', name).stderr}"
        return pid

    def close(self) -> None:
        """End all containers, remove all images and let others in."""
        self._clear()
        self._lock.close()

    def _clear(self) -> None:
        """Leave nothing in the folder, and nothing mounted or running from there."""
        self.run("rm", "--all", "--force", "--time=1", check=False)
        mounted = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for place in reversed([place for place in mounted if place.startswith(f"{self.folder}/")]):
            subprocess.run(["umount", "--lazy", place], check=False)
        for name in ("store", "run-store", "root", "wheels"):
            shutil.rmtree(self.folder / name, ignore_errors=True)


def build(podman: Podman) -> None:
    """Build both images by ``make images``, with libraries from a folder and no index at all."""
    root, wheels = podman.folder / "root", podman.folder / "wheels"
    _run("debootstrap", "--variant=minbase", "--include=python3,python3-venv,ca-certificates", "trixie", str(root))
    _run("tar", "--create", "--file", f"{root}.tar", "--exclude=./var/cache/apt/archives/*", "-C", str(root), ".")
    podman.run("import", f"{root}.tar", BASE)
    Path(f"{root}.tar").unlink()
    python = podman.inside(BASE, "python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()
    _download(wheels, python)
    (podman.folder / "pip.conf").write_text("[global]\nno-index = true\nfind-links = /wheels\n")
    flags = f"--pull=never --layers=false --isolation=chroot --build-arg BASE={BASE} --volume {wheels}:/wheels:ro"
    flags += f" --secret id=pip.conf,src={podman.folder}/pip.conf"
    _run("make", "images", f"IMAGE_FLAGS={flags}", environ=podman.environ)


def version() -> str:
    """Return the project's version."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["version"])


def documented(name: str) -> list[list[str]]:
    """Return the words of podman's commands in docs/get-started/containers.md, of blocks that mention ``name``."""
    text = (REPOSITORY / "docs/get-started/containers.md").read_text(encoding="utf-8")
    blocks = [block for block in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) if f"--name {name}" in block]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))[:1] == ["podman"]]


def get(url: str, token: str = "") -> Any:
    """Return the JSON that the server answers."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    with urllib.request.urlopen(request, timeout=5) as answer:
        return json.load(answer)


def answers(url: str, token: str = "") -> bool:
    """Return whether the server answers at all."""
    try:
        get(url, token)
    except OSError:
        return False
    return True


class Site:
    """A server and an agent, started by the documented commands; the host's folders are in ``folder``."""

    def __init__(self, podman: Podman, folder: Path, server_port: int, metrics_port: int) -> None:
        self.podman = podman
        self.url = f"http://127.0.0.1:{server_port}"
        self._metrics = f"http://127.0.0.1:{metrics_port}/metrics"
        self.spool, self.run, self.etc, self.cache = (folder / name for name in ("spool", "run", "etc", "cache"))
        for each in (self.spool, self.run, self.etc, self.cache):
            each.mkdir(mode=0o755)
        compiled(self.cache / "eagle-eye")  # the image has no compiler
        volume, token, server, join = documented("eagle-eye-server")
        at_home = ["--network=host", "--env", f"EAGLE_EYE_LISTEN=127.0.0.1:{server_port}"]
        podman.run(*volume[1:])
        self.token = podman.run(*token[1:-2]).stdout.strip()
        podman.run(*_replaced(server, {"--publish": at_home})[1:])
        until(lambda: answers(f"{self.url}/healthz"), READY_S)
        (self.etc / "join-token").write_text(podman.run(*join[1:-2]).stdout)
        (self.etc / "agent.toml").write_text(
            f'server = "{self.url}"\nnode = "n1"\njoin_token_file = "/etc/eagle-eye/join-token"\n'
            f'metrics_listen = "127.0.0.1:{metrics_port}"\n'
        )
        self._start_agent()

    def _start_agent(self) -> None:
        """Simulated GPUs in place of NVIDIA's, and what a machine for tests may not have or allow left out."""
        agent = documented("eagle-eye-agent")[0]
        assert agent[-1].startswith("eagle-eye-agent:")
        places = {
            "/var/lib/eagle-eye-agent": self.spool,
            "/run/eagle-eye": self.run,
            "/etc/eagle-eye": self.etc,
        }
        words, rest = [], iter(agent[1:-1])
        for word in rest:
            value = next(rest) if word.startswith("--") and word not in ("--detach", "--read-only") else ""
            host, _, inside = value.partition(":")
            if value == "nvidia.com/gpu=all" or word == "--oom-score-adj":
                continue
            if word == "--volume" and host not in places and not Path(host).exists():
                continue
            if word == "--volume":
                value = f"{places.get(host, host)}:{inside}"
            words += [word, value] if value else [word]
        words += ["--volume", f"{self.cache}:/cache:ro", "--env", "XDG_CACHE_HOME=/cache", agent[-1]]
        self.podman.run(*words, "agent", "--config", "/etc/eagle-eye/agent.toml", "--simulate")

    def node(self) -> Any:
        """Return what the server says of the agent's node; None before it was heard."""
        items = get(f"{self.url}/api/v1/nodes", self.token)["items"]
        return items[0] if items else None

    def page(self) -> str:
        """Return the agent's own metrics."""
        with urllib.request.urlopen(self._metrics, timeout=5) as answer:
            return str(answer.read(), "utf-8")

    def seconds_seen(self, start_s: float, end_s: float) -> int:
        """Return how many of the seconds between the server's history has of the node."""
        query = f"metric=node_memory_used_ratio&node=n1&start={start_s}&end={end_s}"
        series = get(f"{self.url}/api/v1/query_range?{query}", self.token)["series"]
        return len(series[0]["points"]) if series else 0


def _replaced(words: list[str], replacements: dict[str, list[str]]) -> list[str]:
    """Return the command with flags and their values replaced."""
    out, rest = [], iter(words)
    for word in rest:
        if word in replacements:
            next(rest)
            out += replacements[word]
        else:
            out.append(word)
    return out


def _download(wheels: Path, python: str) -> None:
    """Bring what the images install, for that Python, in the locked versions."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    machine = platform.machine()
    tags = ("manylinux2014", "manylinux_2_17", "manylinux_2_27", "manylinux_2_28", "manylinux_2_34")
    _run(
        *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--dest", str(wheels)),
        *("--only-binary=:all:", "--implementation=cp", f"--python-version={python}"),
        *(f"--platform={tag}_{machine}" for tag in tags),
        *("--constraint", "requirements.lock", "hatchling"),
        *project["dependencies"],
        *extras["agent"],
        *extras["checkpoint-store"],
        *extras["server"],
        *extras["postgresql"],
        *extras["orchestrators"],
    )


def _run(*command: str, environ: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, cwd=REPOSITORY, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shlex.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
