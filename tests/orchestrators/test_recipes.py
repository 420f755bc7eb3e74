"""The programs of docs/how-to/orchestrate-recipes.md, against a flux and a Ray that answer as their manuals say."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from eagle_eye.orchestrators.protocol import CannotCarryOutError, Exclusion, JobState, Restart
from eagle_eye.orchestrators.site_program import CommandOrchestrator, Programs
from tests.orchestrators.contract import cause
from tests.orchestrators.test_command_orchestrator import script

DOCS = Path(__file__).parents[2] / "docs" / "how-to"
NODES = frozenset({"n1", "n2", "n3"})

# Keeps its state in a file beside it. Jobs run at once.
FLUX = """
import json, os, sys
from pathlib import Path
file = Path(sys.argv[0]).with_name("flux.json")
state = json.loads(file.read_text())
verb, words = sys.argv[1], sys.argv[2:]
if verb == "hostlist":
    assert words[:2] == ["--expand", "--delimiter=,"]
    print(words[2].replace("n[1-3]", "n1,n2,n3"))
elif verb == "jobs":
    assert words == ["-a", "-n", "--name=llm", "--format={id} {state}"]
    for job in reversed(state["jobs"]):
        print(*job)
elif verb == "cancel":
    [job.__setitem__(1, "INACTIVE") for job in state["jobs"] if job[0] == words[0]]
elif verb == "submit":
    assert words[0] == "--job-name=llm" and words[-1] == "./llm.sh", words
    state["jobs"].append(["f" + str(len(state["jobs"]) + 1), "RUN"])
elif words[0] == "list":
    print("n[1-3]")
elif words[:2] == ["drain", "-n"]:
    for node, reason in state["drained"].items():
        print(node, reason)
elif words[0] == "drain":
    assert words[1] == "--update"
    state["drained"].setdefault(words[2], " ".join(words[3:]))
elif words[0] == "undrain":
    if words[1] not in state["drained"]:
        sys.exit("flux-resource: ERROR: not drained")
    del state["drained"][words[1]]
file.write_text(json.dumps(state))
"""
SSH = """
import sys
from pathlib import Path
with Path(sys.argv[0]).with_name("ssh.log").open("a") as log:
    print(*sys.argv[3:], file=log)
"""


def documented(title: str, folder: Path) -> Path:
    text = (DOCS / "orchestrate-recipes.md").read_text(encoding="utf-8").partition(f"\n## {title}\n")[2]
    found = re.search(r"```python\n#!/usr/bin/env python3\n(.*?)```", text, re.DOTALL)
    assert found is not None
    return script(folder / f"{title}.py", found[1])


def orchestrator(program: Path, **environment: str) -> CommandOrchestrator:
    folder = program.parent
    programs = Programs({"PATH": f"{folder}:{os.environ['PATH']}", **environment}, str(folder))
    return CommandOrchestrator([str(program)], programs, folder / "out.json", resumes=True)


def exclusion(*nodes: str) -> Exclusion:
    return Exclusion("llm", 1, nodes, True, cause())


def test_flux_drains_cancels_and_submits_and_leaves_an_administrators_drain(tmp_path: Path) -> None:
    script(tmp_path / "flux", FLUX)
    known = tmp_path / "flux.json"
    known.write_text(json.dumps({"jobs": [["f1", "RUN"]], "drained": {"n3": "broken fan"}}))
    flux = orchestrator(documented("Flux", tmp_path))
    assert flux.state("other") is None
    assert flux.state("llm") == JobState(1, NODES, running=True)
    assert flux.exclude(exclusion("n2", "n3")) == "n2, n3 drained"
    assert flux.restart("llm", Restart(1, None, cause(), ("n2",))) == "f2 runs, attempt 2"
    assert flux.state("llm") == JobState(2, NODES, running=True)
    assert json.loads(known.read_text()) == {
        "jobs": [["f1", "INACTIVE"], ["f2", "RUN"]],
        "drained": {"n3": "broken fan", "n2": "eagle-eye inc-1 gpu_lost"},
    }
    assert flux.readmit(["n2", "n3"]) == "n2 undrained"
    assert json.loads(known.read_text())["drained"] == {"n3": "broken fan"}


class RayJobs:
    """The part of Ray's Jobs API that the recipe uses."""

    def __init__(self) -> None:
        self.jobs: list[dict[str, Any]] = []
        ray = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                text = self.rfile.read(int(self.headers.get("content-length") or 0))
                content = json.dumps(ray.answer(self.command, self.path, json.loads(text) if text else {})).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = _answer  # noqa: N815 - as the standard library wants it

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def submit(self, name: str) -> dict[str, str]:
        made = {"submission_id": f"raysubmit_{len(self.jobs)}", "start_time": len(self.jobs), "status": "RUNNING"}
        self.jobs.append({"type": "SUBMISSION", "metadata": {"eagle_eye_job": name}, **made})
        return {"submission_id": str(made["submission_id"])}

    def answer(self, method: str, path: str, body: dict[str, Any]) -> Any:
        if method == "GET":
            return self.jobs
        if path.endswith("/stop"):
            for job in self.jobs:
                if job["submission_id"] == path.split("/")[3]:
                    job["status"] = "STOPPED"
            return {"stopped": True}
        assert body["entrypoint"] == "python train.py"
        return self.submit(body["metadata"]["eagle_eye_job"])

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def ray() -> Iterator[RayJobs]:
    made = RayJobs()
    yield made
    made.close()


def test_ray_loses_a_node_and_restarts_itself_or_is_submitted_again(tmp_path: Path, ray: RayJobs) -> None:
    script(tmp_path / "ssh", SSH)
    ray.submit("llm")
    program = orchestrator(documented("Ray", tmp_path), RAY_API=ray.url)
    assert program.state("llm") == JobState(1, NODES, running=True)
    assert program.exclude(exclusion("n2")) == "n2 taken out of the cluster"
    assert program.restart("llm", Restart(1, None, cause(), ("n2",))) == "raysubmit_0 runs, attempt 1"
    assert program.restart("llm", Restart(1, None, cause())) == "raysubmit_1 runs, attempt 2"
    assert [job["status"] for job in ray.jobs] == ["STOPPED", "RUNNING"]
    assert program.readmit(["n2"]) == "n2 in the cluster again"
    assert (tmp_path / "ssh.log").read_text() == "n2 ray stop --force\nn2 ray start --address=auto\n"


def test_ray_with_somebody_elses_job_is_left_alone(tmp_path: Path, ray: RayJobs) -> None:
    script(tmp_path / "ssh", SSH)
    ray.submit("llm")
    ray.submit("another")
    program = orchestrator(documented("Ray", tmp_path), RAY_API=ray.url)
    with pytest.raises(CannotCarryOutError, match="raysubmit_1 may run there too"):
        program.exclude(exclusion("n2"))
    assert not (tmp_path / "ssh.log").exists()


def test_the_documented_alertmanager_configuration_is_one(tmp_path: Path) -> None:
    if shutil.which("amtool") is None:
        pytest.skip("amtool is not installed: apt-get install prometheus-alertmanager (make test-full does it)")
    found = re.search(r"```yaml\n(route:.*?)```", (DOCS / "orchestrators.md").read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    file = tmp_path / "alertmanager.yml"
    file.write_text(found[1])
    done = subprocess.run(["amtool", "check-config", file], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_documented_file_is_read(tmp_path: Path) -> None:
    from eagle_eye.orchestrators.orchestrate import settings
    from eagle_eye.orchestrators.orchestrate.settings import KINDS

    found = re.search(r"```toml\n(.*?)```", (DOCS / "orchestrators.md").read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    file = tmp_path / "orchestrate.toml"
    file.write_text(found[1])
    kind = next(kind for kind in KINDS if kind.name == "command")
    options = settings.read(kind, ["--config", str(file)], {})
    assert (options.webhook_url, options.program, options.timeout) == (
        "http://login1:8472/", ["/opt/site/jobs.py"], 120.0,
    )  # fmt: skip
