"""A small OpenID Connect provider on loopback: real HTTP, redirects and signatures; it lies where it is told to."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlencode, urlsplit

from joserfc import jwt
from joserfc.jwk import RSAKey

CLIENT_ID = "eagle-eye"
CLIENT_SECRET = "the-secret-of-the-client"
KEY = RSAKey.generate_key(2048, {"kid": "1"}, private=True)
OTHER_KEY = RSAKey.generate_key(2048, {"kid": "1"}, private=True)  # of the same name
NEXT_KEY = RSAKey.generate_key(2048, {"kid": "2"}, private=True)


@dataclass
class OpenIdProvider:
    """What it says of whom it signs in, and where it lies. ``sign`` returns the ID token for its claims."""

    now_s: Callable[[], float]
    claims: dict[str, Any] = field(default_factory=lambda: {"preferred_username": "ada", "groups": ["staff"]})
    lies: dict[str, Any] = field(default_factory=dict)  # claims that it puts in place of the right ones
    key: RSAKey = field(default_factory=lambda: KEY)
    published: RSAKey = field(default_factory=lambda: KEY)
    unsigned: bool = False
    asks: bool = False  # whether a person has to click before they are sent back
    refuses: str = ""  # the OAuth error with which it sends people back
    url: str = ""
    codes: dict[str, dict[str, str]] = field(default_factory=dict)
    redeemed: list[dict[str, str]] = field(default_factory=list)

    def discovery(self) -> dict[str, Any]:
        ends = {
            "authorization_endpoint": "/authorize",
            "token_endpoint": "/token",
            "jwks_uri": "/keys",
        }
        return {"issuer": self.url, **{name: self.url + path for name, path in ends.items()}}

    def sent_back(self, asked: dict[str, str]) -> str:
        """Return where a person who has signed in goes."""
        code = secrets.token_urlsafe(8)
        self.codes[code] = asked
        said = {"error": self.refuses} if self.refuses else {"code": code}
        return f"{asked['redirect_uri']}?{urlencode({**said, 'state': asked['state']})}"

    def token(self, form: dict[str, str], authorization: str) -> dict[str, Any] | None:
        """Return what a code is redeemed for; None if the secret, the code or its verifier is wrong."""
        asked = self.codes.pop(form["code"], None)
        pair = base64.b64decode(authorization.removeprefix("Basic ")).decode()
        digest = hashlib.sha256(form["code_verifier"].encode()).digest()
        challenge = base64.urlsafe_b64encode(digest).decode().rstrip("=")
        if asked is None or pair != f"{CLIENT_ID}:{CLIENT_SECRET}" or challenge != asked["code_challenge"]:
            return None
        self.redeemed.append(form)
        now_s = int(self.now_s())
        right = {"iss": self.url, "aud": CLIENT_ID, "sub": "1", "iat": now_s, "exp": now_s + 300}
        claims = {**right, "nonce": asked["nonce"], **self.claims, **self.lies}
        if self.unsigned:
            parts = ({"alg": "none"}, claims)
            head, body = (base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts)
            return {"token_type": "Bearer", "access_token": "x", "id_token": f"{head}.{body}."}
        signed = jwt.encode({"alg": "RS256", "kid": self.key.kid}, claims, self.key)
        return {"token_type": "Bearer", "access_token": "x", "id_token": signed}


@contextmanager
def providing(now_s: Callable[[], float]) -> Iterator[OpenIdProvider]:
    """Run a provider on a free port of loopback."""
    provider = OpenIdProvider(now_s)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            path, query = urlsplit(self.path).path, dict(parse_qsl(urlsplit(self.path).query))
            if path == "/.well-known/openid-configuration":
                self.answer(200, provider.discovery())
            elif path == "/keys":
                self.answer(200, {"keys": [provider.published.as_dict(private=False)]})
            elif path == "/authorize" and provider.asks:
                link = f'<a href="{provider.sent_back(query).replace("&", "&amp;")}">I am ada</a>'
                self.answer(200, f"<!doctype html><title>Provider</title>{link}")
            elif path == "/authorize":
                self.answer(302, "", Location=provider.sent_back(query))
            else:
                self.answer(204, "")  # a browser's wish for an icon

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            form = {name: values[0] for name, values in parse_qs(body).items()}
            given = provider.token(form, self.headers.get("Authorization", ""))
            self.answer(400, {"error": "invalid_grant"}) if given is None else self.answer(200, given)

        def answer(self, status: int, content: Any, **headers: str) -> None:
            kind = "text/html" if isinstance(content, str) else "application/json"
            raw = content.encode() if isinstance(content, str) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in {"Content-Type": kind, "Content-Length": str(len(raw)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(raw)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        provider.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield provider
        finally:
            server.shutdown()
            thread.join()
