"""Rules and routes: by Prometheus' and Alertmanager's own tools, and against what the server says and the docs."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from eagle_eye.schema.metrics import METRICS, PROMETHEUS_PREFIX

REPOSITORY = Path(__file__).parents[2]
HERE = REPOSITORY / "dashboards/prometheus"
ALERTS = (HERE / "alerts.rules.yml").read_text(encoding="utf-8")
NAMES = re.findall(r"- alert: (\w+)", ALERTS)
ROUTES = (HERE / "alertmanager.yml").read_text(encoding="utf-8")

promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed: apt-get install prometheus"
)
amtool = pytest.mark.skipif(
    shutil.which("amtool") is None, reason="amtool is not installed: apt-get install prometheus-alertmanager"
)


def run(*command: str) -> str:
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@promtool
def test_each_alert_fires_on_what_it_is_for_and_only_then() -> None:
    run("promtool", "test", "rules", "alerts.test.yml")


@promtool
def test_prometheus_takes_the_example_configuration() -> None:
    run("promtool", "check", "config", "--syntax-only", "prometheus.yml")


def test_each_alert_is_tested_with_a_time_at_which_it_is_quiet_and_one_at_which_it_fires() -> None:
    text = (HERE / "alerts.test.yml").read_text(encoding="utf-8")
    for name in NAMES:
        fires = f"{{labels: '{{alertname=\"{name}\"}}', value: 1}}"
        assert fires in text, name
        if name != "EagleEyeAlertsWork":  # it is quiet in all the other cases
            case = text.partition(f"- name: {name};")[2].partition("\n\n")[0]
            assert "exp_samples: []" in case.partition(fires)[0], name


def test_no_rule_asks_for_a_metric_that_does_not_exist() -> None:
    documented = "".join(
        (REPOSITORY / "docs" / name).read_text(encoding="utf-8")
        for name in ("reference/metrics.md", "how-to/orchestrators.md", "how-to/remote-store.md")
    )
    known = set(re.findall(r"`(eagle_eye_\w+)`", documented)) | {PROMETHEUS_PREFIX + spec.name for spec in METRICS}
    known |= {f"eagle_eye_remote_store_{name}" for name in re.findall(r"`(lag_seconds)`", documented)}
    rules = ALERTS + (HERE / "recording.rules.yml").read_text(encoding="utf-8")
    expressions = re.sub(r"(record|alert|- name): .*", "", rules)
    asked = {name.removesuffix("_bucket") for name in re.findall(r"(?<![:\w])eagle_eye_\w+(?!:)\b", expressions)}
    assert asked - known == set()


def test_each_alert_has_a_severity_words_for_people_and_an_entry_in_the_runbooks() -> None:
    text = (REPOSITORY / "docs/how-to/runbooks.md").read_text(encoding="utf-8")
    entries = {re.sub(r"[^\w-]", "", title.lower()) for title in re.findall(r"^## (\w+)$", text, re.MULTILINE)}
    for name, body in zip(NAMES, re.split(r"- alert: \w+", ALERTS)[1:], strict=True):
        assert re.search(r"severity: (critical|warning|none)}", body), name
        assert "summary:" in body, name
        assert "description:" in body, name
        anchor = re.search(r"runbook: docs/how-to/runbooks\.md#([\w-]+)", body)
        assert anchor is not None, name
        assert anchor[1] in entries, name


def test_the_runbooks_have_no_entry_of_an_alert_that_is_gone() -> None:
    text = (REPOSITORY / "docs/how-to/runbooks.md").read_text(encoding="utf-8")
    shared = {"EagleEyeCertificateEndsTomorrow"}  # one entry for both
    assert set(re.findall(r"^## (EagleEye\w+)$", text, re.MULTILINE)) == set(NAMES) - shared


@amtool
def test_alertmanager_takes_the_example_configuration() -> None:
    run("amtool", "check-config", "alertmanager.yml")


@amtool
@pytest.mark.parametrize(
    ("receiver", "labels"),
    [
        ("pager", ["alertname=EagleEyeDown", "severity=critical"]),
        ("pager", ["alertname=EagleEyeFault", "severity=critical", "job=llm", "node=n1"]),
        ("chat", ["alertname=EagleEyeFault", "severity=warning", "job=llm"]),
        ("chat", ["alertname=EagleEyeDiskFills", "severity=warning"]),
        ("chat", ["alertname=EagleEyePing", "severity=info"]),
        ("dead-man", ["alertname=EagleEyeHeartbeat", "severity=none"]),
        ("dead-man", ["alertname=EagleEyeAlertsWork", "severity=none"]),
        ("chat", ["alertname=SomethingElse", "severity=critical"]),
    ],
)
def test_an_alert_goes_to_whom_it_concerns(receiver: str, labels: list[str]) -> None:
    run(
        *("amtool", "config", "routes", "test", "--config.file=alertmanager.yml", f"--verify.receivers={receiver}"),
        *labels,
    )


def test_what_inhibits_and_is_inhibited_exists() -> None:
    named = {name for matcher in re.findall(r"alertname=~?\"([^\"]+)\"", ROUTES) for name in matcher.split("|")}
    reported_by_the_server = {"EagleEyeFault", "EagleEyeHeartbeat", "EagleEyePing", "EagleEye.+"}
    assert named - reported_by_the_server <= set(NAMES)
