"""The settings of the records, ``[records]``."""

from __future__ import annotations

import re

import msgspec

from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.server.model import Positive

SCHEMES = ("postgresql+psycopg://", "postgresql://", "postgres://")
LEASE_S_MIN, LEASE_S_MAX = 1.0, 60.0
DEFAULT_CELL = "default"  # of each site: judges what belongs to no other
_CELL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?")
EXAMPLE = "postgresql+psycopg://eagle_eye@db.example.com/eagle_eye?sslmode=verify-full"


class RecordsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the records are. ``url`` "": a SQLite file in ``data_dir``; else a PostgreSQL database.

    The part after the scheme is libpq's: several hosts, a socket's folder, and its parameters (``sslmode``) work.
    """

    url: str = ""
    password_file: str = ""  # "": what libpq finds by itself (PGPASSFILE, ~/.pgpass), or none
    # A standby leads once the leader gave no sign of life for so long; not for SQLite.
    lease_s: Positive = 5.0
    # Replicas that may lack the last commits are meant, though what is decided may be lost with a failover.
    async_ok: bool = False
    server_url: str = ""  # where the other servers of the database reach this one; "": public_url
    cell: str = (
        DEFAULT_CELL  # whose jobs this server judges while it leads; servers of one cell stand by for each other
    )


def check(settings: RecordsSettings) -> None:
    """Raise ConfigurationError for settings that cannot be. The URL is not named: it may hold a password."""
    if settings.password_file and not settings.url:
        raise ConfigurationError(
            "records.url: expected a PostgreSQL URL, since records.password_file is set; got none"
            " (records in SQLite have no password)"
        )
    if not _CELL.fullmatch(settings.cell):
        raise ConfigurationError(
            f"records.cell: expected up to 32 lower-case letters, digits and hyphens, got {settings.cell!r}"
        )
    if not settings.url:
        if settings.cell != DEFAULT_CELL:
            raise ConfigurationError(
                f"records.url: expected a PostgreSQL URL, since records.cell is {settings.cell!r}; got none"
                " (records in SQLite belong to one server)"
            )
        return
    if not LEASE_S_MIN <= settings.lease_s <= LEASE_S_MAX:
        raise ConfigurationError(
            f"records.lease_s: expected {LEASE_S_MIN:g} to {LEASE_S_MAX:g} seconds, got {settings.lease_s:g}"
        )
    if settings.server_url and not settings.server_url.startswith(("http://", "https://")):
        raise ConfigurationError(
            f"records.server_url: expected an http:// or https:// URL, got {settings.server_url!r}"
        )
    scheme, found, rest = settings.url.partition("://")
    if f"{scheme}{found}" not in SCHEMES:
        raise ConfigurationError(
            f"records.url: expected a URL such as {EXAMPLE}, got one that begins with {settings.url[:12]!r};"
            " leave it out for SQLite in data_dir"
        )
    user, _, _ = rest.partition("/")[0].rpartition("@")
    names = {part.partition("=")[0] for part in rest.partition("?")[2].split("&")}
    if ":" in user or "password" in names:
        raise ConfigurationError(
            "records.url: expected a URL without a password, since configurations are printed and logged;"
            " put it into the file that records.password_file names, or into PGPASSFILE"
        )


def libpq_url(settings: RecordsSettings) -> str:
    """Return the URL as libpq takes it."""
    return f"postgresql://{settings.url.partition('://')[2]}"
