"""Parses Prometheus' text format: samples of the wanted metrics. Pure.

Specification: https://prometheus.io/docs/instrumenting/exposition_formats/, version 0.0.4.
"""

from __future__ import annotations

import io
import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

LINE_CHARS_MAX = 16_384  # exporters on Kubernetes add labels by the dozen, not by the thousand
LABELS_MAX = 64
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(,?)')
_ESCAPE = re.compile(r"\\(.)")
_MEANS = {"n": "\n", "\\": "\\", '"': '"'}


class ParsedSample(NamedTuple):
    """One line: a metric, its labels and its value, which may be NaN or infinite."""

    name: str
    labels: dict[str, str]
    value: float


def samples(text: str, wanted: Collection[str]) -> Iterator[ParsedSample | None]:
    """Yield the wanted metrics' samples, None for one of their lines that cannot be parsed. Others are skipped."""
    for line in io.StringIO(text):  # line by line: a page of short lines would be a list many times its size
        found = _NAME.match(line)
        if found is not None and found[0] in wanted:
            yield _sample(found[0], line[found.end() :]) if len(line) <= LINE_CHARS_MAX else None


def _sample(name: str, rest: str) -> ParsedSample | None:
    labels: dict[str, str] = {}
    at = 0
    if rest.startswith("{"):
        at, more = 1, True
        while found := _LABEL.match(rest, at):
            if not more or len(labels) >= LABELS_MAX:
                return None
            labels[found[1]] = _ESCAPE.sub(lambda escape: _MEANS.get(escape[1], escape[0]), found[2])
            at, more = found.end(), bool(found[3])
        if not rest.startswith("}", at):
            return None
        at += 1
    elif not rest[:1].isspace():
        return None
    words = rest[at:].split()  # the value, and perhaps a timestamp
    if not 1 <= len(words) <= 2:
        return None
    try:
        return ParsedSample(name, labels, float(words[0]))
    except ValueError:
        return None
