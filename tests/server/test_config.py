from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.server.config import ServerConfig, address, exposed_secrets, is_loopback, load, plain_text
from eagle_eye.server.history.settings import HistorySettings, RemoteStoreSettings, fed_from


def test_defaults_listen_on_loopback_and_observe() -> None:
    config = load(None, {"XDG_STATE_HOME": "/state"}, {})
    assert config.listen == "127.0.0.1:8470"
    assert config.policy.mode == "observe"
    assert config.webhooks.allow_private is False
    assert config.data_dir == "/state/eagle-eye/server"
    assert config.public_url == "http://127.0.0.1:8470"
    assert config.grafana_url == ""


def test_flags_win_over_environment_and_environment_over_file(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text('listen = "127.0.0.1:1"\n[policy]\nmode = "act"\n[webhooks]\ntimeout_s = 3\n')
    config = load(
        file, {"EAGLE_EYE_LISTEN": "127.0.0.1:2", "EAGLE_EYE_WEBHOOKS_TIMEOUT_S": "4"}, {"listen": "127.0.0.1:3"}
    )
    assert config.listen == "127.0.0.1:3"
    assert config.webhooks.timeout_s == 4.0
    assert config.policy.mode == "act"


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("listne = 1", "listne"),
        ("[webhooks]\nallow_privat = true", "webhooks.allow_privat"),
        ("[webhooks]\ntimeout_s = 0", "webhooks.timeout_s"),
        ("[webhooks]\nattempts_max = 'many'", "webhooks.attempts_max"),
        ("[policy]\nmode = 'dare'", "policy.mode"),
        ("[detection]\ntick_s = 0", "detection.tick_s"),
        ("[detection]\nsilent_intervals = -4.0", "detection.silent_intervals"),
        ("[detection]\nstraggler_ratio = nan", "detection.straggler_ratio"),
        ("[detection]\nstraggler_mild_ratio = 0.05", "detection.straggler_mild_ratio"),
        ("[ingest]\nnodes = 'n*'", "ingest.nodes"),
        ("[history]\nretention_bytes = 1", "history.retention_bytes"),
        ("listen = 'localhost'", "listen"),
        ("listen = '127.0.0.1:70000'", "listen"),
        ("public_url = 'eagle'", "public_url"),
        ("grafana_url = 'javascript:alert(1)'", "grafana_url"),
        ("grafana_url = 'https://'", "grafana_url"),
        ("grafana_url = 'https://grafana.example.com:70000'", "grafana_url"),
        ("grafana_url = 'https://ada:secret@grafana.example.com'", "grafana_url"),
        ("grafana_url = 'https://grafana.example.com/?orgId=2'", "grafana_url"),
    ],
)
def test_an_error_names_the_key(tmp_path: Path, text: str, key: str) -> None:
    file = tmp_path / "server.toml"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=key):
        load(file, {}, {})


@pytest.mark.parametrize(
    ("listen", "loopback"),
    [
        ("127.0.0.1:1", True),
        ("127.9.9.9:1", True),
        ("[::1]:1", True),
        ("localhost:1", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("10.0.0.1:1", False),
        ("host.example:1", False),
    ],
)
def test_only_this_machine_counts_as_loopback(listen: str, loopback: bool) -> None:
    assert is_loopback(listen) is loopback


def test_an_ipv6_address_loses_its_brackets() -> None:
    assert address("[::1]:8470") == ("::1", 8470)


@pytest.mark.parametrize("key", ["write_url", "read_url"])
def test_a_password_in_the_remote_stores_url_is_refused_and_not_repeated(key: str) -> None:
    with pytest.raises(ConfigurationError, match=f"remote_store.{key}: .*basic_auth_password_file") as refused:
        load(None, {}, {"remote_store": {key: "https://me:sesame@store/api/v1/write"}})
    assert "sesame" not in str(refused.value)


def test_segments_come_more_often_where_a_remote_store_is_written_to() -> None:
    history, store = HistorySettings(segment_s=900.0), RemoteStoreSettings(write_url="http://prometheus:9090")
    assert fed_from(history, RemoteStoreSettings()) == history
    assert fed_from(history, store).segment_s == 300.0
    assert fed_from(HistorySettings(segment_s=60.0), store).segment_s == 60.0


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ({"listen": "127.0.0.1:8470"}, False),
        ({"listen": "0.0.0.0:8470"}, True),
        ({"listen": "0.0.0.0:8470", "public_url": "http://server:8470"}, True),
        ({"listen": "0.0.0.0:8470", "public_url": "https://server"}, False),
        ({"listen": "[::]:8470", "tls": {"certificate_file": "a", "key_file": "b"}}, False),
    ],
)
def test_an_address_without_tls_that_others_reach_is_warned_of(given: dict[str, object], plain: bool) -> None:
    said = plain_text(msgspec.convert(given, ServerConfig))
    assert bool(said) == plain
    assert ("set tls.certificate_file" in said) == plain


def named(settings: Any, file: str) -> Any:
    """The settings with ``file`` for each key that names a file of a secret."""
    values: dict[str, Any] = {}
    for key in settings.__struct_fields__:
        value = getattr(settings, key)
        if isinstance(value, msgspec.Struct):
            values[key] = named(value, file)
        elif re.search(r"(token|secret|password|key)_file$", key):
            values[key] = file
    return msgspec.structs.replace(settings, **values)


def test_each_file_of_a_secret_that_every_user_can_read_is_named_but_not_a_service_accounts() -> None:
    with tempfile.TemporaryDirectory() as name:  # unlike tmp_path, entered by every user
        Path(name).chmod(0o755)
        file = Path(name) / "secret"
        file.write_text("s")
        config = named(ServerConfig(), str(file))
        file.chmod(0o644)
        keys = {line.partition(":")[0] for line in exposed_secrets(config)}
        file.chmod(0o640)
        assert exposed_secrets(config) == []
    text = msgspec.toml.encode(config).decode()
    found = {
        f"{section}.{line.partition(' = ')[0]}"
        for section, lines in re.findall(r"^\[([\w.]+)\]\n((?:[^\[\n].*\n)*)", text, re.MULTILINE)
        for line in lines.splitlines()
        if f'"{file}"' in line
    }
    assert keys == found - {"job_sources.kubernetes.token_file"}
    assert len(keys) >= 7
