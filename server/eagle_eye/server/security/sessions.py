"""Signed cookies: who is signed in, and what a sign-in under way must find again. Pure, but for the secret given.

No session is kept at the server, so that each server of a site knows one that another began. The key comes from the
provider's client secret, which all of them have: a new secret ends all sessions. Those of one person are ended by a
record that says until when they had begun (``EndedSessions``).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import zlib
from typing import Generic, TypeVar

import msgspec

from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import Refusal

COOKIE_BYTES_MAX = 4_000  # browsers drop larger ones
PLAIN_BYTES_MAX = 1 << 16


class Ending(msgspec.Struct, frozen=True):
    """What a cookie holds; it counts until ``ends_s`` (Unix seconds)."""

    ends_s: float


class Session(Ending, frozen=True):
    """Somebody who is signed in; ``begun_s`` is 0 in a cookie of a server that did not say."""

    name: str
    groups: tuple[str, ...]
    begun_s: float = 0.0


class Begun(Ending, frozen=True):
    """A sign-in that the provider has not answered yet."""

    state: str
    nonce: str
    verifier: str


ContentT = TypeVar("ContentT", bound=Ending)


class Cookie(Generic[ContentT]):
    """One kind of cookie. ``__Host-``: no other host, and nobody without TLS, can set it."""

    def __init__(self, name: str, content: type[ContentT], same_site: str, secret: str, clock: Clock) -> None:
        self.name = f"__Host-{name}"
        self._content = content
        self._same_site = same_site
        self._key = hmac.digest(secret.encode(), f"eagle-eye cookie {name}".encode(), "sha256")
        self._clock = clock

    def header(self, content: ContentT) -> str:
        """Return the Set-Cookie header. Raises Refusal 403 if the content does not fit into a cookie."""
        packed = _text(zlib.compress(msgspec.json.encode(content), 9))
        value = f"{packed}.{self._signature(packed)}"
        if len(value) > COOKIE_BYTES_MAX:
            limit = f"{len(value)} bytes of cookie, {COOKIE_BYTES_MAX} at most"
            raise Refusal(403, "groups", f"you are in too many groups ({limit}): have the provider send fewer")
        return f"{self.name}={value}; Max-Age={max(0, int(content.ends_s - self._clock.now_s()))}; {self._attributes}"

    def gone(self) -> str:
        """Return the Set-Cookie header that deletes it."""
        return f"{self.name}=; Max-Age=0; {self._attributes}"

    def read(self, cookies: str) -> ContentT | None:
        """Return the content from a Cookie header; None if there is none, it was not made here, or has ended."""
        found = (part.strip().partition("=") for part in cookies.split(";"))
        value = next((value for name, _, value in found if name == self.name), "")
        packed, _, signature = value.partition(".")
        if not hmac.compare_digest(signature.encode(), self._signature(packed).encode()):
            return None
        try:
            plain = zlib.decompressobj().decompress(base64.urlsafe_b64decode(packed), PLAIN_BYTES_MAX)
            content = msgspec.json.decode(plain, type=self._content)
        except (binascii.Error, ValueError, zlib.error, msgspec.DecodeError):  # of an earlier version
            return None
        return content if self._clock.now_s() < content.ends_s else None

    @property
    def _attributes(self) -> str:
        return f"Path=/; Secure; HttpOnly; SameSite={self._same_site}"

    def _signature(self, packed: str) -> str:
        return _text(hmac.digest(self._key, packed.encode(), hashlib.sha256))


def _text(raw: bytes) -> str:
    return base64.urlsafe_b64encode(raw).decode()
