"""The server's API for Python programs: ``from eagle_eye.client import Client``; docs/reference/client.md."""

from eagle_eye.client.client import Client
from eagle_eye.client.http_client import (
    ClientError,
    DataLacking,
    LimitReached,
    MissingExtra,
    Refused,
    ServerEvent,
    Unreachable,
    UnreadableAnswer,
)
from eagle_eye.schema.record_types import prepare_record_types

__all__ = [
    "Client",
    "ClientError",
    "DataLacking",
    "LimitReached",
    "MissingExtra",
    "Refused",
    "ServerEvent",
    "Unreachable",
    "UnreadableAnswer",
]

prepare_record_types()  # a program may have a client in each of its threads
