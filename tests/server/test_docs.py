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

DOCS = Path(__file__).parents[2] / "docs" / "reference"


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
    text = (DOCS / "metrics.md").read_text(encoding="utf-8").partition("## Ingest")[2]
    documented = set(re.findall(r"`(eagle_eye_\w+)`", text))
    shown = set(re.findall(r"^# TYPE (eagle_eye_\w+)", server.client.get("/metrics").text, re.MULTILINE))
    shown -= {PROMETHEUS_PREFIX + name + end for name in catalogue.BY_NAME for end in ("", "_total")}
    beside = {"eagle_eye_tls_reload_success", "eagle_eye_tls_certificate_expires_timestamp_seconds"}
    beside |= {"eagle_eye_job_source_age_seconds", "eagle_eye_job_source_jobs", "eagle_eye_ingest_age_seconds"}
    beside |= {f"eagle_eye_{name}" for name in ("leads", "epoch", "takeovers_total", "lease_left_seconds")}
    beside |= {f"eagle_eye_{name}" for name in ("epoch_rises_total", "step_downs_total", "nodes_in_vain")}
    # With TLS, with a scheduler, once somebody was heard, and with records in PostgreSQL.
    assert documented == shown | beside


def test_every_event_type_and_report_is_in_the_document() -> None:
    text = (DOCS / "webhooks.md").read_text(encoding="utf-8")
    for word in (*EVENT_TYPES, *get_args(ReportState)):
        assert f"`{word}`" in text
