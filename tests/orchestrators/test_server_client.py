from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import certifi
import pytest

from eagle_eye.orchestrators.server_client import authorities


@pytest.fixture(autouse=True)
def _read_anew() -> Iterator[None]:
    authorities.cache_clear()
    yield
    authorities.cache_clear()


def test_an_authority_of_ones_own_is_believed_and_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end = "-----END CERTIFICATE-----"
    first = Path(certifi.where()).read_text(encoding="utf-8").partition(end)[0] + end
    (tmp_path / "ca.pem").write_text(first, encoding="utf-8")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    assert len(authorities().get_ca_certs()) == 1


def test_the_public_authorities_are_believed_where_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    assert len(authorities().get_ca_certs()) > 50
