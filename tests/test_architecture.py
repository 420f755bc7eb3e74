"""Folders say what they are for, imports stay light, and every name is documented."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import msgspec
import pytest

from eagle_eye.agent.config import AgentConfiguration
from eagle_eye.detectors.faults import FAULTS
from eagle_eye.schema.events import EVENTS
from eagle_eye.server.accounts.trust import AccountSettings
from eagle_eye.server.config import ServerConfig
from eagle_eye.server.delivery.attempts import WebhookSettings
from eagle_eye.server.engine.idle_faults import IdleCheckSettings
from eagle_eye.server.engine.settings import DetectionSettings, EvidenceSettings, PolicySettings
from eagle_eye.server.history.settings import HistorySettings, RemoteStoreSettings
from eagle_eye.server.ingest.settings import IngestSettings, RemoteWriteSettings
from eagle_eye.server.jobs.source import JobSourceSettings, KubernetesSettings, SlurmSettings
from eagle_eye.server.security.settings import LimitSettings, TlsSettings
from eagle_eye.server.store.settings import RecordsSettings
from eagle_eye.server.telemetry.settings import LogSettings

ROOT = Path(__file__).parent.parent
PORTIONS = (
    *("schema", "agent", "detectors", "server", "orchestrators", "checks", "cli", "demo", "simulator", "learning"),
    *("checkpoint", "planning", "client", "traces"),
)
FOLDERS = (*PORTIONS, "server/eagle_eye/server/engine", "benchmarks", "tests", "packaging", "dashboards")


def test_the_namespace_package_stays_one() -> None:
    for portion in PORTIONS:
        inside = {path.name for path in (ROOT / portion / "eagle_eye").iterdir()}
        assert portion in inside
        assert "__init__.py" not in inside


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_says_what_lives_there_and_what_may_not(folder: str) -> None:
    text = (ROOT / folder / "README.md").read_text(encoding="utf-8")
    lines = text.splitlines()
    assert lines[0].startswith("# ")
    assert any(line.startswith("Not here: ") for line in lines)
    assert len(lines) <= 20 or folder == "benchmarks"  # whose figures are there
    named = re.findall(r"`([\w.]+(?:/[\w.]*)+)`", text)
    assert [path for path in named if not (ROOT / folder / path).exists() and not (ROOT / path).exists()] == []


def test_every_folder_is_asked_for_its_readme() -> None:
    there = {path.parent.name for path in ROOT.glob("[!.]*/README.md")}
    assert there == {folder for folder in FOLDERS if "/" not in folder}


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("eagle_eye.schema.frame", {"numpy", "torch", "fastapi", "psutil", "httpx"}),
        ("eagle_eye.agent.command", {"numpy", "torch", "fastapi", "httpx", "pandas"}),
        ("eagle_eye.agent.hook", {"numpy", "torch", "fastapi", "httpx", "msgspec", "psutil"}),
        ("eagle_eye.checkpoint.command", {"numpy", "torch", "fastapi", "httpx", "rich"}),
        ("eagle_eye.checkpoint.store", {"numpy", "torch", "fastapi", "httpx", "psutil"}),
        ("eagle_eye.planning.command", {"numpy", "torch", "fastapi", "httpx", "rich"}),
        ("eagle_eye.cli.main", {"numpy", "torch", "fastapi", "httpx"}),
        ("eagle_eye.server.app", {"torch"}),
        ("eagle_eye.orchestrators.launch.command", {"torch"}),
        ("eagle_eye.orchestrators.orchestrate.command", {"torch", "kubernetes", "starlette", "httpx"}),
    ],
)
def test_imports_stay_light(module: str, forbidden: set[str]) -> None:
    program = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert forbidden & set(done.stdout.split()) == set()


def test_every_fault_and_event_says_what_it_means() -> None:
    assert all(fault.meaning.endswith(".") and fault.evidence.endswith(".") for fault in FAULTS)
    assert all(event.help.endswith(".") for event in EVENTS)


def test_every_fault_is_in_the_docs() -> None:
    text = (ROOT / "docs" / "reference" / "faults.md").read_text(encoding="utf-8")
    for fault in FAULTS:
        assert f"| `{fault.name}` |" in text
        assert fault.meaning in text
        assert fault.evidence in text


def test_no_requirement_names_an_index() -> None:
    text = (ROOT / "requirements.lock").read_text(encoding="utf-8") + (ROOT / "pyproject.toml").read_text("utf-8")
    assert not re.search(r"index-url|find-links|https?://", text)


@pytest.mark.parametrize(
    "shape",
    [
        ServerConfig,
        DetectionSettings,
        PolicySettings,
        WebhookSettings,
        IngestSettings,
        RemoteWriteSettings,
        RemoteStoreSettings,
        RecordsSettings,
        HistorySettings,
        EvidenceSettings,
        IdleCheckSettings,
        LimitSettings,
        AccountSettings,
        LogSettings,
        TlsSettings,
        JobSourceSettings,
        SlurmSettings,
        KubernetesSettings,
        AgentConfiguration,
    ],
)
def test_every_key_is_in_the_docs(shape: type[msgspec.Struct]) -> None:
    text = (ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
    sections = {
        "detection", "policy", "webhooks", "identity", "ingest", "remote_write", "remote_store",
        "records", "history", "evidence", "idle_checks", "limits", "accounts", "log",
        "tls", "job_sources", "slurm", "kubernetes", "sign_in", "proxy", "provider",
    }  # fmt: skip
    assert [key for key in shape.__struct_fields__ if key not in sections and f"| `{key}` |" not in text] == []


SHARED_CLASS_NAMES = {
    "Needs": "what a file needs of the server",
    # Kubernetes' own names, read by the server and by the orchestrator, of which neither imports the other
    **dict.fromkeys(("Condition", "ContainerState", "ContainerStatus", "Metadata", "NodeSpec"), "Kubernetes"),
    **dict.fromkeys(("Pod", "PodSpec", "PodStatus", "Taint"), "Kubernetes"),
    "Trace": "a trace folder, for the engine and as data frames",
    # the same on both sides: the agent imports nothing of the server
    **dict.fromkeys(("Clock", "ServiceManager", "SystemClock"), "agent and server"),
}


def test_a_class_name_has_one_meaning() -> None:
    modules: dict[str, set[str]] = defaultdict(set)
    for portion in PORTIONS:
        for path in (ROOT / portion / "eagle_eye").rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_bytes())):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):  # private: the module says what of
                    modules[node.name].add(str(path.relative_to(ROOT)))
    assert modules
    shared = {name: sorted(where) for name, where in modules.items() if len(where) > 1}
    assert {name: where for name, where in shared.items() if name not in SHARED_CLASS_NAMES} == {}
