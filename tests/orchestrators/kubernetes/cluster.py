"""A real control plane on this machine: etcd, API server with RBAC, controller manager, scheduler; kubelets are played.

The programs come from build.sh. Nodes are objects; a thread does what kubelets would do to their pods: those that were
bound run, those that are to end are gone. A node named in ``Cluster.dead`` does nothing any more.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.loopback import free_port

CONTROLLERS = (
    "namespace", "serviceaccount", "job", "disruption", "garbagecollector", "podgc", "replicaset", "deployment",
)  # fmt: skip
PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")


def missing(environ: Any = os.environ) -> str:
    """Return why no cluster can be started, "" where one can."""
    folder = environ.get("EAGLE_EYE_TEST_KUBERNETES", "")
    if not folder:
        return "no Kubernetes is built: make test-kubernetes builds one from Debian's source package (10 to 30 minutes)"
    lacking = [name for name in PROGRAMS if not (Path(folder) / "bin" / name).exists()]
    if lacking or shutil.which("etcd") is None:
        return f"{', '.join(lacking) or 'etcd'} is missing: make test-kubernetes builds it"
    return ""


def until(true: Callable[[], Any], limit_s: float = 60.0, what: str = "it") -> Any:
    """Return what is true at last. Fails after ``limit_s``."""
    end_s = time.monotonic() + limit_s
    while not (found := true()):
        assert time.monotonic() < end_s, f"{what} never came true"
        time.sleep(0.1)
    return found


class Cluster:
    """The cluster, by its API; every call is an administrator's."""

    def __init__(self, url: str, folder: Path, token: str) -> None:
        self.url = url
        self.authority = folder / "certs" / "apiserver.crt"
        self.token = token
        self.dead: set[str] = set()
        trust = ssl.create_default_context(cafile=str(self.authority))
        self._http = httpx.Client(base_url=url, verify=trust, trust_env=False, timeout=30.0)
        self._http.headers["authorization"] = f"Bearer {token}"
        self._stopping = threading.Event()
        self._kubelets = threading.Thread(target=self._play_kubelets, name="kubelets", daemon=True)

    def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        kind: str = "application/json",
        token: str = "",
        accept: str = "application/json",
    ) -> Any:
        headers = {"content-type": kind, "accept": accept}
        if token:
            headers["authorization"] = f"Bearer {token}"
        return self._http.request(
            method, path, content=None if body is None else json.dumps(body).encode(), headers=headers
        )

    def ask(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Any:
        answer = self.call(method, path, body, kind)
        assert answer.is_success, f"{method} {path}: {answer.status_code} {answer.text[:500]}"
        return answer.json()

    def patch(self, path: str, body: Any, manager: str = "test") -> Any:
        return self.ask("PATCH", f"{path}?fieldManager={manager}", body, "application/merge-patch+json")

    def start_kubelets(self) -> None:
        self._kubelets.start()

    def close(self) -> None:
        self._stopping.set()
        if self._kubelets.is_alive():
            self._kubelets.join(10)
        self._http.close()

    def add_node(self, name: str) -> None:
        capacity = {"cpu": "8", "memory": "16Gi", "pods": "20"}
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": None}
        self.ask("POST", "/api/v1/nodes", {"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}}})
        status = {"capacity": capacity, "allocatable": capacity, "conditions": [ready]}
        self.ask("PATCH", f"/api/v1/nodes/{name}/status", {"status": status}, "application/merge-patch+json")
        self.patch(f"/api/v1/nodes/{name}", {"spec": {"taints": None}})  # a new node is not ready, they say

    def node(self, name: str) -> Any:
        return self.ask("GET", f"/api/v1/nodes/{name}")

    def namespace(self, name: str) -> None:
        self.ask("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        until(lambda: self.call("GET", f"/api/v1/namespaces/{name}/serviceaccounts/default").is_success)

    def job(self, space: str, name: str, pods: int, **template: Any) -> None:
        """A plain Job of so many pods, each of which fills more than half of a node."""
        container = {"name": "c", "image": "none", "resources": {"requests": {"cpu": "5"}}}
        spec = {
            "restartPolicy": "Never", "automountServiceAccountToken": False, "containers": [container],
            "terminationGracePeriodSeconds": 1, **template,
        }  # fmt: skip
        job = {"parallelism": pods, "completions": pods, "backoffLimit": 50, "template": {"spec": spec}}
        self.ask("POST", f"/apis/batch/v1/namespaces/{space}/jobs", {"metadata": {"name": name}, "spec": job})

    def pods(self, space: str, label: str = "") -> list[Any]:
        found: list[Any] = self.ask("GET", f"/api/v1/namespaces/{space}/pods?labelSelector={label}")["items"]
        return found

    def running(self, space: str, job: str) -> dict[str, str]:
        """The job's pods that run and shall go on, and their nodes."""
        return {
            pod["metadata"]["name"]: pod["spec"]["nodeName"]
            for pod in self.pods(space, f"job-name={job}")
            if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
        }

    def runs(self, space: str, job: str, pods: int) -> dict[str, str]:
        found: dict[str, str] = until(
            lambda: len(now := self.running(space, job)) == pods and now, what=f"{pods} pods of {job} run"
        )
        return found

    def token_of(self, space: str, account: str) -> str:
        """A token of the service account, as its pods get one."""
        path = f"/api/v1/namespaces/{space}/serviceaccounts/{account}/token"
        asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": 3600}}
        return str(self.ask("POST", path, asked)["status"]["token"])

    def kubeconfig(self, path: Path, token: str) -> Path:
        authority = base64.b64encode(self.authority.read_bytes()).decode()
        content = {
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": self.url, "certificate-authority-data": authority}}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        }  # fmt: skip
        path.write_text(json.dumps(content), encoding="utf-8")
        return path

    def _play_kubelets(self) -> None:
        while not self._stopping.wait(0.2):
            with contextlib.suppress(httpx.HTTPError, AssertionError):
                for pod in self.ask("GET", "/api/v1/pods")["items"]:
                    self._play(pod)

    def _play(self, pod: Any) -> None:
        meta, node = pod["metadata"], pod["spec"].get("nodeName")
        path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
        if node is None or node in self.dead:
            return
        if "deletionTimestamp" in meta:
            options = {"gracePeriodSeconds": 0, "preconditions": {"uid": meta["uid"]}}
            self.call("DELETE", path, options)
        elif pod["status"]["phase"] == "Pending":
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            state = {"name": "c", "image": "none", "imageID": "", "restartCount": 0, "ready": True,
                     "state": {"running": {"startedAt": now}}}  # fmt: skip
            ready = {"type": "Ready", "status": "True", "lastProbeTime": None, "lastTransitionTime": now}
            status = {"phase": "Running", "startTime": now, "containerStatuses": [state], "conditions": [ready]}
            self.call("PATCH", f"{path}/status", {"status": status}, "application/strategic-merge-patch+json")


@contextmanager
def started(folder: Path, programs: Path, controllers: Sequence[str] = CONTROLLERS) -> Iterator[Cluster]:
    """A control plane whose state is in ``folder``, until the end of the block."""
    etcd, peer, api, manager, scheduler = (free_port() for _ in range(5))
    token = secrets.token_hex(16)
    (folder / "tokens.csv").write_text(f"{token},admin,admin,system:masters\n", encoding="utf-8")
    key = folder / "sa.key"
    subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
    url = f"https://127.0.0.1:{api}"
    kubeconfig = folder / "admin.conf"
    commands = {
        "etcd": [
            "etcd", f"--data-dir={folder / 'etcd'}", f"--listen-client-urls=http://127.0.0.1:{etcd}",
            f"--advertise-client-urls=http://127.0.0.1:{etcd}", f"--listen-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-cluster=default=http://127.0.0.1:{peer}",
        ],
        "kube-apiserver": [
            str(programs / "kube-apiserver"), f"--etcd-servers=http://127.0.0.1:{etcd}", f"--secure-port={api}",
            "--bind-address=127.0.0.1", "--advertise-address=127.0.0.1", f"--cert-dir={folder / 'certs'}",
            "--authorization-mode=RBAC", f"--token-auth-file={folder / 'tokens.csv'}",
            "--service-cluster-ip-range=10.0.0.0/24", "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}", f"--service-account-signing-key-file={key}",
        ],
        "kube-controller-manager": [
            str(programs / "kube-controller-manager"), f"--kubeconfig={kubeconfig}", "--leader-elect=false",
            f"--controllers={','.join(controllers)}", "--bind-address=127.0.0.1", f"--secure-port={manager}",
            "--port=0", f"--cert-dir={folder / 'manager'}", f"--service-account-private-key-file={key}",
        ],
        "kube-scheduler": [
            str(programs / "kube-scheduler"), f"--kubeconfig={kubeconfig}", "--leader-elect=false",
            "--bind-address=127.0.0.1", f"--secure-port={scheduler}", "--port=0", f"--cert-dir={folder / 'scheduler'}",
        ],
    }  # fmt: skip
    running: list[subprocess.Popen[bytes]] = []

    def start(name: str) -> None:
        with (folder / f"{name}.log").open("wb") as log:
            running.append(subprocess.Popen(commands[name], stdout=log, stderr=log, stdin=subprocess.DEVNULL))

    cluster = None
    try:
        start("etcd")
        start("kube-apiserver")
        until((folder / "certs" / "apiserver.crt").exists, what="the API server's certificate")
        cluster = Cluster(url, folder, token)
        until(lambda: _ready(cluster), 120, what="the API server is ready")
        cluster.kubeconfig(kubeconfig, token)
        start("kube-controller-manager")
        start("kube-scheduler")
        cluster.start_kubelets()
        yield cluster
    finally:
        if cluster is not None:
            cluster.close()
        # In turn: an API server without its store takes a minute to give up.
        for process in reversed(running):
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _ready(cluster: Cluster) -> bool:
    try:
        return bool(cluster.call("GET", "/readyz").is_success)
    except httpx.HTTPError:
        return False
