"""What the real API server (version in each recording) said, played back: the same requests, the same outcome.

test_real_cluster.py makes the recordings (make test-kubernetes, with EAGLE_EYE_TEST_RECORD=1).
"""

from __future__ import annotations

import pytest
import tomllib

from tests.orchestrators.kubernetes.recording import (
    FOLDER,
    Clock,
    Playback,
    Recording,
    orchestrator_at,
    perform,
    serving,
)
from tests.orchestrators.kubernetes.rights import MANIFEST, granted, manifest, needed

NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))


@pytest.mark.parametrize("name", NAMES)
def test_a_recording_plays_back(name: str) -> None:
    recording = Recording.load(name)
    playback, clock = Playback(recording), Clock(recording.start_s)
    with serving(playback) as url, orchestrator_at(url, clock, **recording.settings) as orchestrator:
        said = perform(orchestrator, clock, recording.steps)
    assert playback.wrong is None
    assert (said, playback.left) == (recording.said, 0)


def test_there_is_a_recording_of_everything_that_we_do() -> None:
    verbs = {step[0] for name in NAMES for step in Recording.load(name).steps}
    assert verbs == {"state", "exclude", "restart", "readmit"}


def test_the_role_grants_exactly_what_is_asked_for() -> None:
    asked = {
        needed(exchange["method"], exchange["path"]) for name in NAMES for exchange in Recording.load(name).exchanges
    }
    assert asked - {None} == granted()


def test_the_roles_are_bound_to_the_account_that_the_pod_runs_as() -> None:
    documents = manifest()
    [deployment] = [document for document in documents if document["kind"] == "Deployment"]
    account = deployment["spec"]["template"]["spec"]["serviceAccountName"]
    bindings = [document for document in documents if document["kind"] == "ClusterRoleBinding"]
    assert {binding["roleRef"]["name"] for binding in bindings} == {
        document["metadata"]["name"] for document in documents if document["kind"] == "ClusterRole"
    }
    assert {subject["name"] for binding in bindings for subject in binding["subjects"]} == {account}


def test_the_manifest_runs_this_version() -> None:
    [deployment] = [document for document in manifest() if document["kind"] == "Deployment"]
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    project = tomllib.loads((MANIFEST.parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert container["image"] == f"eagle-eye-orchestrator:{project['version']}"


def test_no_role_says_everything() -> None:
    rules = [rule for document in manifest() if document["kind"] == "ClusterRole" for rule in document["rules"]]
    assert "*" not in {word for rule in rules for words in rule.values() for word in words}
