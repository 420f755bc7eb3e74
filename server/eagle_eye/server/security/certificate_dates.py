"""Reads the validity period of certificates in a PEM file (RFC 5280, section 4.1.2.5). Pure."""

from __future__ import annotations

import datetime as dt
import re
import ssl
from typing import NamedTuple

_CERTIFICATE = re.compile("-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
_VERSION, _UTC_TIME, _GENERALIZED_TIME = 0xA0, 0x17, 0x18  # DER tags
_CENTURY_PIVOT = 50  # of two-digit years: 50 is 1950, 49 is 2049


class Validity(NamedTuple):
    """A certificate's validity period in Unix seconds."""

    begins_s: float
    ends_s: float


def first_to_end(pem: str) -> Validity | None:
    """Return the validity of the first certificate to expire in a PEM chain; None where no dates can be read."""
    return min(
        (found for text in _CERTIFICATE.findall(pem) if (found := _validity(text)) is not None),
        key=lambda validity: validity.ends_s,
        default=None,
    )


def _validity(pem: str) -> Validity | None:
    try:
        der = ssl.PEM_cert_to_DER_cert(pem)
        _, certificate, _ = _element(der, 0)
        _, signed, _ = _element(certificate, 0)
        tag, _, at = _element(signed, 0)
        # The validity comes after the version (absent in version 1), serial number, algorithm and issuer.
        for _ in range(3 if tag == _VERSION else 2):
            at = _element(signed, at)[2]
        _, dates, _ = _element(signed, at)
        tag, begins, at = _element(dates, 0)
        begins_s = _moment(tag, begins)
        tag, ends, _ = _element(dates, at)
        return Validity(begins_s, _moment(tag, ends))
    except (IndexError, ValueError):
        return None


def _element(der: bytes, at: int) -> tuple[int, bytes, int]:
    """Return the tag and content of the element at ``at``, and the next one's position. Raises IndexError."""
    tag, length, begin = der[at], der[at + 1], at + 2
    if length >= 0x80:
        wide = length - 0x80
        length, begin = int.from_bytes(der[begin : begin + wide], "big"), begin + wide
    if begin + length > len(der):
        raise IndexError(at)
    return tag, der[begin : begin + length], begin + length


def _moment(tag: int, content: bytes) -> float:
    """Return a date as Unix seconds. Raises ValueError."""
    text = content.decode("ascii")
    if tag == _UTC_TIME:
        text = ("19" if int(text[:2]) >= _CENTURY_PIVOT else "20") + text
    elif tag != _GENERALIZED_TIME:
        raise ValueError(tag)
    return dt.datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=dt.timezone.utc).timestamp()
