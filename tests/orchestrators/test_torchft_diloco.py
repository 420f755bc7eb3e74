"""The DiLoCo program of docs/how-to/orchestrate-torchft.md, as it stands there, against torchft itself."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.torchft.processes import ended, lighthouse
from eagle_eye.agent.training_hook.message import MESSAGE_BYTES_MAX, HookMessage, decode
from eagle_eye.orchestrators.protocol import CannotCarryOutError, Exclusion, Restart
from eagle_eye.orchestrators.torchft.orchestrator import Lighthouse, TorchftJob, TorchftMemory, TorchftOrchestrator
from tests.loopback import free_port
from tests.orchestrators.contract import cause
from tests.orchestrators.test_torchft_real import HOW, TIMING, until

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "orchestrate-torchft.md"
GROUPS = 2
HEARD_WITHIN_S = 60.0


class Job:
    """Replica groups of one process each that run the page's program, and what their hooks say."""

    def __init__(self, folder: Path, url: str, stack: ExitStack) -> None:
        self._folder, self._url, self._stack = folder, url, stack
        program = re.search(r'```python\n(""\"diloco\.py.*?)```', PAGE.read_text(), re.DOTALL)
        assert program is not None
        (folder / "diloco.py").write_text(program[1])
        self._hook = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        self._hook.bind(str(folder / "hook.sock"))
        self._hook.settimeout(HEARD_WITHIN_S)

    def start(self, group: int, host: str) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        store: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # torchrun's part
        environment = {
            "EAGLE_EYE_JOB": "llm", "EAGLE_EYE_ATTEMPT": "0", "EAGLE_EYE_NODE": host, "REPLICA_GROUP_ID": str(group),
            "NUM_REPLICA_GROUPS": str(GROUPS), "TORCHFT_LIGHTHOUSE": self._url, "OMP_NUM_THREADS": "1",
            "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
            "EAGLE_EYE_HOOK_SOCKET": str(self._folder / "hook.sock"),
        }  # fmt: skip
        log = self._stack.enter_context((self._folder / f"group_{group}.log").open("ab"))
        process = subprocess.Popen(
            [sys.executable, str(self._folder / "diloco.py")], env={**os.environ, **environment}, stdout=log, stderr=log
        )
        self._stack.callback(store.set, "over", "")  # the store lives as long as the group
        self._stack.callback(ended, process)

    def heard(self) -> Iterator[HookMessage]:
        """Yield what hooks send until the time is over; raises TimeoutError where they are silent for as long."""
        until_s = time.monotonic() + HEARD_WITHIN_S
        while time.monotonic() < until_s:
            yield decode(self._hook.recv(MESSAGE_BYTES_MAX))


@pytest.mark.slow
def test_a_diloco_group_is_replaced_and_goes_on_where_the_others_are(tmp_path: Path) -> None:
    pytest.importorskip("torchft", reason=f"torchft {HOW}")
    port = free_port()
    page = Lighthouse(f"http://127.0.0.1:{port}")
    orchestrator = TorchftOrchestrator(
        TorchftJob("llm", {}), page, TorchftMemory(tmp_path / "torchft.json", tmp_path / "excluded")
    )
    with ExitStack() as stack:
        stack.callback(orchestrator.close)
        stack.callback(ended, lighthouse(port, tmp_path, TIMING))
        job = Job(tmp_path, page.url, stack)
        for group in range(GROUPS):
            job.start(group, f"127.0.1.{group + 1}")
        until(lambda: [group for group, step in sorted(_steps(page).items()) if step > 2] == ["group_0", "group_1"])

        orchestrator.exclude(Exclusion("llm", 0, ("127.0.1.2",), True, cause()))
        said = orchestrator.restart("llm", Restart(0, None, cause(), ("127.0.1.2",)))
        assert said.startswith("1 replica groups train on, step ")
        went_on = page.status().step

        job.start(1, "127.0.1.9")
        until(lambda: _steps(page).get("group_1", 0) > went_on)
        steps = _steps(page)
        assert abs(steps["group_0"] - steps["group_1"]) <= 1


@pytest.mark.slow
def test_each_diloco_group_reports_its_own_rank_of_the_whole_job(tmp_path: Path) -> None:
    pytest.importorskip("torchft", reason=f"torchft {HOW}")
    port = free_port()
    page = Lighthouse(f"http://127.0.0.1:{port}")
    with ExitStack() as stack:
        stack.callback(page.close)
        stack.callback(ended, lighthouse(port, tmp_path, TIMING))
        job = Job(tmp_path, page.url, stack)
        for group in range(GROUPS):
            job.start(group, f"127.0.1.{group + 1}")
        until(lambda: _steps(page).keys() == {"group_0", "group_1"})
        seen: set[tuple[str, int, int, int]] = set()
        for one in job.heard():
            if one.step > 0:
                seen.add((one.job, one.rank, one.world_size, one.attempt))
            if len(seen) == GROUPS:
                break
        assert seen == {("llm", 0, 2, 0), ("llm", 1, 2, 0)}


def _steps(page: Lighthouse) -> dict[str, int]:
    """Return the step of each group at the latest quorum; none before the lighthouse answers."""
    try:
        return {replica.group: replica.step for replica in page.status().replicas}
    except CannotCarryOutError:
        return {}
