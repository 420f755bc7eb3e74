"""docker-compose.yml: what it promises, read from compose's own view of it. test_containers.py runs it for real."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eagle_eye.demo.two_servers import postgresql_programs
from eagle_eye.server import config as configuration
from eagle_eye.server.store.settings import RecordsSettings
from eagle_eye.server.store.sql_store import open_records
from eagle_eye.server.store.store import TOKENS
from tests.packaging.container_site import REPOSITORY, version
from tests.server.postgresql_server import serving

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: pip install -r tests/full.lock")

from tests.packaging.compose_site import FILE, described  # noqa: E402

STEPS = {"tokens", "records", "subscribe", "demo-subscribe", "demo-fault", "victoria-metrics-folder"}  # begin and end
SETTINGS = REPOSITORY / "packaging/compose/ha.env"
OURS = f"eagle-eye-server:{version()}"

needs_compose = pytest.mark.skipif(
    shutil.which("docker-compose") is None, reason="docker-compose is not installed: apt-get install docker-compose"
)


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    """All services, as compose understands the file."""
    if shutil.which("docker-compose") is None:
        pytest.skip("docker-compose is not installed: apt-get install docker-compose")
    found: dict[str, Any] = described("demo", "victoria-metrics", "ha")["services"]
    assert found
    return found


def test_images_are_pinned_to_exact_versions(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["image"] == OURS or re.fullmatch(r"[\w./-]+:v?\d+(\.\d+)+", service["image"]), name


def test_our_image_is_of_this_version_and_built_from_this_checkout(services: dict[str, Any]) -> None:
    assert services["server"]["image"] == OURS
    assert services["server"]["build"]["args"] == {"VERSION": version()}
    assert (REPOSITORY / services["server"]["build"]["dockerfile"]).is_file()


def test_every_service_is_confined(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "privileged" not in service, name


def test_nothing_that_goes_on_is_root_or_has_a_capability(services: dict[str, Any]) -> None:
    for name, service in services.items():
        user = service.get("user", "65532:65532" if service["image"] == OURS else "")  # our image's own
        if name not in STEPS:
            assert re.match(r"[1-9]\d*:", user), name
            assert "cap_add" not in service, name


def test_who_is_subscribed_runs_before_the_server_is_asked_to_find_its_name(services: dict[str, Any]) -> None:
    start = (REPOSITORY / "packaging/compose/start.sh").read_text(encoding="utf-8")
    always = set(re.findall(r"subscribed \w+ http://([\w-]+):", start))
    commands = {name: service.get("command") or [] for name, service in services.items()}
    asked = {name: command for name, command in commands.items() if command[:1] == ["subscribe"]}
    assert always == {"alertmanager"}
    assert asked.keys() == {"subscribe", "demo-subscribe"}
    for name, (_, *urls) in asked.items():
        before = {*services[name]["depends_on"]}
        before |= {*services["subscribe"]["depends_on"]} if "subscribe" in before else set()
        assert always | {re.findall(r"//([\w-]+):", url)[0] for url in urls} <= before, name


def test_everything_is_published_on_loopback_unless_somebody_says_otherwise(services: dict[str, Any]) -> None:
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert ports
    for port in ports:
        assert (port if isinstance(port, str) else port["host_ip"]).startswith("127.0.0.1"), port


@needs_compose
def test_only_the_servers_can_be_published_elsewhere() -> None:
    environ = {**os.environ, "GRAFANA_ADMIN_PASSWORD": "x", "EAGLE_EYE_PUBLISH": "0.0.0.0"}
    command = ["docker-compose", "--file", str(FILE), "--profile", "victoria-metrics", "--profile", "ha", "config"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    found = yaml.safe_load(done.stdout)["services"]
    assert {name for name, one in found.items() if "0.0.0.0:" in str(one.get("ports"))} == {"server", "server-b"}


@needs_compose
def test_grafana_has_no_default_password() -> None:
    environ = {name: value for name, value in os.environ.items() if name != "GRAFANA_ADMIN_PASSWORD"}
    command = ["docker-compose", "--file", str(FILE), "config"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "set GRAFANA_ADMIN_PASSWORD" in done.stderr


def test_what_goes_on_has_a_health_check(services: dict[str, Any]) -> None:
    without = {name for name, one in services.items() if not one.get("healthcheck", {}).get("test")}
    assert without <= STEPS | {"demo-fleet"}  # which serves nothing


def test_the_admin_token_is_given_to_no_service_that_goes_on_but_the_demos(services: dict[str, Any]) -> None:
    have = {name for name, one in services.items() if "admin-token" in str(one.get("volumes"))}
    assert {name for name in have - STEPS if not name.startswith("demo-")} == set()


def test_what_is_mounted_from_this_checkout_exists_and_cannot_be_written(services: dict[str, Any]) -> None:
    for name, service in services.items():
        for volume in service.get("volumes", []):
            source, target, *mode = volume.split(":") if isinstance(volume, str) else (volume["source"], "", "ro")
            if source.startswith("/"):
                assert os.path.exists(source), (name, target)  # noqa: PTH110 - as compose names it
                assert mode == ["ro"], (name, source)


@pytest.fixture(scope="module")
def pair() -> dict[str, Any]:
    """The services of the profile ha with its settings."""
    if shutil.which("docker-compose") is None:
        pytest.skip("docker-compose is not installed: apt-get install docker-compose")
    found: dict[str, Any] = described("ha", env_file=SETTINGS)["services"]
    return found


def test_two_servers_differ_in_their_name_folder_and_port_alone(pair: dict[str, Any]) -> None:
    first, second = pair["server"], pair["server-b"]
    assert first["environment"]["EAGLE_EYE_RECORDS_URL"].startswith("postgresql")
    own = {"EAGLE_EYE_RECORDS_SERVER_URL": "http://server:8470"}
    assert first["environment"] == {**second["environment"], **own}
    assert second["environment"]["EAGLE_EYE_RECORDS_SERVER_URL"] == "http://server-b:8470"
    differs = {"environment", "depends_on", "ports", "volumes", "profiles"}
    assert {key for key in first | second if first.get(key) != second.get(key)} <= differs
    folders = [next(one for one in each["volumes"] if "eagle-eye-server" in str(one)) for each in (first, second)]
    assert folders[0] != folders[1]


def test_what_two_servers_read_they_are_given(pair: dict[str, Any]) -> None:
    environ = {name: str(value) for name, value in pair["server"]["environment"].items()}
    config = configuration.load(None, {"EAGLE_EYE_DATA_DIR": "/-", **environ}, {})
    folder = Path(config.records.password_file).parent
    for name in ("server", "server-b", "records"):
        assert any(str(folder) in str(volume) for volume in pair[name]["volumes"]), name
    host = re.findall(r"@([\w-]+)/", config.records.url)[0]
    assert pair[host]["environment"]["POSTGRES_USER"] in config.records.url
    assert re.findall(r"//([\w-]+):", config.remote_store.write_url)[0] in pair


def test_a_name_leads_to_whichever_server_is_there(pair: dict[str, Any]) -> None:
    for name in ("server", "server-b"):
        assert "servers" in pair[name]["networks"]["default"]["aliases"]
        assert pair[name]["environment"]["EAGLE_EYE_PUBLIC_URL"] == "http://servers:8470"
    assert pair["subscribe"]["environment"]["SERVER"] == "http://servers:8470"


def test_the_second_server_starts_once_the_records_are_there(pair: dict[str, Any]) -> None:
    assert pair["server-b"]["depends_on"] == {"records": {"condition": "service_completed_successfully"}}
    assert pair["records"]["depends_on"] == {"postgresql": {"condition": "service_healthy"}}


def test_one_server_has_its_records_in_its_folder_and_no_database_beside_it() -> None:
    if shutil.which("docker-compose") is None:
        pytest.skip("docker-compose is not installed: apt-get install docker-compose")
    found = described()["services"]
    assert found["server"]["environment"]["EAGLE_EYE_RECORDS_URL"] == ""
    assert [found[name].get("profiles") for name in ("postgresql", "server-b", "records")] == [["ha"]] * 3


def run_step(step: str, folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run a step as compose does, its volumes in a folder."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    volumes = {"TOKENS": str(folder), "EAGLE_EYE_DATA_DIR": str(folder / "data"), "PATH": path}
    command = ["sh", str(REPOSITORY / "packaging/compose/start.sh"), step]
    return subprocess.run(command, env={**volumes, **environ}, capture_output=True, text=True, timeout=120, check=False)


def test_the_profile_without_its_settings_says_what_is_missing(tmp_path: Path) -> None:
    done = run_step("records", tmp_path)
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.endswith("--env-file packaging/compose/ha.env --profile ha up")


@pytest.mark.slow
def test_the_tokens_that_were_made_in_the_file_are_moved_to_postgresql_once(tmp_path: Path) -> None:
    if (bin_ := postgresql_programs()) is None:
        pytest.skip("PostgreSQL is not installed: apt-get install postgresql-15")
    for name in ("read", "admin", "records"):
        (tmp_path / name).mkdir()
    assert run_step("tokens", tmp_path).returncode == 0
    with serving(bin_) as server:
        records = {
            "EAGLE_EYE_RECORDS_URL": server.new_database(),
            "EAGLE_EYE_RECORDS_PASSWORD_FILE": str(tmp_path / "records/password"),
        }
        for _ in range(2):
            done = run_step("records", tmp_path, **records)
            assert done.returncode == 0, done.stderr
        store = open_records(RecordsSettings(records["EAGLE_EYE_RECORDS_URL"]), Path("/-"))
        try:
            assert sorted(token.scope for token in store.all(TOKENS)) == ["admin", "read"]
        finally:
            store.close()


STUB = """#!/bin/sh
echo "$@" >> "$TOKENS/asked"
case $1 in
tokens) if [ $(grep -c tokens "$TOKENS/asked") = 1 ]; then echo "[]"; else echo '[{"id": "t"}]'; fi ;;
esac
"""


@pytest.mark.parametrize(("url", "before"), [("", []), ("postgresql://db/ee", ["tokens list --json"] * 2)])
def test_a_server_begins_at_once_or_once_its_tokens_are_in_postgresql(
    tmp_path: Path, url: str, before: list[str]
) -> None:
    (tmp_path / "eagle-eye").write_text(STUB, encoding="utf-8")
    (tmp_path / "eagle-eye").chmod(0o755)
    done = run_step("server", tmp_path, EAGLE_EYE_RECORDS_URL=url, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stderr
    asked = (tmp_path / "asked").read_text(encoding="utf-8").splitlines()
    assert asked == [*before, "server --config /etc/eagle-eye/server.toml"]


def test_the_steps_script_is_plain_sh() -> None:
    subprocess.run(["sh", "-n", str(REPOSITORY / "packaging/compose/start.sh")], check=True)
