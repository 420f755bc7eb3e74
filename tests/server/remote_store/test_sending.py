"""When the sender is started, and what on-call hears of it."""

from __future__ import annotations

import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from eagle_eye.schema.configuration import ConfigurationError, masked
from eagle_eye.server.config import ServerConfig, load
from eagle_eye.server.history.remote_history import Figures
from eagle_eye.server.history.remote_store import COMMAND, SenderReport, Sending
from eagle_eye.server.history.settings import RemoteStoreSettings
from eagle_eye.server.model.clock import SystemClock
from tests.server.remote_store.strict_store import StrictStore, keep, second
from tests.server.segments.kept import compact, opened


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"eagle_eye_remote_store_{name}", labels)


def sending(folder: Path, url: str, command: tuple[str, ...] = COMMAND) -> tuple[Sending, CollectorRegistry]:
    registry = CollectorRegistry()
    settings = RemoteStoreSettings(write_url=url)
    return Sending(folder, settings, SystemClock(), Figures(registry), command), registry


def test_the_sender_is_a_process_that_brings_what_waits(tmp_path: Path) -> None:
    store = StrictStore()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            answer = store(httpx.Request("POST", "http://store", content=content))
            self.send_response(answer.status_code)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server, opened(tmp_path) as history:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        keep(history, second(0), second(1))
        compact(history)
        subject, registry = sending(tmp_path, f"http://127.0.0.1:{server.server_port}/api/v1/write")
        try:
            waiting = subject.waiting()
            lag_s = value(registry, "lag_seconds")
            subject.send()
        finally:
            server.shutdown()
            thread.join()
        assert (waiting, subject.waiting()) == (1, 0)
    assert lag_s is not None
    assert lag_s > 0.0
    assert value(registry, "lag_seconds") == 0.0
    assert value(registry, "samples_total") == 6.0  # one of each series in 15 s
    assert len(store.series) == 6


def test_troubles_are_counted(tmp_path: Path) -> None:
    subject, registry = sending(tmp_path, "http://store")
    subject.count_report(SenderReport(retries={"busy": 1}, problem="HTTP 503"))
    assert (value(registry, "ok"), value(registry, "retries_total", reason="busy")) == (0.0, 1.0)
    subject.count_report(SenderReport(problem="", taken=3, refused={"too_old": 2}, lost={"retired": 1}))
    assert (value(registry, "ok"), value(registry, "samples_total")) == (1.0, 3.0)
    assert value(registry, "refused_samples_total", reason="too_old") == 2.0
    assert value(registry, "lost_segments_total", reason="retired") == 1.0


def test_a_sender_that_fails_is_counted_and_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    program = "import sys; sys.stdin.read(); sys.exit('no such thing')"
    subject, registry = sending(tmp_path, "http://store", (sys.executable, "-c", program))
    subject.send()
    assert value(registry, "sender_failures_total") == 1.0
    assert "no such thing" in caplog.text


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"write_url": "prometheus:9090"}, "remote_store.write_url"),
        ({"read_url": "ftp://x"}, "remote_store.read_url"),
        ({"bearer_token_file": "f", "basic_auth_user": "u"}, "remote_store.basic_auth_user"),
        ({"basic_auth_password_file": "f"}, "remote_store.basic_auth_user"),
        ({"external_labels": {"node": "x"}}, "remote_store.external_labels"),
    ],
)
def test_settings_that_make_no_sense_are_refused(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        load(None, {}, {f"remote_store.{key}": value for key, value in keys.items()})


def test_headers_are_masked_where_the_configuration_is_printed() -> None:
    config = ServerConfig(remote_store=RemoteStoreSettings(headers={"Authorization": "Basic secret"}))
    assert "secret" not in str(masked(config)["remote_store"])
