from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import ssl
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle_eye.agent.transport.servers import Trust, connect
from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.schema.frame import CONTENT_TYPE
from eagle_eye.server.app import create_app
from eagle_eye.server.command import refuse_unprotected_address
from eagle_eye.server.config import plain_text
from eagle_eye.server.security import auth
from eagle_eye.server.security.settings import TlsSettings
from eagle_eye.server.security.tls import Certificates, first_to_end, names
from eagle_eye.server.store.sql_store import RECORDS_FILE, open_file
from eagle_eye.server.store.store import Change
from tests.server.builders import NOW, FakeClock, body, frame, running, settings

pytestmark = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="openssl is not installed (apt-get install openssl)"
)

_EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with two authorities, certificates of "old" and "new" for 127.0.0.1, and of node n1."""
    folder = tmp_path_factory.mktemp("pki")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    for name in ("ca", "ca2"):
        openssl("req", "-x509", *_EC, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")
    for name, authority, days in (("old", "ca", "30"), ("new", "ca", "30"), ("n1", "ca", "30"), ("short", "ca", "10")):
        issued = ("-CA", f"{authority}.pem", "-CAkey", f"{authority}.key", "-addext", "basicConstraints=CA:FALSE")
        subject = ("-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}.site,IP:127.0.0.1", "-days", days)
        openssl("req", "-x509", *_EC, "-keyout", f"{name}.key", "-out", f"{name}.pem", *issued, *subject)
    return folder


def put(pki: Path, folder: Path, name: str, *kinds: str) -> None:
    """Put the pair in use, as a renewal does; the times of files may be coarser than a test is quick."""
    for kind in kinds or ("pem", "key"):
        shutil.copy(pki / f"{name}.{kind}", folder / f"live.{kind}")
        stamp = (folder / f"live.{kind}").stat().st_mtime_ns + 1_000_000_000 * len(name)
        os.utime(folder / f"live.{kind}", ns=(stamp, stamp))


def live(folder: Path, **more: Any) -> TlsSettings:
    return TlsSettings(certificate_file=str(folder / "live.pem"), key_file=str(folder / "live.key"), **more)


class Connection:
    """A client and a server that shake hands in memory."""

    def __init__(self, server: ssl.SSLContext, authority: Path, pair: Path | None = None) -> None:
        context = ssl.create_default_context(cafile=authority)
        if pair is not None:
            context.load_cert_chain(pair.with_suffix(".pem"), pair.with_suffix(".key"))
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.client = context.wrap_bio(to_client, to_server, server_hostname="127.0.0.1")
        self.server = server.wrap_bio(to_server, to_client, server_side=True)
        for _ in range(3):
            for end in (self.client, self.server):
                try:
                    end.do_handshake()
                except ssl.SSLWantReadError:
                    continue

    def said(self) -> bytes:
        """Return what the server reads of what the client writes."""
        self.client.write(b"hello")
        return self.server.read(5)


def shown(connection: Connection) -> frozenset[str]:
    certificate = connection.client.getpeercert()
    return names(certificate)


def test_a_changed_certificate_is_shown_to_new_connections_and_drops_none(pki: Path, tmp_path: Path) -> None:
    put(pki, tmp_path, "old")
    certificates = Certificates(live(tmp_path), FakeClock())
    first = Connection(certificates.context, pki / "ca.pem")
    put(pki, tmp_path, "new")
    certificates.poll()
    assert "old" in shown(first)
    assert "new" in shown(Connection(certificates.context, pki / "ca.pem"))
    assert first.said() == b"hello"
    assert certificates.current


def test_a_certificate_without_its_key_is_not_used_until_the_key_is_there(
    pki: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(pki, tmp_path, "old")
    certificates = Certificates(live(tmp_path), FakeClock())
    put(pki, tmp_path, "new", "pem")
    certificates.poll()
    certificates.poll()
    assert not certificates.current
    assert "old" in shown(Connection(certificates.context, pki / "ca.pem"))
    assert len(caplog.records) == 1  # not at each poll
    assert "live.pem" in vars(caplog.records[0])["error"]
    put(pki, tmp_path, "new", "key")
    certificates.poll()
    assert "new" in shown(Connection(certificates.context, pki / "ca.pem"))
    assert certificates.current


def test_files_that_did_not_change_are_not_read_again(pki: Path, tmp_path: Path) -> None:
    put(pki, tmp_path, "old")
    certificates = Certificates(live(tmp_path), FakeClock())
    before = certificates.validity
    certificates.poll()
    assert certificates.validity is before


def test_the_end_of_the_certificate_is_the_one_that_openssl_says(pki: Path, tmp_path: Path) -> None:
    put(pki, tmp_path, "old")
    words = ["openssl", "x509", "-noout", "-enddate", "-in", str(pki / "old.pem")]
    said = subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip().removeprefix("notAfter=")
    found = Certificates(live(tmp_path), FakeClock()).validity
    assert found is not None
    assert found.ends_s == ssl.cert_time_to_seconds(said)


def test_of_a_chain_the_certificate_that_ends_first_counts(pki: Path) -> None:
    def ends_s(text: str) -> float:
        found = first_to_end(text)
        assert found is not None
        return found.ends_s

    short, long = (pki / "short.pem").read_text(), (pki / "ca.pem").read_text()
    assert ends_s(long + short) == ends_s(short) < ends_s(long)
    assert first_to_end("no certificate") is None


@given(st.integers(0, 10_000), st.binary(min_size=1, max_size=4))
def test_a_certificate_that_is_broken_has_an_end_or_none(pki: Path, place: int, other: bytes) -> None:
    der = ssl.PEM_cert_to_DER_cert((pki / "old.pem").read_text())
    at = place % len(der)
    found = first_to_end(ssl.DER_cert_to_PEM_cert(der[:at] + other + der[at + len(other) :]))
    assert found is None or found.ends_s == found.ends_s


def test_an_end_that_is_near_is_said_once_a_day_and_is_a_note_of_readiness(
    pki: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(pki, tmp_path, "short")
    clock = FakeClock()
    certificates = Certificates(live(tmp_path), clock)
    assert certificates.validity is not None
    begins_s, ends_s = certificates.validity
    clock.time_s = ends_s - (ends_s - begins_s) / 3 - 1
    certificates.poll()
    assert (certificates.ending(), caplog.records) == ("", [])
    clock.advance(2)
    for _ in range(3):
        certificates.poll()
    assert "in 3.3 days; put a new one there" in certificates.ending()
    assert len(caplog.records) == 1
    clock.time_s = ends_s + 1
    certificates.poll()
    assert "ago: nobody" in certificates.ending()
    assert len(caplog.records) == 2
    put(pki, tmp_path, "old")
    clock.time_s = begins_s
    certificates.poll()
    assert certificates.ending() == ""


def test_connections_that_never_finish_their_handshake_shut_nobody_out(pki: Path, tmp_path: Path) -> None:
    put(pki, tmp_path, "old")
    trust = ssl.create_default_context(cafile=str(pki / "ca.pem"))
    tls = {f"tls__{name}": getattr(live(tmp_path), name) for name in ("certificate_file", "key_file")}
    with (
        running(tmp_path / "data", verify=trust, limits__address_connections=3, **tls) as server,
        contextlib.ExitStack() as stack,
    ):
        url = httpx.URL(server.url)
        for _ in range(5):
            where = (url.host, url.port or 0)
            stack.enter_context(socket.create_connection(where, 5.0, source_address=("127.0.0.2", 0)))
        assert server.send(body(frame())).status_code == 200
        assert server.metric("connections_refused_total", reason="address") == 2
        assert server.dispatcher.connections.unauthenticated == 3


def test_the_certificates_end_is_on_metrics_and_readyz_tells_of_it_and_is_no_less_ready(
    pki: Path, tmp_path: Path
) -> None:
    put(pki, tmp_path, "short")
    clock = FakeClock()
    trust = ssl.create_default_context(cafile=str(pki / "ca.pem"))
    tls = {f"tls__{name}": getattr(live(tmp_path), name) for name in ("certificate_file", "key_file")}
    with running(tmp_path / "data", clock, verify=trust, **tls) as server:
        server.send(body(frame()))
        shown_s = server.metric("tls_certificate_expires_timestamp_seconds")
        assert server.metric("tls_reload_success") == 1
        reported = server.client.get("/readyz")
        assert (reported.status_code, reported.json()["notes"].get("tls")) == (200, None)
        clock.time_s = shown_s - 1
        server.send(body(frame(2), sent_s=clock.now_s()))
        reported = server.client.get("/readyz")
        assert reported.status_code == 200
        assert "live.pem" in reported.json()["notes"]["tls"]
    with running(tmp_path / "plain") as server:
        assert "eagle_eye_tls" not in server.client.get("/metrics").text


def test_clients_of_an_authority_that_was_taken_out_are_refused(pki: Path, tmp_path: Path) -> None:
    put(pki, tmp_path, "old")
    shutil.copy(pki / "ca.pem", tmp_path / "clients.pem")
    certificates = Certificates(live(tmp_path, client_ca_file=str(tmp_path / "clients.pem")), FakeClock())
    connection = Connection(certificates.context, pki / "ca.pem", pki / "n1")
    assert names(connection.server.getpeercert()) == {"n1", "n1.site"}
    shutil.copy(pki / "ca2.pem", tmp_path / "clients.pem")
    certificates.poll()
    with pytest.raises(ssl.SSLCertVerificationError):
        Connection(certificates.context, pki / "ca.pem", pki / "n1")


def test_clients_without_a_certificate_are_refused_only_if_all_need_one(pki: Path, tmp_path: Path) -> None:
    put(pki, tmp_path, "old")
    asked = {"client_ca_file": str(pki / "ca.pem")}
    assert Connection(Certificates(live(tmp_path, **asked), FakeClock()).context, pki / "ca.pem").said() == b"hello"
    with pytest.raises(ssl.SSLError, match=r"(?i)peer.did.not.return.a.certificate"):
        Connection(
            Certificates(live(tmp_path, client_certificates="all", **asked), FakeClock()).context, pki / "ca.pem"
        )


@pytest.mark.parametrize(
    ("broken", "key"),
    [({"certificate_file": "/none.pem"}, "certificate_file"), ({"client_ca_file": "/none.pem"}, "client_ca_file")],
)
def test_files_of_no_use_are_a_configuration_error(pki: Path, tmp_path: Path, broken: dict[str, str], key: str) -> None:
    put(pki, tmp_path, "old")
    named = {"certificate_file": str(tmp_path / "live.pem"), "key_file": str(tmp_path / "live.key"), **broken}
    with pytest.raises(ConfigurationError, match=rf"tls\.{key}: /none\.pem cannot be used: No such file"):
        Certificates(msgspec.convert(named, TlsSettings), FakeClock())


def test_a_key_without_a_certificate_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"tls\.certificate_file"):
        settings(tmp_path, tls__key_file="/some.key")


def test_names_are_the_common_name_and_dns_names() -> None:
    certificate = {
        "subject": ((("organizationName", "Site"),), (("commonName", "n1"),)),
        "subjectAltName": (("DNS", "n1.site"), ("IP Address", "192.0.2.1"), ("DNS", "n2")),
    }
    assert names(certificate) == {"n1", "n1.site", "n2"}
    assert names(None) == names({}) == frozenset()


def agent_frames(url: str, pki: Path, token: str) -> int:
    """Return how many frames the server takes of node n1's own agent."""
    trust = Trust(pki / "ca.pem", pki / "n1.pem", pki / "n1.key")
    headers = {"authorization": f"Bearer {token}", "content-type": CONTENT_TYPE}
    with contextlib.closing(connect(url, trust, connect_s=10.0, answer_s=10.0)) as connection:
        connection.request("POST", "/api/v1/frames", body(frame(7)), headers)
        accepted: int = json.loads(connection.getresponse().read())["accepted"]
        return accepted


def test_an_agent_needs_the_certificate_of_its_node_beside_its_token(pki: Path, tmp_path: Path) -> None:
    put(pki, tmp_path, "old")
    keys = {f"tls__{name}": value for name, value in (("certificate_file", "live.pem"), ("key_file", "live.key"))}
    flags: dict[str, Any] = {name: str(tmp_path / value) for name, value in keys.items()}
    tokens = {node: auth.mint("agent", node, NOW, None) for node in ("n1", "n2")}
    join, join_token = auth.mint("join", None, NOW, 60.0)
    reader, reader_token = auth.mint("read", None, NOW, None)
    anonymous = ssl.create_default_context(cafile=pki / "ca.pem")
    certified = ssl.create_default_context(cafile=pki / "ca.pem")
    certified.load_cert_chain(pki / "n1.pem", pki / "n1.key")
    with running(tmp_path, verify=anonymous, tls__client_ca_file=str(pki / "ca.pem"), **flags) as server:
        kept = (*(token for _, token in tokens.values()), join_token, reader_token)
        server.dispatcher.services.store.commit(Change(tokens=kept))
        refused = server.send(body(frame(1)), authorization=f"Bearer {tokens['n1'][0]}")
        assert (refused.status_code, refused.json()["reason"]) == (403, "certificate")
        page = server.client.get("/api/v1/nodes", headers={"authorization": f"Bearer {reader}"})
        assert page.status_code == 200
        assert page.headers["strict-transport-security"] == "max-age=31536000"
        with httpx.Client(base_url=server.url, verify=certified, trust_env=False) as client:

            def send(node: str) -> httpx.Response:
                headers = {
                    "authorization": f"Bearer {tokens[node][0]}",
                    "content-type": CONTENT_TYPE,
                }
                return client.post("/api/v1/frames", content=body(frame(1, node)), headers=headers)

            def enrol(node: str) -> httpx.Response:
                headers = {"authorization": f"Bearer {join}"}
                return client.post("/api/v1/enrol", json={"node": node}, headers=headers)

            assert enrol("n1.site").status_code == 201
            assert send("n1").status_code == 200
            assert (send("n2").status_code, send("n2").json()["reason"]) == (403, "certificate")
            assert (enrol("n3").status_code, enrol("n3").json()["reason"]) == (403, "certificate")
        assert agent_frames(server.url, pki, tokens["n1"][0]) == 1


OPEN = {"listen": "192.0.2.1:8470"}  # documentation's: nobody listens there


@pytest.mark.parametrize(
    ("flags", "reported"),
    [
        (OPEN, True),
        ({"listen": "0.0.0.0:8470", "public_url": "http://localhost:8470"}, True),
        ({"listen": "127.0.0.1:8470"}, False),
        ({"listen": "[::1]:8470"}, False),
        ({**OPEN, "public_url": "https://eagle-eye.example"}, False),
        ({**OPEN, "tls__certificate_file": "/certificate.pem"}, False),
    ],
)
def test_an_address_that_others_reach_without_tls_is_reported(
    tmp_path: Path, flags: dict[str, str], reported: bool
) -> None:
    text = plain_text(settings(tmp_path, **flags))
    assert (flags["listen"] in text, "tls.certificate_file" in text) == (reported, reported)


def test_it_is_among_the_notes_that_the_page_and_readyz_show(tmp_path: Path) -> None:
    front = create_app(settings(tmp_path, **OPEN), FakeClock())
    assert front.services.doctor.check().notes == {"tls": plain_text(front.services.config)}


def test_it_is_in_the_log_once_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for listen in (OPEN["listen"], "127.0.0.1:8470"):
        with closing(open_file(tmp_path / RECORDS_FILE)) as store:
            store.commit(Change(tokens=(auth.mint("admin", None, NOW, None)[1],)))
        refuse_unprotected_address(settings(tmp_path, listen=listen))
    (said,) = caplog.records
    assert (said.levelname, said.getMessage()) == ("WARNING", "the server's address has no TLS")
    assert OPEN["listen"] in vars(said)["why"]
