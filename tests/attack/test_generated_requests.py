"""Requests generated from /openapi.json, valid and not: each is answered as the document says."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eagle_eye.server.delivery.webhook import Target, parse_url
from eagle_eye.server.model.errors import TargetRefused
from eagle_eye.server.parts import Services
from eagle_eye.server.security import auth
from eagle_eye.server.store.store import Change
from eagle_eye.server.web.dispatcher import Dispatcher
from tests.server.builders import NOW, body, frame, running
from tests.server.test_openapi import KNOWN, one_of_each

ROOT = Path(__file__).parents[2]
WITHIN_S = 900.0
EXAMPLES = 5  # of each endpoint, beside what the coverage of each parameter asks for
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "positive_data_acceptance",
    "negative_data_rejection",
    "unsupported_method",
    "ignored_auth",
)
LIMITS: dict[str, Any] = {
    "limits__token_burst": 1_000_000,
    "limits__address_burst": 1_000_000,
    "webhooks__subscriptions_max": 10_000,
    "webhooks__allow_private": True,
}


def keep_in(dispatcher: Dispatcher[Services]) -> None:
    """Have the server deliver to loopback alone, whatever a request made it believe."""

    async def check(url: str) -> Target:
        parsed = parse_url(url)
        if parsed.host != "127.0.0.1":
            raise TargetRefused("this server delivers to loopback alone")
        return Target(parsed, ("127.0.0.1",))

    dispatcher.services.guard.check = check  # type: ignore[method-assign]


@pytest.mark.skipif(
    importlib.util.find_spec("schemathesis") is None, reason="schemathesis is not installed (make test-full)"
)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_generated_requests_get_what_the_description_says(tmp_path: Path, seed: int) -> None:
    text, token = auth.mint("admin", None, NOW, None)
    with running(tmp_path, **LIMITS) as server:
        keep_in(server.dispatcher)
        server.dispatcher.services.store.commit(Change(tokens=(token,)))
        one_of_each(server)
        server.send(body(frame()), authorization=f"Bearer {text}")
        lines = [f'"path.{name}" = "{value}"\n' for name, value in KNOWN.items()]
        (tmp_path / "schemathesis.toml").write_text("[parameters]\n" + "".join(lines))
        words = ["--header", f"Authorization: Bearer {text}", "--exclude-path", "/api/v1/events"]  # which never ends
        words += ["--checks", ",".join(CHECKS), "--phases", "coverage,fuzzing", "--max-examples", str(EXAMPLES)]
        # Names are of printable characters; which of Unicode's these are, no pattern of bearable length says.
        words += ["--generation-codec", "latin-1", "--generation-database", "none"]
        words += ["--seed", str(seed), "--no-shrink", "--continue-on-failure", "--request-timeout", "30", "--no-color"]
        command = [sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json", *words]
        env = {**os.environ, "SCHEMATHESIS_HOOKS": "tests.attack.generated_hooks", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=WITHIN_S, cwd=tmp_path, env=env, check=False
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-20_000:]
        assert server.metric("internal_errors_total", place="api") == 0
