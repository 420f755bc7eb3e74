"""The remote store component of a server: writing, reading, or both, as configured."""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry

from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.server.history.remote_store.credentials import CredentialsUnreadable, access_of, client
from eagle_eye.server.history.remote_store.remote_history import RemoteHistory
from eagle_eye.server.history.remote_store.remote_store_metrics import Figures
from eagle_eye.server.history.remote_store.sender_supervisor import Sending
from eagle_eye.server.history.remote_store.settings import RemoteStoreSettings
from eagle_eye.server.model.clock import Clock


class RemoteStore:
    """The remote store. ``past`` is None if no read URL is configured. Raises ConfigurationError."""

    def __init__(self, data: Path, settings: RemoteStoreSettings, clock: Clock, registry: CollectorRegistry) -> None:
        self._sending: Sending | None = None
        self._client = None
        self.past: RemoteHistory | None = None
        if not settings.write_url and not settings.read_url:
            return
        figures = Figures(registry)
        try:
            self._client = client(access_of(settings), settings.timeout_s)
        except CredentialsUnreadable as error:
            raise ConfigurationError(f"remote_store.ca_file: {error}") from None
        if settings.write_url:
            self._sending = Sending(data, settings, clock, figures)
        if settings.read_url:
            self.past = RemoteHistory(self._client, settings, figures)

    def start(self) -> None:
        """Start sending what is not sent yet."""
        if self._sending is not None:
            self._sending.start()

    def close(self) -> None:
        """Stop; requests in progress are sent again next time."""
        if self._sending is not None:
            self._sending.stop()
        if self._client is not None:
            self._client.close()
