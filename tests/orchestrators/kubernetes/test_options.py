"""The options, and which cluster they lead to."""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eagle_eye.orchestrators.kubernetes import options
from eagle_eye.orchestrators.kubernetes.objects import JOB_LABELS
from eagle_eye.orchestrators.kubernetes.orchestrator import KubernetesOrchestrator
from eagle_eye.orchestrators.protocol import OrchestratorError


def parsed(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    options.add_options(parser)
    return parser.parse_args(list(flags))


def kubeconfig(path: Path, **cluster: Any) -> str:
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "c",
        "clusters": [{"name": "c", "cluster": {"server": "http://127.0.0.1:9", **cluster}}],
        "users": [{"name": "u", "user": {"token": "secret"}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
    }
    path.write_text(json.dumps(content), encoding="utf-8")
    return f"--kubeconfig={path}"


def test_a_kubeconfig_is_enough(tmp_path: Path) -> None:
    made = options.build(parsed(kubeconfig(tmp_path / "config")))
    assert isinstance(made, KubernetesOrchestrator)
    with contextlib.closing(made):
        assert made.name == "kubernetes"


@pytest.mark.parametrize("content", ["", "[]", "{", "apiVersion: v1\nkind: Config\n"])
def test_a_kubeconfig_that_is_none_is_one_clear_line(tmp_path: Path, content: str) -> None:
    (tmp_path / "config").write_text(content, encoding="utf-8")
    with pytest.raises(OrchestratorError, match=r"^no cluster to talk to: .*; give --kubeconfig or run it in a pod$"):
        options.build(parsed(f"--kubeconfig={tmp_path / 'config'}"))


def test_a_kubeconfig_that_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(OrchestratorError, match="no cluster to talk to"):
        options.build(parsed(f"--kubeconfig={tmp_path / 'none'}"))


def test_in_a_pod_the_service_account_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    with pytest.raises(OrchestratorError, match=r"[Ss]ervice token file does not exist"):
        options.build(parsed())


def test_labels_that_are_named_stand_in_for_the_usual_ones() -> None:
    assert parsed("--job-label=example.com/job", "--job-label=job").job_label == ["example.com/job", "job"]
    assert parsed().job_label == []
    assert JOB_LABELS[0] == "eagle_eye_job"


@pytest.mark.parametrize(
    "flag",
    [
        "--job-label=a b",
        "--job-label=a,b",
        "--namespace=a/b",
        "--owner=",
        "--taint-effect=Never",
        "--evict=all",
        "--start-wait=0",
        "--start-wait=nan",
        "--resume-config-map=a/b",
        "--health-events=ftp://x",
        "--health-events=https://user:pw@x/",
    ],
)
def test_what_makes_no_sense_is_refused(flag: str) -> None:
    with pytest.raises(argparse.ArgumentError, match=flag.partition("=")[0]):
        parsed(flag)


def test_the_options_alone_load_no_client() -> None:
    program = "import sys, eagle_eye.orchestrators.kubernetes.options; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert {"kubernetes", "pydantic", "yaml"} & set(done.stdout.split()) == set()
