"""Applies configuration changes at runtime where possible; all other changes need a restart."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

import msgspec

from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.server.config import ServerConfig
from eagle_eye.server.delivery.webhook import Guard
from eagle_eye.server.model.clock import Clock
from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.model.records import AuditEntry
from eagle_eye.server.monitor.watcher import Watcher
from eagle_eye.server.security.auth import Limits
from eagle_eye.server.security.tls import Certificates
from eagle_eye.server.store.store import Change, Store
from eagle_eye.server.telemetry import logs
from eagle_eye.server.telemetry.counters import Telemetry

WHO = "configuration"  # in the audit trail

_log = logging.getLogger(__name__)


class Needs(Protocol):
    """What is needed here of the server."""

    certificates: Certificates | None
    clock: Clock
    config: ServerConfig
    guard: Guard
    limits: Limits
    store: Store
    telemetry: Telemetry
    watcher: Watcher


Apply = Callable[[Needs, ServerConfig], None]

# What each change does, by key or section. All else needs a restart.
APPLIED: Mapping[str, Apply] = MappingProxyType(
    {
        "policy": lambda services, config: services.watcher.use_policy(config.policy),
        "webhooks.allow_private": lambda services, config: services.guard.allow_private(config.webhooks.allow_private),
        "limits": lambda services, config: services.limits.use(config.limits),
        "log.level": lambda _services, config: logs.set_level(config.log.level),
    }
)


class Reload:
    """Reads the configuration anew each time it is asked to. ``read`` returns it or raises ConfigurationError."""

    def __init__(self, services: Needs, read: Callable[[], ServerConfig]) -> None:
        self._services = services
        self._read = read
        self._applied = services.config
        self._asked = threading.Event()
        self._woken: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tell(succeeded=True)

    def request_reload(self) -> None:
        """Have the configuration read; may be called from any thread or a signal handler."""
        self._asked.set()
        if self._loop is not None and self._woken is not None:
            self._loop.call_soon_threadsafe(self._woken.set)

    async def run(self) -> None:
        """Do what is asked for until cancelled; what was asked for before counts."""
        self._woken, self._loop = asyncio.Event(), asyncio.get_running_loop()
        while True:
            if self._asked.is_set():
                self._asked.clear()
                await self._reload()
            else:
                await self._woken.wait()
                self._woken.clear()

    async def _reload(self) -> None:
        if self._services.certificates is not None:
            await asyncio.to_thread(self._services.certificates.poll)
        try:
            config = await asyncio.to_thread(self._read)
        except ConfigurationError as error:
            _log.error("the configuration is refused, the one before stays", extra={"error": str(error)})
            self._tell(succeeded=False)
            return
        changed = differences(self._applied, config)
        taken = {key: change for key, change in changed.items() if _part(key) is not None}
        try:
            await asyncio.to_thread(self._write_down, taken)
        except StoreUnavailable as error:
            # A change of policy that nobody could look up later is not made.
            _log.error("the configuration is not taken over: it cannot be written down", extra={"error": str(error)})
            self._tell(succeeded=False)
            return
        for part in sorted({part for key in taken if (part := _part(key)) is not None}):
            APPLIED[part](self._services, config)
            self._applied = _with(self._applied, part, config)
        self._tell(succeeded=True)
        _log.info("the configuration was read", extra={"changed": "; ".join(_said(taken)) or "nothing"})
        waiting = sorted(changed.keys() - taken.keys())
        if waiting:
            _log.warning("some changes of the configuration need a restart", extra={"keys": ", ".join(waiting)})

    def _write_down(self, taken: Mapping[str, tuple[Any, Any]]) -> None:
        if taken:
            detail = "; ".join(_said(taken))[:4096]
            now_s = self._services.clock.now_s()
            entry = AuditEntry(time_s=now_s, who=WHO, verb="reload", subject=WHO, detail=detail)
            self._services.store.commit(Change(audit=(entry,)))

    def _tell(self, *, succeeded: bool) -> None:
        telemetry = self._services.telemetry
        telemetry.config_reload_success.set(succeeded)
        if succeeded:
            telemetry.config_reload_success_time.set(self._services.clock.now_s())


def differences(old: ServerConfig, new: ServerConfig) -> dict[str, tuple[Any, Any]]:
    """Return the dotted keys whose values differ, with the old and the new value; None: the key is in one only."""
    before, after = _flat(msgspec.to_builtins(old)), _flat(msgspec.to_builtins(new))
    pairs = {key: (before.get(key), after.get(key)) for key in before.keys() | after.keys()}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def _part(key: str) -> str | None:
    """Return which of APPLIED takes the key over; None: it needs a restart."""
    return next((part for part in (key, key.partition(".")[0]) if part in APPLIED), None)


def _with(applied: ServerConfig, part: str, config: ServerConfig) -> ServerConfig:
    """Return ``applied`` with one section or key as it is in ``config``."""
    section, _, key = part.partition(".")
    taken = getattr(config, section)
    if key:
        taken = msgspec.structs.replace(getattr(applied, section), **{key: getattr(taken, key)})
    return msgspec.structs.replace(applied, **{section: taken})


def _flat(plain: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in plain.items():
        found.update(_flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value})
    return found


def _said(changed: Mapping[str, tuple[Any, Any]]) -> list[str]:
    return [f"{key}: {old!r} -> {new!r}" for key, (old, new) in sorted(changed.items())]
