"""People sign in at the site's provider: what it says counts only if it said so for us, now, to this browser."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.server.api.events import KEEPALIVE_S
from eagle_eye.server.security.auth import mint
from eagle_eye.server.security.people import COOKIE_BYTES_MAX, Cookie, Session
from eagle_eye.server.store.store import ENDED_SESSIONS, Change
from tests.server.builders import NOW, FakeClock, Running, incident, running, settings
from tests.server.openid_provider import CLIENT_ID, CLIENT_SECRET, NEXT_KEY, OTHER_KEY, OpenIdProvider, providing

CHANGE = {"Eagle-Eye-Request": "1"}
SESSION = "__Host-eagle-eye-session"
GROUPS: dict[str, Any] = {
    "sign_in__read_groups": ("staff",),
    "sign_in__operate_groups": ("gpu-ops",),
}


def provider_keys(folder: Path, provider: OpenIdProvider, **more: Any) -> dict[str, Any]:
    """Return the configuration of a server whose people sign in at the provider."""
    (folder / "secret").write_text(CLIENT_SECRET + "\n")
    keys = {"issuer": provider.url, "client_id": CLIENT_ID, "client_secret_file": str(folder / "secret"), **more}
    return {**GROUPS, **{f"sign_in__provider__{key}": value for key, value in keys.items()}}


@dataclass
class Site:
    server: Running
    provider: OpenIdProvider
    clock: FakeClock

    def begin(self) -> tuple[httpx.Response, str]:
        """Return what a browser that wants to sign in is answered, and its cookie."""
        answer = self.server.client.get("/api/v1/sign-in/start")
        return answer, cookie(answer)

    def sent_back(self, to_provider: httpx.Response) -> str:
        """Have the provider sign the person in and return the path that the browser is sent to."""
        back = httpx.get(to_provider.headers["location"], trust_env=False).headers["location"]
        assert back.startswith(f"{self.server.url}/api/v1/sign-in/callback?")
        return back.removeprefix(self.server.url)

    def sign_in(self, **headers: str) -> httpx.Response:
        begun, kept = self.begin()
        return self.server.client.get(self.sent_back(begun), headers={"Cookie": kept, **headers})

    def refused(self, answer: httpx.Response) -> str:
        """Return the reason of a refusal, which is counted and gives no session."""
        reason: str = answer.json()["reason"]
        assert SESSION not in answer.headers.get("set-cookie", "")
        assert self.server.metric("sign_in_refused_total", reason=reason) == 1
        return reason


def cookie(answer: httpx.Response) -> str:
    """Return what a browser sends back of the answer's cookies."""
    kept = [line for line in answer.headers.get_list("set-cookie") if "Max-Age=0" not in line]
    return "; ".join(line.partition(";")[0] for line in kept)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    clock = FakeClock()
    with (
        providing(clock.now_s) as provider,
        running(tmp_path / "data", clock, **provider_keys(tmp_path, provider)) as server,
    ):
        server.dispatcher.services.store.commit(Change(incidents=(incident(),)))
        yield Site(server, provider, clock)


def test_who_signs_in_is_known_by_name_and_groups(site: Site) -> None:
    answer = site.sign_in()
    assert (answer.status_code, answer.headers["location"]) == (303, f"{site.server.url}/")
    me = site.server.client.get("/api/v1/me", headers={"Cookie": cookie(answer)}).json()
    assert (me["who"], me["scope"], me["groups"]) == ("user:ada", "read", ["staff"])
    assert me["session_ends"] == "2023-11-15T06:13:20.000Z"
    (entry,) = site.server.dispatcher.services.store.audit(verb="sign in").items
    assert entry.who == "user:ada"


def test_the_request_has_pkce_and_asks_for_the_callback(site: Site) -> None:
    begun, _ = site.begin()
    asked = parse_qs(urlsplit(begun.headers["location"]).query)
    assert asked["code_challenge_method"] == ["S256"]
    assert asked["redirect_uri"] == [f"{site.server.url}/api/v1/sign-in/callback"]
    assert asked["response_type"] == ["code"]
    assert len({*asked["state"], *asked["nonce"], *asked["code_challenge"]}) == 3


def test_scripts_and_other_sites_cannot_use_the_sessions_cookie(site: Site) -> None:
    lines = site.sign_in().headers.get_list("set-cookie")
    (set_,) = [line for line in lines if line.startswith(SESSION)]
    assert {"Path=/", "Secure", "HttpOnly", "SameSite=Strict", "Max-Age=28800"} <= set(set_.split("; "))
    assert any(line.startswith("__Host-eagle-eye-sign-in=; Max-Age=0;") for line in lines)


def test_a_change_is_the_persons_and_needs_what_no_foreign_page_can_send(site: Site) -> None:
    site.provider.claims["groups"] = ["staff", "gpu-ops"]
    kept = {"Cookie": cookie(site.sign_in())}
    path = "/api/v1/incidents/inc_1/acknowledge"
    assert site.server.client.post(path, headers=kept).json()["reason"] == "foreign_page"
    assert site.server.client.post(path, headers=kept | CHANGE).status_code == 200
    (entry,) = site.server.dispatcher.services.store.audit(verb="acknowledge").items
    assert entry.who == "user:ada"


def test_a_session_ends(site: Site) -> None:
    kept = {"Cookie": cookie(site.sign_in())}
    site.clock.advance(8 * 3600 - 1)
    assert site.server.client.get("/api/v1/me", headers=kept).status_code == 200
    site.clock.advance(1)
    assert site.server.client.get("/api/v1/me", headers=kept).status_code == 401


def test_sign_out_deletes_the_cookie(site: Site) -> None:
    answer = site.server.client.post("/api/v1/sign-out", headers={"Cookie": cookie(site.sign_in())} | CHANGE)
    assert answer.status_code == 204
    assert answer.headers["set-cookie"].startswith(f"{SESSION}=; Max-Age=0; Path=/; Secure; HttpOnly")


def test_a_foreign_page_signs_nobody_out(site: Site) -> None:
    answer = site.server.client.post("/api/v1/sign-out", headers={"Cookie": cookie(site.sign_in())})
    assert answer.json()["reason"] == "foreign_page"
    assert "set-cookie" not in answer.headers


def whoami(server: Running, kept: str) -> httpx.Response:
    return server.client.get("/api/v1/me", headers={"Cookie": kept})


def end(server: Running, headers: dict[str, str], **body: str) -> httpx.Response:
    return server.client.post("/api/v1/sessions/end", headers=headers, json=body)


def test_who_signs_out_everywhere_is_signed_out_in_every_browser_and_told_so(site: Site) -> None:
    first, second = cookie(site.sign_in()), cookie(site.sign_in())
    assert end(site.server, {"Cookie": first} | CHANGE).json()["person"] == "ada"
    for kept in (first, second):
        answer = whoami(site.server, kept)
        assert (answer.status_code, answer.json()["reason"]) == (401, "session")
        assert "you ended the sessions of ada at 2023-11-14T22:13:20.000Z; sign in again" in answer.json()["detail"]


def test_who_was_signed_out_everywhere_can_sign_in_again(site: Site) -> None:
    assert end(site.server, {"Cookie": cookie(site.sign_in())} | CHANGE).status_code == 200
    site.clock.advance(1)
    assert whoami(site.server, cookie(site.sign_in())).json()["person"] == "ada"


def test_an_administrator_ends_anothers_sessions_and_nobody_else_does(site: Site) -> None:
    kept = cookie(site.sign_in())
    site.provider.claims["preferred_username"] = "bob"
    theirs = cookie(site.sign_in())
    assert end(site.server, {"Cookie": theirs} | CHANGE, person="ada").json()["reason"] == "scope"
    assert whoami(site.server, kept).status_code == 200
    text, record = mint("admin", None, NOW, None)
    site.server.dispatcher.services.store.commit(Change(tokens=(record,)))
    assert end(site.server, {"Authorization": f"Bearer {text}"}, person="ada").status_code == 200
    assert f"{record.id} ended the sessions of ada" in whoami(site.server, kept).json()["detail"]
    assert whoami(site.server, theirs).json()["person"] == "bob"
    (entry,) = site.server.dispatcher.services.store.audit(verb="end sessions").items
    assert (entry.who, entry.subject) == (record.id, "user:ada")


def test_a_token_says_whose_sessions_it_ends(site: Site) -> None:
    text, record = mint("admin", None, NOW, None)
    site.server.dispatcher.services.store.commit(Change(tokens=(record,)))
    answer = end(site.server, {"Authorization": f"Bearer {text}"})
    assert (answer.status_code, answer.json()["reason"]) == (400, "person")


def test_a_foreign_page_ends_nobodys_sessions(site: Site) -> None:
    kept = cookie(site.sign_in())
    assert end(site.server, {"Cookie": kept}).json()["reason"] == "foreign_page"
    assert whoami(site.server, kept).status_code == 200


def test_ended_sessions_are_remembered_for_as_long_as_one_may_last(site: Site) -> None:
    kept, store = cookie(site.sign_in()), site.server.dispatcher.services.store
    end(site.server, {"Cookie": kept} | CHANGE)
    session_s = 8 * 3600.0
    store.prune(site.clock.now_s() + session_s - 1, session_s)
    assert whoami(site.server, kept).json()["reason"] == "session"
    store.prune(site.clock.now_s() + session_s + 1, session_s)
    assert store.count(ENDED_SESSIONS) == 0


def test_a_stream_of_events_ends_with_its_readers_session(site: Site) -> None:
    kept, store = cookie(site.sign_in()), site.server.dispatcher.services.store
    with site.server.client.stream("GET", "/api/v1/events", headers={"Cookie": kept}) as answer:
        lines = answer.iter_lines()
        assert next(lines) == ": hello"
        end(site.server, {"Cookie": kept} | CHANGE)
        site.clock.advance(KEEPALIVE_S)
        store.commit(Change(incidents=(incident("after"),)))
        assert not any("after" in line for line in lines)  # the stream is over


def test_a_session_counts_at_each_server_that_has_the_clients_secret(site: Site, tmp_path: Path) -> None:
    kept = {"Cookie": cookie(site.sign_in())}
    keys = provider_keys(tmp_path, site.provider)
    with running(tmp_path / "other", site.clock, **keys) as other:
        assert other.client.get("/api/v1/me", headers=kept).json()["person"] == "ada"
    (tmp_path / "secret").write_text("another-secret-of-the-client")
    with running(tmp_path / "other", site.clock, **keys) as other:
        assert other.client.get("/api/v1/me", headers=kept).status_code == 401


@pytest.mark.parametrize("spoil", [lambda text: text[:-2], lambda text: text.replace("=", "=A", 1), lambda _: "x.y"])
def test_a_session_that_was_not_made_here_is_none(site: Site, spoil: Any) -> None:
    kept = {"Cookie": spoil(cookie(site.sign_in()))}
    assert site.server.client.get("/api/v1/me", headers=kept).status_code == 401


def test_a_sign_in_under_way_is_no_session(site: Site) -> None:
    _, kept = site.begin()
    forged = kept.replace("__Host-eagle-eye-sign-in", SESSION)
    assert site.server.client.get("/api/v1/me", headers={"Cookie": forged}).status_code == 401


@pytest.mark.parametrize(
    ("lies", "reason"),
    [
        ({"nonce": "another"}, "nonce"),
        ({"nonce": None}, "nonce"),
        ({"aud": "another"}, "audience"),
        ({"aud": [CLIENT_ID, "another"]}, "audience"),
        ({"aud": [CLIENT_ID, "another"], "azp": "another"}, "audience"),
        ({"iss": "https://other.example"}, "issuer"),
        ({"exp": NOW - 61}, "expired"),
        ({"iat": NOW + 3600}, "claims"),
        ({"preferred_username": None}, "claims"),
        ({"groups": [1]}, "claims"),
        ({"preferred_username": "a\nb"}, "name"),
    ],
)
def test_an_id_token_that_says_something_else_is_refused(site: Site, lies: dict[str, Any], reason: str) -> None:
    site.provider.lies = lies
    assert site.refused(site.sign_in()) == reason


def test_an_id_token_of_another_key_is_refused(site: Site) -> None:
    site.provider.key = OTHER_KEY
    assert site.refused(site.sign_in()) == "signature"


def test_an_id_token_without_a_signature_is_refused(site: Site) -> None:
    site.provider.unsigned = True
    assert site.refused(site.sign_in()) == "algorithm"


def test_another_state_is_refused(site: Site) -> None:
    begun, kept = site.begin()
    path = site.sent_back(begun).replace("state=", "state=x")
    assert site.refused(site.server.client.get(path, headers={"Cookie": kept})) == "state"


def test_a_sign_in_that_another_browser_began_is_refused(site: Site) -> None:
    begun, _ = site.begin()
    assert site.refused(site.server.client.get(site.sent_back(begun))) == "state"


def test_a_sign_in_that_took_too_long_is_refused(site: Site) -> None:
    begun, kept = site.begin()
    path = site.sent_back(begun)
    site.clock.advance(601)
    assert site.refused(site.server.client.get(path, headers={"Cookie": kept})) == "state"


def test_a_code_is_redeemed_once(site: Site) -> None:
    begun, kept = site.begin()
    path = site.sent_back(begun)
    assert site.server.client.get(path, headers={"Cookie": kept}).status_code == 303
    assert site.refused(site.server.client.get(path, headers={"Cookie": kept})) == "code"


def test_a_person_whom_the_provider_refuses_is_told(site: Site) -> None:
    site.provider.refuses = "access_denied"
    answer = site.sign_in()
    assert site.refused(answer) == "denied"
    assert "access_denied" in answer.json()["detail"]


def test_a_browser_is_told_on_a_page_and_nothing_becomes_markup(site: Site) -> None:
    site.provider.refuses = "<b>no</b>"
    answer = site.sign_in(Accept="text/html")
    assert (answer.status_code, answer.headers["content-type"]) == (401, "text/html; charset=utf-8")
    assert "&lt;b&gt;no&lt;/b&gt;" in answer.text
    assert "<b>" not in answer.text


def test_who_is_in_no_group_gets_no_session(site: Site) -> None:
    site.provider.claims["groups"] = ["guests"]
    answer = site.sign_in()
    assert (answer.status_code, answer.json()["reason"]) == (403, "no_group")
    assert SESSION not in answer.headers["set-cookie"]


def test_a_new_key_of_the_provider_is_read_when_it_signs(site: Site) -> None:
    assert site.sign_in().status_code == 303
    site.provider.key = site.provider.published = NEXT_KEY
    assert site.sign_in().status_code == 303


def test_while_the_provider_is_away_that_is_said_and_tokens_and_sessions_work(site: Site, tmp_path: Path) -> None:
    kept = {"Cookie": cookie(site.sign_in())}
    text, record = mint("read", None, NOW, None)
    site.provider.url = "http://127.0.0.1:1"
    with running(tmp_path / "other", site.clock, **provider_keys(tmp_path, site.provider)) as other:
        answer = other.client.get("/api/v1/sign-in/start")
        assert (answer.status_code, answer.json()["reason"]) == (503, "provider")
        assert (
            "127.0.0.1 gives no answer that can be used (ConnectError); tokens and sessions still work" in answer.text
        )
        other.dispatcher.services.store.commit(Change(tokens=(record,)))
        assert other.client.get("/api/v1/me", headers={"Authorization": f"Bearer {text}"}).status_code == 200
        assert other.client.get("/api/v1/me", headers=kept).json()["person"] == "ada"


def test_a_provider_that_says_it_is_another_is_refused(tmp_path: Path) -> None:
    clock = FakeClock()
    with providing(clock.now_s) as provider:
        keys = provider_keys(tmp_path, provider, issuer=provider.url + "/")
        with running(tmp_path / "data", clock, **keys) as server:
            answer = server.client.get("/api/v1/sign-in/start")
            assert (answer.status_code, answer.json()["reason"]) == (503, "issuer")
            assert "to the letter" in answer.json()["detail"]


def test_an_address_that_nobody_verified_names_nobody(tmp_path: Path) -> None:
    clock = FakeClock()
    with providing(clock.now_s) as provider:
        keys = provider_keys(tmp_path, provider, user_claim="email")
        with running(tmp_path / "data", clock, **keys) as server:
            site = Site(server, provider, clock)
            provider.claims["email"] = "ada@example.com"
            assert site.refused(site.sign_in()) == "claims"
            provider.claims["email_verified"] = True
            assert site.sign_in().status_code == 303


def test_more_groups_than_a_cookie_holds_are_refused_with_the_remedy() -> None:
    kept = Cookie("x", Session, "Strict", CLIENT_SECRET, FakeClock())
    groups = tuple(f"{one * 7919 % 10**9:x}-{one}" for one in range(1_000))
    with pytest.raises(Exception, match=f"{COOKIE_BYTES_MAX} at most.*have the provider send fewer"):
        kept.header(Session(NOW + 60, "ada", groups))


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"issuer": "http://idp.example"}, r"sign_in\.provider\.issuer"),
        ({"public": "http://eye.example"}, "public_url"),
        ({"client_id": ""}, r"sign_in\.provider\.client_id"),
        ({"scopes": ("profile",)}, r"sign_in\.provider\.scopes"),
        ({"session_s": 91 * 86_400.0}, r"sign_in\.provider\.session_s"),
    ],
)
def test_a_provider_that_people_could_not_trust_is_refused(tmp_path: Path, keys: dict[str, Any], named: str) -> None:
    public_url = keys.pop("public", "https://eye.example")
    told = {"issuer": "https://idp.example", "client_id": CLIENT_ID, "client_secret_file": "x", **keys}
    flags = {f"sign_in__provider__{key}": value for key, value in told.items()}
    with pytest.raises(ConfigurationError, match=named):
        settings(tmp_path, public_url=public_url, **GROUPS, **flags)
