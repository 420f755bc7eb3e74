"""The chart as Helm renders it: recordings for every run, made and compared by Helm itself where it is installed."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from eagle_eye.checkpoint.command import configure_store
from eagle_eye.server import config as configuration
from eagle_eye.server.command import refuse_unprotected_address
from eagle_eye.server.store.sql_store import RECORDS_FILE, open_file
from eagle_eye.server.store.store import TOKENS
from tests.orchestrators.kubernetes.rights import MANIFEST
from tests.packaging.container_site import REPOSITORY, version
from tests.packaging.helm_site import (
    CHART,
    NO_HELM,
    RECORDED,
    SETS,
    VALUES,
    documents,
    fingerprint,
    helm,
    of_kind,
    pod,
    program,
    recorded_form,
    recording,
    rendered,
    unknown,
)

PARTS = ("server", "agent", "orchestrator", "checkpoints")
needs_helm = pytest.mark.skipif(program("helm") is None, reason=NO_HELM)


@pytest.mark.parametrize("name", SETS)
def test_a_recording_is_of_this_chart(name: str) -> None:
    first = (RECORDED / f"helm-{name}.yaml").read_text(encoding="utf-8").partition("\n")[0]
    assert first.endswith(fingerprint()), (
        "the chart was changed: with helm installed, make the recordings anew:"
        " EAGLE_EYE_TEST_RECORD=1 .venv/bin/python -m pytest tests/packaging/test_helm_chart.py"
    )


@needs_helm
@pytest.mark.parametrize("name", SETS)
def test_helm_renders_what_is_recorded(name: str) -> None:
    found = recorded_form(rendered("--values", str(VALUES / f"{name}.yaml")))
    file = RECORDED / f"helm-{name}.yaml"
    if "EAGLE_EYE_TEST_RECORD" in os.environ:
        file.write_text(found, encoding="utf-8")
    # Versions of Helm differ in empty lines.
    assert documents(found) == documents(file.read_text(encoding="utf-8"))


@needs_helm
@pytest.mark.parametrize("name", SETS)
def test_helm_lint_has_nothing_to_say(name: str) -> None:
    done = helm("lint", "--strict", "--quiet", str(CHART), "--values", str(VALUES / f"{name}.yaml"))
    assert "ERROR" not in done.stdout
    assert "WARNING" not in done.stdout


@pytest.mark.parametrize("name", SETS)
def test_kubernetes_types_know_every_field(name: str) -> None:
    pytest.importorskip("kubernetes", reason="the official client is not installed: pip install -r requirements.lock")
    typed = [each for each in recording(name) if not each["apiVersion"].startswith("monitoring.coreos.com/")]
    assert typed
    for document in typed:
        assert unknown(document) == [], document["metadata"]["name"]


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert (chart["version"], chart["appVersion"]) == (version(), version())


def test_rules_and_dashboards_are_those_of_this_checkout() -> None:
    folder = REPOSITORY / "dashboards"
    assert (CHART / "files/prometheus").resolve() == folder / "prometheus"
    assert (CHART / "files/grafana").resolve() == folder / "grafana/dashboards"


@needs_helm
def test_a_package_holds_what_the_links_lead_to(tmp_path: Path) -> None:
    helm("package", str(CHART), "--destination", str(tmp_path))
    with tarfile.open(tmp_path / f"eagle-eye-{version()}.tgz") as package:
        held = {name.partition("/files/")[2] for name in package.getnames() if "/files/" in name}
    boards = {f"grafana/{path.name}" for path in REPOSITORY.glob("dashboards/grafana/dashboards/*.json")}
    assert held == boards | {"prometheus/alerts.rules.yml", "prometheus/recording.rules.yml"}


@needs_helm
@pytest.mark.parametrize("switch", ["metrics.prometheusRule.enabled", "grafana.dashboards.enabled"])
def test_a_copy_that_has_lost_its_links_says_so(tmp_path: Path, switch: str) -> None:
    copy = shutil.copytree(CHART, tmp_path / "eagle-eye", ignore=shutil.ignore_patterns("files"))
    done = helm("template", "eagle-eye", str(copy), "--set", f"agent.enabled=false,{switch}=true", check=False)
    assert (done.returncode, "has lost its links" in done.stderr) == (1, True)


@needs_helm
def test_rules_and_dashboards_come_through_unchanged() -> None:
    switches = ("metrics.prometheusRule.enabled", "grafana.dashboards.enabled")
    found = documents(rendered("--set", "agent.enabled=false", *(f"--set={switch}=true" for switch in switches)))
    for name in ("alerts", "recording"):
        source = yaml.safe_load((REPOSITORY / f"dashboards/prometheus/{name}.rules.yml").read_text(encoding="utf-8"))
        assert of_kind(found, "PrometheusRule", name)["spec"] == source
    boards = [one for one in found if "grafana_dashboard" in one["metadata"]["labels"]]
    shown = {json.loads(text)["uid"]: json.loads(text) for one in boards for text in one["data"].values()}
    files = [json.loads(path.read_bytes()) for path in REPOSITORY.glob("dashboards/grafana/dashboards/*.json")]
    assert shown == {file["uid"]: file for file in files}


def _without(pod: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in pod.items() if key not in keys}


@needs_helm
def test_the_orchestrator_is_the_one_of_the_plain_manifest() -> None:
    plain = list(yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8")))
    words = ("orchestrator.enabled=true", "orchestrator.token.existingSecret=eagle-eye-orchestrator")
    found = documents(rendered("--set=server.enabled=true,agent.enabled=false", *(f"--set={word}" for word in words)))
    ours = {(one["kind"], one["metadata"]["name"]): one for one in found}
    for document in plain:
        kind, name = document["kind"], document["metadata"]["name"]
        chart = ours[kind, name]
        if kind in ("ClusterRole", "ClusterRoleBinding"):
            assert _without(chart, "metadata") == _without(document, "metadata")
        elif kind == "PersistentVolumeClaim":
            assert chart["spec"] == document["spec"]
        elif kind == "Service":
            assert chart["spec"]["ports"] == document["spec"]["ports"]
    chart_pod, plain_pod = pod(found, "orchestrator"), pod(plain, "orchestrator")
    # What is the chart's own: a Secret's key may have another name there, and links to services are left out.
    assert _without(chart_pod, "containers", "volumes", "enableServiceLinks") == _without(
        plain_pod, "containers", "volumes"
    )
    [chart_container], [plain_container] = chart_pod["containers"], plain_pod["containers"]
    assert _without(chart_container, "imagePullPolicy") == plain_container
    names = {volume["name"]: volume.get("secret", {}).get("secretName") for volume in plain_pod["volumes"]}
    assert {volume["name"]: volume.get("secret", {}).get("secretName") for volume in chart_pod["volumes"]} == names


@pytest.mark.parametrize("name", SETS)
def test_every_container_is_confined(name: str) -> None:
    found = recording(name)
    for part in {"everything": PARTS, "two-servers": PARTS[:3]}.get(name, PARTS[:2]):
        spec = pod(found, part)
        for container in [*spec.get("initContainers", []), *spec["containers"]]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"]["drop"] == ["ALL"]
            profile = {**spec.get("securityContext", {}), **security}["seccompProfile"]
            assert profile == {"type": "RuntimeDefault"}
            assert container["resources"]["requests"].keys() >= {"cpu", "memory"}
            assert "memory" in container["resources"]["limits"]


@pytest.mark.parametrize("part", ["server", "orchestrator"])
def test_what_is_no_agent_is_the_user_of_its_image_and_touches_nothing_of_its_host(part: str) -> None:
    spec = pod(recording("everything"), part)
    dockerfile = (REPOSITORY / f"packaging/container/{part}.Dockerfile").read_text(encoding="utf-8")
    user = spec["securityContext"]["runAsUser"]
    assert f"USER {user}:{spec['securityContext']['runAsGroup']}" in dockerfile
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert not {"hostPID", "hostNetwork", "hostIPC"} & spec.keys()
    assert not any("hostPath" in volume for volume in spec["volumes"])


def test_a_store_has_of_its_host_the_folder_of_the_copies_alone_where_jobs_find_it() -> None:
    spec = pod(recording("everything"), "checkpoints")
    [folder], [store] = spec["initContainers"], spec["containers"]
    [copies] = [volume for volume in spec["volumes"] if "hostPath" in volume]
    path = copies["hostPath"]["path"]
    assert path.startswith("/dev/shm/")
    for container in (folder, store):
        assert container["volumeMounts"][0] == {"name": copies["name"], "mountPath": path}
    assert f"--folder={path}" in store["args"]
    assert not {"hostPID", "hostNetwork", "hostIPC"} & spec.keys()


def test_what_copies_take_is_requested_and_limited() -> None:
    [store] = pod(recording("everything"), "checkpoints")["containers"]
    resources = store["resources"]
    assert (resources["requests"]["memory"], resources["limits"]["memory"]) == ("256Gi", "256Gi")


def test_a_store_runs_as_the_jobs_do_and_gives_the_folder_to_that_user() -> None:
    spec = pod(recording("everything"), "checkpoints")
    [folder], [store] = spec["initContainers"], spec["containers"]
    assert (store["securityContext"]["runAsUser"], store["securityContext"]["runAsGroup"]) == (1000, 1000)
    assert folder["command"] == ["chown", "1000:1000", "/dev/shm/eagle-eye-checkpoints"]
    assert (folder["securityContext"]["runAsUser"], folder["securityContext"]["capabilities"]["add"]) == (0, ["CHOWN"])


def test_ranks_of_other_nodes_are_told_the_address_of_the_stores_pod() -> None:
    [store] = pod(recording("everything"), "checkpoints")["containers"]
    assert "--listen=$(POD_IP):8474" in store["args"]
    fields = {one["name"]: one["valueFrom"]["fieldRef"]["fieldPath"] for one in store["env"]}
    assert fields == {"EAGLE_EYE_NODE": "spec.nodeName", "POD_IP": "status.podIP"}


def test_a_store_understands_what_it_is_given() -> None:
    [store] = pod(recording("everything"), "checkpoints")["containers"]
    parser = argparse.ArgumentParser(exit_on_error=False)
    configure_store(parser)
    words = [word.replace("$(POD_IP)", "10.0.0.1") for word in store["args"]]
    assert words[:2] == ["checkpoint", "store"]
    assert parser.parse_args(words[2:]).listen == ("10.0.0.1", 8474)


def test_a_site_that_asks_for_none_gets_no_store() -> None:
    assert not [one for one in recording("least") if one["metadata"]["name"].endswith("-checkpoints")]


def test_the_agent_has_of_its_host_what_the_page_of_containers_says() -> None:
    spec = pod(recording("least"), "agent")
    [container] = spec["containers"]
    page = (REPOSITORY / "docs/get-started/containers.md").read_text(encoding="utf-8")
    command = next(
        block for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL) if "--name eagle-eye-agent" in block
    )
    assert set(container["securityContext"]["capabilities"]["add"]) == set(re.findall(r"--cap-add (\w+)", command))
    folders = {found.partition(":")[0]: found.partition(":")[2] for found in re.findall(r"--volume (\S+)", command)}
    del folders["/etc/eagle-eye"]  # here from a ConfigMap and a Secret
    volumes = {one["name"]: one["hostPath"]["path"] for one in spec["volumes"] if "hostPath" in one}
    mounts = {volumes[one["name"]]: one for one in container["volumeMounts"] if one["name"] in volumes}
    assert mounts.keys() == folders.keys()
    for host, words in folders.items():
        inside, *options = words.split(":")
        assert mounts[host]["mountPath"] == inside
        assert mounts[host].get("readOnly", False) is ("ro" in ",".join(options).split(",")), host
    assert mounts["/"]["mountPropagation"] == "HostToContainer"
    assert (spec["hostPID"], spec["hostNetwork"]) == ("--pid host" in command, "--network host" in command)


@pytest.mark.parametrize("name", SETS)
def test_only_who_speaks_with_the_api_server_has_a_token_for_it(name: str) -> None:
    found = recording(name)
    assert pod(found, "agent")["automountServiceAccountToken"] is False
    assert pod(found, "server")["automountServiceAccountToken"] is True
    bound = {subject["name"] for one in found if one["kind"].endswith("Binding") for subject in one["subjects"]}
    assert bound == {"eagle-eye-server"} | ({"eagle-eye-orchestrator"} if name != "least" else set())


def test_the_servers_roles_are_those_of_the_job_source_and_change_nothing() -> None:
    page = (REPOSITORY / "docs/how-to/job-sources.md").read_text(encoding="utf-8")
    documented = yaml.safe_load(re.search(r"```yaml\n(rules:.*?)```", page, re.DOTALL)[1])["rules"]  # type: ignore[index]
    granted = [rule for one in recording("least") if one["kind"] == "ClusterRole" for rule in one["rules"]]
    assert _rights(granted) == _rights(documented)


def _rights(rules: list[dict[str, Any]]) -> set[tuple[str, str]]:
    return {(verb, kind) for rule in rules for kind in rule["resources"] for verb in rule["verbs"]}


def test_pods_are_read_only_in_the_namespaces_that_are_named() -> None:
    found = recording("everything")
    pods = [one for one in found if one["kind"] == "RoleBinding"]
    assert {(one["roleRef"]["name"], one["metadata"]["namespace"]) for one in pods} == {
        (f"eagle-eye-{part}-pods", space) for part in ("server", "orchestrator") for space in ("ml", "research")
    }
    everywhere = {one["roleRef"]["name"] for one in found if one["kind"] == "ClusterRoleBinding"}
    assert everywhere == {"eagle-eye-server-nodes", "eagle-eye-orchestrator-nodes"}


def test_nothing_holds_a_secret() -> None:
    for name in SETS:
        assert not [one for one in recording(name) if one["kind"] == "Secret"]


def test_probes_ask_what_a_restart_can_mend() -> None:
    for name, scheme in (("least", "HTTP"), ("everything", "HTTPS"), ("two-servers", "HTTPS")):
        [container] = pod(recording(name), "server")["containers"]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            assert container[probe]["httpGet"] == {"path": "/healthz", "port": "api", "scheme": scheme}


def given(name: str, folder: Path) -> configuration.ServerConfig:
    """Return what the server makes of its file and environment in a recording; its files are put into the folder."""
    found = recording(name)
    [container] = pod(found, "server")["containers"]
    for file, text in of_kind(found, "ConfigMap", "-server")["data"].items():
        (folder / file).write_text(text, encoding="utf-8")
    environ = {one["name"]: one.get("value", "postgresql://db/eagle_eye") for one in container["env"]}
    of_this_folder = {key: value.replace("/etc/eagle-eye/", f"{folder}/") for key, value in environ.items()}
    return configuration.load(folder / "server.toml", {"EAGLE_EYE_DATA_DIR": str(folder), **of_this_folder}, {})


@pytest.mark.parametrize("name", SETS[:2])
def test_the_server_understands_what_it_is_given(name: str, tmp_path: Path) -> None:
    config = given(name, tmp_path)
    source = config.job_sources.kubernetes
    assert (config.policy.mode, source.use) == ("observe", "watch")
    assert list(source.namespaces) == ([] if name == "least" else ["ml", "research"])
    assert config.webhooks.allow_private is (name == "everything")


def test_the_first_start_locks_the_door_with_a_key_that_nobody_has_and_the_second_changes_nothing(
    tmp_path: Path,
) -> None:
    [lock] = pod(recording("least"), "server")["initContainers"]
    folder = {"EAGLE_EYE_DATA_DIR": str(tmp_path)}
    environ = {**folder, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    said = [
        subprocess.run(lock["command"], env=environ, capture_output=True, text=True, timeout=60, check=True).stdout
        for _ in range(2)
    ]
    assert said == ["", ""]
    refuse_unprotected_address(configuration.load(None, folder, {"listen": "0.0.0.0:8470"}))
    store = open_file(tmp_path / RECORDS_FILE)
    try:
        [token] = store.all(TOKENS)
    finally:
        store.close()
    assert token.scope == "read"
    assert token.expires_s is not None
    assert token.expires_s - token.created_s < 1.0


def test_a_changed_configuration_starts_the_server_anew() -> None:
    sums = []
    for name in SETS:
        found = recording(name)
        template = of_kind(found, "StatefulSet")["spec"]["template"]["metadata"]
        sums.append(template["annotations"]["checksum/config"])
    assert len({*sums, hashlib.sha256(b"").hexdigest()}) == len(SETS) + 1


@needs_helm
def test_the_values_of_the_page_are_taken_one_after_the_other(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs/get-started/install-kubernetes.md").read_text(encoding="utf-8")
    blocks = [block for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "volumeMounts" not in block]
    assert len(blocks) == 3
    words = []
    for number, block in enumerate(blocks):
        (tmp_path / f"{number}.yaml").write_text(block, encoding="utf-8")
        words += ["--values", str(tmp_path / f"{number}.yaml")]
        assert rendered(*words)
    found = documents(rendered(*words))
    assert {"ServiceMonitor", "PrometheusRule", "NetworkPolicy", "Deployment"} <= {one["kind"] for one in found}
    assert "--dry-run" in pod(found, "orchestrator")["containers"][0]["args"]


SERVERS = [f"https://eagle-eye-servers-{number}.eagle-eye-servers.eagle-eye.svc:8470" for number in (0, 1)]


def test_two_servers_share_the_database_of_a_secret_and_each_names_itself_to_the_other(tmp_path: Path) -> None:
    records = given("two-servers", tmp_path).records
    assert records.url == "postgresql://db/eagle_eye"
    [container] = pod(recording("two-servers"), "server")["containers"]
    [url] = [one["valueFrom"] for one in container["env"] if one["name"] == "EAGLE_EYE_RECORDS_URL"]
    assert url == {"secretKeyRef": {"name": "eagle-eye-records", "key": "url"}}
    names = [one["name"] for one in container["env"]]
    assert names.index("POD_NAME") < names.index("EAGLE_EYE_RECORDS_SERVER_URL")  # by which it is filled
    assert [records.server_url.replace("$(POD_NAME)", f"eagle-eye-servers-{number}") for number in (0, 1)] == SERVERS
    [volume] = [one for one in pod(recording("two-servers"), "server")["volumes"] if one["name"] == "records"]
    [mount] = [one for one in container["volumeMounts"] if one["name"] == "records"]
    assert records.password_file == f"{mount['mountPath']}/{volume['secret']['items'][0]['path']}"


def test_the_first_token_of_two_servers_is_made_where_their_records_are() -> None:
    spec = pod(recording("two-servers"), "server")
    [lock], [server] = spec["initContainers"], spec["containers"]
    assert lock["env"] == [one for one in server["env"] if one["name"] in {each["name"] for each in lock["env"]}]
    assert [one["name"] for one in lock["env"]] == ["EAGLE_EYE_RECORDS_URL", "EAGLE_EYE_RECORDS_PASSWORD_FILE"]
    assert next(one for one in server["volumeMounts"] if one["name"] == "records") in lock["volumeMounts"]


def test_each_of_two_servers_has_a_name_and_a_claim_of_its_own() -> None:
    found = recording("two-servers")
    spec = of_kind(found, "StatefulSet")["spec"]
    service = of_kind(found, "Service", spec["serviceName"])
    assert spec["replicas"] == 2
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == spec["selector"]["matchLabels"]
    [claim] = spec["volumeClaimTemplates"]
    assert claim["metadata"]["name"] == "data"
    assert "data" not in {volume["name"] for volume in spec["template"]["spec"]["volumes"]}
    assert not [one for one in found if one["kind"] == "PersistentVolumeClaim" and "server" in one["metadata"]["name"]]


def test_two_servers_are_on_two_hosts_and_one_of_them_stays_while_hosts_are_drained() -> None:
    found = recording("two-servers")
    labels = of_kind(found, "StatefulSet")["spec"]["selector"]
    rule = pod(found, "server")["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule == [{"topologyKey": "kubernetes.io/hostname", "labelSelector": labels}]
    assert of_kind(found, "PodDisruptionBudget")["spec"] == {"maxUnavailable": 1, "selector": labels}


def test_an_update_of_two_servers_waits_until_the_new_one_stands_by_and_gives_the_old_one_time_to_hand_over() -> None:
    found = recording("two-servers")
    assert of_kind(found, "StatefulSet")["spec"]["minReadySeconds"] == 10
    assert pod(found, "server")["terminationGracePeriodSeconds"] == 30


def test_agents_and_orchestrator_have_both_servers_by_their_own_names() -> None:
    found = recording("two-servers")
    [agent], [orchestrator] = pod(found, "agent")["containers"], pod(found, "orchestrator")["containers"]
    environ = {one["name"]: one.get("value", "") for one in agent["env"]}
    assert json.loads(environ["EAGLE_EYE_SERVERS"]) == SERVERS
    assert "EAGLE_EYE_SERVER" not in environ  # both are an error
    assert f"--server={','.join(SERVERS)}" in orchestrator["args"]


def test_servers_may_pass_on_to_each_other_what_they_are_asked() -> None:
    found = recording("two-servers")
    policy = of_kind(found, "NetworkPolicy", "-server")["spec"]
    servers = {"podSelector": policy["podSelector"]}
    assert servers in [peer for rule in policy["ingress"] for peer in rule["from"]]


def test_prometheus_finds_each_of_two_servers_once() -> None:
    found = recording("two-servers")
    wanted = of_kind(found, "ServiceMonitor")["spec"]["selector"]["matchLabels"]
    services = [one["metadata"] for one in found if one["kind"] == "Service"]
    assert [one["name"] for one in services if wanted.items() <= one["labels"].items()] == ["eagle-eye-server"]


@needs_helm
def test_a_site_that_says_where_its_servers_run_has_that_instead() -> None:
    words = ("server.replicas=2,server.records.url=postgresql://db/ee", "server.affinity.nodeAffinity.any=thing")
    found = documents(rendered("--set=agent.enabled=false", *(f"--set={word}" for word in words)))
    assert pod(found, "server")["affinity"] == {"nodeAffinity": {"any": "thing"}}


@needs_helm
def test_one_server_may_have_its_records_in_postgresql_too() -> None:
    found = documents(rendered("--set=agent.enabled=false,server.records.existingSecret=r"))
    names = [one["name"] for one in pod(found, "server")["containers"][0]["env"]]
    assert {"EAGLE_EYE_RECORDS_URL", "EAGLE_EYE_RECORDS_PASSWORD_FILE"} <= set(names)
    assert of_kind(found, "StatefulSet")["metadata"]["name"] == "eagle-eye-server"
    assert "PodDisruptionBudget" not in {one["kind"] for one in found}


REFUSED = {
    "agent.enabled=true": "agent.joinToken.existingSecret is empty",
    "agent.enabled=false,orchestrator.enabled=true": "orchestrator.token.existingSecret is empty",
    "agent.enabled=false,metrics.serviceMonitor.enabled=true": "metrics.serviceMonitor.token.existingSecret is empty",
    "agent.joinToken.existingSecret=j,server.enabled=false": "agent.server is empty and server.enabled is false",
    "agent.enabled=false,server.enabled=false,orchestrator.enabled=true,orchestrator.token.existingSecret=t":
        "orchestrator.server is empty and server.enabled is false",
    "agent.joinToken.existingSecret=j,networkPolicy.enabled=true": "networkPolicy.nodeCidrs is empty",
    "agent.enabled=false,checkpoints.enabled=true": "checkpoints.memory is empty",
    "agent.enabled=false,checkpoints.enabled=true,checkpoints.memory=lots": "memory",
    "agent.enabled=false,server.replicas=0": "replicas",
    "agent.enabled=false,server.replicas=2": "server.replicas is 2, and server.records names no PostgreSQL database",
    "agent.enabled=false,server.replicas=2,server.records.existingSecret=r,server.persistence.existingClaim=c":
        "server.persistence.existingClaim is one claim, and server.replicas is 2",
    "agent.enabled=false,server.records.url=sqlite:records.db": "url",
    "agent.enabled=false,server.service.port=0": "port",
}  # fmt: skip


@needs_helm
@pytest.mark.parametrize("values", REFUSED)
def test_what_is_missing_or_wrong_is_said(values: str) -> None:
    done = helm("template", "eagle-eye", str(CHART), "--set", values, check=False)
    assert done.returncode != 0
    assert REFUSED[values] in done.stderr
