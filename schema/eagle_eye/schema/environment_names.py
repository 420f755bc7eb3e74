"""Checks environment variables that begin with EAGLE_EYE_ for typos, apart from those that other parts read."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping

from eagle_eye.schema.near_names import nearest

PREFIX = "EAGLE_EYE_"
LIKENESS_MIN = 0.78  # of the name after the prefix: one letter of five may differ
# Variables read by parts other than the caller, so not typos. Sections of the server's file are not among them.
READ_ELSEWHERE = frozenset(
    PREFIX + name
    for name in (
        *(
            "ATTEMPT",
            "CA_FILE",
            "CHECKPOINT_STORE",
            "CONFIG",
            "DATA_DIR",
            "DCGM_EXPORTER",
            "DEMO_CORRUPTION",
            "DRY_RUN",
        ),
        *("HOOK_ATTEMPT", "HOOK_SOCKET", "INTERVAL_S", "JOB", "JOBS", "JOIN_TOKEN_FILE", "JSON", "KEY_FILE", "LAUNCH"),
        *("LAST_PROCESS_GROUP", "LAYOUT", "LISTEN"),
        *("METRICS_LISTEN", "NODE", "POLL", "PORT", "PUBLIC_URL", "PUBLISH", "RESTART_SOCKET"),
        *("RESUME_FROM", "ROLE", "SECRET_FILE"),
        *(
            "SERIES_MAX",
            "SERVER",
            "SERVERS",
            "SHARED_HOST",
            "SIMULATED_GPUS",
            "SPOOL_BYTES_MAX",
            "SPOOL_DIR",
            "STANDBY_ROOM",
            "STATE_DIR",
        ),
        *("STREAMS_MAX", "TOKEN_FILE", "TOPOLOGY_FILE", "TRACEBACK", "TRAINING_LOGS", "VERB", "WEBHOOK_URL"),
    )
)
_TESTS = PREFIX + "TEST_"
# Kubernetes sets variables for the Services of the namespace: for eagle-eye-server EAGLE_EYE_SERVER_PORT and more.
_OF_A_SERVICE = re.compile(
    PREFIX
    + r"(?:[A-Z0-9_]+_)?"
    + r"(?:SERVICE_HOST|SERVICE_PORT(?:_[A-Z0-9_]+)?|PORT_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)"
)
_SERVICE_URL = re.compile(r"(?:tcp|udp|sctp)://")

_log = logging.getLogger(__name__)


def foreign(variable: str, value: str) -> bool:
    """Return whether a variable is read elsewhere: the prefix is not ours, or it is Kubernetes' or another part's."""
    if not variable.startswith(PREFIX) or variable in READ_ELSEWHERE or variable.startswith(_TESTS):
        return True
    of_service = variable.endswith("PORT") and _SERVICE_URL.match(value) is not None
    return of_service or _OF_A_SERVICE.fullmatch(variable) is not None


def slip(environ: Mapping[str, str], known: Collection[str], *, warn: bool = True) -> str:
    """Return an error for the first variable that is close to a known one, "" if there is none.

    ``warn``: log a warning for those that resemble none, which are ignored.
    """
    tails = {name.removeprefix(PREFIX): name for name in known}
    unknown = []
    for variable, value in environ.items():
        if variable in known or foreign(variable, value):
            continue
        meant = nearest(variable.removeprefix(PREFIX), tails, LIKENESS_MIN)
        if meant is not None:
            return f"environment variable {variable} is unknown; did you mean {tails[meant]}?"
        unknown.append(variable)
    if unknown and warn:
        _log.warning("ignored, for nothing here reads it: environment variable %s", ", ".join(sorted(unknown))[:2_000])
    return ""
