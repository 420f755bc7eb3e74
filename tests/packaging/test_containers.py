from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import certifi
import httpx
import pytest
import yaml

from eagle_eye.agent.training_hook.message import encode
from tests.agent.fakes import message, until
from tests.loopback import free_port
from tests.orchestrators.kubernetes.rights import MANIFEST
from tests.packaging.compose_site import HA, STAND_INS, Composed, composed, missing, wait
from tests.packaging.container_site import NEEDED, READY_S, REPOSITORY, Podman, Site, answers, build, get, version
from tests.packaging.helm_site import of_kind, pod, podman_flags, recording

HERE = REPOSITORY / "packaging/container"
IMAGES = ("agent", "server")
SEEN_S_MIN = 3  # frames that an outage must leave behind

pytestmark = pytest.mark.slow


def hadolint() -> str | None:
    return shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")


@pytest.mark.skipif(hadolint() is None, reason="hadolint is not installed: pip install -r tests/full.lock")
@pytest.mark.parametrize("image", [*IMAGES, "orchestrator"])
def test_hadolint_has_nothing_to_say(image: str) -> None:
    command = [hadolint() or "", str(HERE / f"{image}.Dockerfile")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.fixture(scope="module")
def podman() -> Iterator[Podman]:
    """podman with both images, whose making takes minutes."""
    if "EAGLE_EYE_TEST_CONTAINERS" not in os.environ:
        pytest.skip("containers take minutes: make test-full runs them, or EAGLE_EYE_TEST_CONTAINERS=1 make test")
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed: apt-get install podman runc netavark debootstrap")
    if os.geteuid() != 0:
        pytest.skip("needs root: debootstrap and containers with the host's processes")
    podman = Podman()
    try:
        build(podman)
        yield podman
    finally:
        podman.close()


def tag(image: str) -> str:
    return f"eagle-eye-{image}:{version()}"


def installed(podman: Podman, image: str) -> dict[str, str]:
    """The distributions in an image's environment and their versions."""
    program = "import json, importlib.metadata as m; print(json.dumps({d.name: d.version for d in m.distributions()}))"
    found: dict[str, str] = json.loads(podman.inside(tag(image), "/opt/eagle-eye/bin/python", "-c", program))
    return found


def test_the_agents_image_holds_the_agents_libraries_and_no_others(podman: Podman) -> None:
    assert installed(podman, "agent").keys() == {"eagle-eye", "msgspec", "nvidia-ml-py", "psutil", "xxhash"}
    folder = "/opt/eagle-eye/lib/python3*/site-packages/eagle_eye"
    rooms = podman.inside(tag("agent"), "sh", "-c", f"ls {folder}").split()
    assert rooms == ["agent", "checkpoint", "checks", "cli", "client", "schema"]


def test_the_servers_image_needs_no_torch(podman: Podman) -> None:
    names = installed(podman, "server").keys()
    assert {"fastapi", "uvicorn", "numpy", "pyarrow"} <= names
    assert not {"torch", "scikit-learn", "nvidia-ml-py", "pytest", "hatchling"} & names


@pytest.mark.parametrize("image", IMAGES)
def test_every_library_is_the_locked_one(podman: Podman, image: str) -> None:
    locked = (REPOSITORY / "requirements.lock").read_text(encoding="utf-8").splitlines()
    found = installed(podman, image)
    assert found.pop("eagle-eye") == version()
    assert {f"{name}=={number}" for name, number in found.items()} <= set(locked)


@pytest.mark.parametrize("image", IMAGES)
def test_nothing_to_build_with_and_no_secret_stays_behind(podman: Podman, image: str) -> None:
    program = "ls /src /build /etc/pip.conf /opt/eagle-eye/bin/pip 2>/dev/null; command -v cc gcc make; true"
    assert podman.inside(tag(image), "sh", "-c", program) == ""
    assert "find-links" not in podman.run("history", "--no-trunc", tag(image)).stdout


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_says_what_it_is_and_runs_as_nobody_in_particular(podman: Podman, image: str) -> None:
    found = podman.inspected(tag(image))
    labels = found["Config"]["Labels"]
    assert found["Config"]["User"] == "65532:65532"
    assert labels["org.opencontainers.image.title"] == f"eagle-eye-{image}"
    assert labels["org.opencontainers.image.version"] == version()
    assert labels["org.opencontainers.image.created"].startswith("20")
    assert "/opt/eagle-eye/health.py" in found["Healthcheck"]["Test"]


@pytest.mark.parametrize("image", ["agent", "server", "orchestrator"])
def test_whatever_an_image_copies_reaches_the_builder(image: str) -> None:
    reaching = [line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [
        source
        for line in (REPOSITORY / f"packaging/container/{image}.Dockerfile").read_text().splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    ]
    assert copied
    assert [
        one for one in copied if not any(one == allowed or one.startswith(f"{allowed}/") for allowed in reaching)
    ] == []


def test_of_this_checkout_only_the_sources_reach_the_builder(podman: Podman, tmp_path: Path) -> None:
    for secret in (".env", "admin-token", ".git/config", ".venv/token", "schema/eagle_eye/__pycache__/x.pyc"):
        (tmp_path / secret).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / secret).write_text("secret")
    (tmp_path / "schema/eagle_eye/wanted.py").write_text("")
    shutil.copy(REPOSITORY / ".dockerignore", tmp_path)
    (tmp_path / "Dockerfile").write_text("FROM localhost/eagle-eye-test-base:1\nCOPY . /sent\n")
    podman.run(
        "build", "--pull=never", "--isolation=chroot", f"--file={tmp_path}/Dockerfile", "--tag=sent", f"{tmp_path}"
    )
    assert podman.inside("sent", "find", "/sent", "-type", "f").split() == ["/sent/schema/eagle_eye/wanted.py"]


def test_the_servers_image_judges_traces_without_writing_anywhere_but_in_tmp(podman: Podman) -> None:
    program = (
        "eagle-eye simulate /tmp/hot --fault thermal_throttle --nodes 4 --seed 1 && eagle-eye backtest /tmp/hot --json"
    )
    confined = ("--network=none", "--read-only", "--read-only-tmpfs=false", "--tmpfs=/tmp", "--cap-drop=ALL")
    said = podman.run("run", "--rm", *confined, "--entrypoint=sh", tag("server"), "-c", program).stdout
    assert "thermal_throttle" in said


@pytest.fixture(scope="module")
def site(podman: Podman, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The server and one agent, as documented; the agent has been heard."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler is installed: apt-get install gcc libc6-dev")
    site = Site(podman, tmp_path_factory.mktemp("host"), free_port(), free_port())
    until(lambda: site.node() is not None, READY_S)
    yield site
    podman.run("rm", "--force", "--time", "5", "eagle-eye-agent", "eagle-eye-server", check=False)


def test_the_node_is_seen_through_the_api_with_its_gpus(site: Site) -> None:
    node = site.node()
    assert (node["node"], node["agent"]["version"]) == ("n1", version())
    page = site.page()
    assert page.count("\neagle_eye_gpu_power_watts{") == 8
    assert 'collector_ok{node="n1",collector="kernel_log"} 1.0' in page


def test_both_are_confined_as_documented(site: Site) -> None:
    for name, user, capabilities in (
        ("eagle-eye-server", "65532", "0000000000000000"),
        ("eagle-eye-agent", "0", "0000000400080004"),  # SYSLOG, SYS_PTRACE, DAC_READ_SEARCH
    ):
        status = Path(f"/proc/{site.podman.pid(name)}/status").read_text()
        assert f"CapEff:\t{capabilities}" in status
        assert f"Uid:\t{user}\t" in status
        assert "NoNewPrivs:\t1" in status
        written = site.podman.run("exec", name, "touch", "/opt/eagle-eye/x", check=False)
        assert "Read-only file system" in written.stderr


def test_both_are_healthy(site: Site) -> None:
    assert site.podman.health("eagle-eye-server") == (0, "the server answers")
    code, said = site.podman.health("eagle-eye-agent")
    assert (code, said.startswith("the agent's newest frame is ")) == (0, True)


def test_training_on_the_host_reaches_the_agent_through_the_shared_folder(site: Site) -> None:
    numbers = itertools.count(1)

    def heard() -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
            said = message(next(numbers), job="in-a-container", time_s=time.time())
            end.sendto(encode(said), str(site.run / "hook.sock"))
        return any(job["job"] == "in-a-container" for job in get(f"{site.url}/api/v1/jobs", site.token)["items"])

    until(heard, READY_S)


def test_an_agent_that_hangs_is_not_well(site: Site) -> None:
    pid = site.podman.pid("eagle-eye-agent")
    os.kill(pid, signal.SIGSTOP)
    try:
        code, said = site.podman.health("eagle-eye-agent")
    finally:
        os.kill(pid, signal.SIGCONT)
    assert (code, "not well" in said) == (1, True)


def test_frames_outlive_an_agent_and_a_server_that_were_killed(site: Site) -> None:
    killed = site.podman.pid("eagle-eye-agent")
    site.podman.run("kill", "--signal", "KILL", "eagle-eye-server")
    gone_s = time.time() + 1.0
    until(lambda: time.time() - gone_s > SEEN_S_MIN + 2.0 and any(site.spool.glob("*.frames")), READY_S)
    os.kill(killed, signal.SIGKILL)
    end_s = time.time() - 1.0
    until(lambda: site.podman.inspected("eagle-eye-agent")["State"]["Pid"] not in (0, killed), READY_S)
    assert site.podman.health("eagle-eye-server")[0] != 0
    site.podman.run("start", "eagle-eye-server")
    until(lambda: answers(f"{site.url}/healthz"), READY_S)
    until(lambda: site.seconds_seen(gone_s, end_s) >= SEEN_S_MIN, READY_S)


def test_an_agent_that_is_told_nothing_runs_and_says_what_it_cannot_see(podman: Podman) -> None:
    lines = podman.run(
        *("run", "--rm", "--network=none", "--read-only", "--read-only-tmpfs=false", "--cap-drop=ALL"),
        *(tag("agent"), "agent", "--print", "--once", "--node", "n1"),
    )
    assert json.loads(lines.stdout)["rows"]["node"]["-1"]["node_memory_used_ratio"] > 0.0
    assert "collector kernel_log: unsupported: no /dev/kmsg" in lines.stderr
    assert "collector training: failed: hook socket" in lines.stderr


@pytest.fixture
def token_of_a_pod(tmp_path: Path) -> Path:
    """What a kubelet puts into pods whose account has rights; the API server is away."""
    folder = tmp_path / "account"
    folder.mkdir()
    (folder / "token").write_text("x")
    (folder / "namespace").write_text("eagle-eye")
    shutil.copy(certifi.where(), folder / "ca.crt")
    for path in (tmp_path, *folder.parents):
        if path.is_relative_to(tmp_path.parents[1]):
            path.chmod(0o755)
    return folder


IN_A_CLUSTER = ("--env=KUBERNETES_SERVICE_HOST=127.0.0.1", "--env=KUBERNETES_SERVICE_PORT=1")


def test_the_charts_server_runs_confined_as_its_pod_is(podman: Podman, tmp_path: Path, token_of_a_pod: Path) -> None:
    found = recording("least")
    spec = pod(found, "server")
    [lock], [server] = spec["initContainers"], spec["containers"]
    (tmp_path / "config").mkdir(mode=0o755)
    for name, text in of_kind(found, "ConfigMap", "-server")["data"].items():
        (tmp_path / "config" / name).write_text(text)
    places = {"data": "chart-server", "config": str(tmp_path / "config")}
    account = f"--volume={token_of_a_pod}:/var/run/secrets/kubernetes.io/serviceaccount:ro"
    try:
        podman.run("run", "--rm", *podman_flags(spec, lock, places), tag("server"))
        flags = [*podman_flags(spec, server, places), *IN_A_CLUSTER, account]
        podman.run("run", "--detach", "--name=chart-server", *flags, tag("server"))
        until(lambda: podman.run("exec", "chart-server", *WELL, check=False).returncode == 0, READY_S)
        tokens = json.loads(podman.run("exec", "chart-server", "eagle-eye", "tokens", "list", "--json").stdout)
        assert [token["scope"] for token in tokens] == ["read"]
    finally:
        podman.run("rm", "--force", "--time=5", "--volumes", "chart-server", check=False)


WELL = ("python3", "-I", "-S", "/opt/eagle-eye/health.py", "server")
ALIVE = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8472/healthz', timeout=3).status)"


def test_the_charts_orchestrator_runs_confined_as_its_pod_is(
    podman: Podman, tmp_path: Path, token_of_a_pod: Path
) -> None:
    spec = pod(list(yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8"))), "orchestrator")
    [container] = spec["containers"]
    (tmp_path / "token").mkdir(mode=0o755)
    (tmp_path / "token" / "token").write_text("ee_x")
    flags = podman_flags(spec, container, {"state": "chart-ledger", "token": str(tmp_path / "token")})
    account = f"--volume={token_of_a_pod}:/var/run/secrets/kubernetes.io/serviceaccount:ro"
    words = ("--detach", "--name=chart-orchestrator", *flags, *IN_A_CLUSTER, account, tag("orchestrator"))
    try:
        podman.run("run", *words, *container["args"])
        probe = ("exec", "chart-orchestrator", "/opt/eagle-eye/bin/python", "-c", ALIVE)
        until(lambda: podman.run(*probe, check=False).stdout == "200\n", READY_S)
    finally:
        podman.run("rm", "--force", "--time=5", "--volumes", "chart-orchestrator", check=False)


@pytest.fixture(scope="module")
def composition(podman: Podman, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Composed]:
    """docker-compose.yml without Grafana, whose image cannot be had here."""
    if gone := missing():
        pytest.skip(f"{gone} is not installed: apt-get install $(cat tests/debian-packages.txt)")
    folder = tmp_path_factory.mktemp("compose")
    with composed(podman, "eagleeyetest", "--profile", "demo") as composition:
        for name in STAND_INS:
            composition.stand_in(folder / name, name)
        composition.up("server", "subscribe", "prometheus", "alertmanager")
        yield composition


def test_the_server_asks_for_a_token_from_its_first_moment(composition: Composed) -> None:
    assert httpx.get(f"{composition.server}/api/v1/nodes", timeout=5.0, trust_env=False).status_code == 401
    assert composition.get(f"{composition.server}/api/v1/nodes", composition.token("read"))["items"] == []


def test_prometheus_scrapes_with_its_token_and_has_the_rules(composition: Composed) -> None:
    def targets() -> bool:
        active = composition.get(f"{composition.prometheus}/api/v1/targets")["data"]["activeTargets"]
        health = {one["labels"]["job"]: one["health"] for one in active}
        return health == {"eagle-eye": "up", "prometheus": "up", "alertmanager": "up"}

    wait(targets)
    groups = composition.get(f"{composition.prometheus}/api/v1/rules")["data"]["groups"]
    assert {one["health"] for group in groups for one in group["rules"]} <= {"ok", "unknown"}
    assert any(one["name"] == "EagleEyeDown" for group in groups for one in group["rules"])


def test_the_demos_fault_reaches_alertmanager_and_the_receiver(composition: Composed) -> None:
    composition.up("demo-receiver", "demo-subscribe", "demo-fleet", "demo-fault")
    wait(lambda: "incident.opened" in composition.logs("demo-receiver"))

    def alerts() -> list[Any]:
        found = composition.get(f"{composition.alertmanager}/api/v2/alerts")
        return [one for one in found if one["labels"]["alertname"] == "EagleEyeFault"]

    (alert,) = wait(alerts)[:1]
    assert alert["labels"]["fault"] == "gpu_lost"
    assert [one["name"] for one in alert["receivers"]] == ["pager"]


def test_a_second_start_makes_no_second_token_or_subscription(composition: Composed) -> None:
    token = composition.token("admin")
    before = composition.podman.run("exec", "eagleeyetest_server_1", "eagle-eye", "tokens", "list").stdout
    subscribed = composition.get(f"{composition.server}/api/v1/subscriptions", token)["items"]
    composition.up("tokens", "subscribe")
    assert composition.podman.run("exec", "eagleeyetest_server_1", "eagle-eye", "tokens", "list").stdout == before
    again = composition.get(f"{composition.server}/api/v1/subscriptions", token)["items"]
    assert [one["id"] for one in again] == [one["id"] for one in subscribed]


def test_services_cannot_write_where_they_live(composition: Composed) -> None:
    done = composition.podman.run("exec", "eagleeyetest_server_1", "touch", "/opt/x", check=False)
    assert done.returncode != 0
    assert composition.podman.run("exec", "eagleeyetest_server_1", "id", "-u").stdout.strip() == "65532"
    # Prometheus has the token that reads, and no other.
    assert composition.podman.run(
        "exec", "eagleeyetest_prometheus_1", "ls", "/run/eagle-eye-tokens"
    ).stdout.split() == ["token"]


@pytest.fixture
def pair(podman: Podman, tmp_path: Path) -> Iterator[Composed]:
    """The profile ha with its settings: two servers, PostgreSQL and VictoriaMetrics out of Debian's packages."""
    if gone := missing():
        pytest.skip(f"{gone} is not installed: apt-get install $(cat tests/debian-packages.txt)")
    program = shutil.which("victoria-metrics")
    if program is None:
        pytest.skip("victoria-metrics is not installed: apt-get install victoria-metrics")
    with composed(podman, "eagleeyeha", "--env-file", str(HA), "--profile", "ha") as pair:
        pair.debian_base(tmp_path / "debian", "postgresql", "wget")
        pair.debian_stand_in(
            tmp_path / "postgresql",
            "postgresql",
            Path(__file__).with_name("postgresql_entry.sh"),
            # The pinned image has this user and this folder, too.
            "RUN usermod --uid 999 postgres && install -d -o 999 -m 0700 /var/lib/postgresql/data",
            'ENTRYPOINT ["sh", "/postgresql_entry.sh"]',
        )
        entry = 'ENTRYPOINT ["/victoria-metrics"]'
        pair.debian_stand_in(tmp_path / "victoria-metrics", "victoria-metrics", Path(program), entry)
        pair.up("server", "server-b", "victoria-metrics")
        yield pair


def leading(url: str) -> dict[str, Any]:
    """Return who leads, as a server says it; nothing where it does not answer or nobody leads."""
    try:
        said: dict[str, Any] = httpx.get(f"{url}/leadz", timeout=5.0, trust_env=False).json()
    except (httpx.HTTPError, ValueError):
        return {}
    return said if said["leader"] else {}


def test_of_two_servers_on_postgresql_one_leads_and_the_other_takes_over_when_it_is_killed(pair: Composed) -> None:
    by_name = {"server": pair.server, "server-b": pair.server_b}
    wait(lambda: all(leading(url) for url in by_name.values()))
    (before,) = [name for name, url in by_name.items() if leading(url)["leads"]]
    (after,) = by_name.keys() - {before}
    assert leading(by_name[after])["leader"] == f"http://{before}:8470"
    token = pair.token("read")
    for url in by_name.values():
        assert pair.get(f"{url}/api/v1/nodes", token)["items"] == []
    stored = pair.podman.run(
        *("exec", pair.container("postgresql"), "psql", "--host=/tmp", "--username=eagle_eye"),
        *("--tuples-only", "--command=SELECT count(*) FROM tokens", "eagle_eye"),
    ).stdout
    assert int(stored) >= 2
    assert httpx.get(f"{pair.victoria_metrics}/health", timeout=5.0, trust_env=False).text == "OK"
    epoch = leading(by_name[after])["epoch"]
    pair.podman.run("kill", pair.container(before))
    wait(lambda: leading(by_name[after]).get("leads"))
    assert leading(by_name[after])["epoch"] > epoch
    assert pair.get(f"{by_name[after]}/api/v1/nodes", token)["items"] == []
