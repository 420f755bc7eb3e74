"""docker-compose.yml run by docker-compose on podman, with stand-ins for images that only a registry has."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.loopback import free_port
from tests.packaging.container_site import BASE, REPOSITORY, Podman, version

FILE = REPOSITORY / "docker-compose.yml"
HA = REPOSITORY / "packaging/compose/ha.env"
DEBIAN = "localhost/eagle-eye-test-debian:1"
WITHIN_S = 120.0
# Debian's programs under the names of the pinned images, with the same users, folders and entry points.
STAND_INS = {
    "prometheus": ("prom/prometheus", ("prometheus", "promtool"), "/prometheus", "/bin/prometheus"),
    "alertmanager": (
        "prom/alertmanager",
        ("prometheus-alertmanager", "amtool"),
        "/alertmanager",
        "/bin/prometheus-alertmanager",
    ),
}
TEMPLATES = Path("/usr/share/prometheus/alertmanager")
PROGRAMS = ("docker-compose", "prometheus", "promtool", "prometheus-alertmanager", "amtool", "iptables")


def described(*profiles: str, env_file: Path | None = None) -> Any:
    """Return the file as compose understands it. Raises CalledProcessError when it does not."""
    words = [word for profile in profiles for word in ("--profile", profile)]
    words += ["--env-file", str(env_file)] if env_file else []
    command = ["docker-compose", "--file", str(FILE), *words, "config"]
    environ = {**os.environ, "GRAFANA_ADMIN_PASSWORD": "x"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    import yaml

    return yaml.safe_load(done.stdout)


def missing() -> str:
    """Return what of the needed programs is not installed, "" if nothing."""
    gone = [name for name in PROGRAMS if shutil.which(name) is None]
    if not gone and not Path("/usr/lib/podman/aardvark-dns").exists():
        gone = ["aardvark-dns"]
    return gone[0] if gone else ""


class Composed:
    """The services under a project of this test's own, on ports of loopback."""

    def __init__(self, podman: Podman, project: str, *profile: str) -> None:
        """``profile`` are the words that choose services."""
        self.podman, self.project = podman, project
        self._profile = profile
        ports = [free_port() for _ in range(5)]
        self.server, self.prometheus, self.alertmanager, self.server_b, self.victoria_metrics = (
            f"http://127.0.0.1:{port}" for port in ports
        )
        self._environ = {
            **podman.environ,
            "DOCKER_HOST": f"unix://{podman.folder}/{project}.sock",
            "GRAFANA_ADMIN_PASSWORD": "only for this test",
            "EAGLE_EYE_PORT": str(ports[0]),
            "PROMETHEUS_PORT": str(ports[1]),
            "ALERTMANAGER_PORT": str(ports[2]),
            "EAGLE_EYE_PORT_B": str(ports[3]),
            "VICTORIA_METRICS_PORT": str(ports[4]),
            "SPEED": "20",
        }
        self.podman.run(
            "tag", f"localhost/eagle-eye-server:{version()}", f"docker.io/library/eagle-eye-server:{version()}"
        )

    def compose(self, *words: str) -> str:
        """Return what docker-compose says; it has to succeed."""
        command = ["docker-compose", "--project-name", self.project, "--file", str(FILE), *self._profile, *words]
        done = subprocess.run(command, env=self._environ, capture_output=True, text=True, timeout=WITHIN_S, check=False)
        assert done.returncode == 0, done.stdout + done.stderr + self._last_words()
        return done.stdout

    def _last_words(self) -> str:
        """Return what the services said that ended with an error."""
        listed = self.podman.run("ps", "--all", "--format", "{{.Names}} {{.ExitCode}}", "--filter", "status=exited")
        ended = [line.split() for line in listed.stdout.splitlines()]
        said = [(name, self.podman.run("logs", name)) for name, code in ended if code != "0"]
        return "".join(f"\n{name}: {logs.stdout}{logs.stderr}" for name, logs in said)

    def up(self, *services: str) -> None:
        """The services run, and what they depend on is done or healthy."""
        self.compose("up", "--detach", "--no-build", *services)

    def token(self, scope: str) -> str:
        """Return a new token, made as docs/get-started/compose.md says."""
        return self.podman.run(
            *("exec", self.container("server"), "eagle-eye", "tokens", "create", "--scope", scope)
        ).stdout.strip()

    def logs(self, service: str) -> str:
        """Return what a service has printed."""
        return self.podman.run("logs", self.container(service)).stdout

    def container(self, service: str) -> str:
        """Return the name of a service's container."""
        return f"{self.project}_{service}_1"

    def get(self, url: str, token: str = "") -> Any:
        """Return an answer's JSON."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        answer = httpx.get(url, headers=headers, timeout=5.0, trust_env=False)
        answer.raise_for_status()
        return answer.json()

    def stand_in(self, folder: Path, name: str) -> None:
        """Make the image of a service out of this machine's programs."""
        expected, programs, data, entry = STAND_INS[name]
        image = described()["services"][name]["image"]
        assert image.startswith(f"{expected}:")
        folder.mkdir()
        for program in programs:
            shutil.copy(shutil.which(program) or "", folder / program)
        templates = ""
        if TEMPLATES.exists():
            shutil.copytree(TEMPLATES, folder / "templates")
            templates = f"COPY templates {TEMPLATES}\n"
        (folder / "Dockerfile").write_text(
            f"FROM {BASE}\nCOPY {' '.join(programs)} /bin/\n{templates}"
            f'RUN install -d -o 65534 {data}\nUSER 65534\nENTRYPOINT ["{entry}"]\n'
        )
        self._built(image, folder)

    def debian_base(self, folder: Path, *packages: str) -> None:
        """Make the image DEBIAN: a Debian with these packages."""
        words = ["debootstrap", "--variant=minbase", f"--include={','.join(packages)}", "trixie", str(folder)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:]
        left = "--exclude=./var/cache/apt/archives/*"
        subprocess.run(["tar", "--create", f"--file={folder}.tar", left, f"--directory={folder}", "."], check=True)
        self.podman.run("import", f"{folder}.tar", DEBIAN)
        Path(f"{folder}.tar").unlink()
        shutil.rmtree(folder)

    def debian_stand_in(self, folder: Path, name: str, file: Path, *lines: str) -> None:
        """Make the image of a service out of DEBIAN, the file and these lines of a Dockerfile."""
        image = described("ha", env_file=HA)["services"][name]["image"]
        folder.mkdir()
        shutil.copy(file, folder / file.name)
        (folder / "Dockerfile").write_text("\n".join((f"FROM {DEBIAN}", f"COPY {file.name} /", *lines, "")))
        self._built(image, folder)

    def _built(self, image: str, folder: Path) -> None:
        flags = ("--pull=never", "--layers=false", "--isolation=chroot", "--quiet")
        known = image if image.count("/") else f"library/{image}"
        self.podman.run("build", *flags, "--tag", f"docker.io/{known}", str(folder))


@contextmanager
def composed(podman: Podman, project: str, *profile: str) -> Iterator[Composed]:
    """Give the services' project; everything of it is gone afterwards."""
    socket = podman.folder / f"{project}.sock"
    socket.unlink(missing_ok=True)
    command = ["podman", "system", "service", "--time=0", f"unix://{socket}"]
    over = threading.Event()
    with subprocess.Popen(command, env=podman.environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        checking = threading.Thread(target=_check_health, args=(podman, over))
        try:
            wait(socket.exists)
            checking.start()
            site = Composed(podman, project, *profile)
            try:
                yield site
            finally:
                site.compose("down", "--volumes", "--timeout", "2")
        finally:
            over.set()
            with contextlib.suppress(RuntimeError):
                checking.join()
            process.terminate()


def wait(holds: Callable[[], Any]) -> Any:
    """Return what ``holds`` returns once that is true; an answer that does not come is no answer yet."""
    deadline_s = time.monotonic() + WITHIN_S
    while True:
        with contextlib.suppress(httpx.HTTPError, LookupError):
            if found := holds():
                return found
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.2)


def _check_health(podman: Podman, over: threading.Event) -> None:
    """Run the services' health checks, which podman leaves to systemd, where there is one."""
    while not over.wait(1.0):
        names = podman.run("ps", "--format", "{{.Names}}", check=False).stdout.split()
        for name in names:
            podman.run("healthcheck", "run", name, check=False)
