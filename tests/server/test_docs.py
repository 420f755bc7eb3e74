"""What the documents promise is run or looked up here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from eagle_eye.schema import metrics as catalogue
from eagle_eye.schema.action import EVENT_TYPES, ReportState
from eagle_eye.schema.metrics import PROMETHEUS_PREFIX
from tests.server.builders import Running, running

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs" / "reference"
# With records in PostgreSQL alone.
OF_LEADING = {f"{PROMETHEUS_PREFIX}{name}" for name in ("leads", "epoch", "takeovers_total", "lease_left_seconds")}
OF_LEADING |= {f"{PROMETHEUS_PREFIX}{name}" for name in ("epoch_rises_total", "step_downs_total", "nodes_in_vain")}


def documented_metrics() -> set[str]:
    text = (DOCS / "metrics.md").read_text(encoding="utf-8").partition("## Ingest")[2]
    return set(re.findall(r"`(eagle_eye_\w+)`", text))


def shown_metrics(page: str) -> set[str]:
    """Return the names on a server's /metrics, without the catalogue's, which are the fleet's values."""
    shown = set(re.findall(r"^# TYPE (eagle_eye_\w+)", page, re.MULTILINE))
    return shown - {PROMETHEUS_PREFIX + name + end for name in catalogue.BY_NAME for end in ("", "_total")}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("docs")) as started:
        yield started


def test_every_endpoint_is_in_the_document_and_the_document_names_no_other(server: Running) -> None:
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"`(GET|POST|PUT|PATCH|DELETE) (/[^ `]*)`", text))
    paths = server.client.get("/openapi.json").json()["paths"]
    served = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    beside = {("POST", "/api/v1/frames"), ("POST", "/api/v1/write"), ("GET", "/"), ("GET", "/openapi.json")}
    assert documented == served | beside


def test_every_metric_of_the_server_is_in_the_document_and_the_document_names_no_other(server: Running) -> None:
    beside = {"eagle_eye_tls_reload_success", "eagle_eye_tls_certificate_expires_timestamp_seconds"}
    beside |= {"eagle_eye_job_source_age_seconds", "eagle_eye_job_source_jobs", "eagle_eye_ingest_age_seconds"}
    # With TLS, with a scheduler, once somebody was heard, and with records in PostgreSQL.
    assert documented_metrics() == shown_metrics(server.client.get("/metrics").text) | beside | OF_LEADING


def test_every_metric_that_the_code_names_is_in_a_document() -> None:
    """Those that one server does not show, too: of a remote store, of a scheduler, of a cell."""
    named = {
        PROMETHEUS_PREFIX + name
        for file in (ROOT / "server").rglob("*.py")
        for name in re.findall(r'(?:metric_name\(\s*|PROMETHEUS_PREFIX \+ )"(\w+)"', file.read_text(encoding="utf-8"))
    }
    assert len(named) > 75
    elsewhere = (ROOT / "docs/how-to/remote-store.md").read_text(encoding="utf-8")
    known = documented_metrics() | set(re.findall(r"`(eagle_eye_\w+)`", elsewhere))
    assert {name for name in named if not {name, f"{name}_total"} & known} == set()


def test_every_event_type_and_report_is_in_the_document() -> None:
    text = (DOCS / "webhooks.md").read_text(encoding="utf-8")
    for word in (*EVENT_TYPES, *get_args(ReportState)):
        assert f"`{word}`" in text
