"""Helm against a real API server: installed, upgraded and removed; who may do what; what its controllers make of it.

It takes a minute, and a control plane that was built before: make test-kubernetes does both. Kubelets are played.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle_eye.server import config as configuration
from eagle_eye.server.command import refuse_unprotected_address
from eagle_eye.server.security.auth import sha256
from eagle_eye.server.store.sql_store import RECORDS_FILE, open_file
from eagle_eye.server.store.store import TOKENS
from tests.orchestrators.kubernetes.cluster import CONTROLLERS, Cluster, missing, started, until
from tests.orchestrators.kubernetes.rights import granted
from tests.packaging.container_site import REPOSITORY
from tests.packaging.helm_site import CHART, NO_HELM, RELEASE, SETS, SPACE, VALUES, helm, pod, program, recording

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing() or "-"),
    pytest.mark.skipif(program("helm") is None, reason=NO_HELM),
    pytest.mark.slow,
]

NODES = ("n1", "n2", "n3")
VERBS = ("get", "list", "watch", "create", "update", "patch", "delete")
KINDS = (
    "nodes", "nodes/status", "nodes/proxy", "pods", "pods/eviction", "pods/exec", "pods/log", "secrets", "configmaps",
    "serviceaccounts", "services", "persistentvolumeclaims", "events", "namespaces",
)  # fmt: skip
WATCHED = {(verb, kind) for verb in ("list", "watch") for kind in ("nodes", "pods")}


class Site:
    """The cluster and the release in it."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.cluster = cluster
        self.kubeconfig = cluster.kubeconfig(folder / "kubeconfig", cluster.token)

    def helm(self, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return helm(*words, "--namespace", SPACE, check=check, KUBECONFIG=str(self.kubeconfig))

    def may(self, account: str, verb: str, kind: str, namespace: str = "ml") -> bool:
        resource, _, subresource = kind.partition("/")
        asked = {"verb": verb, "resource": resource, "subresource": subresource, "namespace": namespace}
        if resource in ("nodes", "namespaces"):
            del asked["namespace"]
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": f"system:serviceaccount:{SPACE}:{account}",
                "groups": ["system:serviceaccounts", f"system:serviceaccounts:{SPACE}", "system:authenticated"],
                "resourceAttributes": asked,
            },
        }
        answer = self.cluster.ask("POST", "/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
        return bool(answer["status"]["allowed"])

    def rights(self, account: str, namespace: str = "ml") -> set[tuple[str, str]]:
        """Of all that might be asked for, what the account may."""
        return {(verb, kind) for verb in VERBS for kind in KINDS if self.may(account, verb, kind, namespace)}

    def pods(self, part: str) -> list[Any]:
        return [
            pod
            for pod in self.cluster.pods(SPACE, f"app.kubernetes.io/component={part}")
            if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
        ]

    def volume(self, name: str) -> None:
        """A volume for whoever asks first, as a storage class would make one."""
        spec = {"capacity": {"storage": "50Gi"}, "accessModes": ["ReadWriteOnce"], "hostPath": {"path": f"/{name}"}}
        self.cluster.ask("POST", "/api/v1/persistentvolumes", {"metadata": {"name": name}, "spec": spec})


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The release as it is after an installation with the least of values, and the orchestrator."""
    folder = tmp_path_factory.mktemp("cluster")
    more = ("statefulset", "daemonset", "persistentvolume-binder", "pvc-protection", "serviceaccount-token")
    with started(folder, Path(os.environ["EAGLE_EYE_TEST_KUBERNETES"]) / "bin", (*CONTROLLERS, *more)) as cluster:
        for name in NODES:
            cluster.add_node(name)
        cluster.namespace("ml")
        cluster.namespace(SPACE)
        site = Site(cluster, folder)
        site.volume("v1")
        site.volume("v2")
        site.helm("install", RELEASE, str(CHART), *ORCHESTRATED)
        yield site


ORCHESTRATED = (
    "--values", str(VALUES / "least.yaml"),
    "--set=orchestrator.enabled=true,orchestrator.token.existingSecret=eagle-eye-orchestrator",
)  # fmt: skip


def test_controllers_make_a_pod_of_each_on_every_node_that_is_to_have_one(site: Site) -> None:
    until(lambda: len(site.pods("server")) == 1, what="the server's pod runs")
    until(lambda: len(site.pods("orchestrator")) == 1, what="the orchestrator's pod runs")
    until(lambda: len(site.pods("agent")) == len(NODES), what="an agent's pod runs on each node")
    assert {pod["spec"]["nodeName"] for pod in site.pods("agent")} == set(NODES)


def test_an_agent_stays_on_a_node_that_was_excluded_even_without_mercy(site: Site) -> None:
    until(lambda: len(site.pods("agent")) == len(NODES))
    before = {pod["metadata"]["uid"] for pod in site.pods("agent")}
    taint = {"key": "eagle-eye/excluded", "value": "gpu_lost", "effect": "NoExecute"}
    site.cluster.patch("/api/v1/nodes/n1", {"spec": {"unschedulable": True, "taints": [taint]}})
    agent = next(pod for pod in site.pods("agent") if pod["spec"]["nodeName"] == "n1")
    site.cluster.ask("DELETE", f"/api/v1/namespaces/{SPACE}/pods/{agent['metadata']['name']}")
    until(lambda: {pod["metadata"]["uid"] for pod in site.pods("agent")} - before, what="the agent is back on n1")
    assert {pod["spec"]["nodeName"] for pod in site.pods("agent")} == set(NODES)


def test_the_orchestrator_may_what_its_code_asks_for_and_no_more(site: Site) -> None:
    assert site.rights("eagle-eye-orchestrator") == granted()


def test_the_server_may_look_at_nodes_and_pods_and_no_more(site: Site) -> None:
    assert site.rights("eagle-eye-server") == WATCHED


def test_the_agent_may_nothing(site: Site) -> None:
    assert site.rights("eagle-eye-agent") == set()


def test_the_job_source_sees_pods_and_nodes_with_the_servers_account(site: Site) -> None:
    token = site.cluster.token_of(SPACE, "eagle-eye-server")
    for path in ("/api/v1/pods?limit=1", "/api/v1/nodes?limit=1"):
        assert site.cluster.call("GET", path, token=token).status_code == 200
    assert site.cluster.call("GET", f"/api/v1/namespaces/{SPACE}/secrets", token=token).status_code == 403


def test_a_server_that_never_was_ready_is_replaced_by_the_one_that_mends_it(site: Site) -> None:
    until(lambda: len(site.pods("server")) == 1)
    [pod] = site.pods("server")
    path = f"/api/v1/namespaces/{SPACE}/pods/{pod['metadata']['name']}/status"
    unready = {"status": {"conditions": [{"type": "Ready", "status": "False"}]}}
    site.cluster.ask("PATCH", path, unready, "application/strategic-merge-patch+json")
    until(lambda: not _ready(site), what="the set has no ready pod")
    site.helm("upgrade", RELEASE, str(CHART), *ORCHESTRATED, "--set", 'server.config=[policy]\nmode = "approve"\n')
    until(
        lambda: {one["metadata"]["uid"] for one in site.pods("server")} - {pod["metadata"]["uid"]},
        what="the mended server's pod runs",
    )


def _ready(site: Site) -> int:
    found = site.cluster.ask("GET", f"/apis/apps/v1/namespaces/{SPACE}/statefulsets/eagle-eye-server")
    return int(found["status"].get("readyReplicas", 0))


@pytest.fixture(scope="module")
def elsewhere(site: Site) -> str:
    """A namespace in which nothing is yet."""
    site.cluster.namespace("research")
    return "research"


@pytest.mark.parametrize("name", SETS)
def test_the_api_server_takes_every_manifest(site: Site, elsewhere: str, name: str) -> None:
    for document in recording(name):
        if document["apiVersion"].startswith("monitoring.coreos.com/"):
            continue  # prometheus-operator's types are not this server's
        known = _without_newer(document)
        group = "/api/v1" if known["apiVersion"] == "v1" else f"/apis/{known['apiVersion']}"
        kind = document["kind"].lower()
        plural = f"{kind[:-1]}ies" if kind.endswith("y") else f"{kind}s"
        space = ""
        if "namespace" in known["metadata"]:
            known["metadata"]["namespace"] = elsewhere
            space = f"/namespaces/{elsewhere}"
        # Applied by the server, which names each field that it does not know; nothing is kept.
        path = f"{group}{space}/{plural}/{known['metadata']['name']}?dryRun=All&fieldManager=test&force=true"
        answer = site.cluster.call("PATCH", path, known, "application/apply-patch+yaml")
        assert answer.is_success, f"{known['metadata']['name']}: {answer.text[:500]}"


def _without_newer(document: dict[str, Any]) -> dict[str, Any]:
    """Leave out what 1.20 has not: the AppArmor profile's field (1.30), claims for one pod alone (1.22), and so on."""
    plain = json.loads(json.dumps(document).replace("ReadWriteOncePod", "ReadWriteOnce"))
    plain["apiVersion"] = plain["apiVersion"].replace("policy/v1", "policy/v1beta1")
    if plain["kind"] == "StatefulSet":
        plain["spec"].pop("minReadySeconds", None)
    if plain["kind"] == "DaemonSet":
        for container in plain["spec"]["template"]["spec"]["containers"]:
            container["securityContext"].pop("appArmorProfile", None)
    assert isinstance(plain, dict)
    return plain


# What a kubelet would run in the server's pod runs here, where the pod's volume is a folder; the rest is kubectl's.
KUBECTL = """#!/bin/sh
case " $* " in
*" exec "*)
    while [ "$1" != -- ]; do shift; done
    shift
    exec "$@" ;;
*" logs "* | *" port-forward "*) exit 0 ;;
esac
exec {kubectl} "$@"
"""


class Shell:
    """A person's shell, in which the documents' commands are typed."""

    def __init__(self, site: Site, folder: Path) -> None:
        self._folder = folder
        (folder / "kubectl").write_text(KUBECTL.format(kubectl=program("kubectl")), encoding="utf-8")
        (folder / "kubectl").chmod(0o755)
        path = f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.data = folder / "data"
        more = {"PATH": path, "KUBECONFIG": str(site.kubeconfig), "EAGLE_EYE_DATA_DIR": str(self.data)}
        self._environ = {**os.environ, **more}

    def typed(self, text: str) -> str:
        # A failure on either side of a pipe is one.
        words = ["bash", "-euo", "pipefail", "-c", text]
        done = subprocess.run(
            words, cwd=self._folder, env=self._environ, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, f"{text}: {done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def shell(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """The shell, and a server's folder as the first container of its pod leaves it."""
    shell = Shell(site, tmp_path_factory.mktemp("shell"))
    [lock] = pod(recording("least"), "server")["initContainers"]
    shell.typed(lock["command"][-1].replace("/var/lib/eagle-eye-server", str(shell.data)))
    return shell


def page(beginning: str) -> str:
    """Return the block of docs/get-started/install-kubernetes.md that begins so, typed after those before it."""
    text = (REPOSITORY / "docs/get-started/install-kubernetes.md").read_text(encoding="utf-8")
    blocks = re.findall(r"<!-- run by tests/packaging/test_helm_cluster.py -->\n```sh\n(.*?)```", text, re.DOTALL)
    [function] = re.findall(r"^ee\(\) .*$", text, re.MULTILINE)
    [block] = [block for block in blocks if block.startswith(beginning)]
    return f"{function}\n{block}"


def token_in(site: Site, secret: str) -> str:
    held = site.cluster.ask("GET", f"/api/v1/namespaces/{SPACE}/secrets/{secret}")["data"]
    assert held.keys() == {"token"}
    return base64.b64decode(held["token"]).decode()


def scopes(shell: Shell) -> dict[str, str]:
    """The scope of each token of the server, by its hash."""
    store = open_file(shell.data / RECORDS_FILE)
    try:
        return {token.sha256: token.scope for token in store.all(TOKENS)}
    finally:
        store.close()


def test_the_documented_commands_make_the_secrets_that_pods_wait_for(site: Site, shell: Shell) -> None:
    shell.typed(page("kubectl --namespace eagle-eye rollout status"))
    first = token_in(site, "eagle-eye-join")
    assert scopes(shell)[sha256(first)] == "join"
    shell.typed(page("ee tokens create --scope join"))
    second = token_in(site, "eagle-eye-join")
    assert (second != first, scopes(shell)[sha256(second)]) == (True, "join")
    shell.typed(page("ee tokens create --scope operate"))
    assert scopes(shell)[sha256(token_in(site, "eagle-eye-orchestrator"))] == "operate"


def test_the_documented_look_and_backup_work(shell: Shell) -> None:
    assert "eagle-eye-agent" in shell.typed(page("kubectl --namespace eagle-eye get daemonset"))
    backup = page("ee backup").replace("/var/lib/eagle-eye-server", str(shell.data))
    shell.typed(backup)
    assert (shell.data / "before-upgrade" / RECORDS_FILE).exists()


def test_what_helm_says_at_the_end_makes_the_same_secrets(site: Site, shell: Shell) -> None:
    shell.typed("kubectl --namespace eagle-eye delete secret eagle-eye-join eagle-eye-orchestrator --ignore-not-found")
    notes = site.helm("get", "notes", RELEASE).stdout
    shell.typed("\n".join(line for line in notes.splitlines() if line.startswith("  ")))
    assert scopes(shell)[sha256(token_in(site, "eagle-eye-join"))] == "join"
    assert scopes(shell)[sha256(token_in(site, "eagle-eye-orchestrator"))] == "operate"


def test_the_server_never_runs_without_a_token(shell: Shell) -> None:
    assert len(scopes(shell)) > 1
    config = configuration.load(None, {}, {"listen": "0.0.0.0:8470", "data_dir": str(shell.data)})
    refuse_unprotected_address(config)


def test_removal_leaves_what_cannot_be_made_again(site: Site, shell: Shell) -> None:
    site.helm("uninstall", RELEASE)
    path = f"/api/v1/namespaces/{SPACE}"
    kept = {one["metadata"]["name"] for one in site.cluster.ask("GET", f"{path}/persistentvolumeclaims")["items"]}
    assert kept == {"eagle-eye-server", "eagle-eye-orchestrator"}
    until(lambda: not site.cluster.pods(SPACE), what="all pods are gone")
    roles = site.cluster.ask("GET", "/apis/rbac.authorization.k8s.io/v1/clusterroles")["items"]
    assert not [role for role in roles if role["metadata"]["name"].startswith("eagle-eye")]
    # The same name takes it up again.
    site.helm("install", RELEASE, str(CHART), *ORCHESTRATED)
    until(lambda: len(site.pods("server")) == 1, what="the server's pod runs again")
    site.helm("uninstall", RELEASE)
    shell.typed(page("kubectl --namespace eagle-eye delete persistentvolumeclaim"))
    until(lambda: not site.cluster.ask("GET", f"{path}/persistentvolumeclaims")["items"], what="the claims are gone")
