"""Authentication of requests to the store. Credential files are read for each request, as they may be rotated."""

from __future__ import annotations

import ssl
from collections.abc import Generator, Mapping
from pathlib import Path

import httpx
import msgspec

from eagle_eye.server.history.remote_store.settings import RemoteStoreSettings
from eagle_eye.server.model.errors import ServerError

CREDENTIAL_BYTES_MAX = 64 << 10
CONNECT_S = 10.0


class CredentialsUnreadable(ServerError):
    """A file with a token, a password or certificates cannot be read; the message names it."""


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """Credentials sent with each request; "" or {} for those not used."""

    headers: Mapping[str, str] = {}
    bearer_token_file: str = ""
    basic_auth_user: str = ""
    basic_auth_password_file: str = ""
    ca_file: str = ""  # CA certificates that are trusted in place of the system's


def access_of(settings: RemoteStoreSettings) -> Access:
    """Return the credentials for requests to the store."""
    return Access(
        headers=settings.headers,
        bearer_token_file=settings.bearer_token_file,
        basic_auth_user=settings.basic_auth_user,
        basic_auth_password_file=settings.basic_auth_password_file,
        ca_file=settings.ca_file,
    )


def client(access: Access, timeout_s: float) -> httpx.Client:
    """Return a client for any thread that follows no redirects. Raises CredentialsUnreadable for the CA file."""
    verify: ssl.SSLContext | bool = True
    if access.ca_file:
        try:
            verify = ssl.create_default_context(cafile=access.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise CredentialsUnreadable(f"{access.ca_file} holds no certificates that can be read: {error}") from None
    return httpx.Client(
        headers=dict(access.headers),
        auth=_Auth(access) if access.bearer_token_file or access.basic_auth_user else None,
        timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_S)),
        verify=verify,
        trust_env=False,
    )


class _Auth(httpx.Auth):
    def __init__(self, access: Access) -> None:
        self._access = access

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Add the current credentials. Raises CredentialsUnreadable."""
        access = self._access
        if access.bearer_token_file:
            request.headers["Authorization"] = f"Bearer {_content(access.bearer_token_file)}"
            yield request
            return
        password = _content(access.basic_auth_password_file) if access.basic_auth_password_file else ""
        yield from httpx.BasicAuth(access.basic_auth_user, password).auth_flow(request)


def _content(file: str) -> str:
    try:
        with Path(file).open("rb") as opened:
            return opened.read(CREDENTIAL_BYTES_MAX).decode("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CredentialsUnreadable(f"{file} cannot be read: {error}") from None
