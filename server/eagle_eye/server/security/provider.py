"""Signs people in at the site's OpenID Connect provider: authorization code flow with PKCE. Touches: the network.

RFC 6749, RFC 7636, OpenID Connect Core 1.0 (section 3.1) and Discovery 1.0. Signatures and claims of ID tokens are
checked by joserfc.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import math
import secrets
import ssl
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import quote_plus, urlencode

import certifi
import httpx
import msgspec
from joserfc import jwt
from joserfc.errors import (
    ExpiredTokenError,
    InvalidClaimError,
    InvalidKeyIdError,
    JoseError,
    MissingClaimError,
    UnsupportedAlgorithmError,
)
from joserfc.jwk import KeySet

from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import Refusal
from eagle_eye.server.security.people import Begun, Cookie, Person, Session, checked_person, read_secret
from eagle_eye.server.security.settings import ProviderSettings, is_private

BEGUN_S = 600.0  # how long somebody may take at the provider
KEPT_S = 3_600.0  # how long its endpoints and keys are used before they are read anew
AWAY_S = 2.0  # after a failure, how long it is not asked again
LEEWAY_S = 60  # between its clock and ours
ANSWER_BYTES_MAX = 1 << 20
# Signatures with a key that the provider alone has: never "none", and no HMAC, which a public key could forge.
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "Ed25519")
AnswerT = TypeVar("AnswerT")
_CLAIMS = {"iss": "issuer", "aud": "audience", "azp": "audience", "nonce": "nonce", "exp": "expired"}


class Endpoints(msgspec.Struct, frozen=True):
    """What of the provider's discovery document is used."""

    issuer: str
    authorization_endpoint: str
    token_endpoint: str
    jwks_uri: str
    token_endpoint_auth_methods_supported: tuple[str, ...] = ("client_secret_basic",)


class TokenAnswer(msgspec.Struct, frozen=True):
    """What of the token endpoint's answer is used."""

    id_token: str


class Provider:
    """The provider. ``refused(reason)`` counts sign-ins that came to nothing. Raises ConfigurationError.

    On one event loop.
    """

    def __init__(
        self, settings: ProviderSettings, redirect_uri: str, clock: Clock, refused: Callable[[str], None]
    ) -> None:
        self._settings = settings
        self._redirect_uri = redirect_uri
        self._clock = clock
        self._refused = refused
        self._secret = read_secret("sign_in.provider.client_secret_file", settings.client_secret_file)
        self._client = _client(settings)
        self._endpoints: Endpoints | None = None
        self._keys: KeySet | None = None
        self._read_s = self._away_s = -math.inf
        self._why_away = ""
        self.session = Cookie("eagle-eye-session", Session, "Strict", self._secret, clock)
        self.begun = Cookie("eagle-eye-sign-in", Begun, "Lax", self._secret, clock)

    async def begin(self) -> tuple[str, str]:
        """Return where to send the browser, and the cookie to send it with. Raises Refusal 503."""
        endpoints = await self._discovered()
        now_s = self._clock.now_s()
        state, nonce, verifier = (secrets.token_urlsafe(32) for _ in range(3))
        begun = Begun(now_s + BEGUN_S, state, nonce, verifier)
        challenge = base64.urlsafe_b64encode(hashlib.sha256(begun.verifier.encode()).digest()).decode().rstrip("=")
        query = {
            "response_type": "code",
            "client_id": self._settings.client_id,
            "redirect_uri": self._redirect_uri,
            "scope": " ".join(self._settings.scopes),
            "state": begun.state,
            "nonce": begun.nonce,
            "code_challenge": challenge,
            "code_challenge_method": "S256",
        }
        join = "&" if "?" in endpoints.authorization_endpoint else "?"
        return f"{endpoints.authorization_endpoint}{join}{urlencode(query)}", self.begun.header(begun)

    async def finish(self, query: Mapping[str, str], cookies: str) -> Session:
        """Return the session of whom the provider sent back. Raises Refusal 401, 403 or 503."""
        begun = self.begun.read(cookies)
        if begun is None or not hmac.compare_digest(begun.state.encode(), query.get("state", "").encode()):
            raise self._refusal("state", "this sign-in was not begun in this browser, or more than 10 minutes ago")
        # RFC 9207: an answer of another provider than was asked.
        if query.get("iss", self._settings.issuer) != self._settings.issuer:
            raise self._refusal("issuer", f"the answer is of {query['iss'][:200]!a}, not of {self._settings.issuer}")
        if "error" in query or not query.get("code"):
            said = [text[:200] for key in ("error", "error_description") if (text := query.get(key, ""))]
            raise self._refusal("denied", f"the provider signed nobody in: {': '.join(said) or 'it sent no code'!a}")
        endpoints = await self._discovered()
        text = await self._redeem(endpoints, query["code"], begun.verifier)
        person = self._person(await self._claims(text, begun.nonce))
        now_s = self._clock.now_s()
        return Session(now_s + self._settings.session_s, person.name, tuple(sorted(person.groups)), now_s)

    async def close(self) -> None:
        """Release the connections."""
        await self._client.aclose()

    async def _discovered(self) -> Endpoints:
        now_s = self._clock.monotonic_s()
        if self._endpoints is not None and now_s - self._read_s < KEPT_S:
            return self._endpoints
        if now_s - self._away_s < AWAY_S:
            raise self._refusal("provider", self._why_away, 503)
        issuer = self._settings.issuer
        found = await self._asked("GET", f"{issuer.rstrip('/')}/.well-known/openid-configuration", Endpoints)
        if found.issuer != issuer:
            said = f"says that it is {found.issuer[:200]!a}; sign_in.provider.issuer must be that, to the letter"
            raise self._refusal("issuer", f"{issuer} {said}", 503)
        for url in (found.authorization_endpoint, found.token_endpoint, found.jwks_uri):
            if not is_private(url):
                raise self._refusal("provider", f"{issuer} names {url[:200]!a}, which is not https", 503)
        self._endpoints, self._keys, self._read_s = found, None, now_s
        return found

    async def _redeem(self, endpoints: Endpoints, code: str, verifier: str) -> str:
        """Return the ID token for the code."""
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self._redirect_uri,
            "code_verifier": verifier,
        }
        headers = {}
        if "client_secret_basic" in endpoints.token_endpoint_auth_methods_supported:
            pair = f"{quote_plus(self._settings.client_id)}:{quote_plus(self._secret)}"
            headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        else:
            form |= {"client_id": self._settings.client_id, "client_secret": self._secret}
        answer = await self._asked("POST", endpoints.token_endpoint, TokenAnswer, headers=headers, data=form)
        return answer.id_token

    async def _claims(self, text: str, nonce: str) -> dict[str, Any]:
        """Return the claims of an ID token that the provider signed, for us, now, because of this sign-in."""
        try:
            try:
                token = jwt.decode(text, await self._key_set(), algorithms=ALGORITHMS)
            except InvalidKeyIdError:  # it has begun to use another key
                self._keys = None
                token = jwt.decode(text, await self._key_set(), algorithms=ALGORITHMS)
            client_id, audience = self._settings.client_id, token.claims.get("aud")
            registry = jwt.JWTClaimsRegistry(
                lambda: int(self._clock.now_s()),
                LEEWAY_S,
                iss={"essential": True, "value": self._settings.issuer},
                aud={"essential": True, "value": client_id},
                nonce={"essential": True, "value": nonce},
                azp={"value": client_id, "essential": isinstance(audience, list) and len(audience) > 1},
                exp={"essential": True},
                iat={"essential": True},
                sub={"essential": True},
            )
            registry.validate(token.claims)
        except (InvalidClaimError, MissingClaimError, ExpiredTokenError) as error:
            claim = str(getattr(error, "claim", "")) or "exp"
            reason = next((word for name, word in _CLAIMS.items() if name in claim.split(",")), "claims")
            raise self._refusal(reason, f"the ID token's {claim} is not as it must be: {error}") from None
        except UnsupportedAlgorithmError:
            allowed = ", ".join(ALGORITHMS)
            raise self._refusal("algorithm", f"the ID token is signed otherwise than by one of {allowed}") from None
        except (JoseError, ValueError) as error:
            raise self._refusal("signature", f"the ID token is not the provider's: {type(error).__name__}") from None
        return token.claims

    async def _key_set(self) -> KeySet:
        if self._keys is None:
            document = await self._asked("GET", (await self._discovered()).jwks_uri, dict[str, Any])
            try:
                self._keys = KeySet.import_key_set(document)  # type: ignore[arg-type]
            except (JoseError, KeyError, TypeError, ValueError) as error:
                raise self._refusal("provider", f"its keys cannot be read: {type(error).__name__}", 503) from None
        return self._keys

    def _person(self, claims: Mapping[str, Any]) -> Person:
        settings = self._settings
        name, groups = claims.get(settings.user_claim), claims.get(settings.groups_claim, [])
        if not isinstance(name, str):
            known = ", ".join(sorted(claims))[:300]
            why = f"the ID token has no text {settings.user_claim!r} (sign_in.provider.user_claim), but {known}"
            raise self._refusal("claims", why)
        if settings.user_claim == "email" and claims.get("email_verified") is not True:
            raise self._refusal("claims", f"the provider has not verified that {name[:200]!a} is yours")
        groups = [groups] if isinstance(groups, str) else groups
        if not isinstance(groups, list) or not all(isinstance(group, str) for group in groups):
            raise self._refusal("claims", f"{settings.groups_claim!r} is no list of names")
        return checked_person(name, groups, settings.user_claim, self._refused)

    async def _asked(self, method: str, url: str, shape: type[AnswerT], **more: Any) -> AnswerT:
        """Return the provider's JSON. Raises Refusal 503 where it is away, 401 where it refuses."""
        try:
            async with self._client.stream(method, url, **more) as response:
                content = b""
                async for chunk in response.aiter_bytes():
                    content += chunk
                    if len(content) > ANSWER_BYTES_MAX:
                        break
        except (httpx.HTTPError, OSError) as error:
            raise self._away(url, type(error).__name__) from None
        if len(content) > ANSWER_BYTES_MAX:
            raise self._away(url, f"more than {ANSWER_BYTES_MAX} bytes")
        if method == "POST" and response.status_code in (400, 401):  # RFC 6749, section 5.2: the code, or our secret
            raise self._refusal("code", f"the provider did not redeem the sign-in: {_error(content)}")
        if response.status_code != 200:
            raise self._away(url, f"HTTP {response.status_code}")
        try:
            return msgspec.json.decode(content, type=shape)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._away(url, f"its answer is not as expected: {error}"[:200]) from None

    def _away(self, url: str, why: str) -> Refusal:
        host, self._away_s = httpx.URL(url).host, self._clock.monotonic_s()
        detail = f"the sign-in provider {host} gives no answer that can be used ({why}); tokens and sessions still work"
        self._why_away = detail
        return self._refusal("provider", detail, 503)

    def _refusal(self, reason: str, detail: str, status: int = 401) -> Refusal:
        self._refused(reason)
        return Refusal(status, reason, detail)


def _error(content: bytes) -> str:
    """Return the word of an OAuth error; its description may hold anything."""
    try:
        return ascii(msgspec.json.decode(content, type=dict[str, Any]).get("error", "no reason given"))[:80]
    except (msgspec.DecodeError, UnicodeDecodeError):
        return "no reason given"


def _client(settings: ProviderSettings) -> httpx.AsyncClient:
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    if settings.ca_file:
        try:
            context.load_verify_locations(settings.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigurationError(f"sign_in.provider.ca_file: {settings.ca_file} cannot be used: {error}") from None
    # No redirects: neither a secret nor a code goes anywhere else.
    return httpx.AsyncClient(verify=context, trust_env=False, timeout=settings.timeout_s, follow_redirects=False)
