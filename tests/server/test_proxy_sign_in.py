"""A reverse proxy names who signed in: it alone is believed, groups give scopes, and foreign pages change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.server.model.errors import Refusal
from eagle_eye.server.security.auth import CERTIFICATE_NAMES, PEER, mint
from eagle_eye.server.security.people import Proxy
from eagle_eye.server.security.settings import ProxySettings
from eagle_eye.server.store.store import Change
from eagle_eye.server.web.forwarding import Forwarding, UnreachedNodes
from tests.server.builders import NOW, FakeClock, Running, body, frame, incident, running, settings

USER, GROUPS = "X-Forwarded-User", "X-Forwarded-Groups"
SECRET = "a-secret-of-some-length"
CHANGE = {"Eagle-Eye-Request": "1"}
GROUPS_OF: dict[str, Any] = {
    "sign_in__read_groups": ("staff",),
    "sign_in__operate_groups": ("gpu-ops",),
    "sign_in__admin_groups": ("eagle",),
}


@contextmanager
def site(folder: Path, **proxy: Any) -> Iterator[Running]:
    """Run a server behind a proxy on this machine, unless ``proxy`` says where it is."""
    proxy = {"user_header": USER, "groups_header": GROUPS, "addresses": ("127.0.0.0/8",), **proxy}
    with running(folder, **GROUPS_OF, **{f"sign_in__proxy__{key}": value for key, value in proxy.items()}) as server:
        server.dispatcher.services.store.commit(Change(incidents=(incident(),)))
        yield server


def as_of(name: str, groups: str = "staff", **more: str) -> dict[str, str]:
    return {USER: name, GROUPS: groups, **more}


def reason(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["reason"]


def test_groups_give_the_highest_of_their_scopes(tmp_path: Path) -> None:
    with site(tmp_path) as server:
        for groups, scope in (("staff", "read"), ("staff, gpu-ops", "operate"), ("eagle,staff", "admin")):
            me = server.client.get("/api/v1/me", headers=as_of("ada", groups)).json()
            assert (me["who"], me["person"], me["scope"]) == ("user:ada", "ada", scope)
        assert reason(server.client.get("/api/v1/me", headers=as_of("ada", "guests"))) == (403, "no_group")


def test_who_may_only_look_changes_nothing_and_the_answer_names_the_person(tmp_path: Path) -> None:
    with site(tmp_path) as server:
        answer = server.client.post("/api/v1/incidents/inc_1/false", headers=as_of("ada") | CHANGE)
        assert reason(answer) == (403, "scope")
        assert "ada has scope read" in answer.json()["detail"]


def test_the_audit_trail_names_the_person(tmp_path: Path) -> None:
    with site(tmp_path) as server:
        path = "/api/v1/incidents/inc_1/acknowledge"
        assert server.client.post(path, headers=as_of("ada", "gpu-ops") | CHANGE).status_code == 200
        (entry,) = server.dispatcher.services.store.audit(verb="acknowledge").items
        assert (entry.who, entry.subject) == ("user:ada", "inc_1")


def test_a_change_without_the_pages_own_header_is_refused_as_a_foreign_pages(tmp_path: Path) -> None:
    with site(tmp_path) as server:
        path = "/api/v1/incidents/inc_1/acknowledge"
        assert reason(server.client.post(path, headers=as_of("ada", "gpu-ops"))) == (403, "foreign_page")


def test_no_page_of_another_origin_is_let_send_that_header(tmp_path: Path) -> None:
    asked = {"origin": "https://evil.example", "access-control-request-headers": "eagle-eye-request"}
    with site(tmp_path) as server:
        answer = server.client.options("/api/v1/incidents/inc_1/acknowledge", headers=as_of("ada") | asked)
        assert not [name for name in answer.headers if name.startswith("access-control-")]


def test_headers_from_another_address_are_refused_and_counted(tmp_path: Path) -> None:
    with site(tmp_path, addresses=("10.1.0.0/16", "fd00::/8")) as server:
        answer = server.client.get("/api/v1/me", headers=as_of("ada", "eagle"))
        assert reason(answer) == (401, "untrusted_proxy")
        assert "127.0.0.1 is not in sign_in.proxy.addresses" in answer.json()["detail"]
        assert server.metric("sign_in_refused_total", reason="untrusted_proxy") == 1


def test_what_a_client_says_of_its_address_changes_nothing(tmp_path: Path) -> None:
    """uvicorn takes X-Forwarded-For of senders on this machine for the client's address."""
    with site(tmp_path, addresses=("10.1.0.0/16",)) as server:
        claimed = {"X-Forwarded-For": "10.1.0.1", "Forwarded": "for=10.1.0.1"}
        assert reason(server.client.get("/api/v1/me", headers=as_of("ada") | claimed)) == (401, "untrusted_proxy")


@pytest.mark.parametrize("shown", [{}, {"X-Proxy-Secret": "another-secret-of-some-length"}])
def test_without_the_proxys_secret_its_headers_are_refused(tmp_path: Path, shown: dict[str, str]) -> None:
    (tmp_path / "secret").write_text(SECRET + "\n")
    proxy = {"addresses": (), "secret_header": "X-Proxy-Secret", "secret_file": str(tmp_path / "secret")}
    with site(tmp_path / "data", **proxy) as server:
        assert reason(server.client.get("/api/v1/me", headers=as_of("ada") | shown)) == (401, "untrusted_proxy")
        right = as_of("ada") | {"X-Proxy-Secret": SECRET}
        assert server.client.get("/api/v1/me", headers=right).json()["person"] == "ada"


def test_a_certificate_of_another_name_is_not_the_proxys() -> None:
    proxy = Proxy(ProxySettings(user_header=USER, certificate_names=("proxy.example",)), lambda _: None)
    headers = [(b"x-forwarded-user", b"ada")]
    with pytest.raises(Refusal, match="shown: n1"):
        proxy.person(headers, {CERTIFICATE_NAMES: frozenset({"n1"})})
    known = proxy.person(headers, {CERTIFICATE_NAMES: frozenset({"proxy.example"})})
    assert known is not None
    assert known.name == "ada"


def test_all_that_is_configured_of_the_proxy_must_hold() -> None:
    proxy = Proxy(ProxySettings(user_header=USER, addresses=("10.0.0.0/8",), certificate_names=("p",)), lambda _: None)
    for state in ({PEER: "10.0.0.1"}, {PEER: "11.0.0.1", CERTIFICATE_NAMES: frozenset({"p"})}, {}):
        with pytest.raises(Refusal):
            proxy.person([(b"x-forwarded-user", b"ada")], state)


def test_an_ipv4_proxy_on_an_ipv6_socket_is_known() -> None:
    proxy = Proxy(ProxySettings(user_header=USER, addresses=("10.0.0.0/8",)), lambda _: None)
    assert proxy.person([(b"x-forwarded-user", b"ada")], {PEER: "::ffff:10.0.0.1"}) is not None


@pytest.mark.parametrize("twice", [USER, GROUPS])
def test_headers_that_a_client_sent_and_the_proxy_added_to_are_refused(tmp_path: Path, twice: str) -> None:
    with site(tmp_path) as server:
        answer = server.client.get("/api/v1/me", headers=[*as_of("ada").items(), (twice, "eagle")])
        assert reason(answer) == (401, "proxy_headers")
        assert server.metric("sign_in_refused_total", reason="proxy_headers") == 1


@pytest.mark.parametrize("name", ["", "a\x7fb", "x" * 300])
def test_a_name_that_is_none_is_refused(tmp_path: Path, name: str) -> None:
    with site(tmp_path) as server:
        assert reason(server.client.get("/api/v1/me", headers=as_of(name))) == (401, "name")


def test_a_token_decides_and_headers_beside_it_are_not_believed(tmp_path: Path) -> None:
    text, record = mint("read", None, NOW, None)
    with site(tmp_path, addresses=("10.0.0.0/8",)) as server:
        server.dispatcher.services.store.commit(Change(tokens=(record,)))
        headers = as_of("ada", "eagle") | {"Authorization": f"Bearer {text}"}
        me = server.client.get("/api/v1/me", headers=headers).json()
        assert (me["who"], me["scope"]) == (record.id, "read")
        assert server.metric("sign_in_refused_total", reason="untrusted_proxy") == 1


def test_a_proxys_own_authorization_does_not_hide_the_person(tmp_path: Path) -> None:
    with site(tmp_path) as server:
        headers = as_of("ada") | {"Authorization": "Basic YWRhOng="}
        assert server.client.get("/api/v1/me", headers=headers).json()["person"] == "ada"


def test_with_sign_in_loopback_is_no_longer_open_to_everybody(tmp_path: Path) -> None:
    """What the proxy passes on without a name would else be this machine's, which may do everything."""
    with site(tmp_path) as server:
        assert reason(server.client.get("/api/v1/me")) == (401, "no_token")


def test_a_person_sends_no_frames(tmp_path: Path) -> None:
    with site(tmp_path) as server:
        answer = server.send(body(frame()), **as_of("ada", "eagle"), **CHANGE)
        assert answer.status_code == 401


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"user_header": USER}, "sign_in.proxy.addresses"),
        ({"user_header": USER, "addresses": ("10.0.0.0/99",)}, "sign_in.proxy.addresses"),
        ({"user_header": "Authorization", "addresses": ("10.0.0.1",)}, "sign_in.proxy.user_header"),
        ({"user_header": "a b", "addresses": ("10.0.0.1",)}, "sign_in.proxy.user_header"),
        ({"user_header": USER, "secret_header": "X-Secret"}, "sign_in.proxy.secret_file"),
        ({"user_header": USER, "certificate_names": ("proxy",)}, "tls.client_ca_file"),
        ({"user_header": USER, "addresses": ("10.0.0.1",), "groups_separator": ""}, "sign_in.proxy.groups_separator"),
    ],
)
def test_a_proxy_that_could_not_be_told_from_others_is_refused(
    tmp_path: Path, keys: dict[str, Any], named: str
) -> None:
    flags = {f"sign_in__proxy__{key}": value for key, value in keys.items()}
    with pytest.raises(ConfigurationError, match=named):
        settings(tmp_path, sign_in__read_groups=("*",), **flags)


def test_sign_in_without_groups_is_refused(tmp_path: Path) -> None:
    flags = {"sign_in__proxy__user_header": USER, "sign_in__proxy__addresses": ("10.0.0.1",)}
    with pytest.raises(ConfigurationError, match=r"sign_in\.read_groups"):
        settings(tmp_path, **flags)


def test_a_short_secret_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("short")
    with pytest.raises(ConfigurationError, match="5 characters; expected"):
        Proxy(
            ProxySettings(user_header=USER, secret_header="X-S", secret_file=str(tmp_path / "secret")), lambda _: None
        )


def test_a_standby_passes_on_what_the_proxy_sent_and_nobody_elses_word() -> None:
    counted: list[str] = []
    proxy = Proxy(ProxySettings(user_header=USER, groups_header=GROUPS, addresses=("10.0.0.0/8",)), counted.append)
    headers = [(b"host", b"h"), (b"x-forwarded-user", b"ada"), (b"x-forwarded-groups", b"eagle")]
    assert proxy.trusted_only(headers, {PEER: "10.0.0.1"}) == headers
    assert proxy.trusted_only(headers, {PEER: "11.0.0.1"}) == [(b"host", b"h")]
    assert counted == ["untrusted_proxy"]


def test_a_standby_sends_the_leader_no_name_that_its_own_proxy_did_not_send(tmp_path: Path) -> None:
    sent: list[list[tuple[bytes, bytes]]] = []

    class Leader(Forwarding):
        async def answer(self, scope: Any, _receive: Any, send: Any) -> None:
            sent.append(scope["headers"])
            await send({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body", "body": b""})

    with site(tmp_path, addresses=("10.0.0.0/8",)) as server:
        unreached = UnreachedNodes(1.0, FakeClock().monotonic_s)
        server.dispatcher.forwarding = Leader(lambda: "http://leader", server.dispatcher.services.config.tls, unreached)
        server.client.get("/api/v1/me", headers=as_of("ada", "eagle"))
        server.client.get("/api/v1/me")
        server.dispatcher.forwarding = None
    assert [name for name, _ in sent[0] if name.startswith(b"x-forwarded")] == []
    assert server.metric("sign_in_refused_total", reason="untrusted_proxy") == 1
