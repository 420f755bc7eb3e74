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

from tests.packaging.container_site import BASE, REPOSITORY, Podman, version

FILE = REPOSITORY / "docker-compose.yml"
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

    def __init__(self, podman: Podman, folder: Path, ports: tuple[int, int, int]) -> None:
        self.podman = podman
        self.server, self.prometheus, self.alertmanager = (f"http://127.0.0.1:{port}" for port in ports)
        self._environ = {
            **podman.environ,
            "DOCKER_HOST": f"unix://{podman.folder}/podman.sock",
            "GRAFANA_ADMIN_PASSWORD": "only for this test",
            "EAGLE_EYE_PORT": str(ports[0]),
            "PROMETHEUS_PORT": str(ports[1]),
            "ALERTMANAGER_PORT": str(ports[2]),
            "SPEED": "20",
        }
        for name, (image, programs, data, entry) in STAND_INS.items():
            self._stand_in(folder / name, described()["services"][name]["image"], image, programs, data, entry)
        self.podman.run(
            "tag", f"localhost/eagle-eye-server:{version()}", f"docker.io/library/eagle-eye-server:{version()}"
        )

    def compose(self, *words: str) -> str:
        """Return what docker-compose says; it has to succeed."""
        command = ["docker-compose", "--project-name", "eagleeyetest", "--file", str(FILE), "--profile", "demo", *words]
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
            *("exec", "eagleeyetest_server_1", "eagle-eye", "tokens", "create", "--scope", scope)
        ).stdout.strip()

    def logs(self, service: str) -> str:
        """Return what a service has printed."""
        return self.podman.run("logs", f"eagleeyetest_{service}_1").stdout

    def get(self, url: str, token: str = "") -> Any:
        """Return an answer's JSON."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        answer = httpx.get(url, headers=headers, timeout=5.0, trust_env=False)
        answer.raise_for_status()
        return answer.json()

    def _stand_in(
        self, folder: Path, image: str, expected: str, programs: tuple[str, ...], data: str, entry: str
    ) -> None:
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
        flags = ("--pull=never", "--layers=false", "--isolation=chroot", "--quiet")
        self.podman.run("build", *flags, "--tag", f"docker.io/{image}", str(folder))


@contextmanager
def composed(podman: Podman, folder: Path, ports: tuple[int, int, int]) -> Iterator[Composed]:
    """Give the services' project; everything of it is gone afterwards."""
    socket = podman.folder / "podman.sock"
    socket.unlink(missing_ok=True)
    command = ["podman", "system", "service", "--time=0", f"unix://{socket}"]
    over = threading.Event()
    with subprocess.Popen(command, env=podman.environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        checking = threading.Thread(target=_check_health, args=(podman, over))
        try:
            wait(socket.exists)
            checking.start()
            site = Composed(podman, folder, ports)
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
