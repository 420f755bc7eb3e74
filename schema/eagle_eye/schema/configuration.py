"""Loads the configuration of every command: a TOML file, overridden by the environment, overridden by flags.

The shape is a msgspec Struct whose fields are keys and whose Struct fields are sections. Unknown keys and wrong types
are errors that name the key. ``SECRET_FIELDS`` are masked when a configuration is printed, and a masked value is
refused as input. A date-time becomes Unix seconds and must state its offset from UTC. Variables that begin with
EAGLE_EYE_ are checked for typos, apart from those that other parts read. New files of tokens and secrets are readable
only by their owner; others are looked at.
"""

from __future__ import annotations

import datetime as dt
import logging
import os
import re
import stat
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TextIO, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from eagle_eye.schema.names import did_you_mean, nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENVIRONMENT_PREFIX = "EAGLE_EYE_"
SECRET_FIELDS = frozenset({"token", "secret", "secrets", "headers"})
MASK = "********"
FILE_BYTES_MAX = 4 << 20
SHOWN_CHARS_MAX = 80  # of an invalid value

# The unit in a key's name, and the suffixes that users write instead of a plain number.
_UNITS: dict[str, tuple[str, dict[str, float]]] = {
    "s": ("seconds", {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3_600.0, "d": 86_400.0, "w": 604_800.0}),
    "bytes": ("bytes", {f"{k}{b}": 1024.0**n for n, k in enumerate("kmgt", 1) for b in ("", "b", "ib")}),
}
_SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s*([a-z]{1,3})")

ConfigurationT = TypeVar("ConfigurationT", bound=msgspec.Struct)


class ConfigurationError(ValueError):
    """An invalid configuration; the message names the key and what was expected."""


def load(
    shape: type[ConfigurationT],
    file: Path | None,
    environ: Mapping[str, str],
    flags: Mapping[str, Any],
) -> ConfigurationT:
    """Return the configuration: the file's keys, overridden by the environment's, overridden by flags.

    ``flags`` maps dotted keys ("policy.mode") to values; None means that the flag was not given. The environment
    variable for ``policy.mode`` is ``EAGLE_EYE_POLICY_MODE``. Raises ConfigurationError.
    """
    merged = {} if file is None else {key: _in_seconds(value, key) for key, value in read_toml(file).items()}
    known = dict(_keys(shape))
    by_variable = {ENVIRONMENT_PREFIX + key.replace(".", "_").upper(): key for key in known}
    for variable, key in by_variable.items():
        if variable in environ:
            _put(merged, key, _parse(environ[variable], known[key], variable, key))
    _refuse_unknown_variables(environ, by_variable)
    for key, value in flags.items():
        if value is not None:
            _put(merged, key, value)
    _refuse_unknown(merged, known, file)
    _refuse_masked(merged)
    try:
        return msgspec.convert(merged, shape, strict=True)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$.")
        key = where.rstrip("`")
        hint, value = _hint_at(key, known), _at(merged, key)
        if "unknown field" in message and isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            fields = hint.__struct_encode_fields__
            unknown = message.partition("`")[2].rstrip("`")
            message += f", known here are {', '.join(fields)}{did_you_mean(unknown, fields)}"
        else:
            message = _expected(key, hint, value) or message
        if _is_quoted_time(value):
            message += "; a date-time of TOML stands without quotes: 2026-03-01T02:00:00Z"
        raise ConfigurationError(f"{key or 'configuration'}: {message}") from None


def masked(configuration: msgspec.Struct) -> dict[str, Any]:
    """Return the configuration as plain data of the same shape, with each secret's text replaced by asterisks."""

    def mask(value: Any, secret: bool = False) -> Any:
        if isinstance(value, dict):
            return {k: mask(v, secret or k in SECRET_FIELDS) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [mask(v, secret) for v in value]
        return MASK if secret and value else value

    plain = mask(msgspec.to_builtins(configuration))
    assert isinstance(plain, dict)  # noqa: S101 - a Struct becomes a dict
    return plain


def _refuse_masked(value: Any, key: str = "") -> None:
    """Refuse a secret that is only the printed mask: using it would fail later, with an unclear error."""
    if isinstance(value, dict):
        for name, inner in value.items():
            _refuse_masked(inner, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            _refuse_masked(inner, f"{key}[{place}]")
    elif value == MASK and SECRET_FIELDS & set(re.split(r"[.\[\]]", key)):
        raise ConfigurationError(f"{key}: expected the secret itself, got {MASK}, which --print-config shows for it")


def read_toml(file: Path) -> dict[str, Any]:
    """Return the contents of a configuration file as parsed TOML. Raises ConfigurationError."""
    try:
        with file.open("rb") as opened:
            text = opened.read(FILE_BYTES_MAX + 1)
        if len(text) > FILE_BYTES_MAX:
            raise ConfigurationError(
                f"configuration file {file} has more than {FILE_BYTES_MAX >> 20} MiB; is it another?"
            )
        return tomllib.loads(text.decode("utf-8"))
    except OSError as error:
        raise ConfigurationError(f"configuration file {file} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"configuration file {file} is not TOML: {error}") from None


def _in_seconds(value: Any, key: str) -> Any:
    """Return plain data with its date-times as Unix seconds. Raises ConfigurationError for one without an offset."""
    if isinstance(value, dict):
        return {name: _in_seconds(inner, f"{key}.{name}") for name, inner in value.items()}
    if isinstance(value, list):
        return [_in_seconds(inner, f"{key}[{place}]") for place, inner in enumerate(value)]
    if isinstance(value, dt.datetime) and value.tzinfo is not None:
        return value.timestamp()
    if isinstance(value, (dt.date, dt.time)):
        raise ConfigurationError(
            f"{key}: expected a date-time with its offset from UTC, such as 2026-03-01T02:00:00Z, got {value}"
        )
    return value


def _at(plain: Any, key: str) -> Any:
    """Return the value at a key such as ``policy.maintenance[0].from``, None if there is none."""
    for part in re.findall(r"[^.\[\]]+", key):
        if isinstance(plain, list) and part.isdigit():
            plain = plain[int(part)]
            continue
        plain = plain.get(part) if isinstance(plain, dict) else None
    return plain


def _is_quoted_time(value: Any) -> bool:
    try:
        return isinstance(value, str) and dt.datetime.fromisoformat(value) is not None
    except ValueError:
        return False


def _hint_at(key: str, known: Mapping[str, Any]) -> Any:
    """Return the type at a key such as ``policy.modes[0].mode``, None if there is none."""
    base, _, inside = key.partition("[")
    hint = known.get(base)
    for part in re.findall(r"[^.\[\]]+", inside):
        if part.isdigit():
            hint = next(iter(get_args(hint)), None)
        elif isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            named = dict(zip(hint.__struct_encode_fields__, hint.__struct_fields__, strict=True))
            hint = get_type_hints(hint).get(named.get(part, part))
    return hint


def _keys(shape: type[msgspec.Struct], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, hint in get_type_hints(shape).items():
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            yield from _keys(hint, f"{prefix}{name}.")
        else:
            yield prefix + name, hint


def _put(target: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    for section in sections:
        inner = target.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigurationError(f"{section}: expected a section, got {inner!r}")
        target = inner
    target[last] = value


def _refuse_unknown_variables(environ: Mapping[str, str], by_variable: Mapping[str, str]) -> None:
    """Raise ConfigurationError for an unknown variable of a known section or close to a known one; warn of others."""
    sections = {ENVIRONMENT_PREFIX + key.partition(".")[0].upper() + "_" for key in by_variable.values() if "." in key}
    for variable in environ.keys() - by_variable.keys():
        mine = [section for section in sections if variable.startswith(section)]
        if mine and not is_foreign_variable(variable, environ[variable]):
            near = sorted(known for known in by_variable if known.startswith(max(mine, key=len)))
            meant = did_you_mean(variable, near)
            raise ConfigurationError(
                f"environment variable {variable} is unknown; known there are {', '.join(near)}{meant}"
            )
    if wrong := mistyped_variable(environ, by_variable):
        raise ConfigurationError(wrong)


def _expected(key: str, hint: Any, value: Any) -> str:
    """Return what a key accepts and the given value, in the key's own terms; "" if the decoder's message suffices."""
    name = re.split(r"[.\[]", key)[-1]
    got = "" if SECRET_FIELDS & set(re.split(r"[.\[\]]", key)) else f", got {_shown(value)}"
    kinds = (hint, *get_args(hint))
    literal = next((one for one in kinds if get_origin(one) is Literal), None)
    if literal is not None:
        known = [str(one) for one in get_args(literal)]
        return f"expected one of {', '.join(map(repr, get_args(literal)))}{got}{did_you_mean(str(value), known)}"
    if bool in kinds and not isinstance(value, bool):
        return f"expected true or false{got}"
    if (float in kinds or int in kinds) and isinstance(value, str):
        unit, factors = next((two for part, two in _UNITS.items() if re.search(rf"_{part}(_|$)", name)), ("", {}))
        size = _SIZE.fullmatch(value.lower())
        factor = factors.get(size[2]) if size else None
        example = f"{float(size[1]) * factor:.15g}" if size and factor else "300"
        what = f"{unit} as a number, for example {name} = {example}" if unit else "a number"
        return f"expected {what}{got}"
    return ""


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN_CHARS_MAX else text[:SHOWN_CHARS_MAX] + "..."


def _parse(text: str, hint: Any, variable: str, key: str) -> Any:
    try:
        return msgspec.convert(text, hint, strict=False)
    except msgspec.ValidationError:
        pass
    try:
        return msgspec.convert(msgspec.json.decode(text), hint)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        wrong = _expected(key, hint, text) or str(error)
        raise ConfigurationError(f"environment variable {variable} ({key}): {wrong}") from None


def _refuse_unknown(merged: Mapping[str, Any], known: Mapping[str, Any], file: Path | None, prefix: str = "") -> None:
    for name, value in merged.items():
        key = prefix + name
        inside = sorted(k for k in known if k.startswith(key + "."))
        if key in known:
            continue
        if inside and isinstance(value, dict):
            _refuse_unknown(value, known, file, key + ".")
            continue
        if inside:
            raise ConfigurationError(f"{key}: expected a section with {', '.join(inside)}, got {value!r}")
        where = f" in {file}" if file else ""
        near = sorted(k for k in known if k.rpartition(".")[0] == prefix.rstrip(".")) or sorted(known)
        elsewhere = [k for k in known if k.rpartition(".")[2] == name]
        here = {prefix + k.removeprefix(prefix).partition(".")[0] for k in known if k.startswith(prefix)}
        meant = f"; did you mean {elsewhere[0]}?" if elsewhere else did_you_mean(key, here)
        said = key if re.fullmatch(r"[\w.-]{1,80}", key) else _shown(key)
        raise ConfigurationError(f"unknown key {said}{where}; known here are {', '.join(near)}{meant}")


VARIABLE_LIKENESS_MIN = 0.78  # of the name after the prefix: one letter of five may differ
# Variables read by parts other than the caller, so not typos. Sections of the server's file are not among them.
READ_ELSEWHERE = frozenset(
    ENVIRONMENT_PREFIX + name
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
_TEST_VARIABLES = ENVIRONMENT_PREFIX + "TEST_"
# Kubernetes sets variables for the Services of the namespace: for eagle-eye-server EAGLE_EYE_SERVER_PORT and more.
_OF_A_SERVICE = re.compile(
    ENVIRONMENT_PREFIX
    + r"(?:[A-Z0-9_]+_)?"
    + r"(?:SERVICE_HOST|SERVICE_PORT(?:_[A-Z0-9_]+)?|PORT_\d+_(?:TCP|UDP|SCTP)(?:_(?:PROTO|PORT|ADDR))?)"
)
_SERVICE_URL = re.compile(r"(?:tcp|udp|sctp)://")

_log = logging.getLogger(__name__)


def is_foreign_variable(variable: str, value: str) -> bool:
    """Return whether a variable is read elsewhere: the prefix is not ours, or it is Kubernetes' or another part's."""
    if (
        not variable.startswith(ENVIRONMENT_PREFIX)
        or variable in READ_ELSEWHERE
        or variable.startswith(_TEST_VARIABLES)
    ):
        return True
    of_service = variable.endswith("PORT") and _SERVICE_URL.match(value) is not None
    return of_service or _OF_A_SERVICE.fullmatch(variable) is not None


def mistyped_variable(environ: Mapping[str, str], known: Collection[str], *, warn: bool = True) -> str:
    """Return an error for the first variable that is close to a known one, "" if there is none.

    ``warn``: log a warning for those that resemble none, which are ignored.
    """
    tails = {name.removeprefix(ENVIRONMENT_PREFIX): name for name in known}
    unknown = []
    for variable, value in environ.items():
        if variable in known or is_foreign_variable(variable, value):
            continue
        meant = nearest(variable.removeprefix(ENVIRONMENT_PREFIX), tails, VARIABLE_LIKENESS_MIN)
        if meant is not None:
            return f"environment variable {variable} is unknown; did you mean {tails[meant]}?"
        unknown.append(variable)
    if unknown and warn:
        _log.warning("ignored, for nothing here reads it: environment variable %s", ", ".join(sorted(unknown))[:2_000])
    return ""


@contextmanager
def private_file(path: Path, option: str) -> Iterator[TextIO]:
    """Create the file before its contents, and remove it again if writing fails; flushed to disk on success.

    Raises ConfigurationError naming the option if the file exists, as a link too, or cannot be created.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise ConfigurationError(f"{option}: {path} exists, and is left as it is; name another file") from None
    except OSError as error:
        raise ConfigurationError(f"{option}: {path} cannot be made: {error.strerror or error}") from None
    try:
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            yield file
            file.flush()
            os.fsync(descriptor)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def open_to_others(key: str, file: Path) -> str:
    """Return what is wrong if every user of this machine can read the file that ``key`` names; "" otherwise.

    A folder on its way that others may not enter protects it. "" too where it cannot be looked at.
    """
    try:
        place = file.expanduser().resolve()
        entered = all(each.stat().st_mode & stat.S_IXOTH for each in place.parents)
        if not entered or not place.stat().st_mode & stat.S_IROTH:
            return ""
    except OSError:
        return ""
    return f"{key}: every user of this machine can read {file}; chmod o-r {place}, and renew what it holds if in doubt"
