"""Configuration of every command: a TOML file, overridden by the environment, overridden by flags.

The shape is a msgspec Struct whose fields are keys and whose Struct fields are sections. Unknown keys and
wrong types are errors that name the key. ``SECRET_FIELDS`` are masked when a configuration is printed, and refused as
they are printed. A date-time becomes Unix seconds, and has to say its offset from UTC.
"""

from __future__ import annotations

import datetime as dt
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENVIRONMENT_PREFIX = "EAGLE_EYE_"
SECRET_FIELDS = frozenset({"token", "secret", "secrets", "headers"})
MASK = "********"

ConfigurationT = TypeVar("ConfigurationT", bound=msgspec.Struct)


class ConfigurationError(ValueError):
    """A configuration that may not be used; the message names the key and what was expected."""


def load(
    shape: type[ConfigurationT],
    file: Path | None,
    environ: Mapping[str, str],
    flags: Mapping[str, Any],
) -> ConfigurationT:
    """Return the configuration: the file's keys, overridden by the environment's, overridden by flags.

    ``flags`` maps dotted keys ("policy.mode") to values; None means that the flag was not given.
    The environment's name of ``policy.mode`` is ``EAGLE_EYE_POLICY_MODE``. Raises ConfigurationError.
    """
    merged = _read(file)
    known = dict(_keys(shape))
    by_variable = {ENVIRONMENT_PREFIX + key.replace(".", "_").upper(): key for key in known}
    sections = {ENVIRONMENT_PREFIX + key.split(".", maxsplit=1)[0].upper() + "_" for key in known if "." in key}
    for variable, text in environ.items():
        if variable in by_variable:
            _put(merged, by_variable[variable], _parse(text, known[by_variable[variable]], variable))
        elif mine := [section for section in sections if variable.startswith(section)]:
            near = sorted(known for known in by_variable if known.startswith(max(mine, key=len)))
            raise ConfigurationError(f"environment variable {variable} is unknown; known there are {', '.join(near)}")
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
        hint = _hint_at(key, known)
        literal = next((one for one in (hint, *get_args(hint)) if get_origin(one) is Literal), None)
        if literal is not None:
            message += f", expected one of {', '.join(map(repr, get_args(literal)))}"
        elif "unknown field" in message and isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            message += f", known here are {', '.join(hint.__struct_encode_fields__)}"
        elif _is_quoted_time(_at(merged, key)):
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
    """Refuse a secret that is only what was printed in its place: it would be sent, and fail far from here."""
    if isinstance(value, dict):
        for name, inner in value.items():
            _refuse_masked(inner, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            _refuse_masked(inner, f"{key}[{place}]")
    elif value == MASK and SECRET_FIELDS & set(re.split(r"[.\[\]]", key)):
        raise ConfigurationError(f"{key}: expected the secret itself, got {MASK}, which --print-config shows for it")


def _read(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        plain: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"configuration file {file} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"configuration file {file} is not TOML: {error}") from None
    return {name: _in_seconds(value, name) for name, value in plain.items()}


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
    """Return the value at a key such as ``policy.maintenance[0].from``, None where there is none."""
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
    """Return the type at a key such as ``policy.modes[0].mode``, None where there is none."""
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


def _parse(text: str, hint: Any, variable: str) -> Any:
    try:
        return msgspec.convert(text, hint, strict=False)
    except msgspec.ValidationError:
        pass
    try:
        return msgspec.convert(msgspec.json.decode(text), hint)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise ConfigurationError(f"environment variable {variable}: {error}") from None


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
        raise ConfigurationError(f"unknown key {key}{where}; known here are {', '.join(near)}")
