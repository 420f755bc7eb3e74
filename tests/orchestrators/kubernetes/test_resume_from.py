"""Where jobs are told which step to resume from: the manifest, what pods read it by, and what the orchestrator asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from eagle_eye.checkpoint.checkpointer import RESUME_VARIABLE
from eagle_eye.schema.checkpoint_files import FOLDER_VARIABLE
from tests.docs.pages import blocks
from tests.orchestrators.kubernetes.recording import Answer, api_at, serving
from tests.orchestrators.kubernetes.rights import MANIFEST, manifest, needed

ROOT = Path(__file__).parents[3]
FILE = ROOT / "packaging/kubernetes/resume-from.yaml"


def documents() -> dict[str, dict[str, Any]]:
    return {document["kind"]: document for document in yaml.safe_load_all(FILE.read_text(encoding="utf-8"))}


def pod() -> dict[str, Any]:
    """What docs/how-to/checkpoint.md puts into a job's pods."""
    (block,) = [block for block in blocks("docs/how-to/checkpoint.md") if block.language == "yaml"]
    found: dict[str, Any] = yaml.safe_load(block.text)
    return found


def test_its_role_grants_exactly_what_telling_a_job_takes() -> None:
    asked: list[tuple[str, str]] = []

    def answer(method: str, path: str, _: Any) -> Answer:
        asked.append((method, path))
        return Answer(200, {})

    name = documents()["ConfigMap"]["metadata"]["name"]
    with serving(answer) as url:
        api = api_at(url)
        api.set_config_map_key(name, "ml", "train", "memory:40")
        api.set_config_map_key(name, "ml", "train", None)
        api.close()
    (rule,) = documents()["Role"]["rules"]
    assert {needed(*one) for one in asked} == {(verb, kind) for verb in rule["verbs"] for kind in rule["resources"]}
    assert rule["resourceNames"] == [name]


def test_it_is_the_orchestrators() -> None:
    account = next(document for document in manifest() if document["kind"] == "ServiceAccount")["metadata"]
    binding = documents()["RoleBinding"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", **account}]
    assert binding["roleRef"]["name"] == documents()["Role"]["metadata"]["name"]
    assert MANIFEST.parent == FILE.parent


def test_pods_start_without_it_and_read_their_jobs_key_where_it_is() -> None:
    (variable,) = [one for one in pod()["env"] if one["name"] == RESUME_VARIABLE]
    assert variable["valueFrom"]["configMapKeyRef"] == {
        "name": documents()["ConfigMap"]["metadata"]["name"],
        "key": "JOB",
        "optional": True,
    }


def test_pods_find_the_copies_where_the_charts_stores_keep_them() -> None:
    chart = yaml.safe_load((ROOT / "packaging/helm/eagle-eye/values.yaml").read_text(encoding="utf-8"))
    folder = chart["checkpoints"]["hostFolder"]
    given = pod()
    assert {one["name"]: one.get("value") for one in given["env"]}[FOLDER_VARIABLE] == folder
    (mount,), (volume,) = given["volumeMounts"], given["volumes"]
    assert (mount["mountPath"], volume["hostPath"]["path"], volume["name"]) == (folder, folder, mount["name"])
